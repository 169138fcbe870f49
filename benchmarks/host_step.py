"""What the host needs for a decode step of many rows: processor time, without a GPU.

    python benchmarks/host_step.py [--write] [--rows 1,64,256] [--profile] [--before DIR]

Rows of Llama-3.1-8B's shape decode through the first stage's loop (runtime/engine/stage_loop.py):
the scheduler, the step's message, the new tokens, what is published of them. `loop`: with a stage
that returns tokens at once. `staged`: with all that a GPU's stage does on the host up to the launch
of its graph: block tables, the table of rows, the split of attention's work, the rows' sampling.
Rows begin at prompts of unequal lengths, so that a few enter a new block in each step.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from lib.rows import write_row

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.gpu.cuda_graphs import StepOutput, rounded_rows
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.cache.gpu_paged_kv import GpuPagedKV
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.stage_loop import FirstStage
from llmpq.runtime.requests.request import Mailbox, Request, StepKind, StepMessage
from llmpq.runtime.steps.device_copies import HostCopy
from llmpq.runtime.steps.trace import Recorder
from llmpq.sizes.pool_size import PoolSize

MODEL = "llama-3.1-8b"
CPU = torch.device("cpu")
PROMPT_TOKENS = (128, 384)
TOKEN = 5
"""Every row's next token; no request stops at it."""
STOP_IDS = frozenset({128001, 128008, 128009})


class NoStage:
    """Returns a token for every row."""

    runs_ahead = fused_rounds = False

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor:
        """Return tokens [B, 1]."""
        return torch.full((message.num_rows, 1), TOKEN)


class StagedOnly(CudaStageRunner):
    """A GPU's stage that does everything but launch a step."""

    def __init__(self, spec: ModelSpec, size: PoolSize, step_tokens: int) -> None:
        model = SimpleNamespace(
            spec=spec, embedding=True, head=True, is_last=True, reduce=None, asks_host=True
        )
        kv = GpuPagedKV(spec, layers=range(1), size=size, dtype=torch.bfloat16, device=CPU)
        super().__init__(
            *(cast(Any, model), kv, CPU, torch.bfloat16), size=size, step_tokens=step_tokens
        )

    @property
    def runs_ahead(self) -> bool:
        """No: each step waits for the last one's tokens."""
        return False

    def _run(
        self, graphs: Any, message: StepMessage, hidden_BQH: Tensor | None
    ) -> Tensor | HostCopy:
        self.wants_every_place(message)
        rows = rounded_rows(message.num_rows, self._size.slots)
        out = StepOutput(tokens_B=torch.full((rows,), TOKEN), logits_BV=torch.empty(rows, 0))
        return self._answer(self._tokens_B(out, message)[:, None])


class Timed:
    """A stage's computing, and the thread's processor time at each decode step."""

    fused_rounds = False

    def __init__(self, compute: Any, rows: int, profiler: cProfile.Profile | None) -> None:
        """`profiler`: runs from the first decode step on."""
        self._compute, self._rows, self._profiler = compute, rows, profiler
        self.runs_ahead = compute.runs_ahead
        self.at_s: list[float] = []

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | HostCopy:
        """Run a step; note when, if all rows decode in it."""
        if message.kind is StepKind.DECODE and message.num_rows == self._rows:
            if self._profiler is not None and not self.at_s:
                self._profiler.enable()
            self.at_s.append(time.thread_time())
        return cast(Tensor, self._compute.run(message, hidden_BQH))


def main() -> None:
    """Time steps of every number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="loop,staged")
    parser.add_argument("--before", metavar="DIR", help="another commit's tree, timed in turn")
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    for part in args.parts.split(","):
        for rows in map(int, args.rows.split(",")):
            if args.profile:
                profiler = cProfile.Profile(time.thread_time)
                step_us(part, rows, args.steps, profiler)
                profiler.disable()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
            else:
                tell(args, part, rows)


def tell(args: argparse.Namespace, part: str, rows: int) -> None:
    """Time a number of rows, print it and write it."""
    samples, before = [], []
    for _ in range(args.rounds):
        samples.append(step_us(part, rows, args.steps))
        if args.before:
            before.append(elsewhere(args.before, part, rows, args.steps))
    text = f"{statistics.median(samples):5.0f} us a step"
    if before:
        text += f", {statistics.median(before):.0f} in {args.before}"
    print(f"{part:7} {rows:4} rows {text}", flush=True)
    if args.write:
        write_row(
            "engine.jsonl",
            bench="decode_host",
            case={"part": part, "rows": rows, "model": MODEL},
            unit="us",
            samples=samples,
            baselines={"before": statistics.median(before)} if before else None,
        )


def elsewhere(tree: str, part: str, rows: int, steps: int) -> float:
    """Return what `step_us` says in a process of another tree."""
    call = f"import host_step; print(host_step.step_us({part!r}, {rows}, {steps}))"
    path = os.pathsep.join((str(Path(tree).resolve()), str(Path(__file__).parent)))
    run = subprocess.run(
        [sys.executable, "-c", call],
        capture_output=True,
        check=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    return float(run.stdout)


def step_us(part: str, rows: int, steps: int, profiler: cProfile.Profile | None = None) -> float:
    """Return the mean processor time of a decode step of so many rows, in microseconds."""
    spec = ModelSpec.by_name(MODEL)
    longest = PROMPT_TOKENS[1] + steps + 8
    size = PoolSize(num_blocks=rows * -(-longest // 128), slots=rows, max_len=longest)
    limits = PoolLimits(
        num_blocks=size.num_blocks,
        kv=KVPrecision.KV16,
        max_rows=rows,
        max_len=longest,
        step_tokens=rows * PROMPT_TOKENS[1],
        decode_rows=rows,
    )
    storage = replace(size, num_blocks=1)  # nothing is ever written to the blocks
    compute = NoStage() if part == "loop" else StagedOnly(spec, storage, limits.step_tokens)
    timed, mailbox, rng = Timed(compute, rows, profiler), Mailbox(), random.Random(rows)
    for number in range(rows):
        length = rng.randint(*PROMPT_TOKENS)
        mailbox.requests.put(
            Request(
                id=number,
                prompt=tuple(rng.randrange(spec.vocab) for _ in range(length)),
                max_new=steps + 2,
                stop_ids=STOP_IDS,
                recorded=True,
            )
        )
    mailbox.requests.put(None)
    FirstStage(Scheduler(limits), cast(Any, timed), None, mailbox, Recorder(), num_stages=1).run()
    assert all(len(ended.tokens) == steps + 2 for ended in mailbox.finished)
    first, last = timed.at_s[1], timed.at_s[-1]
    return (last - first) / (len(timed.at_s) - 2) * 1e6


if __name__ == "__main__":
    main()

"""Stand-ins for what dummy weights cannot say: acceptance, prompts, text that repeats itself.

Replayed         a verdict on drafts at a given acceptance per token
WithoutPrompts   a stage that answers prompts at once; its cache holds noise
Guesser          n-gram lookup that pays for the lookup and drafts whatever is asked for
rates            tokens/s of a run from the times its steps' tokens were known at
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.stage_loop import FirstStage
from llmpq.runtime.pending import Pending
from llmpq.runtime.request import Request, StepKind
from llmpq.runtime.step_message import StepMessage

ACCEPTANCE = Path(__file__).parents[1] / "results" / "speculation.jsonl"
ROUNDS = 1024
"""Rounds before replayed draws repeat."""
WARM_ROUNDS = 4
GRID = [(1, (1024, 8192, 32768)), (8, (1024, 8192, 32768)), (32, (1024, 8192))]
"""Batch, contexts. 32 requests of 32k tokens are 137 GB of Llama-3.1-8B's cache in 16 bits."""
ROOM = 512
"""Tokens a slot has beyond the longest context."""


class Replayed:
    """A verdict for dummy weights: each draft that is judged is kept with probability `rate`.

    One number u a round and slot decides: the drafts before the first with u >= rate ** place are
    kept. A round's numbers are evenly spaced over the slots, in random order, and shifted from
    round to round by a van der Corput sequence: any few rounds meet the rate within a percent. Runs
    that `restart` meet the same numbers, round by round, however long their drafts are.
    """

    def __init__(self, slots: int, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        order_RS = torch.rand((ROUNDS, slots), generator=generator).argsort(dim=1)
        bits = ROUNDS.bit_length() - 1
        reversed_R = torch.tensor([int(f"{r:0{bits}b}"[::-1], 2) for r in range(ROUNDS)])
        shift_R = (reversed_R.double() + 0.5) / ROUNDS
        self._numbers_RS = ((order_RS + shift_R[:, None]) / slots).to(device)
        self._round = torch.zeros(1, dtype=torch.long, device=device)
        self.rate = torch.ones(1, dtype=torch.float64, device=device)

    def restart(self) -> None:
        """Begin again with the first round's numbers."""
        self._round.zero_()

    def __call__(self, drafts_BG: Tensor, choices_BQ: Tensor, slots_B: Tensor) -> Tensor:
        """Return how many drafts each row keeps."""
        numbers_S = self._numbers_RS.index_select(0, self._round % ROUNDS)[0]
        self._round += 1
        places_G = torch.arange(1, drafts_BG.shape[1] + 1, device=drafts_BG.device)
        return (numbers_S[slots_B, None] < self.rate**places_G).sum(dim=1)


class WithoutPrompts:
    """A stage that skips prompts: their cache is filled with noise beforehand."""

    def __init__(
        self, compute: CudaSlotStageRunner, plain: CudaSlotStageRunner | None = None
    ) -> None:
        """`plain`: the same stage without drafts, which takes over where they are given up."""
        self._compute, self._plain = compute, plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute, name)

    def end_speculation(self) -> None:
        """Go on as the stage without drafts; the other is used again."""
        assert self._plain is not None
        self._compute = self._plain

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | Pending:
        """Answer prompts at once; run everything else."""
        if message.kind is not StepKind.PREFILL:
            return self._compute.run(message, hidden_BQH)
        if self._compute.model.head is None:
            shape = (message.num_rows, message.q_len, self._compute.model.spec.hidden)
            return torch.zeros(shape, dtype=self._compute._dtype)
        return torch.ones(message.num_rows, 1, dtype=torch.long)


class TimedLoop(FirstStage):
    """Keeps when each step's tokens were known, and how many there were by then."""

    log: list[tuple[float, int, int]]

    def _publish(
        self,
        kind: StepKind,
        finished: Sequence[Request],
        now_s: float,
        stepped: Sequence[Request] = (),
    ) -> None:
        if kind is not StepKind.PREFILL:
            self.log.append((now_s, self._scheduler.generated_tokens, len(finished)))
        super()._publish(kind, finished, now_s, stepped)


class Guesser(FixedDrafter):
    """Looks n-grams up as the host does, on text that does not repeat, and drafts all the same."""

    def propose(self, request: Request, gamma: int) -> list[int] | None:
        """Return as many drafts as asked for."""
        found = super().propose(request, gamma)
        return None if found is None else [1] * gamma


@functools.cache
def prompts(count: int, length: int) -> list[tuple[int, ...]]:
    """Return prompts of tokens that hardly repeat."""
    generator = random.Random(0)
    return [tuple(generator.choices(range(2, 50_000), k=length)) for _ in range(count)]


def measured_acceptance(mode: str, target: str) -> float:
    """Return the share of judged drafts accepted on the trained models, all lengths together."""
    rows = [json.loads(line) for line in ACCEPTANCE.read_text().splitlines()]
    newest = {
        (row["case"]["model"], row["case"]["gamma"]): row["value"]
        for row in rows
        if row["bench"] == "acceptance" and row["case"]["mode"] == f"{mode} on {target}"
    }
    found = newest.values()
    # A draft of the same weights accepts alike whatever their precision.
    return statistics.fmean(found) if found else measured_acceptance(mode, "w16a16")


def fill_plain(kv: PlainKVCache) -> None:
    """Fill a cache with noise."""
    for cache in (kv.k, kv.v):
        for layer in cache:
            layer.normal_()


def fill_packed(kv: LowBitKV) -> None:
    """Fill a packed cache with noise."""
    for layer in kv.cache.layers:
        for words in (layer.k_words_PGW, layer.v_words_PGW):
            words.random_(-(2**31), 2**31 - 1)
        for rest in (layer.k_params_PG, layer.v_params_PG):
            rest.uniform_(0.01, 0.1)
        for ring in (layer.k_ring_SGRD, layer.v_ring_SGRD):
            ring.normal_()


def rates(log: Sequence[tuple[float, int, int]]) -> list[float]:
    """Return tokens/s of three even parts, from the 4th round to the first request's end.

    `log`: for each step when its tokens were known, how many there were by then, how many ended.
    """
    end = next((i for i, (_, _, finished) in enumerate(log) if finished), len(log) - 1)
    marks = [WARM_ROUNDS + (end - WARM_ROUNDS) * part // 3 for part in range(4)]
    return [
        (log[b][1] - log[a][1]) / (log[b][0] - log[a][0])
        for a, b in zip(marks[:-1], marks[1:], strict=True)
        if b > a
    ]


def batch_and_contexts(text: str) -> tuple[int, tuple[int, ...]]:
    """Read `8:1024,8192`."""
    batch, contexts = text.split(":")
    return int(batch), tuple(int(context) for context in contexts.split(","))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare model, target, cells and where rows go."""
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in architecture")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", default="w16a16", help="precision of the model that is served")
    parser.add_argument(
        "--grid", type=batch_and_contexts, nargs="*", default=GRID, metavar="BATCH:CONTEXT,..."
    )
    parser.add_argument("--acceptance", nargs="*", default=["0.9", "measured"])
    parser.add_argument("--gammas", type=int, nargs="*", help="lengths; default: the best few")
    parser.add_argument("--rows", required=True, help="result file to append to")
    parser.add_argument("--commit", help="commit a row names, where git cannot tell")

"""Predicted against real memory of single stages of random plans, on one GPU.

    python benchmarks/memory_fidelity.py stages [--plans 20]

Draws models, layers and their precisions, KV precision, batch, lengths, micro-batches and the
stage's place in the pipeline; builds each stage as the runtime does, runs prompts and decode steps
of the planned sizes through it, with the inbox and the outputs on their way that its neighbours
would cause, and reads the allocator's peak and what the driver holds beside the allocator (the CUDA
context). One row a plan, in bytes; the last line is the largest relative error.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.devices.device_spec import DeviceSpec, canonical_kind, device_specs
from llmpq.kernels.gpu_timing import write_row
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.member_memory import planned_shape
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.backends.gpu.cuda_step_times import step_message
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.links.peer_links import BufferSizes
from llmpq.runtime.steps.device_copies import arrived
from llmpq.runtime.weights.sources import RandomSource
from llmpq.sizes.gpu_workspace import OUTPUTS_LEAVING
from llmpq.sizes.memory import StageMemory, stage_memory
from llmpq.sizes.pool_size import PoolSize, planned_pool
from llmpq.units import format_size
from llmpq.workload import Workload

RESULTS = Path(__file__).parents[1] / "results" / "fidelity.jsonl"
MODELS = ("llama-3.1-8b", "opt-13b", "qwen3-8b")
BITS = ("16", "8", "4", "3")
KV = (KVPrecision.KV16, KVPrecision.KV16, KVPrecision.KV8, KVPrecision.KV4)
MOST_TOKENS = 16384
WARM_UP_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One stage of a random plan."""

    spec: ModelSpec
    plan: Plan
    index: int

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0


def draw(rng: random.Random) -> Drawn:
    """Return a stage of 2 to 8 layers, alone or with a one-layer neighbour on either side."""
    full, layers = ModelSpec.by_name(rng.choice(MODELS)), rng.randint(2, 8)
    before, after = rng.randint(0, 1), rng.randint(0, 1)
    spec = dataclasses.replace(full, num_layers=before + layers + after)
    batch, prompt = rng.choice((8, 16, 32, 64)), rng.choice((64, 200, 512, 1000))
    work = Workload(
        batch=batch,
        prompt_len=prompt,
        gen_len=rng.choice((16, 100, 200)),
        kv=rng.choice(KV),
        dtype=full.dtype if full.dtype != "float32" else "float16",
    )
    splits = [1] * before + [before + layers] * after
    plan = manual_plan(
        spec,
        work,
        splits=splits,
        prefill_microbatch=max(1, min(rng.randint(1, batch), MOST_TOKENS // prompt)),
        decode_microbatch=rng.randint(1, batch),
    )
    stages = list(plan.stages)
    stages[before] = stages[before].model_copy(
        update={"precisions": tuple(Precision.parse(rng.choice(BITS)) for _ in range(layers))}
    )
    return Drawn(spec, plan.model_copy(update={"stages": tuple(stages)}), before)


def predict(drawn: Drawn, spec: DeviceSpec) -> StageMemory:
    """Return what the planner counts for the stage."""
    plan, stage = drawn.plan, drawn.plan.stages[drawn.index]
    return stage_memory(
        drawn.spec,
        plan.workload,
        planned_shape(plan, drawn.index, spec, on_gpu=True),
        quantization=plan.settings(),
        context_bytes=spec.context,
        first_layer=stage.layers[0],
    )


def measure(drawn: Drawn, device: torch.device) -> tuple[int, int]:
    """Return the allocator's peak and the bytes of the context, the stage built and run."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plan, work = drawn.plan, drawn.plan.workload
    size = planned_pool(
        drawn.spec, work, plan.prefill_chunk, prefill_microbatch=plan.prefill_microbatch
    )
    compute, _ = build_stage(
        *(plan, drawn.index, drawn.spec, RandomSource(drawn.spec, device=device), device, size),
        step_tokens=plan.prefill_step_tokens,
    )
    compute.leave_on_device()
    compute.warm_up(min(plan.decode_microbatch, work.batch), WARM_UP_TOKENS)
    # Loading is over: what it needed is given back before prompts come.
    torch.cuda.reset_peak_memory_stats()
    _run(drawn, compute, size, device)
    peak = torch.cuda.max_memory_allocated()
    free, total = torch.cuda.mem_get_info()
    return peak, total - free - torch.cuda.memory_reserved()


def _run(drawn: Drawn, compute: StageRunner, size: PoolSize, device: torch.device) -> None:
    """Run every size of micro-batch of both phases, the way neighbours would make it."""
    plan, work = drawn.plan, drawn.plan.workload
    room = BufferSizes(
        hidden_bytes=plan.prefill_step_tokens * drawn.spec.hidden * work.dtype_bytes,
        max_rows=work.batch,
        tickets=8,
    )
    inbox = torch.zeros(0 if drawn.first else room.inbox_bytes(1), dtype=torch.uint8, device=device)
    leaving: deque[Any] = deque(maxlen=OUTPUTS_LEAVING)
    chunks = [(plan.prefill_microbatch, length, start) for start, length in plan.chunks]
    for most, q_len, start in (*chunks, (plan.decode_microbatch, 1, work.prompt_len), *chunks):
        whole = [min(most, work.batch)] * (1 + OUTPUTS_LEAVING)
        for rows in [*whole, work.batch % most or most]:
            message = step_message(rows, start, q_len, num_blocks=size.num_blocks)
            hidden = None if drawn.first else _hidden(inbox, rows * q_len, drawn)
            leaving.append(arrived(compute.run(message, hidden)))
    torch.cuda.synchronize()


def _hidden(inbox: Tensor, tokens: int, drawn: Drawn) -> Tensor:
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[drawn.plan.workload.dtype]
    shape = (1, tokens, drawn.spec.hidden)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return inbox[1024 : 1024 + num_bytes].view(dtype).view(shape)


def main(words: list[str], program: str) -> None:
    """Measure every plan, write its row, and print the largest error."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--context-bytes",
        type=int,
        help="the context as measured by an earlier plan, where this GPU has other processes now",
    )
    parser.add_argument(
        "--most-gib", type=float, default=128.0, help="of a plan; larger: drawn anew"
    )
    parser.add_argument("--part", default="0/1", help="I/N: the I-th of N processes that share it")
    parser.add_argument("--rows", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args(words)
    rng, device = random.Random(args.seed), torch.device("cuda", 0)
    spec = device_specs()[canonical_kind(torch.cuda.get_device_name(0))]
    part, parts = (int(number) for number in args.part.split("/"))
    errors = []
    for index in range(args.plans):
        drawn = draw(rng)
        while predict(drawn, spec).total_bytes > args.most_gib * (1 << 30):
            drawn = draw(rng)
        if index % parts != part:
            continue
        peak, context = measure(drawn, device)
        measured = (peak, args.context_bytes or context)
        errors.append(_one(drawn, measured, spec, args))
    print(f"{len(errors)} plans, largest error {max(errors):.1%}")


def _one(
    drawn: Drawn, measured: tuple[int, int], spec: DeviceSpec, args: argparse.Namespace
) -> float:
    """Write the row of one plan; return the relative error."""
    plan, work = drawn.plan, drawn.plan.workload
    stage = plan.stages[drawn.index]
    predicted = predict(drawn, spec)
    total = sum(measured)
    error = abs(predicted.total_bytes / total - 1)
    bits = " ".join(str(p.weight_bits) for p in stage.precisions)
    print(
        f"{drawn.spec.name} bits {bits} {work.kv.value} batch {work.batch} prompt "
        f"{work.prompt_len} micro-batches {plan.prefill_microbatch}/{plan.decode_microbatch}: "
        f"predicted {format_size(predicted.total_bytes)}, measured {format_size(total)}, of it "
        f"context {format_size(measured[1])} ({predicted.total_bytes / total - 1:+.1%})",
        flush=True,
    )
    write_row(
        args.rows,
        bench="fidelity_memory",
        case={
            "model": drawn.spec.name,
            "bits": bits,
            "kv": work.kv.value,
            "batch": work.batch,
            "prompt": work.prompt_len,
            "gen": work.gen_len,
            "micro_batches": f"{plan.prefill_microbatch}/{plan.decode_microbatch}",
            "place": f"stage {drawn.index + 1} of {len(plan.stages)}",
            "seed": args.seed,
        },
        unit="B",
        samples=[total],
        commit=args.commit,
        predicted=predicted.total_bytes,
        program="python benchmarks/memory_fidelity.py stages",
    )
    return error

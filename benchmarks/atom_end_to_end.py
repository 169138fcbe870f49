"""Tokens/s of 16-bit, W8A8, W4A16 and W4A4 + KV4 in the same GPU memory, at the largest batch each.

    python benchmarks/atom_end_to_end.py --precision w16a16 w8a8 w4a16 w4a4
    python benchmarks/atom_end_to_end.py --lengths drawn --prompt 512 --gen 1536

The paper's Figure 10(c) in kind: Llama-3.1-8B's shape with random weights, one GPU, `--memory` for
weights, KV cache, temporaries and the CUDA context together; the allocator is held to it. The batch
is the largest that llmpq/sizes/memory.py lets in. Requests:

    equal    one batch of `--prompt` and `--gen` tokens: prompts, then tokens for all
    drawn    `--turns` batches with lengths as the authors' own benchmark draws them
             (github.com/efeslab/Atom, e2e/punica-atom/benchmarks/bench_textgen.py): prompts
             lognormal with median 17 tokens, prompt and output together uniform up to 2048, first
             come, first served; theirs has ten batches. `--prompt` and `--gen` are the room a
             request has

W4A4 has what `llmpq-quantize` gives it: 128 outlier channels, channel orders, a rotation before
`down`.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lib.rows import RESULTS
from torch import Tensor

from llmpq.errors import DoesNotFitError
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.gpu_timing import write_row
from llmpq.kernels.weights.atom_weight import quantize_atom
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.member_memory import planned_shape
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.requests.request import Request
from llmpq.runtime.weights.sources import RandomSource
from llmpq.sizes.memory import stage_memory
from llmpq.sizes.pool_size import PoolSize, planned_pool
from llmpq.units import parse_size
from llmpq.workload import Workload
from reference.open_stages import OpenStages

LOG_MEDIAN_PROMPT, SIGMA_PROMPT, SHIFT_PROMPT = math.log(18), 0.8, -1
"""The lognormal distribution of drawn prompts."""
SCHEME = AtomScheme(outliers=128, signed_scale=True, activation_clip=0.95, weight_clip=0.85)
KV = {Precision.W4A4: KVPrecision.KV4}


class AtomSource(RandomSource):
    """Random weights, rounded as `llmpq-quantize --scheme w4a4` stores them."""

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        """Make one decoder layer's parts."""
        parts: dict[str, Weight] = dict(super().layer(index, dtype))
        for name in ("qkv", "o", "gate_up", "down"):
            dense = parts[f"{name}.weight"]
            assert isinstance(dense, Tensor)
            scheme = replace(SCHEME, rotation=name == "down")
            order = torch.randperm(dense.shape[1], device=dense.device)
            parts[f"{name}.weight"] = quantize_atom(
                dense, scheme, dtype=dtype, index_K=None if name == "down" else order
            )
        return parts


def main() -> None:
    """Measure each precision."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--precision", nargs="+", default=["w16a16", "w8a8", "w4a16", "w4a4"])
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--context", default="700MiB", help="of the memory: CUDA and its modules")
    parser.add_argument("--slack", default="768MiB", help="left to the allocator's gaps")
    parser.add_argument("--lengths", choices=("equal", "drawn"), default="equal")
    parser.add_argument("--turns", type=int, default=2, help="drawn requests a slot, on average")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=512)
    parser.add_argument("--prefill-tokens", type=int, default=4096, help="in a micro-batch")
    parser.add_argument("--batch", type=int, help="instead of the largest")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--warm-up-only", action="store_true", help="compile kernels; no row")
    parser.add_argument("--commit", help="to name in rows where git is not at hand")
    args = parser.parse_args()
    spec = ModelSpec.by_name(args.model)
    for name in args.precision:
        precision = Precision.parse(name)
        batch = args.batch or largest_batch(spec, precision, args)
        while not measured(spec, precision, args, batch):
            batch -= max(1, batch // 25)


def measured(spec: ModelSpec, precision: Precision, args: argparse.Namespace, batch: int) -> bool:
    """Whether a batch fits; its row is then written."""
    try:
        measure(spec, precision, args, batch)
    except (torch.OutOfMemoryError, DoesNotFitError) as error:
        print(f"{precision.value} batch {batch}: {error}", flush=True)
        fits = False
    else:
        fits = True
    gc.collect()
    torch.cuda.empty_cache()
    return fits


def measure(spec: ModelSpec, precision: Precision, args: argparse.Namespace, batch: int) -> None:
    """Run the job and write its row."""
    memory, context = parse_size(args.memory), parse_size(args.context)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((memory - context) / total)
    torch.cuda.reset_peak_memory_stats()
    plan = plan_of(spec, precision, args, batch)
    source = (AtomSource if precision is Precision.W4A4 else RandomSource)(spec, device="cuda")
    pool = pool_of(plan, spec)
    engine = OpenStages(plan, spec, source, pool=pool, device="cuda")
    shown = f"{precision.value} {plan.workload.kv.value} batch {batch}"
    print(f"{shown}: {torch.cuda.memory_allocated() / 1e9:.2f} GB loaded", flush=True)
    for compute in engine.computes:
        compute.warm_up(batch, plan.prefill_step_tokens)
    # Prompts of a whole micro-batch and of the last, smaller one: their kernels are compiled here.
    few = plan.prefill_microbatch + batch % plan.prefill_microbatch
    run_job(engine, plan, [replace(r, max_new=3) for r in requests_of(plan, spec, args, 0)[:few]])
    if args.warm_up_only:
        return
    samples: list[float] = []
    requests: list[Request] = []
    steps: dict[str, float] = {}
    for index in range(args.repeat):
        requests = requests_of(plan, spec, args, index)
        seconds, steps = run_job(engine, plan, requests)
        samples.append(sum(request.max_new for request in requests) / seconds)
    free, _ = torch.cuda.mem_get_info()
    write_row(
        RESULTS / "atom_end_to_end.jsonl",
        bench="atom_end_to_end",
        case={
            "model": spec.name,
            "precision": precision.value,
            "kv": plan.workload.kv.value,
            "memory": args.memory,
            "batch": batch,
            "prompt": args.prompt if args.lengths == "equal" else "drawn",
            "gen": args.gen if args.lengths == "equal" else "drawn",
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "new_tokens": sum(request.max_new for request in requests),
            "used_bytes": total - free,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"],
            **steps,
        },
        unit="tok/s",
        samples=samples,
        commit=args.commit,
        program="python benchmarks/atom_end_to_end.py",
    )
    print(f"{shown}: {max(samples):.0f} tok/s, {steps}, used {(total - free) / 2**30:.2f} GiB")


def pool_of(plan: Plan, spec: ModelSpec) -> PoolSize:
    """Return the pool of a job whose prompts share nothing."""
    size = planned_pool(
        spec, plan.workload, plan.prefill_chunk, prefill_microbatch=plan.prefill_microbatch
    )
    return replace(size, prefix_cache=False, window=0, window_blocks=0)


def requests_of(plan: Plan, spec: ModelSpec, args: argparse.Namespace, index: int) -> list[Request]:
    """Return the requests of a job: random tokens, no stop."""
    rng = random.Random(index)
    workload = plan.workload
    lengths = [(workload.prompt_len, workload.gen_len)] * workload.batch
    if args.lengths == "drawn":
        lengths = [drawn_lengths(rng, workload) for _ in range(args.turns * workload.batch)]
    return [
        Request(id=i, prompt=tuple(rng.choices(range(spec.vocab), k=prompt)), max_new=gen)
        for i, (prompt, gen) in enumerate(lengths)
    ]


def drawn_lengths(rng: random.Random, workload: Workload) -> tuple[int, int]:
    """Return tokens of a prompt and of its output, within a request's room."""
    drawn = SHIFT_PROMPT + rng.lognormvariate(LOG_MEDIAN_PROMPT, SIGMA_PROMPT)
    prompt = min(max(1, int(drawn)), workload.prompt_len)
    total = rng.randrange(workload.prompt_len + workload.gen_len)
    return prompt, max(2, min(total - prompt, workload.gen_len))


def run_job(
    engine: OpenStages, plan: Plan, requests: Sequence[Request]
) -> tuple[float, dict[str, float]]:
    """Serve requests; return seconds, and by phase."""
    pool = pool_of(plan, engine.spec)
    limits = PoolLimits(
        num_blocks=pool.num_blocks,
        kv=plan.workload.kv,
        max_rows=pool.slots,
        max_len=pool.max_len + 1,
        step_tokens=plan.prefill_step_tokens,
        decode_rows=plan.decode_microbatch,
        tokens_ahead=2,
        prefix_cache=False,
    )
    torch.cuda.synchronize()
    started = time.perf_counter()
    run = engine.run(Scheduler(limits), requests)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    phases = {}
    for kind, found in run.records[0].totals.items():
        phases[f"{kind}_s"] = round(found.busy_s, 4)
        phases[f"{kind}_steps"] = found.steps
    return seconds, phases


def plan_of(spec: ModelSpec, precision: Precision, args: argparse.Namespace, batch: int) -> Plan:
    """Return the plan of a whole model on one GPU."""
    workload = Workload(
        batch=batch,
        prompt_len=args.prompt,
        gen_len=args.gen,
        kv=KV.get(precision, KVPrecision.KV16),
        dtype="bfloat16",
    )
    plan = manual_plan(
        spec,
        workload,
        precision=precision,
        prefill_microbatch=min(batch, max(1, args.prefill_tokens // args.prompt)),
        decode_microbatch=batch,
    )
    form = plan.quantization.model_copy(
        update={"symmetric": True, "outliers": 128 if precision is Precision.W4A4 else 0}
    )
    stages = tuple(
        stage.model_copy(update={"threads": None, "kind": "H200"}) for stage in plan.stages
    )
    return plan.model_copy(update={"quantization": form, "stages": stages})


def largest_batch(spec: ModelSpec, precision: Precision, args: argparse.Namespace) -> int:
    """Return the largest batch whose predicted memory fits."""
    fits, fails = 0, 1 << 16
    while fails - fits > 1:
        batch = (fits + fails) // 2
        plan = plan_of(spec, precision, args, batch)
        need = stage_memory(
            spec,
            plan.workload,
            planned_shape(plan, 0, None, on_gpu=True),
            quantization=plan.settings(),
            context_bytes=parse_size(args.context) + parse_size(args.slack),
        )
        fits, fails = (
            (batch, fails) if need.total_bytes <= parse_size(args.memory) else (fits, batch)
        )
    if not fits:
        raise SystemExit(f"{precision.value}: not even one request fits {args.memory}")
    return fits


if __name__ == "__main__":
    main()

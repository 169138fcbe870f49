"""A layer of the families beyond Llama on a GPU: decode beside its byte floor, grouped products.

    python benchmarks/families_gpu.py --rows FILE [--models ...] [--batches 1,8,32,128]

Layers of dummy weights, timed as `llmpq-profile` times them (captured, four distinct layers). The
floor is what a step has to read at the card's listed bandwidth: of a mixture the experts that so
many tokens are expected to be sent to, and the keys and values of its context.

Then the product of all experts of a layer at 4096 tokens beside one dense product of as many rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from llmpq.cost_model import Phase
from llmpq.device_spec import canonical_kind, device_specs
from llmpq.kernels.formats.round_to_nearest import quantize_weight
from llmpq.kernels.gemm.expert_sent import assign
from llmpq.kernels.gemm.expert_stack import ExpertStack
from llmpq.kernels.tools.gpu_timing import time_launches, write_row
from llmpq.memory import Quantization, layer_weight_bytes
from llmpq.model_spec import ModelSpec
from llmpq.planner.costs.roofline import experts_hit
from llmpq.precision import Precision, WeightScheme
from llmpq.profiler.timing.cases import Sampling, Target, TimedCase
from llmpq.profiler.timing.stopwatch import Effort
from llmpq.profiler.timing.timed_layers import TimedModel

EFFORT = Effort(seconds=0.3, min_repeats=10)
MODELS = (
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "gemma-3-12b",
    "qwen2.5-32b",
    "llama-3.1-8b",
    "deepseek-v2-lite",
)
PREFILL_TOKENS = 4096


def read_bytes(spec: ModelSpec, precision: Precision, batch: int, context: int) -> float:
    """Return what a step of a layer reads: weights, of experts those that are hit, and cache."""
    whole = layer_weight_bytes(spec, precision, Quantization(), 2)
    if spec.experts:
        experts = sum(s.num_weights for s in spec.linears() if s.name.startswith("experts."))
        share = experts / sum(s.num_weights for s in spec.linears())
        hit = experts_hit(spec.experts, spec.experts_per_token, batch) / spec.experts
        whole *= 1 - share + share * hit
    vectors = 1 if spec.latent is not None else 2
    return whole + 2.0 * batch * context * vectors * spec.kv_heads * spec.head_dim


def decode(name: str, args: argparse.Namespace, kind: str) -> None:
    """Time a model's layer at every precision and batch."""
    spec = ModelSpec.by_name(name)
    timed = TimedModel(spec, torch.device("cuda"), Quantization(), Sampling())
    for text in args.precisions.split(","):
        precision = Precision.parse(text)
        for batch in map(int, args.batches.split(",")):
            target = Target(
                device_kind=kind, part="layer", phase=Phase.DECODE, precision=precision,
                dtype="bfloat16",
            )  # fmt: skip
            case = TimedCase(target=target, v=batch, length=args.context)
            found = timed.time(case, EFFORT)
            nbytes = read_bytes(spec, precision, batch, args.context)
            floor_us = nbytes / device_specs()[kind].mem_gbps / 1e3
            us = found.seconds * 1e6
            where = {"model": name, "precision": text, "batch": batch, "context": args.context}
            write_row(
                args.rows,
                bench="family layer",
                case=where | {"how": found.how},
                unit="us",
                samples=[us],
                floor=floor_us,
                commit=args.commit,
                program="python benchmarks/families_gpu.py",
            )
            print(
                f"{name:18} {text:6} {batch:4} {us:8.1f} us  {us / floor_us:5.2f} x floor",
                flush=True,
            )


def grouped(args: argparse.Namespace) -> None:
    """Time the first product of a layer's experts beside a dense one of equal shape."""
    spec = ModelSpec.by_name("qwen3-30b-a3b")
    n, k = 2 * spec.ffn, spec.hidden
    x = torch.randn(PREFILL_TOKENS, k, device="cuda", dtype=torch.bfloat16)
    expert_TK = torch.rand(PREFILL_TOKENS, spec.experts, device="cuda").topk(
        spec.experts_per_token, dim=1
    ).indices  # fmt: skip
    pairs = expert_TK.numel()
    rows = torch.randn(pairs, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    dense_us = time_launches(lambda _: rows @ w.t(), 1)
    for bits in (16, 8, 4):
        stack = ExpertStack(spec.experts)
        weight = w
        if bits < 16:
            scheme = WeightScheme(bits=bits, group_size=128, symmetric=False, clip_search=False)
            weight = quantize_weight(w, scheme, dtype=torch.bfloat16)
        for e in range(spec.experts):
            stack.put(e, weight, None)
        samples = time_launches(lambda _: stack.product(x, assign(expert_TK, spec.experts)), 1)  # noqa: B023
        write_row(
            args.rows,
            bench="grouped product",
            case={"model": spec.name, "precision": f"w{bits}a16", "tokens": PREFILL_TOKENS},
            unit="us",
            samples=samples,
            baselines={"dense": sorted(dense_us)[len(dense_us) // 2]},
            commit=args.commit,
            program="python benchmarks/families_gpu.py",
        )
        us = sorted(samples)[len(samples) // 2]
        print(f"grouped w{bits}: {us:.0f} us, dense {min(dense_us):.0f} us, "
              f"{min(dense_us) / us:.2f} of its rate", flush=True)  # fmt: skip


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default="w16a16,w4a16")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--commit", help="where git is not at hand")
    args = parser.parse_args()
    kind = canonical_kind(torch.cuda.get_device_name())
    grouped(args)
    for name in args.models.split(","):
        decode(name, args, kind)


if __name__ == "__main__":
    main()

"""A layer of the families beyond Llama on a GPU: decode beside its byte floor, grouped products.

    python benchmarks/families_gpu.py layers --rows FILE [--parts grouped,layers,kernels]
        [--models ...] [--precisions ...] [--batches 1,8,32,128]

layers      layers of dummy weights, timed as `llmpq-profile` times them (captured, four distinct
            layers). The floor is what a step has to read at the card's listed bandwidth: of a
            mixture the experts that so many tokens are expected to be dispatch to, and the keys and
            values of its context.
kernels     the same step, its time split by kernel: a kernel is charged from the end of the
            one before to its own end, so that launches which overlap add up to the step
grouped     the two products of all experts of a layer at 4096 tokens as the runtime calls them,
            each beside one dense product of equal shape, and the sorting of pairs
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from llmpq.costs.cost_model import Phase
from llmpq.devices.device_spec import canonical_kind, device_specs
from llmpq.kernels.formats.codebooks import E8M0, Codebook
from llmpq.kernels.gemm.experts.expert_dispatch import assign
from llmpq.kernels.gemm.experts.expert_stack import ExpertStack
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.gpu_timing import time_launches, write_row
from llmpq.kernels.weights.codebook_weight import codebook_weight
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.roofline import experts_hit
from llmpq.precision import Precision, WeightScheme
from llmpq.profiler.timing.cases import Effort, Sampling, Target, TimedCase
from llmpq.profiler.timing.timed_layers import TimedModel
from llmpq.runtime.models.layer_tensors import LayerTensors
from llmpq.runtime.models.linear import Linear
from llmpq.sizes.memory import Quantization, layer_weight_bytes

MADE = LayerTensors.linear
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
PAUSE_US = 5.0
"""Idle time between two kernels beyond which it is the host's, between two calls."""


def read_bytes(spec: ModelSpec, precision: Precision, batch: int, context: int) -> float:
    """Return what a step of a layer reads: weights, of experts those that are hit, and cache."""
    whole: float = layer_weight_bytes(spec, precision, Quantization(), 2)
    if spec.experts:
        experts = sum(s.num_weights for s in spec.linears() if s.name.startswith("experts."))
        share = experts / sum(s.num_weights for s in spec.linears())
        hit = experts_hit(spec.experts, spec.experts_per_token, batch) / spec.experts
        whole *= 1 - share + share * hit
    vectors = 1 if spec.latent is not None else 2
    return whole + 2.0 * batch * context * vectors * spec.kv_heads * spec.head_dim


def cases(
    name: str, args: argparse.Namespace, kind: str
) -> Iterator[tuple[TimedModel, TimedCase, dict[str, object], float]]:
    """Yield a model's decode steps, what rows say of them and their floor in microseconds."""
    spec = ModelSpec.by_name(name)
    timed = TimedModel(spec, torch.device("cuda"), Quantization(), Sampling())
    for text in args.precisions.split(","):
        precision = Precision.parse(text)
        for batch in map(int, args.batches.split(",")):
            target = Target(
                device_kind=kind, part="layer", phase=Phase.DECODE, precision=precision,
                dtype="bfloat16",
            )  # fmt: skip
            nbytes = read_bytes(spec, precision, batch, args.context)
            floor_us = nbytes / device_specs()[kind].mem_gbps / 1e3
            where = {"model": name, "precision": text, "batch": batch, "context": args.context}
            where |= {"experts": args.experts} if args.experts else {}
            yield timed, TimedCase(target=target, v=batch, length=args.context), where, floor_us


def in_mxfp4(parts: LayerTensors, name: str) -> Linear:
    """Return a linear as `LayerTensors.linear` does, an expert's with random codes of MXFP4."""
    made = MADE(parts, name)
    weight = made.weight
    if not name.startswith("experts.") or not weight.relocates:
        return made
    n, k, device = weight.out_features, weight.in_features, weight.device
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scale = torch.randint(115, 120, (n, -(-k // 32)), dtype=E8M0, device=device)
    return Linear(codebook_weight(codes, scale, codebook=Codebook.E2M1, group_size=32), made.bias)


def layers(args: argparse.Namespace, kind: str) -> None:
    """Time layers at every precision and batch."""
    if args.experts == "mxfp4":
        LayerTensors.linear = in_mxfp4  # type: ignore[method-assign]
    for name in args.models.split(","):
        for timed, case, where, floor_us in cases(name, args, kind):
            found = timed.time(case, EFFORT)
            us = found.seconds * 1e6
            row(args, "family layer", where, [us], floor=floor_us)
            print(
                f"{name:18} {where['precision']:6} {where['batch']:4} {us:8.1f} us  "
                f"{us / floor_us:5.2f} x floor",
                flush=True,
            )


def kernels(args: argparse.Namespace, kind: str) -> None:
    """Tell the time of layers apart by kernel, those that take longest first."""
    for name in args.models.split(","):
        for timed, case, where, floor_us in cases(name, args, kind):
            call, count = timed.step(case)
            spent = by_kernel(call)
            whole = sum(us for _, us in spent.values()) / count
            print(
                f"{name} {where['precision']} batch {where['batch']}: {whole:.1f} us a layer, "
                f"floor {floor_us:.1f}, {sum(n for n, _ in spent.values()) / count:.1f} launches"
            )
            for kernel, (launches, us) in sorted(spent.items(), key=lambda item: -item[1][1]):
                what = where | {"kernel": kernel[:80], "launches": round(launches / count, 3)}
                row(args, "family kernels", what, [us / count])
                print(f"    {us / count:8.2f} us {launches / count:5.2f} x  {kernel[:80]}")
            print(flush=True)


def by_kernel(call: Callable[[], object], repeats: int = 10) -> dict[str, tuple[float, float]]:
    """Return launches and microseconds of one call by kernel's name; a call is far from empty."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            call()
            torch.cuda.synchronize()
    ran = [
        (e.time_range.end, e.time_range.start, e.name)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    spent: dict[str, tuple[float, float]] = {}
    ahead = 0.0
    for end, start, name in sorted(ran):
        # A pause of the host between two calls is charged to no kernel.
        begin = ahead if start - ahead < PAUSE_US else start
        launches, us = spent.get(name, (0.0, 0.0))
        spent[name] = (launches + 1 / repeats, us + max(0.0, end - begin) / repeats)
        ahead = max(ahead, end)
    return spent


def grouped(args: argparse.Namespace) -> None:
    """Time the products of a layer's experts beside dense ones of equal shape."""
    spec = ModelSpec.by_name(args.models.split(",")[0])
    assert spec.experts, f"{spec.name} has no experts"
    expert_TK = torch.rand(PREFILL_TOKENS, spec.experts, device="cuda").topk(
        spec.experts_per_token, dim=1
    ).indices  # fmt: skip
    pairs, dispatch = expert_TK.numel(), assign(expert_TK, spec.experts)
    here = {"model": spec.name, "tokens": PREFILL_TOKENS}
    row(args, "grouped product", here | {"product": "sorting"},
        time_launches(lambda _: assign(expert_TK, spec.experts), 1))  # fmt: skip
    shapes = {"up": (2 * spec.ffn, spec.hidden), "down": (spec.hidden, spec.ffn)}
    for product, (n, k) in shapes.items():
        x = torch.randn(PREFILL_TOKENS if product == "up" else pairs, k, device="cuda").bfloat16()
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        rows = torch.randn(pairs, k, device="cuda", dtype=torch.bfloat16)
        dense_us = statistics.median(time_launches(lambda _: rows @ w.t(), 1))  # noqa: B023
        for text in args.precisions.split(","):
            stack = stacked(w, Precision.parse(text).weight_bits, spec.experts)
            gate = GateRule() if product == "up" and stack.gates(x, dispatch) else None
            samples = time_launches(
                lambda _: stack.product(x, dispatch, back=product == "down", gate=gate),  # noqa: B023
                1,
            )
            us = statistics.median(samples)
            what = here | {"product": product, "precision": text, "gated": gate is not None}
            row(args, "grouped product", what, samples, baselines={"dense": dense_us})
            print(f"grouped {product} {text}: {us:.0f} us, dense {dense_us:.0f} us, "
                  f"{dense_us / us:.2f} of its rate", flush=True)  # fmt: skip


def stacked(w: torch.Tensor, bits: int, experts: int) -> ExpertStack:
    """Return a stack of as many copies of a weight."""
    stack = ExpertStack(experts)
    weight: Weight = DenseWeight(w)
    if bits < 16:
        scheme = WeightScheme(bits=bits, group_size=128, symmetric=False, clip_search=False)
        weight = quantize_weight(w, scheme, dtype=torch.bfloat16)
    for e in range(experts):
        stack.put(e, weight, None)
    return stack


def row(
    args: argparse.Namespace,
    bench: str,
    case: dict[str, object],
    samples: list[float],
    *,
    floor: float | None = None,
    baselines: dict[str, float] | None = None,
) -> None:
    """Append a row of microseconds."""
    write_row(
        args.rows,
        bench=bench,
        case=case,
        unit="us",
        samples=samples,
        floor=floor,
        baselines=baselines,
        commit=args.commit,
        program="python benchmarks/families_gpu.py layers",
    )


def main(words: list[str], program: str) -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--parts", default="grouped,layers")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default="w16a16,w4a16")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--experts", choices=("mxfp4",), help="how a 4-bit layer stores them")
    parser.add_argument("--commit", help="where git is not at hand")
    args = parser.parse_args(words)
    kind = canonical_kind(torch.cuda.get_device_name())
    for part in args.parts.split(","):
        if part == "grouped":
            grouped(args)
        else:
            parts = {"layers": layers, "kernels": kernels}
            parts[part](args, kind)

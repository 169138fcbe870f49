"""A decode step of a dense model on a GPU, launch by launch: bytes, floor, time, gap.

    python benchmarks/step_ledger.py [--model llama-3.1-8b] [--kinds w4,w4s,w16] [--rows 1,8,32,128]
        [--context 1024] [--head-bits 16] [--write] [--quiet]

Dummy weights; the step as the engine runs it, captured. `w4s` has symmetric weights. A launch is
charged from the end of the one before to its own end, so that launches which overlap
(kernels/overlap.py) add up to the step; `own` is from its start to its end, `gap` what passes
before it starts. Its floor is what it has to read and write (weights once, keys and values of the
context, what goes in and out) at the card's listed bandwidth; `copy` is what a large copy reaches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

sys.path.insert(0, str(Path(__file__).parent))
from lib.recurrent_models import DEVICE, build, message, seconds, stage, step_bytes
from lib.rows import write_row

from llmpq.devices.device_spec import canonical_kind, device_specs
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.models.layers import Attention, DecoderLayer
from llmpq.runtime.models.mlps import GatedMLP
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import StepKind
from llmpq.sizes.kv_format import BLOCK_TOKENS

KINDS = {
    "w4": ("w4a16", False),
    "w4s": ("w4a16", True),
    "w8": ("w8a16", False),
    "w3": ("w3a16", False),
    "w16": ("w16a16", False),
}
"""Name -> precision, and whether weights are symmetric."""
NOT_PRODUCTS = (
    ("norm", "rms_norm"),
    ("rope, append", "rope_append"),
    ("attention", "decode_kernel"),
    ("merging", "combine_kernel"),
    ("gate", "gate_kernel"),
)
"""Launches of a layer by a part of their kernel's name; every other one belongs to a product."""
REPEATS = 12
AHEAD = 16
"""Steps that are enqueued one behind the other, as the engine does, which knows no token yet."""


@dataclass(kw_only=True)
class Launch:
    """One launch of a step."""

    kernel: str
    own_us: float
    since_us: float
    """From the end of the launch before to its end."""
    gap_us: float
    """From the end of the launch before to its start; below zero where they overlap."""


def traced(call: Callable[[], object]) -> list[list[Launch]]:
    """Return the launches of several steps, each begun on an idle device."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(REPEATS):
            call()
            torch.cuda.synchronize()
            time.sleep(0.002)
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in found.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
        and not e.name.startswith(("Memcpy", "Memset", "Activity"))
    )
    steps: list[list[Launch]] = []
    ahead = -1e9
    for start, end, name in events:
        if start - ahead > 1000:
            steps.append([])
            ahead = start
        spent = Launch(
            kernel=name, own_us=end - start, since_us=max(0.0, end - ahead), gap_us=start - ahead
        )
        steps[-1].append(spent)
        ahead = max(ahead, end)
    usual = statistics.mode(map(len, steps))
    return [step for step in steps if len(step) == usual]


def part_of(kernel: str) -> str | None:
    """Return what a launch of a layer that is no product does, None of a product's."""
    return next((part for part, text in NOT_PRODUCTS if text in kernel), None)


def period_of(names: list[str], layers: int) -> tuple[int, int]:
    """Return where the first layer begins, and the launches of one."""
    first = next(i for i, name in enumerate(names) if part_of(name) == "norm")
    for period in range(3, 40):
        end = (layers - 1) * period
        if all(names[first + i] == names[first + period + i] for i in range(end)):
            return first, period
    raise SystemExit("layers of this model are not alike: it has no ledger")


def labelled(kernels: list[str]) -> list[str]:
    """Return what each launch of a layer does: products come as qkv, o, gate_up, down.

    A further launch right behind a product's belongs to it: it adds up shares.
    """
    products, ends = iter(("qkv", "o", "gate_up", "down")), True
    found: list[str] = []
    for kernel in kernels:
        part = part_of(kernel)
        if part is None:
            part = next(products) if ends else found[-1]
        ends = part_of(kernel) is not None
        found.append(part)
    return found


def bytes_of(model: StageModel, kv_bytes: float, rows: int) -> dict[str, float]:
    """Return what each launch of a layer has to move; activations have two bytes."""
    layer = cast("DecoderLayer", model.layers[0])
    attention, mlp = cast("Attention", layer.attention), cast("GatedMLP", layer.mlp)
    h, ffn = model.spec.hidden, model.spec.ffn
    q = attention.heads * attention.head_dim
    kv = 2 * attention.kv_heads * attention.head_dim
    wide = 2.0 * rows
    found = {
        "norm": wide * 2 * h,
        "qkv": attention.qkv.weight.nbytes + wide * (h + q + kv),
        "rope, append": wide * 2 * (q + kv),
        "attention": kv_bytes + wide * 2 * q,
        "merging": wide * q,
        "o": attention.o.weight.nbytes + wide * (q + 2 * h),
        "gate_up": mlp.wide.weight.nbytes + wide * (h + 2 * ffn),
        "gate": wide * 3 * ffn,
        "down": mlp.down.weight.nbytes + wide * (ffn + 2 * h),
    }
    return {part: float(value) for part, value in found.items()}


def copy_rate() -> float:
    """Return the bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(seconds(lambda: target.copy_(source), 20))


def ledger(
    name: str, kind: str, rows: int, model: StageModel, precision: Precision, args: Any
) -> None:
    """Print and write a step's lines."""
    layers = len(model.layers)
    compute = stage(model, rows, args.context + 1, rows)
    call = compute.repeatable(message(StepKind.DECODE, rows, args.context, 1), None)
    samples = [s * 1e6 / AHEAD for s in seconds(lambda: [call() for _ in range(AHEAD)], 8)]
    step_us = statistics.median(samples)
    whole = step_bytes(model, compute, precision, rows, args.context)
    blocks = rows * -(-(args.context + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    kv = compute.kv.nbytes / blocks * rows * args.context
    floor_us = whole / args.peak * 1e6
    case: dict[str, Any] = {"model": name, "kind": kind, "rows": rows, "context": args.context,
                            "head_bits": args.head_bits}  # fmt: skip
    share, of_copy = floor_us / step_us, whole / args.copy * 1e6 / step_us
    print(f"{name} {kind:4} {rows:4} rows: {step_us:7.0f} us, floor {floor_us:6.0f}, "
          f"{share:.3f} of it ({of_copy:.3f} of a copy's)", flush=True)  # fmt: skip
    if args.write:
        write_row("step.jsonl", bench="step_share", case=case, unit="us", samples=samples,
                  floor=floor_us, baselines={"copy_us": whole / args.copy * 1e6},
                  device=torch.cuda.get_device_name())  # fmt: skip
    if args.quiet:
        return
    steps = traced(call)
    first, period = period_of([launch.kernel for launch in steps[0]], layers)
    labels = labelled([launch.kernel for launch in steps[0][first : first + period]])
    moved = bytes_of(model, kv / layers, rows)
    inside = 0.0
    for place, part in enumerate(labels):
        at = [step[first + place + i * period] for step in steps for i in range(1, layers)]
        since, own, gap = (
            statistics.fmean(getattr(one, field) for one in at)
            for field in ("since_us", "own_us", "gap_us")
        )
        inside += since
        nbytes = 0.0 if part in labels[:place] and part != "norm" else moved.get(part, 0.0)
        floor = nbytes / args.peak * 1e6
        kernel = at[0].kernel.partition("(")[0][-40:]
        print(f"    {part:13}{nbytes / 1e6:8.2f} MB {floor:6.2f} us floor {since:7.2f} us "
              f"(own {own:6.2f}, gap {gap:6.2f}) {kernel}")  # fmt: skip
        if args.write:
            write_row("step.jsonl", bench="step_launch",
                      case=case | {"place": place, "part": part, "kernel": kernel,
                                   "MB": nbytes / 1e6},
                      unit="us", samples=[since], floor=floor,
                      baselines={"own_us": own, "gap_us": gap},
                      device=torch.cuda.get_device_name())  # fmt: skip
    others = steps[0][:first] + steps[0][first + period * layers :]
    print(f"    a layer {inside:.1f} us; no layer's {step_us - inside * layers:.0f} us, of these: "
          + ", ".join(f"{one.since_us:.0f} {one.kernel.partition('(')[0][-28:]}"
                      for one in others), flush=True)  # fmt: skip


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--kinds", default="w4,w4s,w16", help=", ".join(KINDS))
    parser.add_argument("--rows", default="1,8,32,128", help="requests of a step")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the new one")
    parser.add_argument("--head-bits", type=int, choices=(8, 16), default=16)
    parser.add_argument("--write", action="store_true", help="append rows to results/step.jsonl")
    parser.add_argument("--quiet", action="store_true", help="whole steps alone")
    args = parser.parse_args()
    kind = canonical_kind(torch.cuda.get_device_name(DEVICE))
    args.peak = device_specs()[kind].mem_gbps * 1e9
    args.copy = copy_rate()
    print(f"# {kind}: {args.peak / 1e12:.2f} TB/s listed, {args.copy / 1e12:.2f} by a copy")
    spec = ModelSpec.by_name(args.model)
    head_precision = Precision.W8A16 if args.head_bits == 8 else Precision.W16A16
    for name in args.kinds.split(","):
        text, symmetric = KINDS[name]
        precision = Precision.parse(text)
        model = build(spec, precision, symmetric=symmetric, head_precision=head_precision)
        for rows in map(int, args.rows.split(",")):
            ledger(args.model, name, rows, model, precision, args)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

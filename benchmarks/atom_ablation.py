"""Perplexity of W4A4 as Atom's techniques are added one by one, as rows of `atom.jsonl`.

    python benchmarks/atom_ablation.py                              the demo model
    python benchmarks/atom_ablation.py --model DIR --tokens 8192    another one

The order is that of the paper's Table 2, on the model as it is and on a function-preserving copy
with outlier channels; then this project's two additions, and weight-only and w8a8 beside them.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from lib.atom_models import (
    CachedPipeline,
    Subject,
    add_arguments,
    quantized,
    subjects,
)
from lib.rows import write_row

from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision, WeightScheme
from llmpq.profiler.quantize.one_layer import Recipe
from llmpq.profiler.quantize.recipes import SMOOTHING
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.tools.evaluate import perplexity


@dataclass(frozen=True)
class Step:
    """A row of the table."""

    name: str
    recipe: Recipe
    kv4: Literal["", "token", "channel"] = ""
    """4-bit KV: keys per token and head (the paper), or per channel and 128 tokens (ours)."""


def steps(outliers: int, group: int) -> list[Step]:
    """Return the rows in the paper's order, then ours."""
    rtn = AtomScheme(group_size=None, weight_clip=1.0, activation_clip=1.0)
    kept = replace(rtn, outliers=outliers, outlier_bits=16)
    int8 = replace(kept, outlier_bits=8)
    grouped = replace(int8, group_size=group)
    clipped = replace(grouped, weight_clip=0.85, activation_clip=0.9)
    signed = replace(clipped, weight_clip=None, activation_clip=0.95, signed_scale=True)
    rotated = Recipe(scheme=signed, rotated=("down",))
    improved = replace(rotated, smoothing=SMOOTHING)
    in_turn = replace(improved, compensated=True)
    integers = replace(improved, scheme=replace(signed, integer_scales=True))
    return [
        Step("w4a4 rtn", Recipe(scheme=rtn, method="rtn")),
        Step("+ hidden/32 outliers in 16 bits", Recipe(scheme=kept, method="rtn")),
        Step("+ outliers in int8", Recipe(scheme=int8, method="rtn")),
        Step(f"+ group {group}", Recipe(scheme=grouped, method="rtn")),
        Step("+ clipping", Recipe(scheme=clipped, method="rtn")),
        Step("+ gptq", Recipe(scheme=clipped)),
        Step("+ kv int4 (the paper's atom)", Recipe(scheme=clipped), kv4="token"),
        Step("gptq + signed scales, searched clips", Recipe(scheme=signed)),
        Step("+ rotation before down", rotated),
        Step("+ channels of norms balanced", improved),
        Step("  with integer scales (--integer-scales)", integers),
        Step("+ kv int4 (improved atom, the default)", improved, kv4="token"),
        Step("  or kv int4, keys per channel", improved, kv4="channel"),
        Step("+ each linear undoes the rounding before it", in_turn),
        Step("+ kv int4 (--in-turn)", in_turn, kv4="token"),
        Step("  or kv int4, keys per channel (--in-turn)", in_turn, kv4="channel"),
        Step("w8a8 gptq", Recipe(scheme=W8A8)),
        Step(
            "w8a8 gptq, channels balanced (the default)", Recipe(scheme=W8A8, smoothing=SMOOTHING)
        ),
        Step("w4a16 rtn", Recipe(scheme=WeightScheme(bits=4), method="rtn")),
        Step("w4a16 gptq", Recipe(scheme=WeightScheme(bits=4))),
        Step("w3a16 rtn", Recipe(scheme=WeightScheme(bits=3), method="rtn")),
        Step("w3a16 gptq", Recipe(scheme=WeightScheme(bits=3))),
    ]


def other_numbers(outliers: int) -> list[Step]:
    """Return the paper's other number formats: W3A3 and 4-bit floats, group 64."""
    w3a3 = AtomScheme(weight_bits=3, activation_bits=3, outliers=outliers, group_size=64)
    e2m1 = AtomScheme(number="e2m1", outliers=outliers, group_size=64)
    return [
        Step("w3a3", Recipe(scheme=w3a3)),
        Step("w4a4 e2m1", Recipe(scheme=e2m1)),
    ]


def main() -> None:
    """Measure and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=1 << 30, help="held-out tokens judged (all)")
    parser.add_argument("--part", default="0/1", help="of the recipes: 1/4 is the second of four")
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these")
    args = parser.parse_args()
    for subject in subjects(args, num_tokens=args.tokens):
        measure(subject, args)


def measure(subject: Subject, args: argparse.Namespace) -> None:
    """Write one subject's table."""
    case = {
        "model": subject.name,
        "text": args.text.name,
        "tokens": len(subject.tokens),
        "calibration_tokens": subject.windows_WT.numel(),
    }
    base = ppl(subject, subject.source, kv4="")
    dense = sum(t.nbytes for i in range(subject.spec.num_layers) for t in _layer16(subject, i))
    if args.part.startswith("0"):
        write(subject, case | {"step": "w16a16", "layer_bytes": dense}, base, base)
    outliers = subject.spec.hidden // 32
    chosen = [*steps(outliers, args.group), *other_numbers(outliers)]
    if args.only:
        chosen = [step for step in chosen if any(word in step.name for word in args.only)]
    of_a_recipe: dict[Recipe, list[Step]] = {}
    for step in chosen:
        of_a_recipe.setdefault(step.recipe, []).append(step)
    part, parts = (int(number) for number in args.part.split("/"))
    for recipe, alike in list(of_a_recipe.items())[part::parts]:
        ready = quantized(subject, recipe)
        for step in alike:
            value = ppl(subject, ready, kv4=step.kv4)
            write(subject, case | {"step": step.name, "layer_bytes": ready.nbytes}, value, base)


def ppl(subject: Subject, source: object, *, kv4: str) -> float:
    """Return the perplexity in windows of 1024 tokens."""
    plain = subject.pipeline(source)  # type: ignore[arg-type]
    pipeline = plain
    if kv4:
        key_group = None if kv4 == "token" else 128
        cache = functools.partial(kv4_cache, key_group=key_group, device=subject.device)
        pipeline = CachedPipeline(plain.spec, plain.stages, plain.dtype, plain.device, cache)
    return perplexity(pipeline.scores, subject.tokens, window=1024).value


def kv4_cache(
    spec: ModelSpec,
    num_layers: int,
    slots: int,
    max_len: int,
    *,
    key_group: int | None,
    device: torch.device,
) -> KVCache:
    """Return a 4-bit cache that rounds prompts, too; `key_group` tokens share a key scale."""
    return LowBitKV(
        spec,
        KVPrecision.KV4,
        num_layers=num_layers,
        slots=slots,
        max_len=max_len,
        dtype=torch.float32,
        device=device,
        key_group=key_group,
        exact_prompt=False,
    )


def write(subject: Subject, case: dict[str, object], value: float, base: float) -> None:
    """Append a row and show it."""
    write_row(
        "atom.jsonl",
        bench="atom_ablation",
        case=case,
        unit="perplexity",
        samples=[value],
        baselines={"w16a16": base},
        **subject.made(),
    )
    print(f"{case['model']:20} {case['step']:38} {value:9.4f} {value / base - 1:+9.2%}", flush=True)


def _layer16(subject: Subject, index: int) -> list[torch.Tensor]:
    return list(subject.source.layer(index, torch.float16).values())


if __name__ == "__main__":
    main()

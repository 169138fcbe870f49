"""Dense products with codes of a table and of small groups on a GPU, beside W4 and 16 bits.

    python benchmarks/table_products_gpu.py --rows FILE [--commit HASH] [--forms FORM,...]

As `linear` multiplies them; W3, W4 and W8 in groups of 128 with zeros, FP8 in blocks of 128 x 128.
A launch of a replayed graph,
microseconds, weights that are not in the L2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.formats.fp8_weight import Fp8Weight, fp8_weight
from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.round_to_nearest import quantize_weight
from llmpq.kernels.formats.table_weight import E4M3, E8M0, TableWeight, Values, table_weight
from llmpq.kernels.gpu_timing import copies_for, time_launches, write_row
from llmpq.kernels.linear import linear
from llmpq.precision import WeightScheme

SHAPES = ((28672, 4096), (4096, 14336), (4096, 4096), (2048, 11008), (22016, 2048))
ROWS = (1, 8, 32, 128, 512, 2048)
MOST_COPIES = 24
Weight = QuantizedWeight | TableWeight | Fp8Weight
SCHEMES = {
    "w3": WeightScheme(bits=3, clip_search=False),
    "w3 in 64": WeightScheme(bits=3, group_size=64, clip_search=False),
    "w3 in 32": WeightScheme(bits=3, group_size=32, symmetric=True, clip_search=False),
    "w4": WeightScheme(bits=4, clip_search=False),
    "w4 in 32": WeightScheme(bits=4, group_size=32, symmetric=True, clip_search=False),
    "w8": WeightScheme(bits=8, clip_search=False),
    "w8 in 32": WeightScheme(bits=8, group_size=32, symmetric=True, clip_search=False),
}


def main() -> None:
    """Measure every shape and append rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--commit", help="where git is not at hand")
    parser.add_argument("--forms", default="", help="comma-separated; without, all")
    args = parser.parse_args()
    wanted = [form for form in args.forms.split(",") if form]
    for n, k in SHAPES:
        w = torch.randn(n, k, device="cuda").bfloat16() * 0.02
        plain = [w.clone() for _ in range(min(MOST_COPIES, copies_for(w.nbytes)))]
        weights = {
            form: copies_of(q) for form, q in forms_of(w).items() if not wanted or form in wanted
        }
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda").bfloat16()
            dense = statistics.median(timed(torch.mm, x, [each.t() for each in plain]))
            for form, copies in weights.items():
                write_row(
                    args.rows,
                    bench="table product",
                    case={"n": n, "k": k, "rows": rows, "form": form},
                    unit="us",
                    samples=timed(linear, x, copies),
                    baselines={"16 bits": dense},
                    commit=args.commit,
                    program="python benchmarks/table_products_gpu.py",
                )


def timed(product: Callable[..., Tensor], x: Tensor, copies: Sequence[Any]) -> list[float]:
    """Return the times of a product with a weight and its copies in turn."""
    return time_launches(lambda i: product(x, copies[i]), len(copies), repeats=8)


def forms_of(w: Tensor) -> dict[str, Weight]:
    """Return weights of every form, in the layout of this device."""
    n, k = w.shape
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    e8m0 = torch.randint(116, 122, (n, k // 32), dtype=E8M0, device="cuda")
    e4m3 = (torch.rand(n, k // 16, device="cuda") * 400 + 1).to(E4M3)
    half = torch.rand(n, k // 32, device="cuda").half() / 50
    factor = torch.full((n,), 1e-4, device="cuda")
    tables = {
        "mxfp4": table_weight(codes, e8m0, values=Values.E2M1, group_size=32),
        "nvfp4": table_weight(codes, e4m3, values=Values.E2M1, group_size=16, factor=factor),
        "nf4": table_weight(codes, half[:, ::2], values=Values.NF4, group_size=64),
        "iq4": table_weight(codes, half / 50, values=Values.IQ4, group_size=32),
    }
    eight = (w * 400).to(E4M3)
    fp8 = fp8_weight(eight, torch.rand(n // 128, k // 128, device="cuda"), (128, 128), w.dtype)
    made: dict[str, Weight] = {form: q.to("cuda") for form, q in tables.items()}
    return (
        made
        | {"fp8": fp8.to("cuda")}
        | {form: quantize_weight(w, s, dtype=w.dtype) for form, s in SCHEMES.items()}
    )


def copies_of(q: Weight) -> list[Weight]:
    """Return a weight and copies of its codes, so many that none is found in the L2."""
    more = min(MOST_COPIES, copies_for(q.nbytes)) - 1
    if isinstance(q, Fp8Weight):
        return [q, *(replace(q, codes_NK=q.codes_NK.clone()) for _ in range(more))]
    if isinstance(q, TableWeight):
        return [q, *(replace(q, plane=q.plane.clone()) for _ in range(more))]
    return [q, *(replace(q, planes=tuple(p.clone() for p in q.planes)) for _ in range(more))]


if __name__ == "__main__":
    main()

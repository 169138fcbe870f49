"""Dense products with 4-bit codes of a table on a GPU, beside W4 and torch's in 16 bits.

    python benchmarks/table_products_gpu.py --rows FILE [--commit HASH]

MXFP4 and NF4 as `linear` multiplies them, W4 in groups of 128 with zeros, and in groups of 32; a
launch of a replayed graph, microseconds.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch

from llmpq.kernels.formats.round_to_nearest import quantize_weight
from llmpq.kernels.formats.table_weight import E8M0, Values, table_weight
from llmpq.kernels.linear import linear
from llmpq.kernels.tools.gpu_timing import time_launches, write_row
from llmpq.precision import WeightScheme

SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 8, 32, 128, 1024)


def main() -> None:
    """Measure every shape and append rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--commit", help="where git is not at hand")
    args = parser.parse_args()
    for n, k in SHAPES:
        w = torch.randn(n, k, device="cuda").bfloat16() * 0.02
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scale = torch.randint(116, 122, (n, k // 32), dtype=E8M0, device="cuda")
        half = torch.rand(n, k // 64, device="cuda").half() / 50
        schemes = {
            "w4": WeightScheme(bits=4, clip_search=False),
            "w4 in 32": WeightScheme(bits=4, group_size=32, symmetric=True, clip_search=False),
        }
        weights = {
            "mxfp4": table_weight(codes, scale, values=Values.E2M1, group_size=32),
            "nf4": table_weight(codes, half, values=Values.NF4, group_size=64),
            **{name: quantize_weight(w, s, dtype=torch.bfloat16) for name, s in schemes.items()},
        }
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda").bfloat16()
            dense = statistics.median(time_launches(lambda _, x=x, w=w: x @ w.t(), 1))
            for form, q in weights.items():
                product = partial(lambda _, x, q: linear(x, q), x=x, q=q)
                write_row(
                    args.rows,
                    bench="table product",
                    case={"n": n, "k": k, "rows": rows, "form": form},
                    unit="us",
                    samples=time_launches(product, 1),
                    baselines={"16 bits": dense},
                    commit=args.commit,
                    program="python benchmarks/table_products_gpu.py",
                )


if __name__ == "__main__":
    main()

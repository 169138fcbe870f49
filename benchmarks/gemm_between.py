"""Products of hundreds to thousands of rows: what is chosen beside tiles, pieces of w, and cuBLAS.

    python benchmarks/gemm_between.py [--bits 8] [--weights "bf16 zeros"] [--shapes 4096x6144,...]
        [--m 333,777,...] [--out ROWS.jsonl]

Each way is checked against a float32 product, then timed: captured launches, weights out of the L2,
medians. A row is the chosen way; beside it stand the best of the tiles that the model of the
machine ranks first, w made in pieces and at once before cuBLAS, and cuBLAS with 16-bit weights.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gemm_search import LIMITS, Products
from torch.nn import functional

from llmpq.kernels.gemm import choice, linear_gpu
from llmpq.kernels.gemm.ranking.candidates import candidates
from llmpq.kernels.gemm.ranking.config import DENSE, PIECES, Config, config_entry, make_plan
from llmpq.kernels.gemm.ranking.machine import Machine, machine_of
from llmpq.kernels.gemm.ranking.predict import Product, expected_us
from llmpq.kernels.gpu_timing import copies_for, time_launches, write_row

SHAPES = "4096x6144,4096x4096,4096x28672,14336x4096,6144x32768,2880x5760,8960x1536"
ROWS = "333,512,640,777,900,1024,1280,1500,1792,2048,3072,4096"
FEW = 3
"""Tiles that are timed of a product."""
TILED = ("wgmma_gemm", "wgmma_rows")


def best_tiles(product: Product, machine: Machine) -> list[Config]:
    """Return the tiles that the model of the machine ranks first."""
    times = {c: expected_us(c, product, machine) for c in candidates(product, machine)}
    tiles = (c for c in times if c.kernel in TILED)
    return sorted(tiles, key=lambda config: times[config])[:FEW]


def median_us(call: Callable[[int], object], copies: int) -> float:
    """Return the median of a few replays."""
    return statistics.median(time_launches(call, copies, launches=12, repeats=3))


def time_product(products: Products, rows: int) -> tuple[Config, dict[Config, float]]:
    """Return the chosen configuration, and every one's microseconds."""
    n, k, device = products.n, products.k, products.first.device
    symmetric, dtype = products.first.symmetric, products.dtype
    form, padded = choice.form_name(dtype, symmetric), choice.rounded_rows(rows)
    product = Product(products.bits, n, k, padded, form)
    chosen = choice.plan(products.bits, n, k, padded, device, dtype, symmetric).config
    x = torch.randn(rows, k, device=device, dtype=dtype)
    exact = x.float() @ products.wide.t()
    took: dict[Config, float] = {}
    for config in dict.fromkeys([chosen, *best_tiles(product, machine_of(device)), *PIECES, DENSE]):
        plan = make_plan(config, (9, 0))
        y = linear_gpu.run(plan, x, products.first)
        error = float((y.float() - exact).norm() / exact.norm())
        if not error < LIMITS[dtype]:
            raise SystemExit(f"{product} by {config_entry(config)}: relative error {error}")

        def call(i: int, plan: Any = plan) -> Any:
            return linear_gpu.run(plan, x, products.pool[i])

        took[config] = median_us(call, products.copies)
    return chosen, took


def main() -> None:
    """Time every product and write its row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument(
        "--weights", default="bf16 zeros", help="fp16, bf16, with zeros: bf16 zeros"
    )
    parser.add_argument("--shapes", default=SHAPES, help="K x N")
    parser.add_argument("--m", default=ROWS, help="rows of x")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for shape in options.shapes.split(","):
        k, n = map(int, shape.split("x"))
        products, copies = Products(options.bits, k, n, options.weights), copies_for(2 * n * k)
        dense = torch.randn(copies, n, k, device="cuda", dtype=products.dtype)
        for rows in map(int, options.m.split(",")):
            x = torch.randn(rows, k, device="cuda", dtype=products.dtype)

            def cublas(i: int, x: torch.Tensor = x, dense: torch.Tensor = dense) -> torch.Tensor:
                return functional.linear(x, dense[i])

            chosen, took = time_product(products, rows)
            beside = {
                "tiles": min(us for c, us in took.items() if c.kernel in TILED),
                **{f"pieces of {c.piece_mib} MiB": took[c] for c in PIECES},
                "all of w": took[DENSE],
                "cublas": median_us(cublas, copies),
            }
            print(f"w{options.bits} {shape} {rows} rows: {took[chosen]:.1f} us "
                  f"{config_entry(chosen)}, {beside}", flush=True)  # fmt: skip
            if options.out:
                write_row(
                    options.out,
                    bench="gemm_between",
                    case={
                        "precision": f"w{options.bits}a16", "weights": options.weights,
                        "shape": shape, "m": rows, "config": config_entry(chosen),
                    },
                    unit="us",
                    samples=[took[chosen]],
                    baselines=beside,
                    program="python benchmarks/gemm_between.py",
                )  # fmt: skip


if __name__ == "__main__":
    main()

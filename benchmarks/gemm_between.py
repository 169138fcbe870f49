"""Products of hundreds to thousands of rows: what is chosen beside tiles, pieces of w, and cuBLAS.

    python benchmarks/gemm_between.py [--bits 8] [--weights "bf16 zeros"] [--shapes 4096x6144,...]
        [--m 333,777,...] [--ways chosen] [--peers humming] [--out ROWS.jsonl]

`--ways chosen` leaves out what was not chosen. Humming (pip install humming-kernels) compiles at
its first products, for minutes. Kernels of ours are compiled side by side first. Each way is
checked against a float32 product, then timed: captured launches, weights out of the L2, medians. A
row is the chosen way; beside it stand the best of the tiles that the model of the machine ranks
first, w made in pieces and at once before cuBLAS, and cuBLAS with 16-bit weights.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lib import humming_peer
from lib.gemm_search import LIMITS, Products, kind_of
from torch.nn import functional

from llmpq.kernels.compile_missing import compiling_missing
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


def ways_of(products: Products, rows: int, ways: str) -> list[Config]:
    """Return the configurations to time, the chosen one first."""
    n, k, device = products.n, products.k, products.first.device
    symmetric, dtype = products.first.symmetric, products.dtype
    form, padded = choice.form_name(dtype, symmetric), choice.rounded_rows(rows)
    product = Product(products.bits, n, k, padded, form)
    chosen = choice.plan(products.bits, n, k, padded, device, dtype, symmetric).config
    if ways == "chosen":
        return [chosen]
    return list(dict.fromkeys([chosen, *best_tiles(product, machine_of(device)), *PIECES, DENSE]))


def time_product(products: Products, rows: int, ways: str) -> tuple[Config, dict[Config, float]]:
    """Return the chosen configuration, and every one's microseconds."""
    x = torch.randn(rows, products.k, device="cuda", dtype=products.dtype)
    exact = x.float() @ products.wide.t()
    took: dict[Config, float] = {}
    for config in ways_of(products, rows, ways):
        plan = make_plan(config, (9, 0))
        y = linear_gpu.run(plan, x, products.first)
        error = float((y.float() - exact).norm() / exact.norm())
        if not error < LIMITS[products.dtype]:
            raise SystemExit(f"{rows} rows by {config_entry(config)}: relative error {error}")

        def call(i: int, plan: Any = plan) -> Any:
            return linear_gpu.run(plan, x, products.pool[i])

        took[config] = median_us(call, products.copies)
    return next(iter(took)), took


def compile_all(every: list[Products], rows: list[int], ways: str) -> None:
    """Compile what will be timed."""
    with compiling_missing():
        for products in every:
            for m in rows:
                x = torch.zeros(m, products.k, device="cuda", dtype=products.dtype)
                for config in ways_of(products, m, ways):
                    linear_gpu.run(make_plan(config, (9, 0)), x, products.first)


def main() -> None:
    """Time every product and write its row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument(
        "--weights", default="bf16 zeros", help="fp16, bf16, with zeros: bf16 zeros"
    )
    parser.add_argument("--shapes", default=SHAPES, help="K x N")
    parser.add_argument("--m", default=ROWS, help="rows of x")
    parser.add_argument("--ways", choices=("all", "chosen"), default="all")
    parser.add_argument("--peers", choices=("humming",), help="beside cuBLAS")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.peers and not humming_peer.available():
        parser.error("--peers humming: not installed; pip install humming-kernels")
    rows = [int(m) for m in options.m.split(",")]
    shapes = [shape.split("x") for shape in options.shapes.split(",")]
    every = [Products(options.bits, int(k), int(n), options.weights) for k, n in shapes]
    compile_all(every, rows, options.ways)
    for products in every:
        time_shape(products, rows, options)


def time_shape(products: Products, rows: list[int], options: argparse.Namespace) -> None:
    """Time a shape's products and write their rows."""
    k, n, dtype = products.k, products.n, products.dtype
    copies = copies_for(2 * n * k)
    dense = torch.randn(copies, n, k, device="cuda", dtype=dtype)
    _, symmetric = kind_of(options.weights)
    peer = None
    if options.peers:
        peer = humming_peer.HummingProducts(
            products.bits, k, n, dtype, symmetric=symmetric, copies=products.copies
        )
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=dtype)

        def cublas(i: int, x: torch.Tensor = x) -> torch.Tensor:
            return functional.linear(x, dense[i])

        chosen, took = time_product(products, m, options.ways)
        beside = {"cublas": median_us(cublas, copies)}
        if options.ways == "all":
            beside |= {
                "tiles": min(us for c, us in took.items() if c.kernel in TILED),
                **{f"pieces of {c.piece_mib} MiB": took[c] for c in PIECES},
                "all of w": took[DENSE],
            }
        if peer:
            peer.check(x)
            beside["humming"] = median_us(functools.partial(peer.run, x), products.copies)
        print(f"w{options.bits} {k}x{n} {m} rows: {took[chosen]:.1f} us "
              f"{config_entry(chosen)}, {beside}", flush=True)  # fmt: skip
        if options.out:
            write_row(
                options.out,
                bench="gemm_between",
                case={
                    "precision": f"w{options.bits}a16", "weights": options.weights,
                    "shape": f"{k}x{n}", "m": m, "config": config_entry(chosen),
                },
                unit="us",
                samples=[took[chosen]],
                baselines=beside,
                program="python benchmarks/gemm_between.py",
            )  # fmt: skip


if __name__ == "__main__":
    main()

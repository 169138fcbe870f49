"""What the model of the machine chooses, timed beside cuBLAS, on shapes that no table has.

    python benchmarks/gemm_choice.py --rows gemm_choice.jsonl [--processes 12] [--commit C]

`linear` itself is timed; with --no-table the tuned corrections are left out. A row a product, and
the geometric mean of cuBLAS's time over ours for every number of rows. Kernels are compiled by
some processes first.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict

import torch
from gemm_search import OTHERS, SHAPES, Products, compile_some
from lib.rows import write_row
from torch.nn import functional

from llmpq.kernels.gemm import choice
from llmpq.kernels.gemm.choice import choose, rounded_rows
from llmpq.kernels.gemm.config import Config
from llmpq.kernels.gemm.ranking.machine import machine_of
from llmpq.kernels.gemm.ranking.predict import Product, expected_us, form_key
from llmpq.kernels.gpu_timing import copies_for, time_launches
from llmpq.kernels.linear import linear

ROWS = (1, 4, 16, 48, 64, 96, 200, 512, 777, 2048)


def jobs(bits: list[int], shapes: list[tuple[int, int]], rows: list[int]) -> list:
    """Return small products that between them compile the kernels of all choices."""
    machine, found = machine_of(torch.device("cuda", 0)), {}
    for b in bits:
        for k, n in shapes:
            for m in rows:
                config = choose(Product(b, n, k, rounded_rows(m)), machine)
                split = "split" if config.split > 1 or config.cut else ""
                key = (form_key(config, b), k if config.kernel == "rows" else 0, split)
                found[key] = ((b, k, n, m), config)
    order = {"gluon": 0, "rows": 1, "tile": 2, "dense": 3}
    return sorted(found.values(), key=lambda job: order[job[1].kernel])


def timed(products: Products, rows: int, dense: torch.Tensor) -> tuple[list[float], float, Config]:
    """Return our samples and cuBLAS's median in microseconds, and what was chosen."""
    x = torch.randn(rows, products.k, device="cuda", dtype=torch.float16)
    ours: list[float] = []
    cublas: list[float] = []
    pool = products.pool
    for _ in range(3):  # in turns: the clock moves
        cublas += time_launches(lambda i: functional.linear(x, dense[i]), len(dense), repeats=4)
        ours += time_launches(lambda i: linear(x, pool[i]), len(pool), repeats=4)
    device = torch.device("cuda", 0)
    plan = choice.plan(products.bits, products.n, products.k, rounded_rows(rows), device)
    return ours, statistics.median(cublas), plan.config


def main() -> int:
    """Compile, time, write rows and print the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="file of benchmarks/results to append to")
    parser.add_argument("--bits", default="4,8")
    parser.add_argument("--m", default=",".join(map(str, ROWS)))
    parser.add_argument("--others", action="store_true", help="shapes that were not fitted to")
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--commit")
    args = parser.parse_args()
    bits, rows = ([int(v) for v in text.split(",")] for text in (args.bits, args.m))
    shapes, began = OTHERS if args.others else SHAPES, time.perf_counter()
    work = jobs(bits, shapes, rows)
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        parts = [work[i :: 2 * args.processes] for i in range(2 * args.processes)]
        failed = sum(pool.imap_unordered(compile_some, parts))
    print(f"{len(work)} kernels, {failed} failed, {time.perf_counter() - began:.0f} s", flush=True)
    if args.no_table:
        choice._tuned = dict  # type: ignore[assignment]
    machine = machine_of(torch.device("cuda", 0))
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    for k, n in shapes:
        dense = torch.randn(copies_for(2 * n * k), n, k, device="cuda", dtype=torch.float16)
        for b in bits:
            if time.perf_counter() - began > args.seconds:
                break
            products = Products(b, k, n)
            for m in rows:
                ours, cublas, config = timed(products, m, dense)
                us = statistics.median(ours)
                ratios[b, m].append(cublas / us)
                expected = expected_us(config, Product(b, n, k, rounded_rows(m)), machine)
                if args.rows:
                    write_row(
                        args.rows,
                        bench="gemm",
                        case={
                            "model": None, "shape": f"{k}x{n}", "m": m, "precision": f"w{b}a16",
                            "dtype": "fp16", "symmetric": True, "table": not args.no_table,
                            "form": form_key(config, b),
                        },
                        unit="us",
                        samples=ours,
                        baselines={"cublas_fp16": cublas},
                        predicted=expected,
                        device=torch.cuda.get_device_name(),
                        made_at=args.commit,
                    )  # fmt: skip
            del products
        del dense
    for (b, m), values in sorted(ratios.items()):
        mean = math.exp(statistics.fmean(math.log(v) for v in values))
        print(f"w{b} m={m}: cuBLAS / ours {mean:.2f}, least {min(values):.2f} of {len(values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every configuration that may serve a product, timed: what the model of the machine is fitted to.

    python benchmarks/gemm_search.py --out ROWS.jsonl [--seconds 480] [--processes 15]

Kernels are compiled by some processes first. A line a (shape, rows, bits): cuBLAS, and the
configurations with their microseconds, wrong ones named. Cold L2, captured launches, medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gemm_candidates import (
    FEW_ROWS,
    GLUON_FROM,
    TILE_ROWS,
    gluon_candidates,
    rows_candidates,
    tile_candidates,
)
from torch.nn import functional

from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.gemm.config import Config, config_entry, make_plan
from llmpq.kernels.tools.check_gemm import random_weight
from llmpq.kernels.tools.gpu_timing import copies_for, time_launches

# K x N of the issue, then others to hold the model against.
SHAPES = [
    (2304, 5760), (3072, 8192), (5120, 7168), (5120, 13824), (13824, 5120), (5120, 17408),
    (17408, 5120), (27648, 5120), (6144, 4096), (4096, 6144),
]  # fmt: skip
OTHERS = [
    (4096, 4096), (4096, 28672), (14336, 4096), (3584, 37888), (18944, 3584), (2048, 2560),
    (8192, 10240), (2560, 19456), (5376, 21504), (1536, 8960),
]  # fmt: skip
ROWS = (1, 4, 16, 32, 48, 64, 96, 128, 200, 256, 384, 512, 777, 1024, 2048)
LIMIT = 5e-4
"""Relative error of a float16 product: rounding alone is 2.1e-4."""
Case = tuple[int, int, int, int]  # bits, k, n, rows


def of(case: Case) -> list[Config]:
    """Return the configurations of a case on this GPU."""
    bits, k, n, rows = case
    p = torch.cuda.get_device_properties(0)
    sms = p.multi_processor_count
    found: list[Config] = []
    if rows <= FEW_ROWS:
        found += rows_candidates(bits)
    if rows <= TILE_ROWS:
        found += tile_candidates(bits, n, k, rows, multiprocessors=sms)
    if rows >= GLUON_FROM and (p.major, p.minor) == (9, 0):
        limit = p.shared_memory_per_block_optin
        found += gluon_candidates(bits, n, k, rows, multiprocessors=sms, shared_limit=limit)
    return list(dict.fromkeys(found))


def compile_jobs(cases: list[Case]) -> Iterator[tuple[Case, Config]]:
    """Yield small products that between them compile every kernel of the cases."""
    seen = set()
    for case in cases:
        bits, k, _n, _rows = case
        for config in of(case):
            if config.kernel == "rows":
                key: tuple[Any, ...] = (bits, k, config)
                job = ((bits, k, 256, 1), config)
            elif config.kernel == "tile":
                kind = replace(config, split=min(config.split, 2))
                key, job = (bits, kind), ((bits, 2048, 512, config.bm), kind)
            else:
                kind = replace(config, cut=min(config.cut, 1), programs=0)
                key, job = (bits, kind), ((bits, 2048, 1024, config.bm), kind)
            if key not in seen:
                seen.add(key)
                yield job


def compile_some(jobs: list[tuple[Case, Config]]) -> int:
    """Run products once; return how many failed."""
    failed = 0
    for (bits, k, n, rows), config in jobs:
        q = random_weight(n, k, bits, True, 128, torch.float16, torch.device("cuda"))
        x = torch.randn(rows, k, device="cuda", dtype=torch.float16)
        try:
            linear_gpu.run(make_plan(config, (9, 0)), x, q)
            torch.cuda.synchronize()
        except Exception as error:
            failed += 1
            sys.stdout.write(f"compile {bits} {config_entry(config)}: {str(error)[:200]}\n")
    return failed


class Products:
    """One weight with copies past the L2, at any number of rows."""

    def __init__(self, bits: int, k: int, n: int) -> None:
        device = torch.device("cuda")
        self.k, self.n, self.bits = k, n, bits
        self.first = random_weight(n, k, bits, True, 128, torch.float16, device)
        self.copies = copies_for(self.first.nbytes)
        self.pool = [self.first]
        for _ in range(self.copies - 1):
            planes = [torch.randint_like(plane, 0, 256) for plane in self.first.planes]
            q = QuantizedWeight.fragment(planes, self.first.scale.clone(), None, bits, False, n, k)
            self.pool.append(q)
        self.wide = self.first.dequantize(torch.float32)

    def time(self, rows: int, configs: list[Config]) -> list[tuple[Config, float, float]]:
        """Return the microseconds and the error of every configuration."""
        x = torch.randn(rows, self.k, device="cuda", dtype=torch.float16)
        exact = x.float() @ self.wide.t()
        norm, best, found = exact.norm(), float("inf"), []
        for config in configs:
            plan = make_plan(config, (9, 0))
            try:
                y = linear_gpu.run(plan, x, self.first)
                error = float((y.float() - exact).norm() / norm)

                def call(i: int, plan: Any = plan) -> Any:
                    return linear_gpu.run(plan, x, self.pool[i])

                few = statistics.median(time_launches(call, self.copies, launches=8, repeats=3))
                if few < 1.6 * best:
                    samples = time_launches(call, self.copies, repeats=5)
                    few = statistics.median(samples)
                best = min(best, few)
            except Exception as error_:
                sys.stdout.write(f"{config_entry(config)} {rows}: {str(error_)[:150]}\n")
                continue
            found.append((config, few, error))
        return found


def entry(config: Config, us: float, error: float) -> dict[str, Any]:
    """Return one configuration's part of a line."""
    return {"us": round(us, 3), **config_entry(config)} | (
        {} if error < LIMIT else {"wrong": error}
    )


def main() -> int:
    """Compile, then time every case until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--bits", default="4,8")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    draw = random.Random(args.seed)
    bits = [int(b) for b in args.bits.split(",")]
    weights = [(b, k, n, ROWS) for b in bits for k, n in SHAPES]
    draw.shuffle(weights)
    extra = [(b, k, n, tuple(sorted(draw.sample(ROWS, 7)))) for b in bits for k, n in OTHERS]
    draw.shuffle(extra)
    weights += extra
    cases = [(b, k, n, m) for b, k, n, rows in weights for m in rows]
    jobs = list(compile_jobs(cases))
    # Large kernels first, dealt out in turn.
    jobs.sort(key=lambda job: {"gluon": 0, "rows": 1, "tile": 2}[job[1].kernel])
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        parts = [jobs[i :: 4 * args.processes] for i in range(4 * args.processes)]
        failed = sum(pool.imap_unordered(compile_some, parts))
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s, {failed} failed")
    torch.backends.cuda.matmul.allow_tf32 = False
    args.out.parent.mkdir(parents=True, exist_ok=True)
    wrong = count = 0
    with args.out.open("a") as out:
        for b, k, n, rows in weights:
            if time.perf_counter() - began > args.seconds:
                break
            products = Products(b, k, n)
            copies = copies_for(2 * n * k)
            dense = torch.randn(copies, n, k, device="cuda", dtype=torch.float16)
            for m in rows:
                if time.perf_counter() - began > args.seconds:
                    break
                x = torch.randn(m, k, device="cuda", dtype=torch.float16)
                cublas = statistics.median(
                    time_launches(lambda i, x=x, d=dense: functional.linear(x, d[i]), copies)
                )
                found = products.time(m, of((b, k, n, m)))
                count += len(found)
                wrong += sum(not e < LIMIT for _, _, e in found)
                line = {
                    "bits": b, "k": k, "n": n, "m": m, "cublas_us": round(cublas, 3),
                    "device": torch.cuda.get_device_name(),
                    "configs": [
                        entry(*f) for f in sorted(found, key=lambda f: f[1])
                    ],
                }  # fmt: skip
                out.write(json.dumps(line) + "\n")
                out.flush()
                good = [(us, c) for c, us, e in found if e < LIMIT]
                us, c = min(good, key=lambda g: g[0])
                print(f"w{b} {k}x{n} m={m} {us:.1f} cublas {cublas:.1f} {cublas / us:.2f} "
                      f"{len(found)} {config_entry(c)}", flush=True)  # fmt: skip
            del products, dense
    print(f"{count} timed, {wrong} wrong, {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every configuration that may serve a product, timed: what the model of the machine is fitted to.

    python benchmarks/gemm_model.py search --out ROWS.jsonl [--seconds 480] [--processes 15]
        [--weights "bf16 zeros"] [--shapes 5120x27648,...] [--m 32]

Kernels are compiled by some processes first. A line a (shape K x N, rows, bits): cuBLAS, and the
configurations with their microseconds, wrong ones named. Cold L2, captured launches, medians.
Weights are float16 and symmetric unless asked otherwise (`choice.form_name`).
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lib.gemm_candidates import (
    FEW_ROWS,
    GLUON_FROM,
    TILE_ROWS,
    gluon_candidates,
    rows_candidates,
    tile_candidates,
)
from torch.nn import functional

from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.gemm.ranking.config import Config, config_entry, make_plan
from llmpq.kernels.gpu_timing import copies_for, time_launches
from llmpq.kernels.weights.quantized_weight import QuantizedWeight
from reference.check_gemm import random_weight

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
LIMITS = {torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Relative error of a product: rounding alone is 2.1e-4 and 1.7e-3."""
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
        limit = p.shared_memory_per_block_optin  # type: ignore[attr-defined]
        found += gluon_candidates(bits, n, k, rows, multiprocessors=sms, shared_limit=limit)
    return list(dict.fromkeys(found))


def compile_jobs(cases: list[Case]) -> Iterator[tuple[Case, Config]]:
    """Yield small products that between them compile every kernel of the cases."""
    seen = set()
    for case in cases:
        bits, k, _n, _rows = case
        for config in of(case):
            if config.kernel == "gemv":
                key: tuple[Any, ...] = (bits, k, config)
                job = ((bits, k, 256, 1), config)
            elif config.kernel == "splitk_gemm":
                kind = replace(config, split=min(config.split, 2))
                key, job = (bits, kind), ((bits, 2048, 512, config.bm), kind)
            else:
                kind = replace(config, cut=min(config.cut, 1), programs=0)
                key, job = (bits, kind), ((bits, 2048, 1024, config.bm), kind)
            if key not in seen:
                seen.add(key)
                yield job


def kind_of(weights: str) -> tuple[torch.dtype, bool]:
    """Return dtype and symmetry of a form of weights."""
    dtype = torch.bfloat16 if weights.startswith("bf16") else torch.float16
    return dtype, not weights.endswith("zeros")


def compile_some(jobs: list[tuple[Case, Config]], weights: str = "fp16") -> int:
    """Run products once; return how many failed."""
    failed, (dtype, symmetric) = 0, kind_of(weights)
    for (bits, k, n, rows), config in jobs:
        q = random_weight(n, k, bits, symmetric, 128, dtype, torch.device("cuda"))
        x = torch.randn(rows, k, device="cuda", dtype=dtype)
        try:
            linear_gpu.run(make_plan(config, (9, 0)), x, q)
            torch.cuda.synchronize()
        except Exception as error:
            failed += 1
            sys.stdout.write(f"compile {bits} {config_entry(config)}: {str(error)[:200]}\n")
    return failed


class Products:
    """One weight with copies past the L2, at any number of rows."""

    def __init__(self, bits: int, k: int, n: int, weights: str = "fp16") -> None:
        device, (self.dtype, symmetric) = torch.device("cuda"), kind_of(weights)
        self.k, self.n, self.bits = k, n, bits
        self.first = random_weight(n, k, bits, symmetric, 128, self.dtype, device)
        self.copies = copies_for(self.first.nbytes)
        self.pool = [self.first]
        for _ in range(self.copies - 1):
            planes = [torch.randint_like(plane, 0, 256) for plane in self.first.planes]
            zero = None if symmetric else self.first.zero.clone()
            q = QuantizedWeight.fragment(planes, self.first.scale.clone(), zero, bits, False, n, k)
            self.pool.append(q)
        self.wide = self.first.dequantize(torch.float32)

    def time(self, rows: int, configs: list[Config]) -> list[tuple[Config, float, float]]:
        """Return the microseconds and the error of every configuration."""
        x = torch.randn(rows, self.k, device="cuda", dtype=self.dtype)
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


def entry(config: Config, us: float, error: float, limit: float) -> dict[str, Any]:
    """Return one configuration's part of a line."""
    wrong = {} if error < limit else {"wrong": error}
    return {"us": round(us, 3), **config_entry(config)} | wrong


Weight = tuple[int, int, int, tuple[int, ...]]  # bits, k, n, rows


def asked_for(args: argparse.Namespace) -> list[Weight]:
    """Return what is searched, in random order: the issue's shapes first."""
    draw = random.Random(args.seed)
    bits = [int(b) for b in args.bits.split(",")]
    rows = tuple(map(int, args.m.split(","))) if args.m else ROWS
    if args.shapes:
        shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
        return [(b, k, n, rows) for b in bits for k, n in shapes]
    found = [(b, k, n, rows) for b in bits for k, n in SHAPES]
    draw.shuffle(found)
    few = min(7, len(rows))
    extra = [(b, k, n, tuple(sorted(draw.sample(rows, few)))) for b in bits for k, n in OTHERS]
    draw.shuffle(extra)
    return found + extra


def time_weight(weight: Weight, form: str, until: float, out: Any) -> tuple[int, int]:
    """Time a weight at all its rows, a line each; return how many configurations, and how many
    were wrong."""
    b, k, n, rows = weight
    products, copies = Products(b, k, n, form), copies_for(2 * n * k)
    dtype, wrong, count = products.dtype, 0, 0
    limit = LIMITS[dtype]
    dense = torch.randn(copies, n, k, device="cuda", dtype=dtype)
    for m in rows:
        if time.perf_counter() > until:
            break
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        cublas = statistics.median(
            time_launches(lambda i, x=x, d=dense: functional.linear(x, d[i]), copies)
        )
        found = products.time(m, of((b, k, n, m)))
        count += len(found)
        wrong += sum(not e < limit for _, _, e in found)
        line = {
            "bits": b, "k": k, "n": n, "m": m, "weights": form, "cublas_us": round(cublas, 3),
            "device": torch.cuda.get_device_name(),
            "configs": [
                entry(*f, limit) for f in sorted(found, key=lambda f: f[1])
            ],
        }  # fmt: skip
        out.write(json.dumps(line) + "\n")
        out.flush()
        us, c = min(((us, c) for c, us, e in found if e < limit), key=lambda g: g[0])
        print(f"w{b} {k}x{n} m={m} {us:.1f} cublas {cublas:.1f} {cublas / us:.2f} "
              f"{len(found)} {config_entry(c)}", flush=True)  # fmt: skip
    return count, wrong


def main(words: list[str], program: str) -> int:
    """Compile, then time every case until the time is over."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--bits", default="4,8")
    parser.add_argument("--weights", default="fp16", help="fp16, bf16, with zeros: bf16 zeros")
    parser.add_argument("--shapes", help="K x N, as 5120x27648,...; all known ones if left out")
    parser.add_argument("--m", help="rows of x, as 8,32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    began = time.perf_counter()
    weights = asked_for(args)
    cases = [(b, k, n, m) for b, k, n, rows in weights for m in rows]
    jobs = list(compile_jobs(cases))
    # Large kernels first, dealt out in turn.
    jobs.sort(key=lambda job: {"gluon": 0, "rows": 1, "tile": 2}[job[1].kernel])
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        parts = [jobs[i :: 4 * args.processes] for i in range(4 * args.processes)]
        failed = sum(pool.imap_unordered(partial(compile_some, weights=args.weights), parts))
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s, {failed} failed")
    torch.backends.cuda.matmul.allow_tf32 = False
    args.out.parent.mkdir(parents=True, exist_ok=True)
    until, counts = began + args.seconds, [0, 0]
    with args.out.open("a") as out:
        for weight in weights:
            if time.perf_counter() < until:
                made = time_weight(weight, args.weights, until, out)
                counts = [a + b for a, b in zip(counts, made, strict=True)]
    print(f"{counts[0]} timed, {counts[1]} wrong, {time.perf_counter() - began:.0f} s")
    return 0

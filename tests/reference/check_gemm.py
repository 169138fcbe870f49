"""`kernel_bench.py check gemm`: every path that `linear` may choose against its twin.

On a GPU: all tuned shapes with a number of rows of every bucket of the tuned tables, odd and random
shapes, in random order; exact products in float64 of the dequantised weight. Without one: the CPU
paths. Exit code 1 if any error exceeds its limit.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
import time
from dataclasses import dataclass

import torch

from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.weights.quantized_weight import QuantizedWeight, from_codes
from llmpq.precision import padded_k
from reference.gemm_twins import linear_reference, relative_error
from reference.kernel_commands import CheckGemm, share

LIMITS = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 5e-6}
"""Relative Frobenius error allowed: the rounding of a 16-bit output is 2.1e-4 and 1.7e-3 of it."""

# N, K: tails of the 16-row blocks and of the k-groups, fewer groups than warps, one block.
ODD_SHAPES = ((70, 1000), (33, 200), (16, 128), (4099, 4104), (1040, 11008), (21504, 7168))
ODD_ROWS = (1, 2, 3, 17, 65, 300)
ANY = range(5, 4097)
"""Numbers of rows that random shapes take three of."""
RANDOM_SHAPES = 20
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GemmCase:
    """One weight, and the values of rows of x it is multiplied with."""

    n: int
    k: int
    rows: tuple[int, ...]
    bits: int
    dtype: torch.dtype
    symmetric: bool
    group_size: int | None


def main(asked: CheckGemm) -> int:
    """Check, print one line per case that fails and a summary; 0 if none did."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(asked.seed)
    cases = _cases(gpu, asked)
    random.Random(asked.seed).shuffle(cases)
    cases = list(share(cases, asked.part))
    started_s = time.perf_counter()
    worst: dict[torch.dtype, float] = {}
    failed = checked = weights = 0
    for case in cases:
        if asked.seconds is not None and time.perf_counter() - started_s > asked.seconds:
            break
        weights += 1
        q = random_weight(
            case.n, case.k, case.bits, case.symmetric, case.group_size, case.dtype, device
        )
        for m in case.rows:
            error = _error(q, m, case.k, case.dtype, device)
            checked += 1
            worst[case.dtype] = max(worst.get(case.dtype, 0.0), error)
            if not error < LIMITS[case.dtype]:
                failed += 1
                sys.stdout.write(f"WRONG {case} m={m}: error {error:.1e}\n")
    summary = ", ".join(f"{d} {e:.1e} (limit {LIMITS[d]:.0e})" for d, e in worst.items())
    sys.stdout.write(
        f"{checked} products with {weights} of {len(cases)} weights checked on {device}, "
        f"{failed} wrong; worst {summary}\n"
    )
    return 1 if failed else 0


def random_weight(
    n: int,
    k: int,
    bits: int,
    symmetric: bool,
    group_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> QuantizedWeight:
    """Return a weight of random codes, scales and zeros: every code occurs, unlike after RTN."""
    k_padded = padded_k(k)
    groups = k_padded // (group_size or k_padded)
    codes = torch.randint(0, 1 << bits, (n, k_padded), dtype=torch.uint8, device=device)
    scale = (torch.rand(n, groups, device=device) * 0.01 + 0.005).to(dtype)
    zero = None
    if not symmetric:
        zero = torch.randint(0, 1 << bits, (n, groups), device=device).to(dtype)
    return from_codes(codes, scale, zero, bits=bits, group_size=group_size, in_features=k)


def _cases(gpu: bool, asked: CheckGemm) -> list[GemmCase]:
    """Every kind of weight of every shape."""
    names = (asked.dtype or ("fp16,bf16" if gpu else "fp32,bf16")).split(",")
    shapes = _shapes(gpu, asked)
    return [
        GemmCase(n, k, rows, int(bits), _DTYPES[name], symmetric, group)
        for bits, name, (n, k, rows) in itertools.product(asked.bits.split(","), names, shapes)
        for symmetric, group in itertools.product((True, False), (GROUP, None))
        # Per channel takes the same configurations; small shapes cover it.
        if group is not None or n * k <= 1 << 24
    ]


def _shapes(gpu: bool, asked: CheckGemm) -> list[tuple[int, int, tuple[int, ...]]]:
    if not gpu:
        return [(n, k, ODD_ROWS) for n, k in (*ODD_SHAPES[:3], (512, 1024))]
    from llmpq.kernels.gemm.choice import M_BUCKETS, tuned_shapes

    draw = random.Random(asked.seed)
    # The fullest of a bucket while these are few, then also those that leave a tile unfinished.
    rows = tuple(
        high if high <= 256 else draw.randint(low + 1, high)
        for low, high in itertools.pairwise((0, *M_BUCKETS))
    )
    if asked.m is not None:
        rows = tuple(int(m) for m in asked.m.split(","))
    kinds: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
        "tuned": [(n, k, rows) for n, k in tuned_shapes()],
        "odd": [(n, k, ODD_ROWS) for n, k in ODD_SHAPES],
        "random": [
            (
                draw.randint(1, 6000),
                draw.randint(1, 6000),
                (draw.randint(1, 4), *draw.sample(ANY, 3)),
            )
            for _ in range(RANDOM_SHAPES)
        ],
    }
    if asked.shapes != "all" and asked.shapes not in kinds:
        raise ValueError(f"--shapes: got {asked.shapes!r}, expected {', '.join(kinds)} or all")
    return [s for name, some in kinds.items() for s in some if asked.shapes in (name, "all")]


def _error(q: QuantizedWeight, m: int, k: int, dtype: torch.dtype, device: torch.device) -> float:
    x = torch.randn(m, k, device=device).to(dtype)
    bias = torch.randn(q.out_features, device=device).to(dtype) if m % 2 else None
    exact = linear_reference(x, q, bias, exact=True)
    return max(relative_error(q.matmul(x, bias), exact) for _ in range(2))

"""`python -m llmpq.profiler.timing.cpu_probe THREADS DTYPE`: this CPU's rates as JSON on stdout.

Memory by summing 256 MiB. Products by the kernels that runs take, with one row behind weights that
no cache holds (`_COLD_BYTES` of copies in turn), with more on one that does: those are bound by
arithmetic. Each time is the least of a few: other work only adds. The whole takes some two seconds
beside the start of torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmpq.costs.cpu_rates import ProductRate, rates_of
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.kernels.weights.weight import Weight
from llmpq.precision import WeightScheme
from llmpq.sizes.memory import CpuActivations

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS = (1, 4, 16, 64, 256)
SIDE = 2048
"""Of the square weight: 4.2 million weights, as a small model's."""
_READ_BYTES = 1 << 28
_POINT_S = 0.04
"""Time for one measurement: as many passes as fit, one at least."""
_COLD_BYTES = 1 << 27
_COLD_ROWS = 4
"""Rows up to which weights are read from memory, not from a cache."""


@torch.inference_mode()
def measure(threads: int, dtype_name: Any) -> str:
    """Return `CpuRates` as JSON."""
    torch.set_num_threads(threads)
    dtype = DTYPES[dtype_name]
    w_NK = torch.randn(SIDE, SIDE).mul_(0.02).to(dtype)
    products = [_rate(16, "exact", DenseWeight(w_NK).packed(), w_NK.nbytes, dtype)]
    for bits in (8, 4, 3):
        scheme = WeightScheme(bits=bits, group_size=128, symmetric=False, clip_search=False)
        exact = quantize_weight(w_NK, scheme, dtype=dtype)
        products.append(_rate(bits, "exact", exact, exact.nbytes, dtype))
        rounded = exact.with_rounded_inputs(8)
        products.append(_rate(bits, "int8", rounded, exact.nbytes, dtype))
    return rates_of(threads, dtype_name, products, _read_gbps()).dump_json()


def _rate(
    bits: int, activations: CpuActivations, weight: Weight, num_bytes: int, dtype: torch.dtype
) -> ProductRate:
    copies = [weight, *(weight.map_tensors(torch.clone) for _ in range(_COLD_BYTES // num_bytes))]
    points = []
    for rows in ROWS:
        x_MK = torch.randn(rows, SIDE).to(dtype)
        used = copies if rows <= _COLD_ROWS else copies[:1]
        points.append((rows, _least_s(x_MK, used) / SIDE**2))
    return ProductRate(bits=bits, activations=activations, per_weight=tuple(points))


def _least_s(x_MK: Tensor, weights: Sequence[Weight]) -> float:
    """Return the seconds of one product: the least of a few passes over the weights."""

    def one_pass() -> None:
        for weight in weights:
            weight.matmul(x_MK)

    weights[0].matmul(x_MK)  # what is new to warm up
    return _least_of(one_pass) / len(weights)


def _least_of(one_pass: Callable[[], object]) -> float:
    """Return the seconds of the quickest pass."""
    least, begun_s = float("inf"), time.perf_counter()
    while least == float("inf") or time.perf_counter() - begun_s < _POINT_S:
        started_s = time.perf_counter()
        one_pass()
        least = min(least, time.perf_counter() - started_s)
    return least


def _read_gbps() -> float:
    values = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / _least_of(values.sum) / 1e9


if __name__ == "__main__":
    sys.stdout.write(measure(int(sys.argv[1]), sys.argv[2]))

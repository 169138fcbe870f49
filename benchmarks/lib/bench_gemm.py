"""`kernel_bench.py bench gemm`: the weight kernels against cuBLAS and torch's tinygemm.

Cold caches, CUDA graphs, medians. `shape: layer` is the sum of a decoder layer's four
products (qkv, o, gate_up, down); NxK names are single products written K x N as in papers.
"""

from __future__ import annotations

import logging
import statistics
import sys
from dataclasses import dataclass

import torch
from torch.nn import functional

from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.gpu_timing import copies_for, time_launches, write_row
from llmpq.kernels.weights.quantized_weight import QuantizedWeight
from llmpq.precision import Precision
from reference.check_gemm import random_weight
from reference.kernel_commands import BenchGemm

log = logging.getLogger(__name__)

# K x N of a layer's products: q, k, v fused; gate and up fused where there is a gate.
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "llama-3.1-8b": {
        "qkv": (4096, 6144),
        "o": (4096, 4096),
        "gate_up": (4096, 28672),
        "down": (14336, 4096),
    },
    "llama-2-7b": {
        "qkv": (4096, 12288),
        "o": (4096, 4096),
        "gate_up": (4096, 22016),
        "down": (11008, 4096),
    },
    "opt-30b": {
        "qkv": (7168, 21504),
        "o": (7168, 7168),
        "fc1": (7168, 28672),
        "fc2": (28672, 7168),
    },
}
_TINYGEMM_ROWS = 16
_ROUNDS = 4


@dataclass(frozen=True)
class GemmTime:
    """One case's samples in microseconds, what it must move, and what the peers took."""

    us: list[float]
    moved_bytes: int
    floor_us: float
    cublas_us: float
    tinygemm_us: float | None


_MATRIX_FLOPS = 790e12  # a bf16 8192^3 product on an H200: the floor of long prefills
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def copy_bandwidth() -> float:
    """Return bytes read plus bytes written a second of a large device-to-device copy."""
    source = torch.empty(1 << 29, device="cuda").uniform_()
    target = torch.empty_like(source)

    def copy(_: int) -> None:
        # A kernel, not copy_: in a graph that is a memcpy node, at two thirds of the rate (H200).
        torch.mul(source, 1.5, out=target)

    us = statistics.median(time_launches(copy, 1, launches=4, repeats=8))
    return 2 * source.nbytes / (us * 1e-6)


def main(asked: BenchGemm) -> int:
    """Time every case, print a table and write rows."""
    if not torch.cuda.is_available():
        log.error("bench gemm needs a CUDA GPU; `check gemm` compares the CPU paths without one")
        return 2
    bandwidth = copy_bandwidth()
    sys.stdout.write(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s\n")
    sys.stdout.write(
        f"{'case':44s} {'us':>8s} {'GB/s':>7s} {'% floor':>8s} {'cuBLAS':>8s} {'ratio':>6s}  tiny\n"
    )
    for precision in (Precision.parse(p) for p in asked.precision.split(",")):
        for name in asked.shapes.split(","):
            for m in (int(m) for m in asked.m.split(",")):
                _bench_case(name, m, precision, bandwidth, asked)
    return 0


def _bench_case(
    name: str, m: int, precision: Precision, bandwidth: float, asked: BenchGemm
) -> None:
    """One model's layer (and each of its products) or one product, at one number of rows."""
    products = MODELS.get(name) or {name: _parse_product(name)}
    results = {}
    for product, (k, n) in products.items():
        results[product] = _time_product(n, k, m, precision, bandwidth, asked)
        _report(name, product, m, precision, results[product], asked)
    if name in MODELS:
        _report(name, "layer", m, precision, _total(list(results.values())), asked)


def _total(parts: list[GemmTime]) -> GemmTime:
    tiny = [p.tinygemm_us for p in parts if p.tinygemm_us is not None]
    return GemmTime(
        us=[sum(samples) for samples in zip(*(p.us for p in parts), strict=True)],
        moved_bytes=sum(p.moved_bytes for p in parts),
        floor_us=sum(p.floor_us for p in parts),
        cublas_us=sum(p.cublas_us for p in parts),
        tinygemm_us=sum(tiny) if len(tiny) == len(parts) else None,
    )


def _parse_product(name: str) -> tuple[int, int]:
    try:
        k, n = (int(size) for size in name.split("x"))
    except ValueError:
        raise ValueError(
            f"shape: got {name!r}, expected KxN (8192x16384) or one of {', '.join(MODELS)}"
        ) from None
    return k, n


def _time_product(
    n: int, k: int, m: int, precision: Precision, bandwidth: float, asked: BenchGemm
) -> GemmTime:
    dtype, device = _DTYPES[asked.dtype], torch.device("cuda")
    bits = precision.weight_bits
    first = random_weight(n, k, bits, asked.symmetric, GROUP, dtype, device)
    copies = copies_for(first.nbytes)
    pool = [first] + [_shuffled(first) for _ in range(copies - 1)]
    x = torch.randn(m, k, device=device).to(dtype)
    dense = torch.randn(copies_for(2 * n * k), n, k, device=device, dtype=dtype)
    us, cublas = [], []
    for _ in range(_ROUNDS):  # in turns: the clock moves between a cold and a busy GPU
        each = -(-asked.repeats // _ROUNDS)
        cublas += time_launches(lambda i: functional.linear(x, dense[i]), len(dense), repeats=each)
        us += time_launches(lambda i: pool[i].matmul(x), copies, repeats=each)
    moved = first.nbytes + 2 * m * (n + k)
    return GemmTime(
        us=us,
        moved_bytes=moved,
        floor_us=max(moved / bandwidth, 2 * m * n * k / _MATRIX_FLOPS) * 1e6,
        cublas_us=statistics.median(cublas),
        tinygemm_us=_time_tinygemm(first, x) if bits == 4 and m <= _TINYGEMM_ROWS else None,
    )


def _shuffled(q: QuantizedWeight) -> QuantizedWeight:
    planes = [torch.randint_like(plane, 0, 256) for plane in q.planes]
    zero = None if q.zero is None else q.zero.clone()
    return QuantizedWeight.fragment(
        planes, q.scale.clone(), zero, q.bits, q.group_size is None, q.out_features, q.in_features
    )


def _time_tinygemm(q: QuantizedWeight, x: torch.Tensor) -> float | None:
    """torch's int4 kernel (bfloat16 only), if this build has it."""
    n, k = q.out_features, q.in_features
    x = x.to(torch.bfloat16)
    copies = copies_for(q.nbytes)
    try:
        packed = [
            torch.ops.aten._convert_weight_to_int4pack(
                torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=x.device), 8
            )
            for _ in range(copies)
        ]
    except (RuntimeError, AttributeError) as error:
        log.info("tinygemm not measured: %s", str(error).splitlines()[0])
        return None
    scales = torch.rand(k // GROUP, n, 2, device=x.device).to(torch.bfloat16)
    operator = torch.ops.aten._weight_int4pack_mm
    return statistics.median(
        time_launches(lambda i: operator(x, packed[i], GROUP, scales), copies, repeats=10)
    )


def _report(
    name: str, shape: str, m: int, precision: Precision, result: GemmTime, asked: BenchGemm
) -> None:
    us = statistics.median(result.us)
    tiny = "" if result.tinygemm_us is None else f"{result.tinygemm_us:8.1f}"
    sys.stdout.write(
        f"{f'{name} {shape} m={m} {precision.value} {asked.dtype}':44s} {us:8.2f} "
        f"{result.moved_bytes / us / 1e3:7.0f} {100 * result.floor_us / us:8.0f} "
        f"{result.cublas_us:8.1f} {us / result.cublas_us:6.2f} {tiny}\n"
    )
    if not asked.out:
        return
    baselines = {f"cublas_{asked.dtype}": result.cublas_us}
    if result.tinygemm_us is not None:
        baselines["tinygemm_bf16"] = result.tinygemm_us
    write_row(
        asked.out,
        bench="gemm",
        case={
            "model": name if name in MODELS else None,
            "shape": shape,
            "m": m,
            "precision": precision.value,
            "dtype": asked.dtype,
            "symmetric": asked.symmetric,
        },
        unit="us",
        samples=result.us,
        floor=result.floor_us,
        baselines=baselines,
        commit=asked.commit,
    )

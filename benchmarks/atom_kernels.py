"""Atom's kernels on a GPU: right against their twins, then timed against cuBLAS, as rows.

    python benchmarks/atom_kernels.py check              every shape and scheme, random data
    python benchmarks/atom_kernels.py gemm --m 1 32 1024 4096 [--fp8]
    python benchmarks/atom_kernels.py sweep --m 1024     tiles, fastest first
    python benchmarks/atom_kernels.py fused              norm and rounding beside RMSNorm alone

Shapes are those of a Llama-3.1-8B layer, 128 outlier channels; cold caches, CUDA graphs, medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rows import RESULTS
from torch.nn import functional

from llmpq.kernels.atom_formats import AtomWeight, quantize_atom
from llmpq.kernels.atom_fused import GemmPlan, act_round, atom_gemm, norm_round, plan
from llmpq.kernels.atom_linear import integer_linear
from llmpq.kernels.atom_quantize import round_activations
from llmpq.kernels.atom_reference import (
    activation_reference,
    atom_linear_reference,
    norm_reference,
    rounded_layout,
)
from llmpq.kernels.atom_scheme import AtomScheme
from llmpq.kernels.timing import copies_for, time_launches, write_row

SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
"""K, N."""
W4A4 = AtomScheme(outliers=128, signed_scale=True, activation_clip=0.95)
W8A8 = AtomScheme(
    weight_bits=8, activation_bits=8, group_size=None, weight_clip=1.0, activation_clip=1.0
)
SCHEMES = {"w4a4": W4A4, "w4a4-g64": replace(W4A4, group_size=64), "w8a8": W8A8}


def main() -> None:
    """Run one of the four."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "gemm", "sweep", "fused"))
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 32, 128, 1024, 2048, 4096])
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=["w4a4", "w8a8"])
    parser.add_argument("--fp8", action="store_true", help="w4a4 through fp8 tensor cores")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    torch.manual_seed(0)
    {"check": check, "gemm": gemm, "sweep": sweep, "fused": fused}[args.what](args)


def weight(name: str, scheme: AtomScheme, copies: int = 1) -> list[AtomWeight]:
    """Return `copies` random weights of a shape."""
    k, n = SHAPES[name]
    w = torch.randn(n, k, device="cuda") / k**0.5
    one = quantize_atom(w, scheme, dtype=torch.bfloat16)
    return [one] + [replace(one, codes=one.codes.clone()) for _ in range(copies - 1)]


def check(args: argparse.Namespace) -> None:
    """Compare every kernel with its twin; raise on the first that is wrong."""
    for name, key, m in itertools.product(args.shape, args.scheme, (1, 3, 16, 65, 257)):
        scheme = SCHEMES[key]
        k, _ = SHAPES[name]
        (w,) = weight(name, scheme)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        x[:, -8:] *= 30
        exact = atom_linear_reference(x.float(), w)
        error = float((integer_linear(x, w).float() - exact).norm() / exact.norm())
        print(f"{name:8} {key:9} m={m:4} linear {error:.2e}", flush=True)
        if not error < 6e-3:  # bf16 output alone: 1.7e-3; codes on an edge add a little
            raise SystemExit(f"wrong: {name} {key} m={m}: relative error {error}")
        if scheme.activation_bits == 4:
            int8, fp8 = (
                atom_gemm(norm_round(x, scheme, fp8=f), w, dtype=torch.float32)
                for f in (False, True)
            )
            error = float((fp8 - int8).norm() / int8.norm())
            print(f"{name:8} {key:9} m={m:4} fp8 {error:.2e}", flush=True)
            if not error < 1e-5:  # both are exact but for the scaling in float32
                raise SystemExit(f"wrong: {name} {key} m={m}: fp8 differs by {error}")
    for m in (1, 7, 130):
        x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        norm, order = torch.rand(4096, device="cuda"), torch.randperm(4096, device="cuda").int()
        got = norm_round(x, W4A4, norm="rms", weight_K=norm, index_K=order, eps=1e-5)
        _same(got.codes, norm_reference(x, "rms", norm, None, 1e-5)[:, order.long()], W4A4)
        gate_up = torch.randn(m, 28672, device="cuda", dtype=torch.bfloat16)
        for scheme in (W4A4, replace(W4A4, rotation=True)):
            got = act_round(gate_up, scheme, "silu")
            _same(got.codes, activation_reference(gate_up, "silu"), scheme)
    print("all kernels agree with their twins")


def _same(codes: torch.Tensor, exact: torch.Tensor, scheme: AtomScheme) -> None:
    expected, _ = rounded_layout(round_activations(exact, scheme))
    off = (codes.int() - expected.int()).abs()
    share = float((off > 0).float().mean())
    print(f"codes that differ: {share:.2e}, by at most {int(off.max())}")
    if int(off.max()) > 1 or share > 2e-3:
        raise SystemExit("wrong codes")


def gemm(args: argparse.Namespace) -> None:
    """Time the product with rounding of its input, beside cuBLAS bf16."""
    for key, m in itertools.product(args.scheme, args.m):
        total = dict.fromkeys(("product", "with_rounding", "cublas_bf16"), 0.0)
        for name in args.shape:
            fp8 = args.fp8 and key != "w8a8"
            times = _times(name, SCHEMES[key], m, plan(m, SHAPES[name][1]), fp8=fp8)
            for kind, us in times.items():
                total[kind] += us
            case = {"m": m, "precision": key, "through": "fp8" if fp8 else "int8"}
            _write("atom_gemm", {"shape": name, **case}, times)
        if len(args.shape) == len(SHAPES):
            _write("atom_gemm", {"shape": "layer", **case}, total)


def sweep(args: argparse.Namespace) -> None:
    """Time tiles and print the fastest."""
    for key, m, name in itertools.product(args.scheme, args.m, args.shape):
        found = []
        for tiles in _tiles(m):
            try:
                fp8 = args.fp8 and key != "w8a8"
                us = _times(name, SCHEMES[key], m, tiles, fp8=fp8, product_only=True)["product"]
            except Exception as error:  # tiles that do not fit shared memory or registers
                print(f"{tiles}: {type(error).__name__}")
                continue
            found.append((us, tiles))
        for us, tiles in sorted(found, key=lambda pair: pair[0])[:3]:
            print(f"{key} {name} m={m} {us:8.1f} us  {tiles}", flush=True)


def _tiles(m: int) -> Iterator[GemmPlan]:
    sizes = [b for b in (16, 32, 64, 128, 256) if b <= max(16, 2 * m)][-3:]
    for block_m, block_n, warps in itertools.product(sizes, (64, 128, 256), (4, 8)):
        if block_m * block_n > 128 * 256 or block_m * block_n // warps > 8192:
            continue
        for stages in (2, 3, 4):
            yield GemmPlan(block_m=block_m, block_n=block_n, warps=warps, stages=stages)


def _times(
    name: str,
    scheme: AtomScheme,
    m: int,
    tiles: GemmPlan,
    *,
    fp8: bool = False,
    product_only: bool = False,
) -> dict[str, float]:
    k, n = SHAPES[name]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    nbytes = n * k * scheme.weight_bits // 8
    copies = min(copies_for(nbytes), 24)
    ws = weight(name, scheme, copies)
    rounded = norm_round(x, scheme, fp8=fp8)

    def median(call: Callable[[int], object], sets: int) -> float:
        return statistics.median(time_launches(call, sets))

    def product(i: int) -> object:
        return atom_gemm(rounded, ws[i], dtype=torch.bfloat16, tiles=tiles)

    times = {"product": median(product, copies)}
    if product_only:
        return times
    times["with_rounding"] = median(
        lambda i: atom_gemm(
            norm_round(x, scheme, fp8=fp8), ws[i], dtype=torch.bfloat16, tiles=tiles
        ),
        copies,
    )
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(min(copies, 6))]
    times["cublas_bf16"] = median(lambda i: functional.linear(x, dense[i]), len(dense))
    return times


def fused(args: argparse.Namespace) -> None:
    """Time norm + order + rounding beside the norm alone, and the activation likewise."""
    norm = torch.rand(4096, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(4096, device="cuda").int()
    for m in args.m:
        x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        gate_up = torch.randn(m, 28672, device="cuda", dtype=torch.bfloat16)
        times = {
            name: statistics.median(time_launches(call, 1))
            for name, call in _fused_calls(x, gate_up, norm, order).items()
        }
        _write("atom_fused", {"m": m, "hidden": 4096, "ffn": 14336}, times)


def _fused_calls(
    x: torch.Tensor, gate_up: torch.Tensor, norm: torch.Tensor, order: torch.Tensor
) -> dict[str, Callable[[int], object]]:
    rotated = replace(W4A4, rotation=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return {
        "norm_alone": lambda _: functional.rms_norm(x, norm.shape, norm, 1e-5),
        "norm_round": lambda _: norm_round(
            x, W4A4, norm="rms", weight_K=norm, index_K=order, eps=1e-5
        ),
        "silu_mul_alone": lambda _: functional.silu(gate) * up,
        "act_round": lambda _: act_round(gate_up, W4A4, "silu"),
        "act_rotate_round": lambda _: act_round(gate_up, rotated, "silu"),
    }


def _write(bench: str, case: dict[str, object], times: dict[str, float]) -> None:
    first, *others = times
    write_row(
        Path(RESULTS) / "atom_kernels.jsonl",
        bench=bench,
        case={"model": "llama-3.1-8b", **case},
        unit="us",
        samples=[times[first]],
        baselines={name: times[name] for name in others},
        program="python benchmarks/atom_kernels.py",
    )
    shown = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
    print(f"{case}  {shown} us", flush=True)


if __name__ == "__main__":
    main()

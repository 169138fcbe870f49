"""`kernel_bench.py bench atom`: W4A4 and W8A8 against cuBLAS bf16, and our W4A16.

Llama-3.1-8B's products with 128 outlier channels; cold caches, CUDA graphs, medians.
`shape: layer` is the sum of qkv, o, gate_up and down. `with_rounding` starts from 16-bit inputs.
`--what fused` times norm + channel order + rounding beside the norm alone, and SiLU-mul likewise.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from llmpq.kernels.atom.hopper import (
    HopperPlan,
    RoundedTokens,
    activation_input,
    any_input,
    norm_input,
    plan,
    product,
)
from llmpq.kernels.atom.portable import GemmPlan, RoundedInput, atom_gemm, round_input
from llmpq.kernels.fused import gated_mlp
from llmpq.kernels.fused import rms_norm as fused_norm
from llmpq.kernels.gpu_timing import copies_for, time_launches, write_row
from llmpq.kernels.weights.atom_weight import AtomTiles, AtomWeight
from reference.check_atom import LAYER, SCHEMES, W4A4, random_weight
from reference.check_gemm import random_weight as random_w4a16
from reference.kernel_commands import BenchAtom

log = logging.getLogger(__name__)

SMALL = 64
"""Tokens up to which W4A16 is the peer."""

Call = Callable[[int], object]


def main(asked: BenchAtom) -> int:
    """Time what was asked for."""
    if not torch.cuda.is_available():
        log.error("bench atom needs a CUDA GPU; `check atom` compares the CPU's way without one")
        return 2
    rows = [int(m) for m in asked.m.split(",")]
    if asked.what == "fused":
        for m in rows:
            _report("atom_fused", {"m": m, "hidden": 4096, "ffn": 14336}, _fused(m, asked), asked)
        return 0
    for key, m in itertools.product(asked.scheme.split(","), rows):
        if asked.what == "sweep":
            for name in asked.shapes.split(","):
                _sweep(name, key, m, asked)
            continue
        found = {name: _products(name, key, m, asked) for name in asked.shapes.split(",")}
        for name, times in found.items():
            _report("atom_gemm", {"shape": name, "m": m, "precision": key}, times, asked)
        if len(found) == len(LAYER):
            total = {k: _sum([t[k] for t in found.values()]) for k in next(iter(found.values()))}
            _report("atom_gemm", {"shape": "layer", "m": m, "precision": key}, total, asked)
    return 0


def _products(name: str, key: str, m: int, asked: BenchAtom) -> dict[str, list[float]]:
    """Time a product, the same from 16-bit inputs, and its peers."""
    k, n = LAYER[name]
    ways = _ways(name, key, m)
    pool, calls = ways
    times = {kind: _time(call, len(pool), asked) for kind, call in calls.items()}
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    if key != "w8a8" and m <= SMALL:
        peers = [
            random_w4a16(n, k, 4, True, 128, torch.bfloat16, x.device)
            for _ in range(copies_for(n * k // 2))
        ]
        times["w4a16"] = _time(lambda i: peers[i].matmul(x), len(peers), asked)
        del peers
    copies = copies_for(2 * n * k)
    dense = torch.randn(copies, n, k, device="cuda", dtype=torch.bfloat16)
    times["cublas_bf16"] = _time(lambda i: functional.linear(x, dense[i]), copies, asked)
    return times


def _ways(name: str, key: str, m: int) -> tuple[list[AtomWeight], dict[str, Call]]:
    """Return copies of a weight past the L2, and the calls to time."""
    k, n = LAYER[name]
    one = random_weight(name, k, n, SCHEMES[key], torch.bfloat16, torch.device("cuda")).packed()
    pool = [_copy(one) for _ in range(copies_for(one.nbytes))]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    if not isinstance(one, AtomTiles):
        rounded = round_input(x, one.scheme, index_K=one.index_K)
        return pool, {
            "product": lambda i: atom_gemm(rounded, pool[i], dtype=x.dtype),
            "with_rounding": lambda i: atom_gemm(
                round_input(x, one.scheme, index_K=one.index_K), pool[i], dtype=x.dtype
            ),
        }
    tokens = any_input(x, one)
    return pool, {
        "product": lambda i: product(tokens, _tiles(pool[i]), dtype=x.dtype),
        "with_rounding": lambda i: product(any_input(x, one), _tiles(pool[i]), dtype=x.dtype),
    }


def _tiles(weight: AtomWeight) -> AtomTiles:
    assert isinstance(weight, AtomTiles)
    return weight


def _copy(weight: AtomWeight) -> AtomWeight:
    if isinstance(weight, AtomTiles):
        words = replace(weight.words, planes=(weight.words.planes[0].clone(),))
        return replace(weight, words=words, codes=words.planes[0])
    return replace(weight, codes=weight.codes.clone())


def _sweep(name: str, key: str, m: int, asked: BenchAtom) -> None:
    """Time tiles and print the fastest three."""
    k, n = LAYER[name]
    one = random_weight(name, k, n, SCHEMES[key], torch.bfloat16, torch.device("cuda")).packed()
    pool = [_copy(one) for _ in range(copies_for(one.nbytes))]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    calls: list[tuple[str, Call]] = []
    if isinstance(one, AtomTiles):
        if plan(m, n, one.groups).bm is None or one.scheme.takes_integers(m):
            return
        tokens = any_input(x, one)
        for bm, group_m, shares in itertools.product((64, 128), (4, 8, 16), (False, True)):
            chosen = HopperPlan(bm=bm, group_m=group_m, shares=shares)
            calls.append((str(chosen), _tiled(tokens, pool, chosen, x.dtype)))
    else:
        rounded = round_input(x, one.scheme, index_K=one.index_K)
        for tiles in _channel_tiles(m):
            calls.append((str(tiles), _channels(rounded, pool, tiles, x.dtype)))
    found = []
    for shown, call in calls:
        try:
            found.append((statistics.median(_time(call, len(pool), asked)), shown))
        except Exception as error:  # tiles that do not fit shared memory or registers
            sys.stdout.write(f"{shown}: {type(error).__name__}\n")
    for us, shown in sorted(found)[:3]:
        sys.stdout.write(f"{key} {name} m={m} {us:8.1f} us  {shown}\n")


def _tiled(
    tokens: RoundedTokens, pool: list[AtomWeight], chosen: HopperPlan, dtype: torch.dtype
) -> Call:
    return lambda i: product(tokens, _tiles(pool[i]), dtype=dtype, chosen=chosen)


def _channels(
    rounded: RoundedInput, pool: list[AtomWeight], tiles: GemmPlan, dtype: torch.dtype
) -> Call:
    return lambda i: atom_gemm(rounded, pool[i], dtype=dtype, tiles=tiles)


def _channel_tiles(m: int) -> Iterator[GemmPlan]:
    for block_m, block_n, warps in ((64, 64, 4), (64, 128, 4), (128, 128, 4), (128, 256, 8)):
        if block_m <= max(64, m):
            for stages in (3, 4, 5):
                yield GemmPlan(block_m=block_m, block_n=block_n, warps=warps, stages=stages)


def _fused(m: int, asked: BenchAtom) -> dict[str, list[float]]:
    """Time the fused roundings beside the operations they ride on."""
    hidden, ffn = 4096, 14336
    device, dtype = torch.device("cuda"), torch.bfloat16
    wide = random_weight("qkv", hidden, 256, W4A4, dtype, device).packed()
    down = random_weight("down", ffn, 256, W4A4, dtype, device).packed()
    assert isinstance(wide, AtomTiles) and isinstance(down, AtomTiles)
    copies = min(16, copies_for(2 * m * hidden))
    x = torch.randn(copies, m, hidden, device=device, dtype=dtype)
    norm_K = torch.rand(hidden, device=device, dtype=dtype)
    times = {
        "norm_round": _time(
            lambda i: norm_input(x[i], wide, norm="rms", weight_K=norm_K, eps=1e-5), copies, asked
        ),
        "rms_norm_torch": _time(
            lambda i: functional.rms_norm(x[i], norm_K.shape, norm_K, 1e-5), copies, asked
        ),
        "rms_norm_ours": _time(lambda i: fused_norm.rms_norm(x[i], norm_K, 1e-5), copies, asked),
    }
    copies = min(8, copies_for(4 * m * ffn))
    gate_up = torch.randn(copies, m, 2 * ffn, device=device, dtype=dtype)
    plain = replace(down, scheme=replace(down.scheme, rotation=False))
    times |= {
        "silu_mul_rotate_round": _time(
            lambda i: activation_input(gate_up[i], down, "silu"), copies, asked
        ),
        "silu_mul_round": _time(
            lambda i: activation_input(gate_up[i], plain, "silu"), copies, asked
        ),
        "silu_mul_ours": _time(lambda i: gated_mlp.gate_mul(gate_up[i]), copies, asked),
    }
    return times


def _time(call: Call, copies: int, asked: BenchAtom) -> list[float]:
    return time_launches(call, copies, repeats=asked.repeats)


def _sum(parts: list[list[float]]) -> list[float]:
    return [sum(samples) for samples in zip(*parts, strict=True)]


def _report(
    bench: str, case: dict[str, object], times: dict[str, list[float]], asked: BenchAtom
) -> None:
    medians = {kind: statistics.median(us) for kind, us in times.items()}
    shown = " ".join(f"{k}={v}" for k, v in case.items())
    each = "  ".join(f"{kind} {us:.1f}" for kind, us in medians.items())
    peers = [us for kind, us in medians.items() if kind == "cublas_bf16"]
    ratio = f"  x{peers[0] / medians['product']:.2f}" if peers else ""
    sys.stdout.write(f"{shown:48s} {each} us{ratio}\n")
    sys.stdout.flush()
    if not asked.out:
        return
    first, *others = times
    write_row(
        asked.out,
        bench=bench,
        case={"model": "llama-3.1-8b", **case},
        unit="us",
        samples=times[first],
        baselines={kind: medians[kind] for kind in others},
        commit=asked.commit,
    )

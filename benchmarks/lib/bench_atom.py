"""`kernel_bench.py bench atom`: W4A4 and W8A8 against cuBLAS bf16, and our W4A16.

Llama-3.1-8B's products with 128 outlier channels; cold caches, CUDA graphs, medians.
`shape: layer` is the sum of qkv, o, gate_up and down. `with_rounding` starts from 16-bit inputs.
`--what fused` times norm + channel order + rounding beside the norm alone, and SiLU-mul likewise.
`--what layer` times a layer's products with what stands before each, from 16-bit inputs: norms and
the gate that round as they make, the same by passes of their own, and
cuBLAS bf16 behind norms and gate; attention is left out, o and down add the residual stream.
`--what words` times W4A4's product and rounding beside those of the weight-only kernels, which take
few tokens: on 16-bit values that rounding leaves.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.atom import hopper_inputs, portable
from llmpq.kernels.atom.hopper import (
    HopperPlan,
    RoundedTokens,
    activation_input,
    any_input,
    norm_input,
    plan,
    product,
)
from llmpq.kernels.atom.portable import GemmPlan, RoundedInput, round_input
from llmpq.kernels.compile_missing import compiling_missing
from llmpq.kernels.fused import gated_mlp
from llmpq.kernels.fused import rms_norm as fused_norm
from llmpq.kernels.gpu_timing import copies_for, time_launches, write_row
from llmpq.kernels.weights.atom_weight import AtomTiles, AtomWeight
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.weight import Weight
from reference.check_atom import LAYER, SCHEMES, W4A4, random_weight
from reference.check_gemm import random_weight as random_w4a16
from reference.kernel_commands import BenchAtom

log = logging.getLogger(__name__)

CODES_TILES = ((64, 3), (80, 3), (96, 3), (96, 2), (128, 2), (144, 2), (160, 2))
"""Tokens and warpgroups of tiles of W4A4's product."""
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
    if asked.what == "layer":
        for key in asked.scheme.split(","):
            _layers(key, rows, asked)
        return 0
    for key, m in itertools.product(asked.scheme.split(","), rows):
        if asked.what == "words":
            ways = [_restored(name, m, asked) for name in asked.shapes.split(",")]
            each = {kind: _sum([times[kind] for times in ways]) for kind in ways[0]}
            _report("atom_words", {"shape": asked.shapes, "m": m}, each, asked)
            continue
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
            "product": lambda i: portable.product(rounded, pool[i], dtype=x.dtype),
            "with_rounding": lambda i: portable.product(
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
        for (bm, warpgroups), shares in itertools.product(CODES_TILES, (False, True)):
            chosen = HopperPlan(bm=bm, warpgroups=warpgroups, shares=shares)
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
    return lambda i: portable.product(rounded, pool[i], dtype=dtype, tiles=tiles)


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


def _layers(key: str, rows: list[int], asked: BenchAtom) -> None:
    """Time whole layers, compiled before side by side."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    made = [
        random_weight(name, k, n, SCHEMES[key], dtype, device).packed()
        for name, (k, n) in LAYER.items()
    ]
    if not SCHEMES[key].outliers:  # as checkpoints have them: sorted channels are outliers' affair
        made = [replace(one, index_K=None) for one in made]
    pool = [[_copy(one) for one in made] for _ in range(copies_for(sum(w.nbytes for w in made)))]
    dense = [
        [DenseWeight(torch.randn(n, k, device=device, dtype=dtype)) for k, n in LAYER.values()]
        for _ in range(2)
    ]
    norm_K = torch.rand(LAYER["qkv"][0], device=device, dtype=dtype)
    calls: dict[int, dict[str, tuple[int, Call]]] = {}
    for m in rows:
        x = torch.randn(m, LAYER["qkv"][0], device=device, dtype=dtype)
        calls[m] = {
            "by_themselves": (len(pool), partial(_by_themselves, pool, x, norm_K)),
            "cublas_bf16": (len(dense), partial(_by_themselves, dense, x, norm_K)),
        }
        if all(one.takes_rounded_tokens for one in made):
            calls[m] = {"as_made": (len(pool), partial(_as_made, pool, x, norm_K)), **calls[m]}
    with compiling_missing():
        for ways in calls.values():
            for _, call in ways.values():
                call(0)
    for m, ways in calls.items():
        times = {name: _time(call, copies, asked) for name, (copies, call) in ways.items()}
        _report("atom_layer", {"m": m, "precision": key}, times, asked)


def _as_made(pool: Sequence[Sequence[AtomWeight]], x: Tensor, norm_K: Tensor, i: int) -> Tensor:
    """Run a layer's products, each on inputs that what stands before rounds."""
    qkv, o, gate_up, down = pool[i]
    dtype, norm = x.dtype, {"norm": "rms", "weight_K": norm_K, "eps": 1e-5}
    made = qkv.kernels.product(qkv.kernels.norm_input(x, qkv, **norm), qkv, dtype=dtype)
    attended = made[:, : o.in_features].contiguous()
    y = o.kernels.product(o.kernels.any_input(attended, o), o, dtype=dtype, residual_MN=x)
    tokens = gate_up.kernels.norm_input(y, gate_up, **norm)
    wide = gate_up.kernels.product(tokens, gate_up, dtype=dtype)
    tokens = down.kernels.activation_input(wide, down, "silu")
    out: Tensor = down.kernels.product(tokens, down, dtype=dtype, residual_MN=y, into_residual=True)
    return out


def _by_themselves(pool: Sequence[Sequence[Weight]], x: Tensor, norm_K: Tensor, i: int) -> Tensor:
    """Run a layer's products on 16-bit inputs, which those of few bits round."""
    qkv, o, gate_up, down = pool[i]
    made = qkv.matmul(fused_norm.rms_norm(x, norm_K, 1e-5))
    attended = made[:, : o.in_features].contiguous()
    y = o.matmul(attended, None, x)
    wide = gate_up.matmul(fused_norm.rms_norm(y, norm_K, 1e-5))
    return down.matmul(gated_mlp.gate_mul(wide), None, y, into_residual=True)


def _restored(name: str, m: int, asked: BenchAtom) -> dict[str, list[float]]:
    """Time W4A4's product of codes, its rounding, and both of the weight-only kernels' way."""
    k, n = LAYER[name]
    one = random_weight(name, k, n, W4A4, torch.bfloat16, torch.device("cuda")).packed()
    assert isinstance(one, AtomTiles)
    pool = [_copy(one) for _ in range(copies_for(one.nbytes))]
    dense = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_for(2 * n * k))
    ]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    tokens, words = any_input(x, one), _as_words(x, one)
    times = {
        "codes": _time(lambda i: product(tokens, _tiles(pool[i]), dtype=x.dtype), len(pool), asked),
        "rounding": _time(lambda _: any_input(x, one), 1, asked),
        "words": _time(lambda i: product(words, _tiles(pool[i]), dtype=x.dtype), len(pool), asked),
        "restoring": _time(lambda _: _as_words(x, one), 1, asked),
        "cublas_bf16": _time(lambda i: functional.linear(x, dense[i]), len(dense), asked),
    }
    return times


def _as_words(x: Tensor, weight: AtomTiles) -> RoundedTokens:
    """Round as for few tokens, however many there are: to 16-bit values that rounding leaves."""
    plain = hopper_inputs.is_few
    hopper_inputs.is_few = lambda *_: True
    try:
        return any_input(x, weight)
    finally:
        hopper_inputs.is_few = plain


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
    ratio = f"  x{peers[0] / next(iter(medians.values())):.2f}" if peers else ""
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

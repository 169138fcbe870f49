"""Products of experts that a pair or a few were sent to: all of K in one short program.

    program     16 * BH rows of w of one expert (FUSE: as many up rows beside them) x 8 pairs at a
                time; its WM warps take the k-groups in turn and add up once, as gemv.py
                    words --> registers --> code - zero --> mma.sync with x's fragment
                D k-groups of words in flight per warp, no shared memory until the warps add up

A program of expert_kernel.py walks over K instead: of an expert with few pairs each step waits for
the one before, and few programs are left to hide it. Words in groups of 128.

Legend as in expert_kernel.py.
"""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.experts.store_pairs import store_pairs
from llmpq.kernels.gemm.operands.packed_operands import (
    accumulator_scale,
    dot,
    load_tile,
    unpack,
    zero_constants,
)

PAIRS = 8
"""Pairs that a program takes at a time."""


@triton.jit
def _x_step(X, at_row, live_row, step: tl.constexpr, K, WM: tl.constexpr, EVEN_K: tl.constexpr):
    """x of step `step`, [WM, 128 k, 8]; at_row, live_row [16, WM, 8, 4, 2] flat, as it lies."""
    first = step * WM
    f = tl.arange(0, WM * 1024)
    warp = f // 64 % WM
    pair = warp * 128 + f // (64 * WM) * 8 + f // 2 % 4 * 2
    keep = live_row
    if not EVEN_K:
        keep = keep & (first * 128 + pair < K)  # K is even: both of a pair or none
    x = tl.load(X + first * 128 + at_row + (pair + f % 2), mask=keep, other=0.0)
    x = tl.permute(tl.reshape(x, (8, 2, WM, 8, 4, 2)), (2, 0, 4, 1, 5, 3))
    return tl.reshape(x, (WM, 128, 8))


@triton.jit
def _multiply(
    acc,
    tile,
    x,
    BITS: tl.constexpr,
    DT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc [WM, rows, 8] += scale * (code - zero) x of WM k-groups."""
    words, scale, zero = tile
    zeros = ()
    if not SYMMETRIC:
        zeros = zero_constants(zero, BITS, DT, INTERPRET)
    w = unpack(words, zeros, BITS, DT, SYMMETRIC, BH, WM, True, True, INTERPRET)
    t = dot(w, x, tl.zeros([WM, BH * 16, 8], tl.float32), INTERPRET)
    t = tl.reshape(t, (WM, BH * 16, 1, 4, 2)) * accumulator_scale(scale, DT, BH, WM, True)
    return acc + tl.reshape(t, (WM, BH * 16, 8))


@triton.jit(do_not_specialize=["top", "limit", "slope"])
def rows_expert_kernel(
    X,
    P0,
    P1,
    S,
    Z,
    BIAS,
    Y,
    order,
    runs,
    N,
    K,
    blocks,
    groups,
    top,
    limit,
    slope,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    STEPS: tl.constexpr,
    D: tl.constexpr,
    FUSE: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y of one expert's pairs and 16 * BH rows of its w; grid (tiles of rows, runs).

    STEPS * WM = groups.
    """
    DT: tl.constexpr = X.dtype.element_ty
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    tile, run = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e, first, end = (
        tl.load(runs + run * 3),
        tl.load(runs + run * 3 + 1),
        tl.load(runs + run * 3 + 2),
    )
    block = tile * BH
    half = blocks // 2 if FUSE else blocks
    left = half - block
    whole = (e * blocks + block).to(tl.int64) * groups
    P0 += whole * WORDS
    P1 += whole * WORDS
    S += whole * 8
    Z += whole * 8
    words_on, pairs_on = half * groups * WORDS, half * groups * 8
    f = tl.arange(0, WM * 1024)
    for m0 in tl.range(first, end, 8, num_stages=1):  # else words go by shared memory
        tiles = ()
        for i in tl.static_range(min(D, STEPS)):
            g = i * WM
            tiles += (
                load_tile(P0, P1, S, Z, left, groups, g, BITS, True, SYMMETRIC, BH, WM, True),
            )
            if FUSE:
                tiles += (
                    load_tile(
                        P0 + words_on,
                        P1 + words_on,
                        S + pairs_on,
                        Z + pairs_on,
                        left,
                        groups,
                        g,
                        BITS,
                        True,
                        SYMMETRIC,
                        BH,
                        WM,
                        True,
                    ),
                )
        pair = m0 + f // 8 % 8
        live = pair < end
        source = pair
        if GATHER:
            source = tl.load(order + pair, mask=live, other=0) // top
        at_row = tl.max_constancy(source, 8).to(tl.int64) * K
        acc = tl.zeros([WM, BH * 16, 8], tl.float32)
        acc2 = tl.zeros([WM, BH * 16, 8], tl.float32) if FUSE else 0
        PARTS: tl.constexpr = 2 if FUSE else 1
        for i in tl.static_range(STEPS):
            if i + D < STEPS:
                g = (i + D) * WM
                tiles += (
                    load_tile(P0, P1, S, Z, left, groups, g, BITS, True, SYMMETRIC, BH, WM, True),
                )
                if FUSE:
                    tiles += (
                        load_tile(
                            P0 + words_on,
                            P1 + words_on,
                            S + pairs_on,
                            Z + pairs_on,
                            left,
                            groups,
                            g,
                            BITS,
                            True,
                            SYMMETRIC,
                            BH,
                            WM,
                            True,
                        ),
                    )
            x = _x_step(X, at_row, live, i, K, WM, EVEN_K)
            acc = _multiply(acc, tiles[i * PARTS], x, BITS, DT, SYMMETRIC, BH, WM, INTERPRET)
            if FUSE:
                acc2 = _multiply(
                    acc2, tiles[i * PARTS + 1], x, BITS, DT, SYMMETRIC, BH, WM, INTERPRET
                )
        total = tl.sum(acc, axis=0)
        total2 = tl.sum(acc2, axis=0) if FUSE else 0
        row = m0 + tl.arange(0, 8)
        store_pairs(
            total,
            total2,
            Y,
            BIAS,
            order,
            row,
            row < end,
            block * 16,
            e,
            N,
            limit,
            slope,
            BH * 16,
            HAS_BIAS,
            not GATHER,
            FUSE,
            ACT,
        )

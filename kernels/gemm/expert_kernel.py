"""Products of a mixture's experts: each expert's rows of w meet the tokens that were sent to it.

    pair        a (token, expert) the router chose; C = T k of them, numbered t k + j
    order [C]   pairs sorted by expert; those of expert e stand in starts[e]..ends[e]
    program     BN rows of w of one expert x BM pairs at a time, every `shares`-th BM of them

    assign      one program an expert counts, and writes its part of `order`
    packed      words --> registers --> code - zero --> left operand, as tile_kernel.py
    dense       16-bit w through shared memory

Nothing is known on the host but C, so a step of any routing is one captured graph. An expert
without pairs reads nothing; one with pairs reads its weight once per `shares` (the L2 serves the
rest). x is gathered as it is read, and the second product's rows go back to their pairs' places.

M pairs of an expert, K in, N out, E experts; `blocks` of 16 rows of w, `groups` of 128 of K.
"""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.packed_operands import load_pairs, load_tile
from llmpq.kernels.gemm.tile_kernel import _accumulate, _load_x


@triton.jit
def assign_kernel(expert_C, order, starts, ends, C, STEP: tl.constexpr, PDL: tl.constexpr):
    """Expert e's pairs in order of their numbers, behind those of smaller experts."""
    e = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before = 0
    for c0 in range(0, C, STEP):
        c = c0 + tl.arange(0, STEP)
        expert = tl.load(expert_C + c, mask=c < C, other=0x7FFFFFFF).to(tl.int32)
        before += tl.sum((expert < e).to(tl.int32))
    place = before
    for c0 in range(0, C, STEP):
        c = c0 + tl.arange(0, STEP)
        expert = tl.load(expert_C + c, mask=c < C, other=0x7FFFFFFF).to(tl.int32)
        mine = (expert == e).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, c, mask=mine == 1)
        place += tl.sum(mine)
    tl.store(starts + e, before)
    tl.store(ends + e, place)


@triton.jit
def _store(
    acc, Y, BIAS, order, row, live, n0, e, N, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCATTER: tl.constexpr,
):  # fmt: skip
    """Add the expert's bias to acc [BN, BM] and store it, transposed, into y [C, N]."""
    n = n0 + tl.arange(0, BN)
    target = row
    if SCATTER:
        target = tl.load(order + row, mask=live, other=0)
    if HAS_BIAS:
        bias = tl.load(BIAS + e.to(tl.int64) * N + n, mask=n < N, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    at = target.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["shares", "top"])
def packed_expert_kernel(
    X, P0, P1, S, Z, BIAS, Y, order, starts, ends, N, K, blocks, groups, top, shares,
    BITS: tl.constexpr, GROUPED: tl.constexpr, SYMMETRIC: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATHER: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """y of one expert's pairs and BN rows of its w; grid (tiles of rows, E, shares)."""
    DT: tl.constexpr = X.dtype.element_ty
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    BN: tl.constexpr = BH * WM * 16
    tile, e, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, end = tl.load(starts + e), tl.load(ends + e)
    block = tile * (BH * WM)
    left = blocks - block
    S_GROUPS = groups if GROUPED else 1
    whole = (e * blocks + block).to(tl.int64)
    P0 += whole * groups * WORDS
    P1 += whole * groups * WORDS
    S += whole * S_GROUPS * 8
    Z += whole * S_GROUPS * 8
    k = tl.arange(0, 128)
    if KWIDTH4:  # as tile_kernel.py
        k = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    for m0 in range(first + share * BM, end, shares * BM):
        row = m0 + tl.arange(0, BM)
        live = row < end
        source = row
        if GATHER:
            source = tl.load(order + row, mask=live, other=0) // top
        at = X + source.to(tl.int64)[None, :] * K + k[:, None]
        acc = tl.zeros([BN, BM], tl.float32)
        for g in tl.range(0, groups, num_stages=STAGES):
            # Scales of a channel stand still: they are loaded with every group all the same.
            held = g if GROUPED else 0
            words, _, _ = load_tile(
                P0, P1, S, Z, left, groups, g, BITS, False, SYMMETRIC, BH, WM, False
            )
            scale = load_pairs(S, left, S_GROUPS, held, BH, WM, False)
            zero = 0
            if not SYMMETRIC:
                zero = load_pairs(Z, left, S_GROUPS, held, BH, WM, False)
            x = _load_x(at, g, live[None, :], k[:, None], K, EVEN_K)
            acc = _accumulate(
                acc,
                (words, scale, zero),
                x,
                0,
                BITS,
                DT,
                True,
                SYMMETRIC,
                False,
                BH,
                WM,
                BM,
                KWIDTH4,
                INTERPRET,
            )
        _store(acc, Y, BIAS, order, row, live, block * 16, e, N, BN, HAS_BIAS, not GATHER)


@triton.jit(do_not_specialize=["shares", "top"])
def dense_expert_kernel(
    X, W, BIAS, Y, order, starts, ends, N, K, top, shares,
    HAS_BIAS: tl.constexpr, GATHER: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The same with w [E, N, K] in x's dtype."""
    tile, e, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, end = tl.load(starts + e), tl.load(ends + e)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w_at = W + (e.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    for m0 in range(first + share * BM, end, shares * BM):
        row = m0 + tl.arange(0, BM)
        live = row < end
        source = row
        if GATHER:
            source = tl.load(order + row, mask=live, other=0) // top
        x_at = X + source.to(tl.int64)[None, :] * K + k[:, None]
        acc = tl.zeros([BN, BM], tl.float32)
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            inside = k0 + k < K
            w = tl.load(w_at + k0, mask=(n < N)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_at + k0, mask=live[None, :] & inside[:, None], other=0.0)
            if INTERPRET:
                acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc)
            else:
                acc = tl.dot(w, x, acc, input_precision="ieee")
        _store(acc, Y, BIAS, order, row, live, tile * BN, e, N, BN, HAS_BIAS, not GATHER)

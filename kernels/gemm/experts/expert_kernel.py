"""Products of a mixture's experts: each expert's rows of w times the tokens routed to it.

    pair        a (token, expert) the router chose; C = T k of them, numbered t k + j
    order [C]   pairs sorted by expert
    runs [E]    an expert, its first row in `order` and its end; those that have rows come first
    program     BN rows of w of one expert x BM pairs at a time, every `shares`-th BM of them

    assign      one program an expert counts, and writes its part of `order` and its run; of no
                more pairs than experts one program a pair (`assign_pairs_kernel`); BESIDE: each
                token has a pair more, of the MLP that all share, whose run comes first
    packed      words --> registers --> code - zero --> left operand, as splitk_gemm.py;
                E2M1: code * its group's scale
    dense       16-bit w through shared memory
    FUSE        a program takes gate rows and the up rows beside them; act(gate) up leaves
Nothing is known on the host but C, so a step of any routing is one captured graph, of as many runs
as C pairs can have. An expert without pairs reads nothing; one with pairs reads its weight once per
`shares` (the L2 serves the rest). x is gathered as it is read, and the second product's rows go
back to their pairs' places.

M pairs of an expert, K in, N out, E experts; `blocks` of 16 rows of w, `groups` of 128 of K.
"""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.experts.store_pairs import store_pairs
from llmpq.kernels.gemm.operands.e2m1_operand import SCALE_WORDS, load_e2m1, own_sum, unpack_e2m1
from llmpq.kernels.gemm.operands.k_group import accumulate, load_x
from llmpq.kernels.gemm.operands.packed_operands import dot, load_pairs, load_tile


@triton.jit
def assign_kernel(
    expert_C, order, runs, C, E, EP: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr
):
    """Expert e's pairs in order of their indices, behind those of smaller experts; its run."""
    e = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    bins = tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    for c0 in range(0, C, STEP):
        c = c0 + tl.arange(0, STEP)
        expert = tl.load(expert_C + c, mask=c < C, other=0).to(tl.int32)
        counts += tl.histogram(expert, EP, mask=c < C)
    before = tl.sum(tl.where(bins < e, counts, 0))
    place = before
    for c0 in range(0, C, STEP):
        c = c0 + tl.arange(0, STEP)
        expert = tl.load(expert_C + c, mask=c < C, other=0x7FFFFFFF).to(tl.int32)
        mine = (expert == e).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, c, mask=mine == 1)
        place += tl.sum(mine)
    hit = (counts > 0).to(tl.int32)
    ahead = tl.sum(tl.where(bins < e, hit, 0))
    at = tl.where(place > before, ahead, tl.sum(hit) + e - ahead)
    tl.store(runs + at * 3, e)
    tl.store(runs + at * 3 + 1, before)
    tl.store(runs + at * 3 + 2, place)


@triton.jit(do_not_specialize=["C", "E", "top"])
def assign_pairs_kernel(
    expert_C, order, runs, C, E, top, STEP: tl.constexpr, BESIDE: tl.constexpr, PDL: tl.constexpr
):
    """Where pair number `own` goes; the run of its expert if it is the first of those, else none.

    BESIDE: the last program writes the first run, the pairs of expert E.
    """
    own = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    c = tl.arange(0, STEP)
    tokens = C // top if BESIDE else 0
    if own < C:
        expert = tl.load(expert_C + c, mask=c < C, other=0x7FFFFFFF).to(tl.int32)
        e = tl.load(expert_C + own).to(tl.int32)
        before = tokens + tl.sum((expert < e).to(tl.int32), 0)
        mine = (expert == e).to(tl.int32)
        rank = tl.sum(tl.where(c < own, mine, 0), 0)
        pair = own + own // top if BESIDE else own
        tl.store(order + before + rank, pair)
        run = runs + (own + BESIDE) * 3
        tl.store(run, e)
        tl.store(run + 1, before)
        tl.store(run + 2, tl.where(rank == 0, before + tl.sum(mine, 0), before))
    else:
        tl.store(order + c, c * (top + 1) + top, mask=c < tokens)
        tl.store(runs, E)
        tl.store(runs + 1, 0)
        tl.store(runs + 2, tokens)


@triton.jit
def _load_group(
    P0,
    P1,
    S,
    Z,
    left,
    groups,
    S_GROUPS,
    g,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    E2M1: tl.constexpr,
):
    """Words, scales and zeros of one k-group."""
    if E2M1:
        words, exponents = load_e2m1(P0, S, left, groups, g, BH, WM)
        return words, exponents, 0
    else:
        # Scales of a channel stand still: they are loaded with every group all the same.
        held = g if GROUPED else 0
        words, _, _ = load_tile(
            P0, P1, S, Z, left, groups, g, BITS, False, SYMMETRIC, BH, WM, False
        )
        scale = load_pairs(S, left, S_GROUPS, held, BH, WM, False)
        zero = 0
        if not SYMMETRIC:
            zero = load_pairs(Z, left, S_GROUPS, held, BH, WM, False)
        return words, scale, zero


@triton.jit
def _add_group(
    acc,
    now,
    x,
    BITS: tl.constexpr,
    DT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    E2M1: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc + w x of one k-group."""
    if E2M1:
        w = unpack_e2m1(now[0], now[1], DT, BH, WM, KWIDTH4, INTERPRET)
        # A sum of its own, which nothing folds into `acc`: Triton 3.6 does not wait for wgmma to
        # have read its operand where wgmma carries a sum on, and the next step unpacks over it.
        t = dot(w, x, tl.zeros([BH * WM * 16, BM], tl.float32), INTERPRET)
        return acc + own_sum(t, INTERPRET)
    else:
        return accumulate(
            acc, now, x, 0, BITS, DT, True, SYMMETRIC, False, BH, WM, BM, KWIDTH4, INTERPRET, "", ""
        )


@triton.jit(do_not_specialize=["shares", "top", "limit", "slope"])
def packed_expert_kernel(
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
    shares,
    limit,
    slope,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    FUSE: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
    E2M1: tl.constexpr = False,
):
    """y of one expert's pairs and BN rows of its w; grid (tiles of rows, runs, shares).

    FUSE: and of the BN rows half of w further on, which the first are the gate of. E2M1: w is
    MXFP4 (e2m1_operand.py), not linear codes.
    """
    DT: tl.constexpr = X.dtype.element_ty
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    BN: tl.constexpr = BH * WM * 16
    tile, run, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e, first, end = (
        tl.load(runs + run * 3),
        tl.load(runs + run * 3 + 1),
        tl.load(runs + run * 3 + 2),
    )
    block = tile * (BH * WM)
    half = blocks // 2 if FUSE else blocks
    left = half - block
    S_GROUPS = groups if GROUPED else 1
    PAIRS: tl.constexpr = SCALE_WORDS if E2M1 else 8
    whole = (e * blocks + block).to(tl.int64)
    P0 += whole * groups * WORDS
    P1 += whole * groups * WORDS
    S += whole * S_GROUPS * PAIRS
    Z += whole * S_GROUPS * PAIRS
    words_on, pairs_on = half * groups * WORDS, half * S_GROUPS * PAIRS
    k = tl.arange(0, 128)
    if KWIDTH4:  # as splitk_gemm.py
        k = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    for m0 in range(first + share * BM, end, shares * BM):
        row = m0 + tl.arange(0, BM)
        live = row < end
        source = row
        if GATHER:
            source = tl.load(order + row, mask=live, other=0) // top
        at = X + source.to(tl.int64)[None, :] * K + k[:, None]
        acc = tl.zeros([BN, BM], tl.float32)
        acc2 = tl.zeros([BN, BM], tl.float32) if FUSE else 0
        for g in tl.range(0, groups, num_stages=STAGES):
            now = _load_group(
                P0, P1, S, Z, left, groups, S_GROUPS, g, BITS, GROUPED, SYMMETRIC, BH, WM, E2M1
            )
            if FUSE:
                now2 = _load_group(
                    P0 + words_on,
                    P1 + words_on,
                    S + pairs_on,
                    Z + pairs_on,
                    left,
                    groups,
                    S_GROUPS,
                    g,
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                    BH,
                    WM,
                    E2M1,
                )
            x = load_x(at, g, live[None, :], k[:, None], K, EVEN_K)
            acc = _add_group(acc, now, x, BITS, DT, SYMMETRIC, BH, WM, BM, KWIDTH4, E2M1, INTERPRET)
            if FUSE:
                acc2 = _add_group(
                    acc2, now2, x, BITS, DT, SYMMETRIC, BH, WM, BM, KWIDTH4, E2M1, INTERPRET
                )
        store_pairs(
            acc,
            acc2,
            Y,
            BIAS,
            order,
            row,
            live,
            block * 16,
            e,
            N,
            limit,
            slope,
            BN,
            HAS_BIAS,
            not GATHER,
            FUSE,
            ACT,
        )


@triton.jit(do_not_specialize=["shares", "top", "limit", "slope"])
def dense_expert_kernel(
    X,
    W,
    BIAS,
    Y,
    order,
    runs,
    N,
    K,
    top,
    shares,
    limit,
    slope,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    FUSE: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The same with w [E, N, K] in x's dtype."""
    tile, run, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e, first, end = (
        tl.load(runs + run * 3),
        tl.load(runs + run * 3 + 1),
        tl.load(runs + run * 3 + 2),
    )
    F = N // 2 if FUSE else N
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w_at = W + (e.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    up_at = w_at + F.to(tl.int64) * K if FUSE else w_at
    for m0 in range(first + share * BM, end, shares * BM):
        row = m0 + tl.arange(0, BM)
        live = row < end
        source = row
        if GATHER:
            source = tl.load(order + row, mask=live, other=0) // top
        x_at = X + source.to(tl.int64)[None, :] * K + k[:, None]
        acc = tl.zeros([BN, BM], tl.float32)
        acc2 = tl.zeros([BN, BM], tl.float32) if FUSE else 0
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            inside = k0 + k < K
            w_live = (n < F)[:, None] & inside[None, :]
            w = tl.load(w_at + k0, mask=w_live, other=0.0)
            if FUSE:
                w2 = tl.load(up_at + k0, mask=w_live, other=0.0)
            x = tl.load(x_at + k0, mask=live[None, :] & inside[:, None], other=0.0)
            acc = _dot(w, x, acc, INTERPRET)
            if FUSE:
                acc2 = _dot(w2, x, acc2, INTERPRET)
        store_pairs(
            acc,
            acc2,
            Y,
            BIAS,
            order,
            row,
            live,
            tile * BN,
            e,
            N,
            limit,
            slope,
            BN,
            HAS_BIAS,
            not GATHER,
            FUSE,
            ACT,
        )


@triton.jit
def _dot(w, x, acc, INTERPRET: tl.constexpr):
    if INTERPRET:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc)
    else:
        return tl.dot(w, x, acc, input_precision="ieee")

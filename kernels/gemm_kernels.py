"""The two Triton kernels of y = x w^T with packed w: `rows_kernel` for one or two rows of x, and
`tile_kernel` for more. Both read a weight once, in the order it is stored, and put it from memory
into the tensor core's left operand without passing through shared memory (layout: formats.py).

    rows_kernel   program = 16*BH rows of w, all of K; its warps take k-groups in turn
                    warp w:  words --> registers --> code - zero --> mma.sync with x's fragment
                    D k-groups of words in flight per warp before the first use; no loop; the
                    warps' sums meet in shared memory at the end, once
    tile_kernel   program = 16*BH*WM rows of w x BM rows of x x a share of K (split)
                    D k-groups of words ahead in registers while D are multiplied (STAGES 1), or
                    a cp.async pipeline of STAGES (both win somewhere)
                    shares of a tile leave float32 sums in a workspace; the last one to arrive
                    adds them in order, so results do not depend on the timing

Moves bits/8 + 2/128 (scale) bytes per weight. With PDL the weights of a kernel are requested
before the previous kernel has ended (they do not depend on it), x only after.
M rows of x, K in, N out; `blocks` of 16 rows of w, `groups` k-groups.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm_tiles import (
    accumulator_scale,
    load_pairs,
    load_words,
    pair_floats,
    unpack,
    zero_constants,
)


@triton.jit
def _load_tile(
    P0,
    P1,
    S,
    Z,
    blocks,
    groups,
    group,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Everything a tile needs from memory: (words, scale pairs, zero pairs)."""
    if BITS == 3:
        words = (
            load_words(P0, blocks, groups, group, 192, 0, BH, WM, BATCH),
            load_words(P0, blocks, groups, group, 192, 1, BH, WM, BATCH),
            load_words(P0, blocks, groups, group, 192, 2, BH, WM, BATCH),
        )
    elif BITS == 8:
        words = (
            load_words(P0, blocks, groups, group, 256, 0, BH, WM, BATCH),
            load_words(P1, blocks, groups, group, 256, 0, BH, WM, BATCH),
        )
    else:
        words = (load_words(P0, blocks, groups, group, 256, 0, BH, WM, BATCH),)
    scale = 0
    zero = 0
    if GROUPED:
        scale = load_pairs(S, blocks, groups, group, BH, WM, BATCH)
        if not SYMMETRIC:
            zero = load_pairs(Z, blocks, groups, group, BH, WM, BATCH)
    return words, scale, zero


@triton.jit
def _finish(
    acc,
    Y,
    BIAS,
    RESIDUAL,
    n0,
    m0,
    M,
    N,
    last,
    BN: tl.constexpr,
    BM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add bias and residual to acc [BN, BM] and store it, transposed, into y [M, N]."""
    n = n0 + tl.arange(0, BN)
    m = m0 + tl.arange(0, BM)
    at = m[None, :].to(tl.int64) * N + n[:, None]
    keep = (m < M)[None, :] & (n < last)[:, None]
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < last, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        acc += tl.load(RESIDUAL + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=keep)


@triton.jit
def _dot(w, x, acc, INTERPRET: tl.constexpr):
    """acc + w x; the interpreter multiplies bfloat16 as if it were integers, so widen there."""
    if INTERPRET:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc)
    else:
        return tl.dot(w, x, acc)


@triton.jit
def _first(group, groups, WM: tl.constexpr, EVEN_G: tl.constexpr):
    """First of WM k-groups from `group` on; moved back where they would pass the last one."""
    if EVEN_G:
        return group
    else:
        return tl.minimum(group, groups - WM)


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    X, P0, P1, S, Z, BIAS, RESIDUAL, Y, M, N, K, blocks, groups,
    BITS: tl.constexpr, GROUPED: tl.constexpr, SYMMETRIC: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_G: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BH: tl.constexpr, WM: tl.constexpr, STEPS: tl.constexpr, D: tl.constexpr, XD: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """y = x w^T for M <= 8: STEPS * WM >= groups; steps past the last group are multiplied by 0."""
    DT: tl.constexpr = X.dtype.element_ty
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    block = tl.program_id(0) * BH
    left = blocks - block
    S_GROUPS = groups if GROUPED else 1
    P0 += block.to(tl.int64) * groups * WORDS
    P1 += block.to(tl.int64) * groups * WORDS
    S += block * S_GROUPS * 8
    Z += block * S_GROUPS * 8

    # Weights: D steps ahead of their use. A step that would start past the last group re-reads
    # the last WM groups' start; x is zero there.
    tiles = ()
    for i in tl.static_range(min(D, STEPS)):
        tiles += (
            _load_tile(
                P0,
                P1,
                S,
                Z,
                left,
                groups,
                _first(i * WM, groups, WM, EVEN_G),
                BITS,
                GROUPED,
                SYMMETRIC,
                BH,
                WM,
                True,
            ),
        )
    if not GROUPED:
        channel_scale = load_pairs(S, left, 1, 0, BH, 1, True)
        if not SYMMETRIC:
            channel_zero = load_pairs(Z, left, 1, 0, BH, 1, True)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    xs = ()
    for i in tl.static_range(min(XD, STEPS)):
        xs += (_x_step(X, i, M, K, groups, WM, EVEN_K, EVEN_G),)

    acc = tl.zeros([WM, BH * 16, 8], tl.float32)
    for i in tl.static_range(STEPS):
        if i + D < STEPS:
            tiles += (
                _load_tile(
                    P0,
                    P1,
                    S,
                    Z,
                    left,
                    groups,
                    _first((i + D) * WM, groups, WM, EVEN_G),
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                    BH,
                    WM,
                    True,
                ),
            )
        if i + XD < STEPS:
            xs += (_x_step(X, i + XD, M, K, groups, WM, EVEN_K, EVEN_G),)
        words, scale, zero = tiles[i]
        zeros = ()
        if not SYMMETRIC:
            if GROUPED:
                zeros = zero_constants(zero, BITS, DT, INTERPRET)
            else:
                wide = tl.broadcast_to(tl.reshape(channel_zero, (BH, 1, 32)), (BH, WM, 32))
                zeros = zero_constants(tl.reshape(wide, (BH * WM * 32,)), BITS, DT, INTERPRET)
        w = unpack(words, zeros, BITS, DT, SYMMETRIC, BH, WM, True, True, INTERPRET)
        if GROUPED:
            t = _dot(w, xs[i], tl.zeros([WM, BH * 16, 8], tl.float32), INTERPRET)
            t = tl.reshape(t, (WM, BH * 16, 1, 4, 2))
            acc += tl.reshape(t * accumulator_scale(scale, DT, BH, WM, True), (WM, BH * 16, 8))
        else:
            acc = _dot(w, xs[i], acc, INTERPRET)
    total = tl.sum(acc, axis=0)
    if not GROUPED:
        s = tl.reshape(accumulator_scale(channel_scale, DT, BH, 1, True), (BH * 16, 1, 4, 1))
        total = tl.reshape(tl.reshape(total, (BH * 16, 1, 4, 2)) * s, (BH * 16, 8))
    _finish(
        total,
        Y,
        BIAS,
        RESIDUAL,
        block * 16,
        0,
        M,
        N,
        blocks * 16,
        BH * 16,
        8,
        HAS_BIAS,
        HAS_RESIDUAL,
    )


@triton.jit
def _x_step(
    X,
    step: tl.constexpr,
    M,
    K,
    groups,
    WM: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_G: tl.constexpr,
):
    """x of step `step`: the groups that `_load_tile` reads, those already done masked to zero."""
    first = _first(step * WM, groups, WM, EVEN_G)
    f = tl.arange(0, WM * 1024)
    warp = f // 64 % WM
    row = f // 8 % 8
    k = warp * 128 + f // (64 * WM) * 8 + f // 2 % 4 * 2 + f % 2
    keep = row < M
    if not EVEN_G:
        keep = keep & (first + warp >= step * WM)
    if not EVEN_K:
        keep = keep & (first * 128 + k < K)
    x = tl.load(X + first * 128 + row * K + k, mask=keep, other=0.0)
    x = tl.permute(tl.reshape(x, (8, 2, WM, 8, 4, 2)), (2, 0, 4, 1, 5, 3))
    return tl.reshape(x, (WM, 128, 8))


@triton.jit
def _scaled(
    w, pairs, DT: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr, INTERPRET: tl.constexpr
):
    """w * scale in DT: for tiles so wide that scaling the accumulator would need a second one."""
    low, high = pair_floats(pairs, DT)
    s = tl.reshape(tl.join(low.to(DT), high.to(DT)), (BH, WM, 8, 4, 2))
    s = tl.reshape(tl.permute(s, (0, 1, 4, 2, 3)), (BH * WM * 16, 1, 4, 1))
    w = tl.reshape(w, (BH * WM * 16, 16, 4, 2))
    s = tl.broadcast_to(s, (BH * WM * 16, 16, 4, 2))
    if INTERPRET:
        w = (w.to(tl.float32) * s.to(tl.float32)).to(DT)
    elif DT == tl.float16:
        w = tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [w, s], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        w = tl.inline_asm_elementwise(
            "{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z;}",
            "=r,r,r",
            [w, s],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return tl.reshape(w, (BH * WM * 16, 128))


@triton.jit
def _accumulate(
    acc,
    tile,
    x,
    channel_zero,
    BITS: tl.constexpr,
    DT: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SCALE_W: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc += scale * (code - zero) x of one k-group (the scale of a channel is applied at the end)."""
    words, scale, zero = tile
    zeros = ()
    if not SYMMETRIC:
        if GROUPED:
            zeros = zero_constants(zero, BITS, DT, INTERPRET)
        else:
            zeros = zero_constants(channel_zero, BITS, DT, INTERPRET)
    w = unpack(words, zeros, BITS, DT, SYMMETRIC, BH, WM, False, KWIDTH4, INTERPRET)
    BN: tl.constexpr = BH * WM * 16
    if not GROUPED:
        acc = _dot(w, x, acc, INTERPRET)
    elif SCALE_W:
        acc = _dot(_scaled(w, scale, DT, BH, WM, INTERPRET), x, acc, INTERPRET)
    else:
        t = _dot(w, x, tl.zeros([BN, BM], tl.float32), INTERPRET)
        t = tl.reshape(t, (BN, BM // 8, 4, 2))
        acc += tl.reshape(t * accumulator_scale(scale, DT, BH, WM, False), (BN, BM))
    return acc


@triton.jit
def _load_x(at, group, row_ok, k, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at + group * 128, mask=row_ok, other=0.0)
    else:
        return tl.load(at + group * 128, mask=row_ok & (group * 128 + k < K), other=0.0)


@triton.jit(do_not_specialize=["M", "split"])
def tile_kernel(
    X, P0, P1, S, Z, BIAS, RESIDUAL, Y, PARTIAL, ARRIVED, M, N, K, blocks, groups, split,
    BITS: tl.constexpr, GROUPED: tl.constexpr, SYMMETRIC: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, SCALE_W: tl.constexpr,
    BH: tl.constexpr, WM: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, KWIDTH4: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """y = x w^T, grid (tiles of BM rows of x, tiles of rows of w, split).

    Tiles of x come first so that a long x stays in the L2 and w is streamed once.
    """
    DT: tl.constexpr = X.dtype.element_ty
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    BN: tl.constexpr = BH * WM * 16
    m0 = tl.program_id(0) * BM
    tile, part = tl.program_id(1), tl.program_id(2)
    block = tile * (BN // 16)
    left = blocks - block
    S_GROUPS = groups if GROUPED else 1
    P0 += block.to(tl.int64) * groups * WORDS
    P1 += block.to(tl.int64) * groups * WORDS
    S += block * S_GROUPS * 8
    Z += block * S_GROUPS * 8
    steps = groups // D
    first, last = part * steps // split, (part + 1) * steps // split

    channel_zero = 0
    if not GROUPED:
        channel_scale = load_pairs(S, left, 1, 0, BH, WM, False)
        if not SYMMETRIC:
            channel_zero = load_pairs(Z, left, 1, 0, BH, WM, False)
    k = tl.arange(0, 128)
    if KWIDTH4:  # operand position 16 s + 4 c + 2 k3 + k0 holds k = 16 s + 8 k3 + 2 c + k0
        k = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    row_ok = (m0 + tl.arange(0, BM) < M)[None, :]
    at = X + (m0 + tl.arange(0, BM)).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)

    if STAGES > 1:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        for g in tl.range(first, last, num_stages=STAGES):
            now = _load_tile(P0, P1, S, Z, left, groups, g, BITS, GROUPED, SYMMETRIC, BH, WM, False)
            x = _load_x(at, g, row_ok, k[:, None], K, EVEN_K)
            acc = _accumulate(
                acc,
                now,
                x,
                channel_zero,
                BITS,
                DT,
                GROUPED,
                SYMMETRIC,
                SCALE_W,
                BH,
                WM,
                BM,
                KWIDTH4,
                INTERPRET,
            )
    else:
        ahead = ()
        for i in tl.static_range(D):
            ahead += (
                _load_tile(
                    P0,
                    P1,
                    S,
                    Z,
                    left,
                    groups,
                    first * D + i,
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                    BH,
                    WM,
                    False,
                ),
            )
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        for step in tl.range(first, last, num_stages=1):
            xs = ()
            for i in tl.static_range(D):
                xs += (_load_x(at, step * D + i, row_ok, k[:, None], K, EVEN_K),)
            now = ahead
            after = tl.minimum(step + 1, last - 1) * D
            ahead = ()
            for i in tl.static_range(D):
                ahead += (
                    _load_tile(
                        P0,
                        P1,
                        S,
                        Z,
                        left,
                        groups,
                        after + i,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        BH,
                        WM,
                        False,
                    ),
                )
            for i in tl.static_range(D):
                acc = _accumulate(
                    acc,
                    now[i],
                    xs[i],
                    channel_zero,
                    BITS,
                    DT,
                    GROUPED,
                    SYMMETRIC,
                    SCALE_W,
                    BH,
                    WM,
                    BM,
                    KWIDTH4,
                    INTERPRET,
                )

    if not GROUPED:
        s = accumulator_scale(channel_scale, DT, BH, WM, False)
        acc = tl.reshape(tl.reshape(acc, (BN, BM // 8, 4, 2)) * s, (BN, BM))
    if not SPLIT:
        _finish(
            acc,
            Y,
            BIAS,
            RESIDUAL,
            block * 16,
            m0,
            M,
            N,
            blocks * 16,
            BN,
            BM,
            HAS_BIAS,
            HAS_RESIDUAL,
        )
    else:
        slot = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        slab = PARTIAL + tile.to(tl.int64) * split * (BN * BM)
        tl.store(slab + part * (BN * BM) + slot, acc)
        tl.debug_barrier()  # every thread's sums are written before this program counts itself
        before = tl.atomic_add(ARRIVED + tile, 1, sem="acq_rel")
        if before == split - 1:
            total = tl.zeros([BN, BM], tl.float32)
            for share in range(0, split):
                total += tl.load(slab + share * (BN * BM) + slot, cache_modifier=".cg")
            _finish(
                total,
                Y,
                BIAS,
                RESIDUAL,
                block * 16,
                m0,
                M,
                N,
                blocks * 16,
                BN,
                BM,
                HAS_BIAS,
                HAS_RESIDUAL,
            )
            tl.store(ARRIVED + tile, 0)

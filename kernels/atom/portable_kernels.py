"""Triton bodies of Atom: round activations where they are made, multiply integers by groups.

A rounded input is one int8 matrix [M, Kp + Op]: normal channels padded to groups of 128, then the
outliers padded to 128; its scales are float32 [M, G + 1], the outliers' last. So the outliers are
one more group to the product:

    acc[n, m] = sum_g  (w_g a_g) * sw[n, g] * sa[m, g]  +  (w_o a_o) * so[n] * sa[m, G]

    w bytes of a k-group   [ k = j+64 | k = j ]        high | low nibble, two's complement
    byte & 0xF0            16 * w[k = j + 64]           as int8, no further instruction
    byte << 4              16 * w[k = j]                the factor 16 goes into the scale

w stands on the left of the tensor core (A operand, from registers), a on the right. Group size 64
is the same loop with one scale per nibble half. Bytes per output and k-group of 128: 64 / BM of w,
128 / BN of a. All products are exact in int32: |sum| <= 128 * 8 * 127 * 16.

Hopper runs W4A4 through fp8 (fp8_kernel.py); these run on every GPU with int8 tensor cores. W8A8
for many tokens has no groups: a plain product (`channel_gemm_kernel`), tokens on the left.

M tokens, N = out_features, K = in_features, G groups of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _nearest(x):
    """Round half to even: adding 1.5 * 2^23 leaves no bits below one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _codes(y, BITS: tl.constexpr, SIGNED: tl.constexpr, CLIP: tl.constexpr):
    """Atom's codes [R, G, 128 or 64] and scales [R, G] of y, whose last axis is a group.

    SIGNED: scales have the sign that gives the largest value the code -half, which symmetric
    grids leave unused. CLIP: the share of the largest value that the grid reaches.
    """
    half: tl.constexpr = 2 ** (BITS - 1)
    high = tl.max(y, axis=2)
    low = tl.min(y, axis=2)
    if SIGNED:
        scale = tl.where(high >= -low, high, low) * (CLIP / -half)
    else:
        scale = tl.maximum(high, -low) * (CLIP / (half - 1))
    tiny: tl.constexpr = 1.1754943508222875e-38
    scale = tl.where(tl.abs(scale) < tiny, tiny, scale)
    q = _nearest(tl.div_rn(y, tl.broadcast_to(scale[:, :, None], y.shape)))
    return tl.minimum(tl.maximum(q, -half), half - 1), scale


@triton.jit
def _compressed(y, DT: tl.constexpr):
    """int8 codes and scale of the rows y [R, G, K] as compressed-tensors defines them for DT."""
    scale = tl.maximum(tl.max(y, axis=2), -tl.min(y, axis=2))
    scale = tl.div_rn(scale, scale * 0.0 + 127.5).to(DT).to(tl.float32)
    eps: tl.constexpr = (
        0.0009765625 if tl.float16 == DT else 0.0078125 if tl.bfloat16 == DT else 2.0**-23
    )
    scale = tl.where(scale == 0.0, eps, scale)
    q = tl.div_rn(y, tl.broadcast_to(scale[:, :, None], y.shape)).to(DT).to(tl.float32)
    return tl.minimum(tl.maximum(_nearest(q), -128.0), 127.0), scale


@triton.jit
def round_input_kernel(
    X,
    INDEX,
    CODES,
    SCALES,
    normal,
    outliers,
    x_stride,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    COMPRESSED: tl.constexpr,
):
    """Round a token's channels in the order of INDEX: normal ones by groups, then the outliers."""
    row = tl.program_id(0).to(tl.int64)
    x_row = X + row * x_stride
    # normal channels, all groups of the row at once
    within = tl.arange(0, BLOCK_GROUP)[None, :]
    place = tl.arange(0, BLOCK_G)[:, None] * GROUP + within
    live = (place < normal) & (within < GROUP)
    y = _ordered(x_row, INDEX, place, live, HAS_INDEX)
    if COMPRESSED:
        DT: tl.constexpr = X.dtype.element_ty
        q, scale = _compressed(y.to(DT).to(tl.float32)[None], DT)
    else:
        q, scale = _codes(y[None], BITS, SIGNED, CLIP)
    width = GROUPS * GROUP
    code_row = CODES + row * (width + (outliers > 0) * 128)
    scale_row = SCALES + row * (GROUPS + 1)
    groups = tl.arange(0, BLOCK_G)
    inside = ((place < width) & (within < GROUP))[None]
    tl.store(code_row + place[None], q.to(tl.int8), mask=inside)
    tl.store(scale_row + groups[None], scale, mask=groups[None] < GROUPS)

    # outliers: 8 bits, one scale
    if outliers > 0:
        slot = tl.arange(0, 128)[None, :]
        kept = _ordered(x_row, INDEX, normal + slot, slot < outliers, HAS_INDEX)
        kept_q, kept_scale = _codes(kept[None], 8, False, 1.0)
        tl.store(code_row + width + slot[None], kept_q.to(tl.int8))
        tl.store(scale_row + GROUPS + tl.zeros((1, 1), tl.int32), kept_scale)


@triton.jit
def _ordered(x_row, INDEX, place, live, HAS_INDEX: tl.constexpr):
    """A token's channels at places of the order of INDEX in float32, zero where not live."""
    channel = place
    if HAS_INDEX:
        channel = tl.load(INDEX + place, mask=live, other=0)
    y = tl.load(x_row + channel, mask=live, other=0.0).to(tl.float32)
    return tl.where(live, y, 0.0)


@triton.jit
def _scales(sw_at, sa_at):
    """Scales of w times scales of the inputs, [N, M]: the factor of a tile's integer sums."""
    return tl.load(sw_at).to(tl.float32)[:, None] * tl.load(sa_at)[None, :]


@triton.jit(do_not_specialize=["M"])
def atom_gemm_kernel(
    A,
    SA,
    W,
    SW,
    WO,
    SO,
    BIAS,
    Y,
    M,
    N,
    outliers,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OUTLIERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Y [M, N] = A W^T with scales; BLOCKS k-groups of 128, PARTS scales in each (0: one a row)."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    # GROUP_N row blocks of w walk the tokens together, so that both operands are found in L2.
    width = GROUP_N * tiles_m
    first_n = pid // width * GROUP_N
    count_n = tl.minimum(tl.cdiv(N, BLOCK_N) - first_n, GROUP_N)
    n = (first_n + pid % width % count_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid % width // count_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n_row = tl.where(n < N, n, 0).to(tl.int64)
    m_row = tl.where(m < M, m, 0).to(tl.int64)
    j = tl.arange(0, 64)
    a_width = BLOCKS * 128 + HAS_OUTLIERS * 128
    a_at = A + m_row[None, :] * a_width + j[:, None]
    sa_row = SA + m_row * (GROUPS + 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    zero = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for block in range(BLOCKS):
        a_low = tl.load(a_at + block * 128)
        a_high = tl.load(a_at + block * 128 + 64)
        if BITS == 4:
            byte = tl.load(W + n_row[:, None] * (BLOCKS * 64) + block * 64 + j[None, :])
            w_low = (byte << 4).to(tl.int8, bitcast=True)
            w_high = (byte & 0xF0).to(tl.int8, bitcast=True)
        else:
            w_at = W + n_row[:, None] * (BLOCKS * 128) + block * 128 + j[None, :]
            w_low = tl.load(w_at)
            w_high = tl.load(w_at + 64)
        if PARTS == 0:
            total = tl.dot(w_low, a_low, total, out_dtype=tl.int32)
            total = tl.dot(w_high, a_high, total, out_dtype=tl.int32)
        elif PARTS == 1:
            part = tl.dot(w_low, a_low, zero, out_dtype=tl.int32)
            part = tl.dot(w_high, a_high, part, out_dtype=tl.int32)
            acc += part.to(tl.float32) * _scales(SW + n_row * GROUPS + block, sa_row + block)
        else:
            group = 2 * block
            part = tl.dot(w_low, a_low, zero, out_dtype=tl.int32)
            acc += part.to(tl.float32) * _scales(SW + n_row * GROUPS + group, sa_row + group)
            part = tl.dot(w_high, a_high, zero, out_dtype=tl.int32)
            acc += part.to(tl.float32) * _scales(
                SW + n_row * GROUPS + group + 1, sa_row + group + 1
            )
    if PARTS == 0:
        acc = total.to(tl.float32) * _scales(SW + n_row, sa_row)
    if BITS == 4:
        acc *= 0.0625
    if HAS_OUTLIERS:
        k = tl.arange(0, 128)
        a = tl.load(A + m_row[None, :] * a_width + BLOCKS * 128 + k[:, None])
        w = tl.load(
            WO + n_row[:, None] * outliers + k[None, :], mask=k[None, :] < outliers, other=0
        )
        part = tl.dot(w, a, out_dtype=tl.int32)
        acc += part.to(tl.float32) * _scales(SO + n_row, sa_row + GROUPS)
    if HAS_BIAS:
        acc += tl.load(BIAS + n_row).to(tl.float32)[:, None]
    y_at = Y + m_row[None, :] * N + n[:, None]
    tl.store(y_at, acc.to(Y.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def channel_gemm_kernel(
    A,
    SA,
    W,
    SW,
    BIAS,
    Y,
    M,
    N,
    a_width,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Y [M, N] = A W^T of int8 with one scale a token and a row; both operands in shared memory."""
    pid = tl.program_id(0)
    width = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = pid // width * GROUP_M
    count_m = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    m = (first_m + pid % width % count_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid % width // count_m * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row = tl.where(m < M, m, 0).to(tl.int64)
    n_row = tl.where(n < N, n, 0).to(tl.int64)
    k = tl.arange(0, 128)
    a_at = A + m_row[:, None] * a_width + k[None, :]
    w_at = W + n_row[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for _ in range(K // 128):
        acc = tl.dot(tl.load(a_at), tl.load(w_at), acc, out_dtype=tl.int32)
        a_at += 128
        w_at += 128
    # Two scales a token in SA: the second is that of outliers, of which there are none.
    sa = tl.load(SA + m_row * 2)
    sw = tl.load(SW + n_row).to(tl.float32)
    y = acc.to(tl.float32) * sa[:, None] * sw[None, :]
    if HAS_BIAS:
        y += tl.load(BIAS + n_row).to(tl.float32)[None, :]
    y_at = Y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_at, y.to(Y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])

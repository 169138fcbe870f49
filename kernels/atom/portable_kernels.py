"""Triton bodies of Atom: integer products by groups, of inputs that input_kernels.py rounds.

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

Hopper runs W4A4 through fp8 (wgmma_codes.cu); these run on every GPU with int8 tensor cores. W8A8
for many tokens has no groups: a plain product (`channel_gemm_kernel`), tokens on the left.

M tokens, N = out_features, K = in_features, G groups of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scales(sw_at, sa_at):
    """Scales of w times scales of the inputs, [N, M]: the factor of a tile's integer sums."""
    return tl.load(sw_at).to(tl.float32)[:, None] * tl.load(sa_at)[None, :]


@triton.jit
def _store_sum(y, Y, RESIDUAL, at, live, HAS_RESIDUAL: tl.constexpr):
    """Store y in Y's dtype, the residual added as by a pass of its own: it is rounded twice."""
    y = y.to(Y.dtype.element_ty)
    if HAS_RESIDUAL:
        more = tl.load(RESIDUAL + at, mask=live, other=0.0)
        y = (y.to(tl.float32) + more.to(tl.float32)).to(Y.dtype.element_ty)
    tl.store(Y + at, y, mask=live)


@triton.jit(do_not_specialize=["M"])
def atom_gemm_kernel(
    A,
    SA,
    W,
    SW,
    WO,
    SO,
    BIAS,
    RESIDUAL,
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
    HAS_RESIDUAL: tl.constexpr,
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
    at = m_row[None, :] * N + n[:, None]
    live = (n < N)[:, None] & (m < M)[None, :]
    _store_sum(acc, Y, RESIDUAL, at, live, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["M"])
def channel_gemm_kernel(
    A,
    SA,
    W,
    SW,
    BIAS,
    RESIDUAL,
    Y,
    M,
    N,
    a_width,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    live = (m < M)[:, None] & (n < N)[None, :]
    _store_sum(y, Y, RESIDUAL, at, live, HAS_RESIDUAL)

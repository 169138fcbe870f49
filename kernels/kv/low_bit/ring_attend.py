"""Low-bit attention's newest tokens, those of the 16-bit ring; caps and lines that all parts share.

Cost per output: 4 D bytes of keys and values a token and key-value head, of tokens that are there.

H: query heads.  G: key-value heads.  D: head_dim.  R: columns.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.float32_products import dot_float32
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
HOLDBACK = tl.constexpr(HOLDBACK_TOKENS)
RING = tl.constexpr(RING_TOKENS)
RING_STEP = tl.constexpr(32)
LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-3.0e30)
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def packed_line(position):
    """packed_end(position) of llmpq/sizes/kv_format.py."""
    return tl.maximum(position - HOLDBACK, 0) // BLOCK * BLOCK


@triton.jit
def capped(x, cap):
    """Scores x, exponents of 2, under a soft cap: cap tanh(score / cap), of e as before."""
    return cap * LOG2_E * (1.0 - 2.0 / (tl.exp2(x * (2.0 / cap)) + 1.0))


@triton.jit
def column_positions(col, start, end, GROUP_HEADS: tl.constexpr):
    """Position of each column's query; columns beyond the step take its last."""
    return tl.minimum(start + col // GROUP_HEADS, end - 1)


@triton.jit
def attend_ring(
    q_ptr, k_ring, v_ring, slopes, since, steps, start, end, ring_at, b, head, first_col,
    score_scale, cap, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """16-bit keys, 32 tokens a step, operands through Triton's own layouts: output [P, R], lse [R].

    bf16 goes through fp16, whose three more bits keep the probabilities' error below 2**-11;
    float32 is multiplied as such. P: D padded to a power of two.
    """
    C: tl.constexpr = H // G
    P: tl.constexpr = max(32, triton.next_power_of_2(D))
    FLOAT32: tl.constexpr = k_ring.dtype.element_ty == tl.float32
    cols = first_col + tl.arange(0, R)
    q_pos = column_positions(cols, start, end, C)
    q_line = packed_line(q_pos)
    d = tl.arange(0, P)
    q_at = (b * H + head * C + cols) * D
    asked = (cols < C)[None, :] if P == D else (cols < C)[None, :] & (d < D)[:, None]
    q = tl.load(q_ptr + q_at[None, :] + d[:, None], mask=asked, other=0.0)
    if not FLOAT32:
        q = q.to(tl.float16)
    if ALIBI:
        slope = tl.load(slopes + head * C + cols, mask=cols < C, other=0.0) * LOG2_E
    m_i = tl.full([R], LOWEST, tl.float32)
    l_i = tl.zeros([R], tl.float32)
    acc = tl.zeros([P, R], tl.float32)
    for step in tl.range(0, steps, num_stages=1):
        pos = since + step * RING_STEP + tl.arange(0, RING_STEP)
        live = (pos < end)[:, None]  # what is not there is not read: half a step, on average
        here = ring_at + (since + step * RING_STEP) % RING * D  # 32 tokens lie together
        at = tl.arange(0, RING_STEP)[:, None] * D + d[None, :]
        there = live if P == D else live & (d < D)[None, :]
        k = tl.load(k_ring + here + at, mask=there, other=0.0)
        v = tl.load(v_ring + here + at, mask=there, other=0.0)
        x = (dot_float32(k, q) if FLOAT32 else tl.dot(k.to(tl.float16), q)) * score_scale
        if CAPPED:
            x = capped(x, cap)
        if ALIBI:
            x += slope[None, :] * (pos[:, None] - q_pos[None, :]).to(tl.float32)
        seen = (pos[:, None] >= q_line[None, :]) & (pos[:, None] <= q_pos[None, :]) & live
        if WINDOWED:
            seen &= pos[:, None] > q_pos[None, :] - window
        x = tl.where(seen, x, MASKED)
        m_new = tl.maximum(m_i, tl.max(x, 0))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(x - m_new[None, :])
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 0)
        if FLOAT32:
            acc = acc * alpha[None, :] + dot_float32(tl.trans(v), p)
        else:
            acc = tl.dot(tl.trans(v.to(tl.float16)), p.to(tl.float16), acc * alpha[None, :])
    norm = 1.0 / tl.maximum(l_i, 1e-30)
    lse = tl.where(l_i > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), MASKED)
    return acc * norm[None, :], lse

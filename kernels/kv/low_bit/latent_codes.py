"""Attention over latents (MLA) of 8, 4 or 2 bits: codes go from words to tensor cores' registers.

    scores [R, 64 tokens] = sum of operands of 64 channels (q_c scale_c) [R, 64] K_c^T [64, 64]
    out_c [R, 64 channels] += (p scale) [R, 64 tokens] V_c^T [64, 64]

K_c^T and V_c^T are right operands, whose registers are those of kv_block.py's left ones: rows of a
drawing are columns here, in the order (r m g), so that each of four warps has the words of its own
(latent_operands.py). Codes are fp16 subnormals of one `and` a pair (unpack.py); scales fold into
the other operand, zeros are one sum a row each, as attend.py's. What attend.py does with one warp
for heads of up to 256 channels this does with four for one key/value head of any multiple of 64:
the sums of 576 channels need more registers than one has. Heads are the rows of products, 16 at a
time, so that Triton takes mma: it forgets to wait for wgmma with operands in registers (3.6).

Cost per output: C * bits / 4 bytes a token, 0.63 integer operations an element, once per R rows.

B requests, Q new tokens, H query heads of the one latent, D channels, C padded ones, R rows
(query heads x new tokens).  KW: see unpack.py.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.latent_operands import (
    by_token,
    in_columns,
    in_parts,
    key_channel,
    operand_at,
    right_operand_of,
    tokens_of_rows,
    value_channel,
)
from llmpq.kernels.kv.low_bit.ring_attend import LOWEST, RING

CHUNK = 64
"""Channels of an operand."""
ROWS = 16
"""Query heads and new tokens of a product."""
WARPS = 4
"""One for each 16 rows of a tile's 64."""
LOOK = 3
"""Operands that loads are ahead of products."""
P_SHIFT = tl.constexpr(4.0)
"""Probabilities are kept times 2**4: fp16 keeps its precision down to 2**-14."""


@triton.jit
def _queries(q_ptr, row, used, channel, D: tl.constexpr):
    """Some channels of the queries [R, 4, 16], fp16."""
    live = used[:, None, None] & (channel < D)[None, :, :]
    return tl.load(q_ptr + row[:, None, None] * D + channel[None, :, :], mask=live, other=0.0)


@triton.jit
def _again(q_ptr, EMULATE: tl.constexpr):
    """q_ptr, and no compiler keeps what it loaded from there for the next block."""
    if EMULATE:
        return q_ptr
    else:
        return q_ptr + 16 * tl.inline_asm_elementwise(
            "mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _scaled(q_ptr, row, used, kp, i: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
            WIDE: tl.constexpr):  # fmt: skip
    """Queries of an operand's channels, with their scales and zeros, as every thread needs them."""
    channel = key_channel(i, C, WIDE)
    q = _queries(q_ptr, row, used, channel, D)
    return q, tl.load(kp + channel)[None, :, :], tl.load(kp + C + channel)[None, :, :]


@triton.jit
def _times(q, scale, EMULATE: tl.constexpr):
    """q scale, where q lies: else both went to all four warps first, and were multiplied there."""
    if EMULATE:
        return q * scale
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;",
            "=r,r,r",
            [q, scale],
            dtype=tl.float16,
            is_pure=False,
            pack=2,
        )


@triton.jit
def _block(
    q_ptr, row, used, kw, kp, vw, vp, hidden, state, unit, score_unit,
    D: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    LOOK: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Both tiles of a packed block; state: maximum, sums of p and of p zero, sums of values.

    Loads go LOOK operands ahead of products, values' behind keys', so that nothing waits for them.
    """
    m_i, l_p, z_p, accs = state
    TILE_WORDS: tl.constexpr = 2 * C * BITS
    WIDE: tl.constexpr = 32 if BITS == 8 else 64
    KEYS: tl.constexpr = C // WIDE
    PARTS: tl.constexpr = 64 // WIDE
    NEAR: tl.constexpr = LOOK if LOOK < KEYS else KEYS
    SCALES: tl.constexpr = 2 if KEYS > 1 else 1
    ahead = ()
    for i in tl.static_range(NEAR):
        ahead += (operand_at(kw, vw, i, C, BITS),)
        ahead += (operand_at(kw + TILE_WORDS, vw + TILE_WORDS, i, C, BITS),)
    q_ptr = _again(q_ptr, EMULATE)
    given = ()
    for i in tl.static_range(SCALES):
        given += (_scaled(q_ptr, row, used, kp, i, D, C, WIDE),)
    token = tokens_of_rows()
    token = token % 16 // 2 * 8 + token // 16 * 2 + token % 2  # in thread order
    scale0, scale1 = tl.load(vp + token), tl.load(vp + 64 + token)
    zero0, zero1 = tl.load(vp + 128 + token), tl.load(vp + 192 + token)
    x0 = tl.zeros([R, 64], tl.float32)
    x1 = tl.zeros([R, 64], tl.float32)
    zero = tl.zeros([R, 4, WIDE // 4], tl.float32)
    for i in tl.static_range(KEYS):
        ahead += (operand_at(kw, vw, i + NEAR, C, BITS),)
        ahead += (operand_at(kw + TILE_WORDS, vw + TILE_WORDS, i + NEAR, C, BITS),)
        if i + 2 < KEYS:
            given += (_scaled(q_ptr, row, used, kp, i + 2, D, C, WIDE),)
        q = given[i][0]
        zero += q.to(tl.float32) * given[i][2].to(tl.float32)
        q = in_columns(_times(q, given[i][1], EMULATE), KW)
        x0 = tl.dot(q, right_operand_of(ahead[2 * i], BITS, KW, EMULATE), x0)
        x1 = tl.dot(q, right_operand_of(ahead[2 * i + 1], BITS, KW, EMULATE), x1)
    start = (tl.sum(tl.reshape(zero, (R, WIDE)), 1) * score_unit)[:, None]
    x0 = x0 * unit + start
    x1 = x1 * unit + start
    top = tl.max(tl.maximum(x0, x1), 1)
    if Q > 1:  # the last block may lie beyond the line of the first queries
        top = tl.where(hidden, LOWEST, top)
    m_new = tl.maximum(m_i, top)
    alpha = tl.exp2(m_i - m_new)
    p0 = tl.exp2(x0 - (m_new - P_SHIFT)[:, None])
    p1 = tl.exp2(x1 - (m_new - P_SHIFT)[:, None])
    if Q > 1:
        p0 = tl.where(hidden[:, None], 0.0, p0)
        p1 = tl.where(hidden[:, None], 0.0, p1)
    l_p = l_p * alpha[:, None] + (p0 + p1)
    z_p = z_p * alpha[:, None] + p0 * zero0.to(tl.float32)[None, :]
    z_p += p1 * zero1.to(tl.float32)[None, :]
    w0 = in_parts(by_token((p0 * scale0.to(tl.float32)[None, :]).to(tl.float16), KW), PARTS)
    w1 = in_parts(by_token((p1 * scale1.to(tl.float32)[None, :]).to(tl.float16), KW), PARTS)
    made = ()
    acc = accs[0]
    for i in tl.static_range(KEYS, 2 * KEYS):
        if i + NEAR < 2 * KEYS:
            ahead += (operand_at(kw, vw, i + NEAR, C, BITS),)
            ahead += (operand_at(kw + TILE_WORDS, vw + TILE_WORDS, i + NEAR, C, BITS),)
        if i % PARTS == 0:
            acc = accs[(i - KEYS) // PARTS] * alpha[:, None]
        acc = tl.dot(w0[i % PARTS], right_operand_of(ahead[2 * i], BITS, KW, EMULATE), acc)
        acc = tl.dot(w1[i % PARTS], right_operand_of(ahead[2 * i + 1], BITS, KW, EMULATE), acc)
        if i % PARTS == PARTS - 1:
            made += (acc,)
    return m_new, l_p, z_p, made


@triton.jit
def _take_newest(
    q_ptr, row, used, k_ring, v_ring, new, t, start, end, stride, position, line, state,
    score_unit, D: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """64 tokens in 16 bits, of the ring and from `start` on of a step's own."""
    m_i, l_p, z_p, accs = state
    x = tl.zeros([R, 64], tl.float32)
    live = (t < end)[:, None, None]
    for c in tl.static_range(C // 64):
        channel = key_channel(c, C, 64)
        k = _recent(k_ring, new, t[:, None, None], start, stride, channel[None, :, :], live, D)
        q = tl.reshape(_queries(q_ptr, row, used, channel, D), (R, 64))
        x = tl.dot(q, tl.trans(tl.reshape(k.to(tl.float16), (64, 64))), x)
    seen = (t < end)[None, :] & (t[None, :] <= position[:, None]) & (t[None, :] >= line[:, None])
    x = tl.where(seen, x * score_unit, LOWEST)
    m_new = tl.maximum(m_i, tl.max(x, 1))
    alpha = tl.exp2(m_i - m_new)
    p = tl.where(seen, tl.exp2(x - (m_new - P_SHIFT)[:, None]), 0.0)
    made = ()
    for c in tl.static_range(C // 64):
        channel = value_channel(c, C)
        v = _recent(v_ring, new, t[:, None, None], start, stride, channel[None, :, :], live, D)
        v = tl.permute(tl.reshape(v.to(tl.float16), (64, 8, 4, 2)), (0, 3, 2, 1))  # g m r -> r m g
        v = tl.reshape(v, (64, 64))
        made += (tl.dot(p.to(tl.float16), v, accs[c] * alpha[:, None]),)
    return m_new, l_p * alpha[:, None] + p, z_p * alpha[:, None], made


@triton.jit
def _recent(ring, new, pos, start, stride, channel, live, D: tl.constexpr):
    """Channels of tokens of the ring, and from `start` on of the step's own."""
    inside = live & (channel < D)
    at = ring + pos % RING * D + channel
    old = tl.load(at, mask=inside & (pos < start), other=0.0)
    late = inside & (pos >= start)
    late = tl.load(new + (pos - start) * stride + channel, mask=late, other=0.0)
    return tl.where(pos < start, old, late)


@triton.jit
def _by_channel(acc, z_i, norm, R: tl.constexpr):
    """A chunk's sums [R, 64] as [R, 8 g, 8 (m r)], values' zeros taken in."""
    out = (acc + z_i[:, None]) * norm[:, None]
    out = tl.permute(tl.reshape(out, (R, 2, 4, 8)), (0, 3, 2, 1))  # r m g -> g m r
    return tl.reshape(out, (R, 8, 8))

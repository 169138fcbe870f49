"""Attention over packed tiles of keys and values: what a program does with those it takes.

    scores^T [64 tokens, R] = K [64, D] q^T [D, R]        K, V^T: packed words, unpacked in
    out^T    [D, R]        += V^T [D, 64] p [64, R]       registers (formats/kv_block.py draws them)

Keys and values are the left operand (16 rows a tile, always full); the R = 8 or 16 columns are the
query heads of one key-value head, so GQA reads each byte once. Scales never touch the unpacked
elements: a channel's key scale folds into q, a token's into p; zeros are one extra row of products
(keys) and one sum (values). One warp a program: words arrive in shared memory by asynchronous
copies, STAGES deep, and go to the operand's registers in 16-byte loads (straight loads were latency
bound: ncu, H200, 20 % of issue slots used). GAIN: stored scales make up for a plane's power of two
(kv_block.py), sums are GAIN times too large. Keys and values may have different bits; keys of 16
stand as they are, are loaded in the order of rows and multiplied by queries in fp16.

Cost per output: D * (KEY_BITS + VALUE_BITS) / 8 + (scales) bytes of keys and values per token and
key-value head, 0.63 integer instructions per 4-bit element, 1 mma.m16n8k16 per 256 elements.

G: key-value heads.  D: head_dim, C channels of it stored.  R: columns, query heads of one of G.
KW, KW0: consecutive columns of the left operand in a thread (register_operands.py), those of codes
and of the row of zeros.  EMULATE: without inline assembly, for Triton's interpreter.
g, t, h, r, m, s: see formats/kv_block.py; thread 4g + t of the warp.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.float32_products import LOW_GAIN, dot_float32, high_and_low
from llmpq.kernels.kv.low_bit.register_operands import (
    by_thread,
    fold_keys,
    from_zero,
    over_scores,
    probability_operand,
    times_codes,
    token_vector,
    words,
    zero_by_thread,
)
from llmpq.kernels.kv.low_bit.ring_attend import (
    BLOCK,
    MASKED,
    capped,
)
from llmpq.kernels.kv.low_bit.unpack import unpack

TILE = tl.constexpr(64)
P_SHIFT = tl.constexpr(4.0)
"""Probabilities are kept times 2**4: fp16 keeps its precision down to 2**-14."""


@triton.jit
def score_unit(unit, CAPPED: tl.constexpr):
    """The factor that makes a score of `_tiles` an exponent of 2: one under a cap is so already."""
    return 1.0 if CAPPED else unit


@triton.jit
def first_step(position, window, STEP: tl.constexpr, WINDOWED: tl.constexpr):
    """The first step of STEP tokens with a key that the query at a position sees."""
    return tl.maximum(position - window + 1, 0) // STEP if WINDOWED else 0


@triton.jit
def _weighed(
    v, p, acc, R: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr, FLOAT32: tl.constexpr
):
    """acc [D, R] plus values' codes [D, 64] times p [64, R], probabilities times values' scales."""
    if FLOAT32:
        high, low = high_and_low(p)
        acc += tl.dot(v, probability_operand(low, R, KW, EMULATE)) * (1.0 / LOW_GAIN)
    else:
        high = p.to(tl.float16)
    return tl.dot(v, probability_operand(high, R, KW, EMULATE), acc)


@triton.jit
def _tiles(
    step0, step1, m_i, l_g, z_g, acc, k_words, k_params, v_words, v_params, table, slot,
    table_width, head, q_plain, q_thread, q_pos, slope, unit, cap, window,
    G: tl.constexpr, D: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    R: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, KW: tl.constexpr, KW0: tl.constexpr,
    EMULATE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Steps step0..step1-1 of TILES packed tiles; returns the softmax so far with these.

    m_i: the largest score.  l_g: sums of probabilities.  z_g: sums of them times values' zeros.
    acc: the output, not divided yet.

    `unit` makes scores exponents of 2; those under a cap are so already (`score_unit`). C channels
    are stored, their keys by octet where D is more. Queries of float32 are multiplied as such.
    Beside plain keys (KEY_BITS of 16) `q_plain` is [D, R], channel by channel.
    """
    PLAIN: tl.constexpr = KEY_BITS == 16  # keys as they are, one tile a step
    APART: tl.constexpr = not (CAPPED or PLAIN)  # a channel's zero joins the exponents
    score = unit
    unit = score_unit(unit, CAPPED)
    FLOAT32: tl.constexpr = q_thread.dtype == tl.float32
    K_VECS: tl.constexpr = D * KEY_BITS // 64  # 16-byte loads a thread needs for a tile
    K_STORED: tl.constexpr = C * KEY_BITS // 64
    V_VECS: tl.constexpr = D * VALUE_BITS // 64
    V_STORED: tl.constexpr = C * VALUE_BITS // 64
    BY_OCTET: tl.constexpr = C < D
    GAIN: tl.constexpr = 1 if PLAIN else 2 ** (8 - KEY_BITS)
    row = tl.arange(0, 64)
    row_token = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    for step in tl.range(step0, step1, num_stages=STAGES):
        tile = step * TILES
        block = tile // 2
        half = tile % 2
        page = tl.load(table + slot * table_width + block).to(tl.int64)
        at = page * G + head
        vw_at = v_words + at * (2 * V_STORED * 128) + half * (V_STORED * 128)
        vp_at = v_params + at * (2 * BLOCK) + half * TILE
        # ---- scores of one or two tiles
        if PLAIN:
            d = tl.arange(0, D)[None, :]
            key_at = k_words + (at * (2 * TILE) + half * TILE + row_token[:, None]) * C + d
            k0 = tl.load(key_at) if C == D else tl.load(key_at, mask=d < C, other=0.0)
            x0 = dot_float32(k0, q_plain) if FLOAT32 else tl.dot(k0.to(tl.float16), q_plain)
        else:
            kw_at = k_words + at * (2 * K_STORED * 128) + half * (K_STORED * 128)
            k0 = words(kw_at, K_VECS, K_STORED)
            k0 = unpack(k0, 4, D // 16, KEY_BITS, KW, EMULATE, BY_OCTET)
            if TILES == 2:
                kw1 = words(kw_at + K_STORED * 128, K_VECS, K_STORED)
                k1 = unpack(kw1, 4, D // 16, KEY_BITS, KW, EMULATE, BY_OCTET)
            q_mat, init = fold_keys(
                k_params + at * (2 * C), q_plain, q_thread, GAIN, D, R, KW, KW0, C
            )  # fmt: skip
            x0 = times_codes(k0, q_mat, FLOAT32)
            if TILES == 2:
                x1 = times_codes(k1, q_mat, FLOAT32)
        if ALIBI:
            pos = tile * TILE + row_token
            x0 += slope[None, :] * (pos[:, None] - q_pos[None, :]).to(tl.float32)
            if TILES == 2:
                x1 += slope[None, :] * (pos[:, None] + TILE - q_pos[None, :]).to(tl.float32)
        if CAPPED:
            if not PLAIN:
                x0 += from_zero(init, R)
            x0 = capped(x0 * score, cap)
            if TILES == 2:
                x1 += from_zero(init, R)
                x1 = capped(x1 * score, cap)
        if WINDOWED:
            hidden = q_pos[None, :] - window - tile * TILE
            x0 = tl.where(row_token[:, None] > hidden, x0, MASKED)
            if TILES == 2:
                x1 = tl.where(row_token[:, None] + TILE > hidden, x1, MASKED)
        # ---- softmax
        # the channels' zeros have one score a column: it joins the largest and the shift
        if APART:
            top_g = by_thread(x0, R) + zero_by_thread(init, R)
            if TILES == 2:
                top_g = tl.maximum(top_g, by_thread(x1, R) + zero_by_thread(init, R))
        else:
            top_g = by_thread(tl.maximum(x0, x1) if TILES == 2 else x0, R)
        top = tl.max(top_g, 0)
        m_new = tl.maximum(m_i, top)
        alpha = tl.exp2((m_i - m_new) * unit)
        shift = m_new * unit - P_SHIFT
        m_i = m_new
        if APART:
            p0 = tl.exp2(x0 * unit + from_zero(init * unit - shift[None, :], R))
        else:
            p0 = tl.exp2(x0 * unit - shift[None, :])
        pz = p0 * over_scores(token_vector(vp_at + BLOCK).to(tl.float32), R)
        p_all = p0
        if TILES == 2:
            if APART:
                p1 = tl.exp2(x1 * unit + from_zero(init * unit - shift[None, :], R))
            else:
                p1 = tl.exp2(x1 * unit - shift[None, :])
            pz += p1 * over_scores(token_vector(vp_at + BLOCK + TILE).to(tl.float32), R)
            p_all += p1
        l_g = l_g * alpha[None, :] + tl.sum(tl.reshape(p_all, (8, 8, R)), 0)
        z_g = z_g * alpha[None, :] + tl.sum(tl.reshape(pz, (8, 8, R)), 0)
        # ---- output
        p0 = p0 * over_scores(token_vector(vp_at).to(tl.float32), R)
        v0 = unpack(words(vw_at, V_VECS, V_STORED), D // 16, 4, VALUE_BITS, KW, EMULATE)
        acc = _weighed(v0, p0, acc * alpha[None, :], R, KW, EMULATE, FLOAT32)
        if TILES == 2:
            p1 = p1 * over_scores(token_vector(vp_at + TILE).to(tl.float32), R)
            vw1 = words(vw_at + V_STORED * 128, V_VECS, V_STORED)
            v1 = unpack(vw1, D // 16, 4, VALUE_BITS, KW, EMULATE)
            acc = _weighed(v1, p1, acc, R, KW, EMULATE, FLOAT32)
    return m_i, l_g, z_g, acc

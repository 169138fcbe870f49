"""Attention of rows of several tokens over a pool of packed blocks, causal inside.

    scores [M, 64] = (q scale) [M, D] K^T [D, 64] + q zero         M = 64: TILE new tokens of a row
    out    [M, D] += (p scale) [M, 64] V [64, D] + p zero          times a group's query heads

A query sees the keys below its own line packed and the others in 16 bits: old ones in the ring,
which is unchanged since, new ones where the step has left them. Key scales are folded into
queries once a block, value scales into probabilities, so that unpacked codes (subnormals, see
unpack.py) go to the tensor cores as they are, by way of shared memory. Columns of keys and rows of
values come out of a word in an order of their own (kv_block.py): queries are loaded in it, and the
output is put in order once, between the packed and the 16-bit keys. Queries of float32, and keys
and values that are kept in it, are multiplied as such (float32_products.py).

Cost: D * (KEY_BITS + VALUE_BITS) / 8 bytes of packed keys and values per token and tile, 4 D
operations per query head, new token and key, 1.3 integer instructions per 4-bit element and tile.

Channels: D of a head, C stored (padded to 32s), P in registers (to a power of two).
R rows.  H query heads.  G key/value heads.  m r g t o h: see kv_block.py.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.kv.low_bit.attend import P_SHIFT, TILE
from llmpq.kernels.kv.low_bit.float32_products import LOW_GAIN, dot_float32, high_and_low
from llmpq.kernels.kv.low_bit.register_operands import words
from llmpq.kernels.kv.low_bit.ring_attend import BLOCK, LOG2_E, RING, capped, packed_line
from llmpq.kernels.kv.low_bit.unpack import TWO_24, unpack
from llmpq.kernels.kv.paged.packed_pages_decode import value_channels
from llmpq.kernels.kv.paged.paged_attend import reach_of


@triton.jit
def _softmax_step(x, seen, m_i, l_i):
    """Take scores into a running softmax: probabilities times 2**P_SHIFT, the old ones' factor."""
    x = tl.where(seen, x, -1.0e30)
    m_new = tl.maximum(m_i, tl.max(x, 1))
    alpha = tl.exp2(m_i - m_new)
    p = tl.where(seen, tl.exp2(x - m_new[:, None] + P_SHIFT), 0.0)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def _packed_keys(
    q, k_words, k_params, v_words, v_params, own_table, head, first, blocks, line, position, slope,
    score_scale, cap, reach, m_i, l_i, acc,
    G: tl.constexpr, D: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    """Take packed blocks into the softmax of M queries, which have the keys' order of channels."""
    C: tl.constexpr = (D + 31) // 32 * 32
    P: tl.constexpr = triton.next_power_of_2(C)
    K_VECS: tl.constexpr = P * KEY_BITS // 64
    K_STORED: tl.constexpr = C * KEY_BITS // 64
    V_VECS: tl.constexpr = P * VALUE_BITS // 64
    V_STORED: tl.constexpr = C * VALUE_BITS // 64
    PLAIN: tl.constexpr = KEY_BITS == 16
    K_UNIT: tl.constexpr = 1.0 if PLAIN else TWO_24 / 2 ** (8 - KEY_BITS)
    V_UNIT: tl.constexpr = TWO_24 / 2 ** (8 - VALUE_BITS)
    FLOAT32: tl.constexpr = q.dtype == tl.float32
    channel = key_channels(D, KEY_BITS)
    row = tl.arange(0, 64)
    m, r, g = row // 16, row // 8 % 2, row % 8
    token = 16 * m + 2 * g + r
    in_memory = 8 * g + 2 * m + r
    q = q.to(tl.float32)
    z_i = tl.zeros_like(m_i)
    for block in tl.range(first, blocks, num_stages=STAGES):
        at = tl.load(own_table + block).to(tl.int64) * G + head
        if not PLAIN:
            kp_at = k_params + at * (2 * C)
            if D == P:
                scale = tl.load(kp_at + channel).to(tl.float32)
                zero = tl.load(kp_at + C + channel).to(tl.float32)
            else:
                scale = tl.load(kp_at + channel, mask=channel < D, other=0.0).to(tl.float32)
                zero = tl.load(kp_at + C + channel, mask=channel < D, other=0.0).to(tl.float32)
            q_scaled = q * scale[None, :]
            q_zero = tl.sum(q * zero[None, :], 1)[:, None]
        seen = (line > block * BLOCK)[:, None] & (row >= 0)[None, :]
        for half in tl.static_range(2):
            tile_at = 2 * at + half
            vp_at = v_params + at * (2 * BLOCK) + half * TILE + in_memory
            if PLAIN:
                key_at = k_words + (tile_at * TILE + token[:, None]) * C + channel[None, :]
                k = tl.load(key_at, mask=channel[None, :] < D, other=0.0)
                x = _product(q, tl.trans(k), FLOAT32) * score_scale
            else:
                k = words(k_words + tile_at * (K_STORED * 128), K_VECS, K_STORED)
                k = tl.trans(unpack(k, 4, P // 16, KEY_BITS, 2, EMULATE, C < P))
                x = (_by_codes(q_scaled, k, FLOAT32) * K_UNIT + q_zero) * score_scale
            if CAPPED:
                x = capped(x, cap)
            behind = position[:, None] - (token + half * TILE + block * BLOCK)[None, :]
            if ALIBI:
                x -= slope[:, None] * behind.to(tl.float32)
            within = seen & (behind < reach) if WINDOWED else seen
            p, alpha, m_i, l_i = _softmax_step(x, within, m_i, l_i)
            z_i = z_i * alpha + tl.sum(p * tl.load(vp_at + BLOCK).to(tl.float32)[None, :], 1)
            p *= tl.load(vp_at).to(tl.float32)[None, :]
            v = words(v_words + tile_at * (V_STORED * 128), V_VECS, V_STORED)
            v = unpack(v, P // 16, 4, VALUE_BITS, 2, EMULATE)
            if FLOAT32:
                acc = acc * alpha[:, None] + _by_codes(p, tl.trans(v), True)
            else:
                acc = tl.dot(p.to(tl.float16), tl.trans(v), acc * alpha[:, None])
    acc = acc * V_UNIT + z_i[:, None]
    acc = tl.permute(tl.reshape(acc, (acc.shape[0], P // 16, 2, 8)), (0, 3, 1, 2))
    return m_i, l_i, tl.reshape(acc, (acc.shape[0], P))


@triton.jit
def key_channels(D: tl.constexpr, BITS: tl.constexpr):
    """The channels of keys in the order of registers [P], those without one from D on.

    Keys that stand as they are come channel by channel.
    """
    C: tl.constexpr = (D + 31) // 32 * 32
    P: tl.constexpr = triton.next_power_of_2(C)
    c = tl.arange(0, P)
    if BITS == 16:
        return c
    own = (c // 16 * 2 + c // 8 % 2) * 2 + c % 2
    channel = c // 2 % 4 * (C // 4) + own
    return channel if C == P else tl.where(own < C // 4, channel, P)


@triton.jit
def _by_codes(x, codes, FLOAT32: tl.constexpr):
    """Float32 numbers times codes of fp16; rounded to fp16 before, unless FLOAT32."""
    if FLOAT32:
        high, low = high_and_low(x)
        product = tl.dot(high, codes, tl.dot(low, codes) * (1.0 / LOW_GAIN))
    else:
        product = tl.dot(x.to(tl.float16), codes)
    return product


@triton.jit
def _newest_keys(
    q, k_new, v_new, k_ring, v_ring, since, start, end, new_at, ring_at, kv_stride, line, position,
    slope, score_scale, cap, reach, m_i, l_i, acc,
    D: tl.constexpr, N: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Take 16-bit tokens since..end-1 into the softmax: below `start` the ring's, then new ones."""
    FLOAT32: tl.constexpr = q.dtype == tl.float32
    d = value_channels(D)[None, :]
    for t0 in tl.range(since, end, N, num_stages=2):
        t = t0 + tl.arange(0, N)
        old = (t < start)[:, None] & (d < D)
        new = ((t >= start) & (t < end))[:, None] & (d < D)
        old_at = ring_at + (t % RING)[:, None] * D + d
        at = new_at + (t - start)[:, None] * kv_stride + d
        k = tl.load(k_ring + old_at, mask=old, other=0.0)
        k = tl.where(old, k, tl.load(k_new + at, mask=new, other=0.0))
        v = tl.load(v_ring + old_at, mask=old, other=0.0)
        v = tl.where(old, v, tl.load(v_new + at, mask=new, other=0.0))
        x = _product(q, tl.trans(k), FLOAT32) * score_scale
        if CAPPED:
            x = capped(x, cap)
        behind = position[:, None] - t[None, :]
        if ALIBI:
            x -= slope[:, None] * behind.to(tl.float32)
        seen = (behind >= 0) & (t[None, :] >= line[:, None])
        if WINDOWED:
            seen &= behind < reach
        p, alpha, m_i, l_i = _softmax_step(x, seen, m_i, l_i)
        if FLOAT32:
            acc = acc * alpha[:, None] + dot_float32(p, v)
        else:
            acc = tl.dot(p.to(tl.float16), v.to(tl.float16), acc * alpha[:, None])
    return l_i, acc


@triton.jit
def _product(a, b, FLOAT32: tl.constexpr):
    """A product of 16-bit numbers, by way of fp16, or of float32."""
    return dot_float32(a, b) if FLOAT32 else tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit(do_not_specialize=["num_rows", "columns", "cap", "window"])
def chunk_packed(
    q_ptr, k_new, v_new, k_words, k_params, v_words, v_params, k_ring, v_ring, rows, table, slopes,
    sinks, out_ptr, score_scale, num_rows, columns, cap, window, kv_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    """TILE new tokens of a row of several, times the query heads of one key/value head."""
    C: tl.constexpr = H // G
    P: tl.constexpr = triton.next_power_of_2((D + 31) // 32 * 32)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = rows + 4 * num_rows
    if tile < tl.load(sums + num_rows - 1):
        r = tl.arange(0, ROWS)
        ends = tl.load(sums + r, mask=r < num_rows, other=2147483647)
        row = tl.sum((ends <= tile).to(tl.int32), 0)
        slot = tl.load(rows + row).to(tl.int64)
        start = tl.load(rows + num_rows + row)
        count = tl.load(rows + 2 * num_rows + row)
        place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
        begin = (tile - tl.load(sums + row - 1, mask=row > 0, other=0)) * TILE
        end = start + tl.minimum(count, begin + TILE)

        # ---- queries: row m is head m % C of the group, new token begin + m // C
        m = tl.arange(0, M)
        new = begin + m // C
        used = (m < TILE * C) & (new < count)
        position = start + tl.minimum(new, count - 1)
        reach = reach_of(position[:, None], window, CHUNKED)
        line = packed_line(position)
        at = ((place + new) * H + head * C + m % C)[:, None] * D
        d = value_channels(D)[None, :]
        kept = used[:, None] & (d < D)
        slope = tl.zeros([M], tl.float32)
        if ALIBI:
            slope = tl.load(slopes + head * C + m % C, mask=used, other=0.0) * LOG2_E
        m_i = tl.full([M], -1.0e30, tl.float32)
        l_i = tl.zeros([M], tl.float32)
        if SINKS:  # one more score, of a key without a value
            m_i = tl.load(sinks + head * C + m % C).to(tl.float32) * LOG2_E
            l_i += tl.exp2(P_SHIFT)
        acc = tl.zeros([M, P], tl.float32)
        channel = key_channels(D, KEY_BITS)[None, :]
        q = tl.load(q_ptr + at + channel, mask=used[:, None] & (channel < D), other=0.0)
        since = tl.maximum(start + begin - window + 1, 0) if WINDOWED else 0
        m_i, l_i, acc = _packed_keys(
            q, k_words, k_params, v_words, v_params, table + slot * columns, head, since // BLOCK,
            packed_line(end - 1) // BLOCK, line, position, slope, score_scale, cap, reach, m_i,
            l_i, acc, G, D, KEY_BITS, VALUE_BITS, ALIBI, CAPPED, WINDOWED, STAGES, EMULATE,
        )  # fmt: skip
        q = tl.load(q_ptr + at + d, mask=kept, other=0.0)
        l_i, acc = _newest_keys(
            q, k_new, v_new, k_ring, v_ring, tl.maximum(packed_line(start + begin), since // N * N),
            start, end, place * kv_stride + head * D, (slot * G + head) * (RING * D), kv_stride,
            line, position, slope, score_scale, cap, reach, m_i, l_i, acc,
            D, N, ALIBI, CAPPED, WINDOWED,
        )  # fmt: skip
        out = acc / tl.maximum(l_i, 1e-30)[:, None]
        tl.store(out_ptr + at + d, out.to(out_ptr.dtype.element_ty), mask=kept)

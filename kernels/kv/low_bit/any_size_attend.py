"""Attention over the low-bit KV cache, heads of any number of channels: latents, 80, 96, 192.

    what a step sees   |0 ......... packed ......... line|line .. ring, 16 bits .. end - 1|
    tiles of N keys    |0|1|2|3|4|5|6|7|8|9|10|11|12|13|14|0|1|2|3|4|
    programs           |   split 0   |   split 1   |    split 2     |    equal shares of both lines

A program takes some query heads and new tokens (rows) of one request's key/value head. Every
element of a tile is gathered from its word (formats/kv_block.py), made a number of the queries'
type and multiplied there; attend.py, for heads of 32, 64, 128 and 256 channels, multiplies codes.
What a query sees packed depends on its position alone, rules on scores are ruled_attend.py's.

Cost per output: D * bits / 4 bytes a key and 2 * 12 integer operations an element, once per R rows.

B requests, Q new tokens, H query heads, G key/value heads, D head_dim, C its padded channels.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.launch_plan import MAX_Q_LEN, shared_memory
from llmpq.kernels.kv.low_bit.ring_attend import BLOCK, RING, packed_line
from llmpq.kernels.kv.plain_attend import choose_splits, merge_splits
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.kernels.kv.ruled_attend import halves
from llmpq.kernels.kv.storage import DeviceRows, KVLayer
from llmpq.kernels.multiprocessors import multiprocessors


@triton.jit
def _codes_at(words, at, shift, inside, BITS: tl.constexpr):
    word = tl.load(words + at, mask=inside, other=0)
    return ((word >> shift) & (2**BITS - 1)).to(tl.float32)


@triton.jit
def _packed_keys(
    words, params, token, c, C: tl.constexpr, BITS: tl.constexpr, KEY_GROUP: tl.constexpr
):
    """Keys [N, len(c)] of some tokens of a block, N of them in one group of scales; float32."""
    I: tl.constexpr = 8 // BITS  # noqa: E741
    n = token // 64
    m = token % 64 // 16
    g = token % 16 // 2
    r = token % 2
    t = c // (C // 4)
    pair = c % (C // 4) // 2
    number = m[:, None] * (C * BITS // 64) + (pair // I)[None, :]
    at = n[:, None] * (2 * C * BITS) + number // 4 * 128 + number % 4
    at += (4 * g[:, None] + t[None, :]) * 4
    shift = 8 * (2 * (c % 2)[None, :] + r[:, None]) + (pair % I * BITS)[None, :]
    inside = (c < C)[None, :] & (token >= 0)[:, None]
    x = _codes_at(words, at, shift, inside, BITS)
    if KEY_GROUP == 0:
        order = 64 * n + 8 * g + 2 * m + r
        scale = tl.load(params + order).to(tl.float32)[:, None]
        return x * scale + tl.load(params + BLOCK + order).to(tl.float32)[:, None]
    group = params + tl.min(token, 0) // KEY_GROUP * (2 * C) + c
    gain = tl.exp2((BITS - 8 + pair % I * BITS).to(tl.float32))
    scale = tl.load(group, mask=c < C, other=0.0).to(tl.float32) * gain
    return x * scale[None, :] + tl.load(group + C, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _packed_values(words, params, token, c, C: tl.constexpr, BITS: tl.constexpr):
    """Values [N, len(c)] of some tokens of a block; float32."""
    I: tl.constexpr = 8 // BITS  # noqa: E741
    n = token // 64
    octet = token % 64 // 16 * 2 + token % 2
    t = token % 16 // 4
    h = token % 4 // 2
    g = c // (C // 8)
    m = c % (C // 8) // 2
    r = c % 2
    number = m[None, :] * BITS + (octet // I)[:, None]
    at = n[:, None] * (2 * C * BITS) + number // 4 * 128 + number % 4
    at += (4 * g[None, :] + t[:, None]) * 4
    shift = 8 * (2 * h[:, None] + r[None, :]) + (octet % I * BITS)[:, None]
    x = _codes_at(words, at, shift, (c < C)[None, :] & (token >= 0)[:, None], BITS)
    order = n * 64 + token % 16 // 2 * 8 + token % 64 // 16 * 2 + token % 2
    gain = tl.exp2((BITS - 8 + octet % I * BITS).to(tl.float32))
    scale = tl.load(params + order).to(tl.float32) * gain
    return x * scale[:, None] + tl.load(params + BLOCK + order).to(tl.float32)[:, None]


@triton.jit
def _newest(ring, t, live, c, D: tl.constexpr):
    """Keys or values [N, len(c)] of the ring."""
    at = (t % RING)[:, None] * D + c[None, :]
    return tl.load(ring + at, mask=live[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def _under_rule(x, behind, seen, slope, cap, window, ALIBI: tl.constexpr, CAPPED: tl.constexpr):
    """Scores as exponents of 2, what is not seen far below all others."""
    if CAPPED:  # tanh(y) = 1 - 2 / (e^2y + 1)
        x = cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))
    if ALIBI:
        x -= slope[:, None] * behind.to(tl.float32)
    seen = seen & (behind >= 0) & (behind < window)
    return tl.where(seen, x * 1.4426950408889634, -1.0e30), seen


@triton.jit
def _taken(x, seen, m_i, l_i):
    """Take scores into a running softmax: probabilities, the old ones' factor."""
    m_new = tl.maximum(m_i, tl.max(x, 1))
    alpha = tl.exp2(m_i - m_new)
    p = tl.where(seen, tl.exp2(x - m_new[:, None]), 0.0)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=["table_width", "cap", "window", "splits"])
def attend_rows(
    q_ptr, k_words, k_params, v_words, v_params, k_ring, v_ring, table, slots, starts, counts,
    slopes, sinks, out_ptr, part_ptr, lse_ptr, scale, cap, window, table_width, splits,
    Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BITS: tl.constexpr, KEY_GROUP: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    PADDED: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One part of some rows of one request's one key/value head."""
    HEADS: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (HEADS * Q + R - 1) // R
    split = tl.program_id(0)
    group = tl.program_id(1) // CHUNKS
    b = tl.program_id(2)
    start = tl.load(starts + b).to(tl.int32)
    count = tl.load(counts + b).to(tl.int32)
    slot = tl.load(slots + b).to(tl.int64)

    # ---- queries: row c is head c % HEADS of the group, new token c // HEADS
    c = tl.program_id(1) % CHUNKS * R + tl.arange(0, R)
    used = c < HEADS * Q
    position = start + tl.minimum(c // HEADS, count - 1)
    line = packed_line(position)
    head = group * HEADS + c % HEADS
    d = tl.arange(0, MAIN)
    e = MAIN + tl.arange(0, REST if REST > 0 else 16)
    row = (b * Q + c // HEADS).to(tl.int64) * H + head
    q = tl.load(
        q_ptr + row[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0
    )
    if REST > 0:
        q_rest = tl.load(
            q_ptr + row[:, None] * D + e[None, :], mask=used[:, None] & (e < D)[None, :], other=0.0
        )
    slope = tl.zeros([R], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=used, other=0.0).to(tl.float32)

    # ---- this part's share of the tiles: packed ones within reach, then the ring's
    reach = tl.where(window > 0, window, 2147483647)
    hidden = tl.where(window > 0, tl.maximum(start - window + 1, 0), 0) // N
    end = start + count
    packed = tl.maximum(packed_line(end - 1) // N - hidden, 0)
    since = packed_line(start)
    tiles = packed + (end - since + N - 1) // N
    share = (tiles + splits - 1) // splits
    first = split * share
    last = tl.minimum(tiles, first + share)

    m_i = tl.full([R], -1.0e30, tl.float32)
    l_i = tl.zeros([R], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        m_i = tl.where(split == 0, sink, m_i)
        l_i = tl.where(split == 0, 1.0, l_i)
    acc = tl.zeros([R, MAIN], tl.float32)
    if REST > 0:
        acc_rest = tl.zeros([R, REST], tl.float32)
    kind = q.dtype
    for tile in tl.range(first, tl.minimum(last, packed), num_stages=1):
        t = (hidden + tile) * N + tl.arange(0, N)
        block = (hidden + tile) * N // BLOCK
        at = tl.load(table + slot * table_width + block).to(tl.int64) * G + group
        token = t - block * BLOCK
        words = k_words + at * (4 * C * BITS)
        params = k_params + at * (2 * BLOCK if KEY_GROUP == 0 else BLOCK // KEY_GROUP * 2 * C)
        k = _packed_keys(words, params, token, d, C, BITS, KEY_GROUP).to(kind)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _packed_keys(words, params, token, e, C, BITS, KEY_GROUP).to(kind)
            x = tl.dot(q_rest, tl.trans(k_rest), x, input_precision="ieee")
        behind = position[:, None] - t[None, :]
        below = t[None, :] < line[:, None]
        x, seen = _under_rule(x * scale, behind, below, slope, cap, reach, ALIBI, CAPPED)
        p, alpha, m_i, l_i = _taken(x, seen, m_i, l_i)
        words = v_words + at * (4 * C * BITS)
        params = v_params + at * (2 * BLOCK)
        v = _packed_values(words, params, token, d, C, BITS).to(kind)
        acc = tl.dot(p.to(kind), v, acc * alpha[:, None], input_precision="ieee")
        if REST > 0:
            v_rest = _packed_values(words, params, token, e, C, BITS).to(kind)
            acc_rest = tl.dot(p.to(kind), v_rest, acc_rest * alpha[:, None], input_precision="ieee")
    ring = (slot * G + group) * (RING * D)
    for tile in tl.range(tl.maximum(first, packed), last, num_stages=1):
        t = since + (tile - packed) * N + tl.arange(0, N)
        live = t < end
        k = _newest(k_ring + ring, t, live, d, D)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _newest(k_ring + ring, t, live, e, D)
            x = tl.dot(q_rest, tl.trans(k_rest), x, input_precision="ieee")
        behind = position[:, None] - t[None, :]
        above = (t[None, :] >= line[:, None]) & live[None, :]
        x, seen = _under_rule(x * scale, behind, above, slope, cap, reach, ALIBI, CAPPED)
        p, alpha, m_i, l_i = _taken(x, seen, m_i, l_i)
        v = _newest(v_ring + ring, t, live, d, D)
        acc = tl.dot(p.to(kind), v, acc * alpha[:, None], input_precision="ieee")
        if REST > 0:
            v_rest = _newest(v_ring + ring, t, live, e, D)
            acc_rest = tl.dot(p.to(kind), v_rest, acc_rest * alpha[:, None], input_precision="ieee")

    # ---- results
    whole = tl.maximum(l_i, 1e-30)[:, None]
    if SPLIT:
        r = (b * G * CHUNKS + tl.program_id(1)) * splits + split
        r = r.to(tl.int64) * R + tl.arange(0, R)
        lse = tl.where(l_i > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), -1.0e30)
        tl.store(lse_ptr + r, lse)
        out_at, out = part_ptr + r[:, None] * PADDED, part_ptr
    else:
        out_at, out = out_ptr + row[:, None] * D, out_ptr
    made = out.dtype.element_ty
    tl.store(out_at + d[None, :], (acc / whole).to(made), mask=used[:, None] & (d < D)[None, :])
    if REST > 0:
        tl.store(
            out_at + e[None, :], (acc_rest / whole).to(made), mask=used[:, None] & (e < D)[None, :]
        )


def tile_of(fmt: KVFormat, item: int, rows: int, block: int) -> tuple[int, int, int]:
    """Return the rows, keys and warps of a program, within `block` bytes of shared memory."""
    main, rest = halves(fmt.head_dim)
    width = (main + rest) * item
    most = 16 if rows <= 16 or main * item > 512 else 32
    for r, n in ((most, 32), (16, 32), (16, 16)):
        # queries and both tiles wait there for the tensor cores, and probabilities
        if width * (r + 2 * n) + 4 * r * n + 4096 <= block:
            return r, n, 8 if main > 128 else 4
    raise ValueError(
        f"heads of {fmt.head_dim} channels of {item} bytes exceed {block} bytes shared"
    )


def attend_any_size(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    q_BQHD: Tensor,
    rows: DeviceRows,
    *,
    max_end: int,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    rule: ScoreRule = EVERYTHING,
    splits: int | None = None,
) -> Tensor:
    """Return o [B, Q, H, D]; the step's own keys and values are in the cache already.

    `max_end` bounds every request's length and only decides the number of programs.
    """
    batch, q_len, heads, dim = q_BQHD.shape
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(f"this kernel takes 1..{MAX_Q_LEN} new tokens a request, got {q_len}")
    groups, q_BQHD = layer.k_ring_SGRD.shape[1], q_BQHD.contiguous()
    device = q_BQHD.device
    wanted = heads // groups * q_len
    r, n, warps = tile_of(fmt, q_BQHD.element_size(), wanted, shared_memory(device)[0])
    chunks = -(-wanted // r)
    if splits is None:
        seen = min(max_end, rule.window + n) if rule.window else max_end
        sms = multiprocessors(device)
        splits = choose_splits(batch * groups * chunks, seen, n, sms)
    out = torch.empty_like(q_BQHD)
    padded = max(16, triton.next_power_of_2(dim))
    parts = batch * groups * chunks * splits * r if splits > 1 else 1
    part = q_BQHD.new_empty(parts * padded, dtype=torch.float32)
    lse = part.new_empty(parts)
    main, rest = halves(dim)
    same = {"H": heads, "G": groups, "PADDED": padded, "R": r}
    packed = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
    attend_rows[(splits, groups * chunks, batch)](
        *(q_BQHD, *packed, layer.k_ring_SGRD, layer.v_ring_SGRD, table_SN),
        *(rows.slots, rows.starts, rows.counts),
        *(lse if alibi_slopes_H is None else alibi_slopes_H,),
        *(lse if rule.sinks_H is None else rule.sinks_H, out, part, lse),
        *(float(scale), float(rule.cap or 1.0), rule.window, table_SN.shape[1], splits),
        **same | {"Q": q_len, "D": dim, "C": fmt.channels, "MAIN": main},
        REST=rest,
        N=n,
        BITS=fmt.bits,
        KEY_GROUP=fmt.key_group or 0,
        SPLIT=splits > 1,
        ALIBI=alibi_slopes_H is not None,
        CAPPED=rule.cap > 0,
        SINKS=rule.sinks_H is not None,
        num_warps=warps,
    )
    if splits > 1:
        merge_splits(part, lse, out, splits, same | {"PDL": False})
    return out

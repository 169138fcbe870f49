"""A pool of blocks of packed latents (MLA) on a GPU: a step's rows brought in and attended.

    append_ring     rows of one token: the ring
    make_scales     of every block that the rows complete; what is behind it, for who finds it
    make_words      ... and its words, one program for WORDS of keys' or of values'
    attend          rows of one token: program = HEADS query heads, one of SPLITS shares of the
                    tokens, merged by paged_latents.combine_latents; rows of several: program = TILE
                    new tokens times HEADS query heads over all they see
    keep_rings      rows of several tokens, behind their attention: their newest

What a query sees packed depends on its position alone, as packed_pages.py, whose twin is this one's
too. Codes meet tensor cores as latent_codes.py's do. A latent is key and value at once, but each is
rounded on a grid of its own (kv_block.py), and both rings are kept.

H query heads, D channels, V of them values, C padded ones, T places, R rows or columns.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.any_size_append import CHANNELS, WORDS, _rounded, _ungained
from llmpq.kernels.kv.latent_codes import (
    P_SHIFT,
    _block,
    _key_channels,
    _queries,
    _value_channels,
    order_of,
)
from llmpq.kernels.kv.pack import _gained, _grid
from llmpq.kernels.kv.packed_pages import PackedPages, PackedRows
from llmpq.kernels.kv.paged_latents import LatentPlan, combine_latents
from llmpq.kernels.kv.ring_attend import BLOCK, HOLDBACK, LOG2_E, LOWEST, RING, packed_line
from llmpq.kernels.kv.unpack import TWO_24
from llmpq.kv_format import BLOCK_TOKENS, RING_TOKENS, TAIL_TOKENS


@triton.jit
def _recent(ring, new, pos, start, stride, channel, live, D: tl.constexpr):
    """Channels of tokens, those from `start` on among the step's new ones."""
    inside = live & (channel < D)
    old = tl.load(ring + pos % RING * D + channel, mask=inside & (pos < start), other=0.0)
    late = tl.load(new + (pos - start) * stride + channel, mask=inside & (pos >= start), other=0.0)
    return tl.where(pos < start, old, late)


@triton.jit(do_not_specialize=["num_rows"])
def append_ring(
    new, k_ring, v_ring, rows, num_rows, stride, D: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """The new token of a row of one."""
    row = tl.program_id(0)
    slot = tl.load(rows + row).to(tl.int64)
    count = tl.load(rows + 2 * num_rows + row)
    if (slot >= 0) & (count == 1):
        start = tl.load(rows + num_rows + row)
        place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
        d = tl.arange(0, PADDED)
        x = tl.load(new + place * stride + d, mask=d < D, other=0.0)
        to = slot * (RING * D) + start % RING * D + d
        tl.store(k_ring + to, x, mask=d < D)
        tl.store(v_ring + to, x, mask=d < D)


@triton.jit
def _completed(rows, table, index, num_rows, columns, ROWS: tl.constexpr):
    """Row, page, number and start of the index-th block that the rows complete; a live one or not."""
    r = tl.arange(0, ROWS)
    used = r < num_rows
    owner = tl.load(rows + r, mask=used, other=-1)
    starts = tl.load(rows + num_rows + r, mask=used, other=0)
    counts = tl.load(rows + 2 * num_rows + r, mask=used, other=0)
    firsts = tl.maximum((starts - HOLDBACK + BLOCK - 1) // BLOCK, 1) - 1
    lines = tl.maximum(starts + counts - 1 - HOLDBACK, 0) // BLOCK
    done = tl.where((owner >= 0) & (counts > 0), tl.maximum(lines - firsts, 0), 0)
    ends = tl.cumsum(done, 0)
    live = index < tl.sum(done, 0)
    own = tl.minimum(tl.sum((ends <= index).to(tl.int32), 0), num_rows - 1)
    before = tl.max(tl.where(r < own, ends, 0), 0)
    block = tl.where(live, tl.sum(tl.where(r == own, firsts, 0), 0) + index - before, 0)
    slot = tl.maximum(tl.load(rows + own), 0).to(tl.int64)
    page = tl.load(table + slot * columns + block).to(tl.int64)
    start = tl.load(rows + num_rows + own)
    place = tl.load(rows + 3 * num_rows + own).to(tl.int64)
    return live, slot, page, block, start, place


@triton.jit(do_not_specialize=["num_rows", "columns"])
def make_scales(
    new, k_ring, v_ring, k_params, v_params, k_behind, v_behind, rows, table, num_rows, columns,
    stride, D: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of a completed block, and the tokens behind it."""
    live, slot, page, block, start, place = _completed(
        rows, table, tl.program_id(0), num_rows, columns, ROWS
    )
    if live:
        new += place * stride
        k_ring += slot * (RING * D)
        v_ring += slot * (RING * D)
        d = tl.arange(0, PADDED)[None, :]
        for first in range(0, BLOCK, 16):
            token = first + tl.arange(0, 16)
            pos = (block * BLOCK + token)[:, None]
            x = _recent(v_ring, new, pos, start, stride, d, True, D).to(tl.float32)
            low = tl.min(tl.where(d < D, x, float("inf")), 1)
            high = tl.max(tl.where(d < D, x, float("-inf")), 1)
            scale, zero, _ = _grid(low, high, BITS)
            scale = _gained(scale, token % 64 // 16 * 2 + token % 2, BITS)
            to = token // 64 * 64 + token % 16 // 2 * 8 + token % 64 // 16 * 2 + token % 2
            tl.store(v_params + page * (2 * BLOCK) + to, scale)
            tl.store(v_params + page * (2 * BLOCK) + BLOCK + to, zero)
        pos = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
        for first in range(0, C, CHANNELS):
            c = first + tl.arange(0, CHANNELS)
            x = _recent(k_ring, new, pos, start, stride, c[None, :], True, D).to(tl.float32)
            scale, zero, _ = _grid(tl.min(x, 0), tl.max(x, 0), BITS)
            to = k_params + page * (2 * C) + c
            tl.store(to, _gained(scale, c % (C // 4) // 2, BITS), mask=c < C)
            tl.store(to + C, zero, mask=c < C)
        if TAIL > 0:
            i = tl.arange(0, 32)[:, None]
            x = _recent(k_ring, new, (block + 1) * BLOCK + i, start, stride, d, i < TAIL, D)
            to = (page * TAIL + i) * D + d
            tl.store(k_behind + to, x, mask=(i < TAIL) & (d < D))
            tl.store(v_behind + to, x, mask=(i < TAIL) & (d < D))


@triton.jit(do_not_specialize=["num_rows", "columns"])
def make_words(
    new, k_ring, v_ring, k_words, v_words, k_params, v_params, rows, table, num_rows, columns,
    stride, D: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """WORDS words of the keys (or, from program PIECES on, the values) of a completed block."""
    I: tl.constexpr = 8 // BITS  # noqa: E741
    live_block, slot, page, block, start, place = _completed(
        rows, table, tl.program_id(0), num_rows, columns, ROWS
    )
    piece = tl.program_id(1)
    if live_block:
        new += place * stride
        word = piece % PIECES * WORDS + tl.arange(0, WORDS)
        live = word < 4 * C * BITS
        n = word // (2 * C * BITS)
        inner = word % (2 * C * BITS)
        lane = inner % 128 // 4
        number = inner // 128 * 4 + inner % 4
        g = lane // 4
        t = lane % 4
        made = tl.zeros([WORDS], tl.int32)
        if piece < PIECES:
            m = number // (C * BITS // 64)
            o = number % (C * BITS // 64)
            for j in tl.static_range(4 * I):  # h r i
                h, r, i = j // (2 * I), j // I % 2, j % I
                pos = block * BLOCK + 64 * n + 16 * m + 2 * g + r
                c = t * (C // 4) + 2 * (o * I + i) + h
                x = _recent(k_ring + slot * (RING * D), new, pos, start, stride, c, live, D)
                params = k_params + page * (2 * C) + c
                zero = tl.load(params + C, mask=live, other=0.0)
                scale = _ungained(tl.load(params, mask=live, other=0.0), o * I + i, BITS)
                code = _rounded(x.to(tl.float32), scale, zero, live & (c < D), BITS)
                made |= code << (8 * (2 * h + r) + i * BITS)
            tl.store(k_words + page * (4 * C * BITS) + word, made, mask=live)
        else:
            m = number // BITS
            o = number % BITS
            for j in tl.static_range(4 * I):
                h, r, i = j // (2 * I), j // I % 2, j % I
                octet = o * I + i
                token = 64 * n + 16 * (octet // 2) + 4 * t + 2 * h + octet % 2
                c = g * (C // 8) + 2 * m + r
                pos = block * BLOCK + token
                x = _recent(v_ring + slot * (RING * D), new, pos, start, stride, c, live, D)
                order = token // 64 * 64 + token % 16 // 2 * 8 + token % 64 // 16 * 2 + token % 2
                params = v_params + page * (2 * BLOCK) + order
                zero = tl.load(params + BLOCK, mask=live, other=0.0)
                scale = _ungained(tl.load(params, mask=live, other=0.0), octet, BITS)
                code = _rounded(x.to(tl.float32), scale, zero, live & (c < D), BITS)
                made |= code << (8 * (2 * h + r) + i * BITS)
            tl.store(v_words + page * (4 * C * BITS) + word, made, mask=live)


@triton.jit
def _newest(
    q_ptr, row, used, k_ring, v_ring, new, t, start, end, stride, position, line, state, score_unit,
    D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """64 tokens in 16 bits, of the ring or new ones."""
    m_i, l_p, z_p, accs = state
    live = t < end
    none = tl.zeros([64, R], tl.float32)
    x = tl.zeros([64, R], tl.float32)
    for c in tl.static_range(C // 64):
        channel = _key_channels(c, C, KW)
        k = _recent(
            k_ring, new, t[:, None], start, stride, channel[None, :], live[:, None], D
        ).to(tl.float16)  # fmt: skip
        x += tl.dot(k, _queries(q_ptr, row, used, channel, D), none)
    seen = live[:, None] & (t[:, None] <= position[None, :]) & (t[:, None] >= line[None, :])
    x = tl.where(seen, x * score_unit, LOWEST)
    m_new = tl.maximum(m_i, tl.max(x, 0))
    alpha = tl.exp2(m_i - m_new)
    p = tl.where(seen, tl.exp2(x - (m_new - P_SHIFT)[None, :]), 0.0)
    made = ()
    for c in tl.static_range(C // 64):
        channel = _value_channels(c, C)
        v = _recent(
            v_ring, new, t[None, :], start, stride, channel[:, None], live[None, :], D
        ).to(tl.float16)  # fmt: skip
        made += (accs[c] * alpha[None, :] + tl.dot(v, p.to(tl.float16), none),)
    return m_new, l_p * alpha[None, :] + p, z_p * alpha[None, :], made


@triton.jit(do_not_specialize=["num_rows", "columns"])
def attend(
    q_ptr, new, k_words, k_params, v_words, v_params, k_ring, v_ring, rows, table, to_ptr, lse_ptr,
    scale, num_rows, columns, stride,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr,
    R: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """CHUNKS: grid (tiles, head groups), sums leave; else (splits, head groups, rows), parts do."""
    TILE: tl.constexpr = R // HEADS
    m = tl.arange(0, R)
    split, begin = 0, 0
    if CHUNKS:
        tile = tl.program_id(0)
        r = tl.arange(0, ROWS)
        ends = tl.load(rows + 4 * num_rows + r, mask=r < num_rows, other=2147483647)
        row = tl.minimum(tl.sum((ends <= tile).to(tl.int32), 0), num_rows - 1)
        last_tile = tl.load(rows + 4 * num_rows + row - 1, mask=row > 0, other=0)
        begin = (tile - last_tile) * TILE
        go = tile < tl.load(rows + 5 * num_rows - 1)
    else:
        split, row = tl.program_id(0), tl.program_id(2)
        go = True
    slot = tl.load(rows + row).to(tl.int64)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    if go & (slot >= 0) & ((count > 1) if CHUNKS else (count == 1)):
        late = begin + m // HEADS
        head = tl.program_id(1) * HEADS + m % HEADS
        used = (m < TILE * HEADS) & (late < count) & (head < H)
        at = (place + tl.minimum(late, count - 1)) * H + tl.minimum(head, H - 1)
        position = start + tl.minimum(late, count - 1)
        end = start + tl.minimum(count, begin + TILE)
        line = packed_line(position)
        GAIN: tl.constexpr = 2 ** (8 - BITS)
        score_unit = scale * LOG2_E
        blocks = packed_line(end - 1) // BLOCK
        since = packed_line(start + begin)
        share = (blocks + (end - since + BLOCK - 1) // BLOCK + SPLITS - 1) // SPLITS
        first, last = split * share, split * share + share
        accs = ()
        for c in tl.static_range(C // 64):
            accs += (tl.zeros([64, R], tl.float32),)
        m_i = tl.full([R], LOWEST, tl.float32)
        l_p = tl.zeros([64, R], tl.float32)
        z_p = tl.zeros([64, R], tl.float32)
        for block in tl.range(first, tl.minimum(last, blocks), num_stages=STAGES):
            page = tl.load(table + slot * columns + block).to(tl.int64)
            m_i, l_p, z_p, accs = _block(
                q_ptr, at, used, k_words + page * (4 * C * BITS), k_params + page * (2 * C),
                v_words + page * (4 * C * BITS), v_params + page * (2 * BLOCK),
                line <= block * BLOCK, (m_i, l_p, z_p, accs), score_unit * (TWO_24 / GAIN),
                score_unit, D, C, BITS, R, TILE if CHUNKS else 1, KW, EMULATE,
            )  # fmt: skip
        made = ()
        for c in tl.static_range(C // 64):
            made += (accs[c] * (TWO_24 / GAIN),)
        accs = made
        ring = slot * (RING * D)
        t_first = since + (tl.maximum(first, blocks) - blocks) * BLOCK
        t_last = tl.minimum(end, since + (last - blocks) * BLOCK)
        for t0 in tl.range(t_first, t_last, 64, num_stages=1):
            m_i, l_p, z_p, accs = _newest(
                q_ptr, at, used, k_ring + ring, v_ring + ring, new + place * stride,
                t0 + tl.arange(0, 64), start, end, stride, position, line,
                (m_i, l_p, z_p, accs), score_unit, D, C, R, KW,
            )  # fmt: skip
        l_i, z_i = tl.sum(l_p, 0), tl.sum(z_p, 0)
        norm = 1.0 / tl.maximum(l_i, 1e-30)
        lse = tl.where(l_i > 0, m_i - P_SHIFT + tl.log2(tl.maximum(l_i, 1e-30)), -1.0e30)
        if CHUNKS:
            out_at = at
        else:
            out_at = (row.to(tl.int64) * H + head) * SPLITS + split
            tl.store(lse_ptr + out_at, lse, mask=used)
        for c in tl.static_range(C // 64):
            out = ((accs[c] + z_i[None, :]) * norm[None, :]).to(to_ptr.dtype.element_ty)
            channel = _value_channels(c, C)
            live = used[None, :] & (channel < V)[:, None]
            tl.store(to_ptr + out_at[None, :] * V + channel[:, None], out, mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def keep_rings(
    new, k_ring, v_ring, rows, num_rows, stride, D: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """16 of the newest RING tokens of a row of several."""
    row = tl.program_id(1)
    slot = tl.load(rows + row).to(tl.int64)
    start = tl.load(rows + num_rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    count = tl.where((slot >= 0) & (count > 1), count, 0)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    i = tl.maximum(count - RING, 0) + tl.program_id(0) * 16 + tl.arange(0, 16)
    d = tl.arange(0, PADDED)[None, :]
    live = (i < count)[:, None] & (d < D)
    x = tl.load(new + (place + i)[:, None] * stride + d, mask=live, other=0.0)
    to = tl.maximum(slot, 0) * (RING * D) + ((start + i) % RING)[:, None] * D + d
    tl.store(k_ring + to, x, mask=live)
    tl.store(v_ring + to, x, mask=live)


def attend_packed_latents(
    q_THD: Tensor,
    new_TD: Tensor,
    pages: PackedPages,
    step: PackedRows,
    plan: LatentPlan,
    fmt: KVFormat,
    *,
    scale: float,
) -> Tensor:
    """Append a step's latents, then return its causal sums [T, H, V]; padding gets zeros."""
    layer, (places, num_rows) = pages.layer, (len(q_THD), step.rows_FR.shape[1])
    new_TD, columns = new_TD.contiguous(), step.table_SM.shape[1]
    rings = (layer.k_ring_SGRD, layer.v_ring_SGRD)
    params = (layer.k_params_PG, layer.v_params_PG)
    words = (layer.k_words_PGW, layer.v_words_PGW)
    told = (step.rows_FR, num_rows, new_TD.stride(0))
    asked = (step.rows_FR, step.table_SM, num_rows, columns, new_TD.stride(0))
    padded, rows = triton.next_power_of_2(plan.dim), triton.next_power_of_2(num_rows)
    own = {"D": plan.dim, "C": fmt.channels, "BITS": fmt.bits}
    append_ring[(num_rows,)](new_TD, *rings, *told, D=plan.dim, PADDED=padded)
    most = num_rows + (places // BLOCK_TOKENS if step.chunks else 0)
    behind = (pages.k_behind_PGTD, pages.v_behind_PGTD) if pages.keeps_behind else rings
    tail = TAIL_TOKENS if pages.keeps_behind else 0
    make_scales[(most,)](
        *(new_TD, *rings, *params, *behind, *asked),
        **own | {"PADDED": padded, "ROWS": rows, "TAIL": tail},
        num_warps=8,
    )
    pieces = triton.cdiv(fmt.block_words, int(WORDS))
    make_words[(most, 2 * pieces)](
        *(new_TD, *rings, *words, *params, *asked), **own | {"PIECES": pieces, "ROWS": rows}
    )
    q = q_THD.contiguous().to(torch.float16)
    out = q_THD.new_empty(places, plan.heads, plan.value_dim)
    splits = plan.splits(num_rows, columns * BLOCK_TOKENS)
    parts = num_rows * plan.heads * splits
    part = q_THD.new_empty(parts * plan.value_dim, dtype=torch.float32)
    lse = part.new_empty(parts)
    groups = triton.cdiv(plan.heads, plan.program_heads)
    given = (q, new_TD, words[0], params[0], words[1], params[1], *rings, step.rows_FR)
    last = (float(scale), num_rows, columns, new_TD.stride(0))
    same = own | {"H": plan.heads, "V": plan.value_dim, "R": plan.rows, "HEADS": plan.program_heads}
    same |= {"ROWS": rows, "STAGES": 1, "KW": order_of(q.device)}
    same |= {"EMULATE": bool(triton.knobs.runtime.interpret), "num_warps": 4}
    attend[(splits, groups, num_rows)](
        *(*given, step.table_SM, part, lse, *last), **same, SPLITS=splits, CHUNKS=False
    )
    combine_latents[(num_rows, plan.heads)](
        *(part, lse, step.rows_FR, out, num_rows),
        H=plan.heads,
        V=plan.value_dim,
        PADDED=triton.next_power_of_2(plan.value_dim),
        SPLITS=splits,
        X=triton.next_power_of_2(splits),
        num_warps=4,
    )
    if step.chunks:
        attend[(places // plan.tile_queries + num_rows, groups)](
            *(*given, step.table_SM, out, lse, *last), **same, SPLITS=1, CHUNKS=True
        )
        keep_rings[(RING_TOKENS // 16, num_rows)](new_TD, *rings, *told, D=plan.dim, PADDED=padded)
    return out

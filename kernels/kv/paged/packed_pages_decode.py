"""Attention of rows of one token over a pool of packed blocks.

A row reads two kinds of tile: those of its packed blocks, and 32 tokens each of its 16-bit ring.
packed_pages_deal.py cuts either into parts and deals the parts to the programs of a key/value head;
a program's entry says what it takes, so that it can ask for its first tiles at once. A part is
normalised, with its log2-sum-exp; `combine_packed` merges a row's. The loops are attend.py's, one
warp a program; their cost is drawn there.

Channels: D of a head, C stored (padded to 32s), P in registers (to a power of two; kv_block.py).
R rows.  H query heads.  G key/value heads.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.kv.low_bit.attend import P_SHIFT, TILE, _tiles, first_step, score_unit
from llmpq.kernels.kv.low_bit.register_operands import (
    plain_queries,
    prefetch_ring,
    prefetch_tiles,
)
from llmpq.kernels.kv.low_bit.ring_attend import (
    LOG2_E,
    LOWEST,
    MASKED,
    RING,
    RING_STEP,
    attend_ring,
    packed_line,
)
from llmpq.kernels.kv.low_bit.unpack import TWO_24
from llmpq.kernels.kv.paged.paged_attend import reach_of


@triton.jit
def _packed_part(
    q_ptr, k_words, k_params, v_words, v_params, table, slopes, begin, stop, slot, position, place,
    columns, head, first_col, score_scale, cap, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, KW: tl.constexpr,
    KW0: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Steps begin..stop-1 of a row's packed tiles: output [R, P], log2-sum-exp [R].

    Element e of an output is channel `value_channels`.
    """
    GROUP: tl.constexpr = H // G
    C: tl.constexpr = (D + 31) // 32 * 32
    P: tl.constexpr = triton.next_power_of_2(C)
    NC: tl.constexpr = P // 32
    K_UNIT: tl.constexpr = 1.0 if KEY_BITS == 16 else TWO_24 / 2 ** (8 - KEY_BITS)
    V_UNIT: tl.constexpr = TWO_24 / 2 ** (8 - VALUE_BITS)
    # ---- queries by thread: column 8n + g, channels t*C/4 + 8c + j
    row = tl.arange(0, R * NC * 4)[:, None]
    own = row // 32 % NC * 8 + tl.arange(0, 8)[None, :]
    channel = row % 4 * (C // 4) + own
    q_col = first_col + row // (32 * NC) * 8 + row // 4 % 8
    q_at = (place * H + head * GROUP + q_col) * D
    asked = q_col < GROUP if D == P else (q_col < GROUP) & (own < C // 4) & (channel < D)
    q_raw = tl.load(q_ptr + q_at + channel, mask=asked, other=0.0)
    q_thread = tl.reshape(q_raw, (R // 8, NC, 32, 8))
    if q_thread.dtype != tl.float32:
        q_thread = q_thread.to(tl.float16)
    cols = first_col + tl.arange(0, R)
    if KEY_BITS == 16:
        d = tl.arange(0, P)[:, None]
        q_plain_at = q_ptr + ((place * H + head * GROUP + cols) * D)[None, :] + d
        q_plain = tl.load(q_plain_at, mask=(cols < GROUP)[None, :] & (d < D), other=0.0)
        q_plain = q_plain.to(q_thread.dtype)
    else:
        q_plain = plain_queries(q_thread, P, R, KW0)
    q_pos = position + cols * 0
    unit = score_scale * K_UNIT
    slope = 0
    if ALIBI:
        slope = tl.load(slopes + head * GROUP + cols, mask=cols < GROUP, other=0.0)
        slope *= LOG2_E / unit
    m_i, l_g, z_g, acc = _tiles(
        begin, stop, tl.full([R], LOWEST, tl.float32), tl.zeros([8, R], tl.float32),
        tl.zeros([8, R], tl.float32), tl.zeros([P, R], tl.float32), k_words, k_params, v_words,
        v_params, table, slot, columns, head, q_plain, q_thread, q_pos, slope, unit, cap, window,
        G, P, KEY_BITS, VALUE_BITS, R, ALIBI, CAPPED, WINDOWED, TILES, STAGES, KW, KW0, EMULATE, C,
    )  # fmt: skip
    l_i = tl.sum(l_g, 0)
    norm = 1.0 / tl.maximum(l_i, 1e-30)
    out = (acc * V_UNIT + tl.sum(z_g, 0)[None, :]) * norm[None, :]
    top = m_i * score_unit(unit, CAPPED) - P_SHIFT
    lse = tl.where(l_i > 0, top + tl.log2(tl.maximum(l_i, 1e-30)), MASKED)
    return tl.permute(tl.reshape(out, (P // 16, 2, 8, R)), (3, 2, 0, 1)).reshape(R, P), lse


@triton.jit
def value_channels(D: tl.constexpr):
    """The channels of values in the order of registers [P], those without one from D on."""
    C: tl.constexpr = (D + 31) // 32 * 32
    P: tl.constexpr = triton.next_power_of_2(C)
    e = tl.arange(0, P)
    own = e % (P // 8)
    return e if C == P else tl.where(own < C // 8, e // (P // 8) * (C // 8) + own, P)


@triton.jit(do_not_specialize=["num_rows", "columns", "cap", "window"])
def decode_packed(
    q_ptr, k_words, k_params, v_words, v_params, k_ring, v_ring, rows, work_split, table, slopes,
    part_ptr, lse_ptr, score_scale, num_rows, columns, cap, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, R: tl.constexpr, PROGRAMS: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, KW: tl.constexpr, KW0: tl.constexpr,
    PDL: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """What a program's entries say of the rows' packed tiles and rings, of one key/value head."""
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C + R - 1) // R
    head_part = tl.program_id(0)
    program = tl.program_id(1)
    head = head_part // CHUNKS
    first_col = head_part % CHUNKS * R
    P: tl.constexpr = triton.next_power_of_2((D + 31) // 32 * 32)
    c = tl.arange(0, R)
    d = tl.arange(0, P)
    packed_d = value_channels(D)
    used = first_col + c < C
    row, row_last, begin, last_stop, part, slot, position, place = _entry(work_split + program * 8)
    stop = tl.where(row == row_last, last_stop, packed_line(position) // (TILES * TILE))
    ring_row, ring_last, ring_begin, ring_stop, ring_part, ring_slot, ring_position, ring_place = (
        _entry(work_split + (PROGRAMS + program) * 8)
    )
    ring_part += tl.load(rows + 6 * num_rows - 1)
    # Programs without work leave at once; one waits in any case, so that this kernel's end is also
    # the end of the one in front.
    if (program == 0) | (row <= row_last) | (ring_row <= ring_last):
        if PDL:
            # Rows and tables are older than the kernel in front; what it may write is asked for
            # only.
            if (AHEAD > 0) & (not WINDOWED) & (row <= row_last):
                prefetch_tiles(
                    k_words, k_params, v_words, v_params, table, slot, columns, head,
                    begin * TILES, tl.minimum(begin * TILES + AHEAD, stop * TILES),
                    G, (D + 31) // 32 * 32, KEY_BITS, VALUE_BITS,
                )  # fmt: skip
            if (AHEAD > 0) & (ring_row <= ring_last):
                ring_at = (ring_slot * G + head) * (RING * D)
                since = packed_line(ring_position) + ring_begin * RING_STEP
                prefetch_ring(
                    k_ring + ring_at, v_ring + ring_at, since,
                    tl.minimum(since + RING_STEP, ring_position + 1), RING, RING_STEP, D,
                )  # fmt: skip
            gdc_wait()
            gdc_launch_dependents()
        while row <= row_last:
            if begin < stop:
                # Steps before the window are dealt, too: their programs have less to do.
                reach = reach_of(position, window, CHUNKED)
                seen = first_step(position, reach, TILES * TILE, WINDOWED)
                out, lse = _packed_part(
                    q_ptr, k_words, k_params, v_words, v_params, table, slopes,
                    tl.maximum(begin, seen), stop, slot, position, place, columns, head, first_col,
                    score_scale, cap, reach,
                    H, G, D, KEY_BITS, VALUE_BITS, R, TILES, STAGES, ALIBI, CAPPED, WINDOWED, KW,
                    KW0, EMULATE,
                )  # fmt: skip
                to = (part.to(tl.int64) * (G * CHUNKS) + head_part) * R
                tl.store(lse_ptr + to + c, lse, mask=used)
                at = part_ptr + (to + c)[:, None] * P + packed_d[None, :]
                kept = used[:, None] if D == P else used[:, None] & (packed_d < D)[None, :]
                tl.store(at, out, mask=kept)
                part += 1
            row += 1
            if row <= row_last:
                slot, position, place, one = _next_row(rows, row, num_rows)
                begin = 0
                stop = tl.where(one, packed_line(position) // (TILES * TILE), 0)
                stop = tl.where(row == row_last, last_stop, stop)

        # ---- rings; their parts come behind all packed ones
        row, begin, part, place = ring_row, ring_begin, ring_part, ring_place
        slot, position = ring_slot, ring_position
        while row <= ring_last:
            stop = (position + RING_STEP - packed_line(position)) // RING_STEP
            stop = tl.where(row == ring_last, ring_stop, stop)
            if begin < stop:
                out, lse = attend_ring(
                    q_ptr, k_ring, v_ring, slopes, packed_line(position) + begin * RING_STEP,
                    stop - begin, position, position + 1, (slot * G + head) * (RING * D), place,
                    head, first_col, score_scale, cap, reach_of(position, window, CHUNKED),
                    H, G, D, R, ALIBI, CAPPED, WINDOWED,
                )  # fmt: skip
                to = (part.to(tl.int64) * (G * CHUNKS) + head_part) * R
                tl.store(lse_ptr + to + c, lse, mask=used)
                tl.store(part_ptr + (to + c)[None, :] * P + d[:, None], out, mask=used[None, :])
                part += 1
            row += 1
            begin = 0
            if row <= ring_last:
                slot, position, place, one = _next_row(rows, row, num_rows)
                begin = tl.where(one, 0, 2 * RING)  # others have no steps here


@triton.jit
def _entry(at):
    """A program's entry (packed_pages_deal.py)."""
    row = tl.load(at)
    row_last = tl.load(at + 1)
    begin = tl.load(at + 2)
    stop = tl.load(at + 3)
    part = tl.load(at + 4)
    slot = tl.load(at + 5).to(tl.int64)
    position = tl.load(at + 6)
    place = tl.load(at + 7)
    return row, row_last, begin, stop, part, slot, position, place


@triton.jit
def _next_row(rows, row, num_rows):
    """A row's slot, position and place, and whether it has one token."""
    slot = tl.load(rows + row)
    position = tl.load(rows + num_rows + row)
    one = (slot >= 0) & (tl.load(rows + 2 * num_rows + row) == 1)
    return slot.to(tl.int64), position, tl.load(rows + 3 * num_rows + row), one


@triton.jit
def _merge(
    part_ptr, lse_ptr, packed_first, packed, ring_first, ring, at_head, d, used, m_i, l_i,
    P: tl.constexpr, PARTS: tl.constexpr, N_STEP: tl.constexpr, D_STEP: tl.constexpr,
    X_STEP: tl.constexpr,
):  # fmt: skip
    """The sum of weights [N] and of weighted outputs [N, D_STEP], X_STEP parts at a time."""
    acc = tl.zeros([N_STEP, D_STEP], tl.float32)
    for x0 in range(0, packed + ring, X_STEP):
        x = x0 + tl.arange(0, X_STEP)
        part = tl.where(x < packed, packed_first + x, ring_first + x - packed)
        live = (x < packed + ring)[None, :] & used[:, None]
        at = part.to(tl.int64)[None, :] * PARTS + at_head
        lse = tl.load(lse_ptr + at, mask=live, other=MASKED)
        o_at = part_ptr + at[:, :, None] * P + d[None, None, :]
        out = tl.load(o_at, mask=live[:, :, None], other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, 1))
        alpha = tl.exp2(m_i - m_new)
        weight = tl.exp2(lse - m_new[:, None])
        l_i = l_i * alpha + tl.sum(weight, 1)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], 1)
        m_i = m_new
    return l_i, acc


@triton.jit(do_not_specialize=["num_rows"])
def combine_packed(
    part_ptr, lse_ptr, rows, sinks, out_ptr, num_rows,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, N_STEP: tl.constexpr,
    D_STEP: tl.constexpr, X_STEP: tl.constexpr, X_FEW: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a row of one token for N_STEP query heads and D_STEP channels.

    X_STEP parts are loaded at once, packed ones and then the ring's. Padding gets zeros.
    """
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C + R - 1) // R
    PARTS: tl.constexpr = G * CHUNKS * R
    P: tl.constexpr = triton.next_power_of_2((D + 31) // 32 * 32)
    row = tl.program_id(0)
    n = tl.program_id(1) * N_STEP + tl.arange(0, N_STEP)
    d = tl.program_id(2) * D_STEP + tl.arange(0, D_STEP)
    if PDL:
        gdc_launch_dependents()
    # The rows' table is older than the kernel in front.
    slot = tl.load(rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    ends = rows + 5 * num_rows + row
    packed_first = tl.load(ends - 1, mask=row > 0, other=0)
    packed = tl.load(ends) - packed_first
    ring_first = tl.load(ends + num_rows - 1, mask=row > 0, other=0)
    ring = tl.load(ends + num_rows) - ring_first
    ring_first += tl.load(rows + 6 * num_rows - 1)
    if PDL:
        gdc_wait()
    used = n < H
    kept = used[:, None] if D == P else used[:, None] & (d < D)[None, :]
    to = out_ptr + (n * D)[:, None] + d[None, :]
    if slot < 0:
        nothing = tl.zeros([N_STEP, D_STEP], out_ptr.dtype.element_ty)
        for i in range(count):
            tl.store(to + (place + i) * (H * D), nothing, mask=kept)
    elif count == 1:
        at_head = ((n // C * CHUNKS + n % C // R) * R + n % C % R)[:, None]
        m_i = tl.full([N_STEP], LOWEST, tl.float32)
        l_i = tl.zeros([N_STEP], tl.float32)
        if SINKS:  # one more part, without output
            m_i = tl.load(sinks + n, mask=used, other=0.0).to(tl.float32) * LOG2_E
            l_i += 1.0
        if packed + ring <= X_FEW:
            l_i, acc = _merge(
                part_ptr, lse_ptr, packed_first, packed, ring_first, ring, at_head, d, used, m_i,
                l_i, P, PARTS, N_STEP, D_STEP, X_FEW,
            )  # fmt: skip
        else:
            l_i, acc = _merge(
                part_ptr, lse_ptr, packed_first, packed, ring_first, ring, at_head, d, used, m_i,
                l_i, P, PARTS, N_STEP, D_STEP, X_STEP,
            )  # fmt: skip
        out = acc / tl.maximum(l_i, 1e-30)[:, None]
        tl.store(to + place * (H * D), out.to(out_ptr.dtype.element_ty), mask=kept)

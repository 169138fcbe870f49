"""Attention of rows of one token over a pool of packed blocks: equal shares of all rows' tiles.

What a row reads is two kinds of tile: those of its packed blocks, and 32 tokens each of its 16-bit
ring. Either stands in a line of its own, of all rows; a program of a key/value head takes an equal
run of each, whatever the rows' lengths. The ring's line is dealt from the last program on, so that
where tiles are few those without packed ones take it:

    packed     |0 0 0 0 0 0 0 0|1 1 1 1|2 2|            ring    |0 0 0|1 1 1 1|2|
    programs   |0 0 0|1 1 1|2 2 2|3 3 3|4 4|            programs |5 5|4 4|3 3|2 2|

A program's run over a row is a part, normalised, with its log2-sum-exp; `combine_packed` merges a
row's. The loops are attend.py's, one warp a program; their cost is drawn there.

R rows.  H query heads.  G key/value heads.  D head_dim.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.kv.low_bit.attend import P_SHIFT, TILE, _tiles, first_step, score_unit
from llmpq.kernels.kv.low_bit.register_operands import prefetch_tiles, right_operand
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


@triton.jit
def _share(sums, num_rows, program, PROGRAMS: tl.constexpr, ROWS: tl.constexpr):
    """A program's run of a line, the rows it runs over, and where each row ends."""
    r = tl.arange(0, ROWS)
    ends = tl.load(sums + r, mask=r < num_rows, other=2147483647)
    total = tl.load(sums + num_rows - 1)
    share = (total + PROGRAMS - 1) // PROGRAMS
    first = program * share
    last = tl.minimum(total, first + share)
    row_first = tl.sum((ends <= first).to(tl.int32), 0)
    row_last = tl.where(first < last, tl.sum((ends < last).to(tl.int32), 0), -1)
    return ends, first, last, row_first, row_last


@triton.jit
def _packed_part(
    q_ptr, k_words, k_params, v_words, v_params, table, slopes, begin, stop, slot, position, place,
    columns, head, first_col, score_scale, cap, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, KW: tl.constexpr, KW0: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Steps begin..stop-1 of a row's packed tiles: output [R, D], log2-sum-exp [R]."""
    C: tl.constexpr = H // G
    NC: tl.constexpr = D // 32
    GAIN: tl.constexpr = 2 ** (8 - BITS)
    # ---- queries by thread: column 8n + g, channels t*D/4 + 8c + j
    row = tl.arange(0, R * NC * 4)[:, None]
    channel = row % 4 * (D // 4) + row // 32 % NC * 8 + tl.arange(0, 8)[None, :]
    q_col = first_col + row // (32 * NC) * 8 + row // 4 % 8
    q_at = (place * H + head * C + q_col) * D
    q_raw = tl.load(q_ptr + q_at + channel, mask=q_col < C, other=0.0)
    q_thread = tl.reshape(q_raw, (R // 8, NC, 32, 8)).to(tl.float16)
    q_plain = right_operand(q_thread, D, R, KW0)
    cols = first_col + tl.arange(0, R)
    q_pos = position + cols * 0
    unit = score_scale * (TWO_24 / GAIN)
    slope = 0
    if ALIBI:
        slope = tl.load(slopes + head * C + cols, mask=cols < C, other=0.0) * LOG2_E / unit
    m_i, l_g, z_g, acc = _tiles(
        begin, stop, tl.full([R], LOWEST, tl.float32), tl.zeros([8, R], tl.float32),
        tl.zeros([8, R], tl.float32), tl.zeros([D, R], tl.float32), k_words, k_params, v_words,
        v_params, table, slot, columns, head, q_plain, q_thread, 0, 0, q_pos, q_pos, slope, unit,
        cap, window, G, 1, D, BITS, 128, R, True, ALIBI, CAPPED, WINDOWED, TILES, STAGES, KW, KW0,
        EMULATE,
    )  # fmt: skip
    l_i = tl.sum(l_g, 0)
    norm = 1.0 / tl.maximum(l_i, 1e-30)
    out = (acc * (TWO_24 / GAIN) + tl.sum(z_g, 0)[None, :]) * norm[None, :]
    top = m_i * score_unit(unit, CAPPED) - P_SHIFT
    lse = tl.where(l_i > 0, top + tl.log2(tl.maximum(l_i, 1e-30)), MASKED)
    return tl.permute(tl.reshape(out, (D // 16, 2, 8, R)), (3, 2, 0, 1)).reshape(R, D), lse


@triton.jit(do_not_specialize=["num_rows", "columns", "cap", "window"])
def decode_packed(
    q_ptr, k_words, k_params, v_words, v_params, k_ring, v_ring, rows, table, slopes, part_ptr,
    lse_ptr, score_scale, num_rows, columns, cap, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, PROGRAMS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    KW: tl.constexpr, KW0: tl.constexpr, PDL: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """An equal share of all rows' packed tiles and of their rings, of one key/value head."""
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C + R - 1) // R
    program = tl.program_id(0)
    head_part = tl.program_id(1)
    head = head_part // CHUNKS
    first_col = head_part % CHUNKS * R
    c = tl.arange(0, R)
    d = tl.arange(0, D)
    used = first_col + c < C
    r = tl.arange(0, ROWS)

    # ---- packed tiles
    sums = rows + 5 * num_rows
    ends, first, last, row_first, row_last = _share(sums, num_rows, program, PROGRAMS, ROWS)
    if PDL:
        # Rows and tables are older than the kernel in front; what it may write is asked for only.
        if (AHEAD > 0) & (not WINDOWED) & (row_first <= row_last):
            before = tl.max(tl.where(r < row_first, ends, 0), 0)
            stop = tl.minimum(last, tl.load(sums + row_first))
            prefetch_tiles(
                k_words, k_params, v_words, v_params, table, tl.load(rows + row_first).to(tl.int64),
                columns, head, (first - before) * TILES,
                tl.minimum((first - before) * TILES + AHEAD, (stop - before) * TILES),
                G, D, BITS, 128, True,
            )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    for row in range(row_first, row_last + 1):
        row_begin = tl.max(tl.where(r < row, ends, 0), 0)
        begin = tl.maximum(first, row_begin)
        stop = tl.minimum(last, tl.load(sums + row))
        if begin < stop:
            slot = tl.load(rows + row).to(tl.int64)
            position = tl.load(rows + num_rows + row)
            place = tl.load(rows + 3 * num_rows + row)
            # Steps before the window stand in the line, too: their programs have less to do.
            seen = row_begin + first_step(position, window, TILES * TILE, WINDOWED)
            out, lse = _packed_part(
                q_ptr, k_words, k_params, v_words, v_params, table, slopes,
                tl.maximum(begin, seen) - row_begin, stop - row_begin, slot, position, place,
                columns, head, first_col, score_scale, cap, window,
                H, G, D, BITS, R, TILES, STAGES, ALIBI, CAPPED, WINDOWED, KW, KW0, EMULATE,
            )  # fmt: skip
            part = ((row + program).to(tl.int64) * (G * CHUNKS) + head_part) * R
            tl.store(lse_ptr + part + c, lse, mask=used)
            tl.store(part_ptr + (part + c)[:, None] * D + d[None, :], out, mask=used[:, None])

    # ---- rings; their parts come behind all packed ones
    program = PROGRAMS - 1 - program
    sums = rows + 6 * num_rows
    ends, first, last, row_first, row_last = _share(sums, num_rows, program, PROGRAMS, ROWS)
    for row in range(row_first, row_last + 1):
        row_begin = tl.max(tl.where(r < row, ends, 0), 0)
        begin = tl.maximum(first, row_begin)
        stop = tl.minimum(last, tl.load(sums + row))
        if begin < stop:
            slot = tl.load(rows + row).to(tl.int64)
            position = tl.load(rows + num_rows + row)
            place = tl.load(rows + 3 * num_rows + row)
            out, lse = attend_ring(
                q_ptr, k_ring, v_ring, slopes,
                packed_line(position) + (begin - row_begin) * RING_STEP, stop - begin, position,
                position + 1, (slot * G + head) * (RING * D), place, head, first_col, score_scale,
                cap, window, H, G, 1, D, R, ALIBI, CAPPED, WINDOWED,
            )  # fmt: skip
            part = (num_rows + PROGRAMS + row + program).to(tl.int64)
            part = (part * (G * CHUNKS) + head_part) * R
            tl.store(lse_ptr + part + c, lse, mask=used)
            tl.store(part_ptr + (part + c)[None, :] * D + d[:, None], out, mask=used[None, :])


@triton.jit
def _merged(
    part_ptr, lse_ptr, sums, row, num_rows, offset, at_head, top, total, acc,
    PARTS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, X: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Take the parts of a row from one line into a running softmax."""
    begin = tl.load(sums + row - 1, mask=row > 0, other=0)
    end = tl.load(sums + row)
    share = tl.maximum((tl.load(sums + num_rows - 1) + PROGRAMS - 1) // PROGRAMS, 1)
    first = begin // share
    last = tl.where(begin < end, (end - 1) // share, first - 1)
    d = tl.arange(0, D)
    for program in range(first, last + 1, X):
        number = program + tl.arange(0, X)
        live = number <= last
        part = (offset + row + number).to(tl.int64) * PARTS + at_head
        lse = tl.load(lse_ptr + part, mask=live, other=-1.0e30)
        out = tl.load(part_ptr + part[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(lse, 0))
        kept = tl.exp2(top - higher)
        weight = tl.where(live, tl.exp2(lse - higher), 0.0)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept + tl.sum(out * weight[:, None], 0)
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize=["num_rows"])
def combine_packed(
    part_ptr, lse_ptr, rows, sinks, out_ptr, num_rows,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, X: tl.constexpr,
    PROGRAMS: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query head of a row of one token; padding gets zeros."""
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C + R - 1) // R
    PARTS: tl.constexpr = G * CHUNKS * R
    row = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    d = tl.arange(0, D)
    if slot < 0:
        nothing = tl.zeros([D], out_ptr.dtype.element_ty)
        for i in range(count):
            tl.store(out_ptr + ((place + i) * H + head) * D + d, nothing)
    elif count == 1:
        at_head = (head // C * CHUNKS + head % C // R) * R + head % C % R
        packed, ring = rows + 5 * num_rows, rows + 6 * num_rows
        acc = tl.zeros([D], tl.float32)
        top = tl.full([], -1.0e30, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        if SINKS:  # one more part, without output
            top = tl.load(sinks + head).to(tl.float32) * LOG2_E
            total += 1.0
        top, total, acc = _merged(
            part_ptr, lse_ptr, packed, row, num_rows, 0, at_head, top, total, acc,
            PARTS, R, D, X, PROGRAMS,
        )  # fmt: skip
        # the ring is dealt from the last program on: its parts count from there
        top, total, acc = _merged(
            part_ptr, lse_ptr, ring, row, num_rows, num_rows + PROGRAMS, at_head, top, total, acc,
            PARTS, R, D, X, PROGRAMS,
        )  # fmt: skip
        out_at = out_ptr + (place * H + head) * D + d
        tl.store(out_at, (acc / total).to(out_ptr.dtype.element_ty))

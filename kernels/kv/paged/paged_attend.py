"""Attention of a step's rows of any lengths over unquantised keys and values in blocks of a pool.

    pool [blocks, G, PAGE, D]    token p of a request: p % PAGE of block table[slot, p // PAGE]

    decode   rows of one token. Key tiles of all rows stand in one line; each of PROGRAMS programs
             of a key/value head takes an equal run of it, whatever the rows' lengths:
                 rows       |0 0 0 0 0 0 0|1 1|2 2 2 2|
                 programs   |0 0 0 0|1 1 1 1|2 2 2 2|3|        share = ceil(tiles / PROGRAMS)
             A row within one program is written at once. The parts of others (row + program numbers
             them) wait with their log2-sum-exp: the last program to arrive merges them, in order,
             or in steps of few rows, of which every row is shared, a launch of its own (`combine`).
             Rows of one length get the nearest share that divides it.
    chunk    rows of several: a program takes TILE = M / (H / G) new tokens of a row, times the
             query heads of a key/value head, over all keys they see, causal inside.

A `ScoreRule` caps scores, hides keys behind a window, gives every row a sink (one more score, of a
key without a value). Keys before the window are not read: decoding rows of windowed layers have a
line of tiles of their own, as long as the model's widest window. Windows that begin at multiples of
their size (Llama 4's chunks) are read as far as moving ones are.

Launches have shapes of their own, not the rows': lengths and tables are read on the device
(paged_rows.py), so a CUDA graph of a step serves any mix of as many places. No kernel writes them,
the host does before a step, which also tells each program its share: they are read, and first keys
asked of the L2, while the kernel in front ends.

Cost: decode reads 2 D elements of the pool per token and key/value head once; a chunk reads them
once a tile, and does 4 D operations per query head, new token and key.

H query heads, G key/value heads, D head_dim, T places, R rows.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.kv.paged.paged_merge import combine_kernel, merge_parts
from llmpq.kernels.kv.paged.paged_plan import PagedPlan, Scores
from llmpq.kernels.kv.paged.tiles import LOG2_E, ask_tiles
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.kernels.overlap import overlaps
from llmpq.sizes.kv_format import BLOCK_TOKENS


@triton.jit
def _load_tile(
    k_ptr, v_ptr, block, t0, end, base, block_stride, d,
    D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Keys and values of N tokens from t0 on, all in `block`; WHOLE: all are before `end`.

    Loops read the number of a tile's block while the tile before is at work: a load whose address
    hangs on another load of its round is fetched half as far ahead.
    """
    n = tl.arange(0, N)
    live = (d < D)[None, :]
    if not WHOLE:
        live &= (t0 + n < end)[:, None]
    at = block.to(tl.int64) * block_stride + base + (t0 % PAGE + n)[:, None] * D + d[None, :]
    return tl.load(k_ptr + at, mask=live, other=0.0), tl.load(v_ptr + at, mask=live, other=0.0)


@triton.jit
def _seen(
    q, k, v, t0, position, slope, m_i, l_i, acc, score_scale, cap, reach,
    N: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Take a tile of keys and values into query rows' softmax; WHOLE: each row sees all keys.

    `reach`: how many keys a row sees, one number or [M, 1].
    """
    t = t0 + tl.arange(0, N)
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
    if CAPPED:  # cap tanh(y / cap), x = y log2 e; tanh(z) = 1 - 2 / (2^(2 z log2 e) + 1)
        x = cap * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp2(x * (2.0 / cap)) + 1.0))
    behind = position[:, None] - t[None, :]
    if ALIBI:
        x -= slope[:, None] * behind.to(tl.float32)
    seen = behind >= 0
    if WINDOWED:
        seen &= behind < reach
    if not WHOLE:
        x = tl.where(seen, x, -1.0e30)
    m_new = tl.maximum(m_i, tl.max(x, 1))
    alpha = tl.exp2(m_i - m_new)
    p = tl.exp2(x - m_new[:, None])
    if not WHOLE:
        p = tl.where(seen, p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def reach_of(position, window, CHUNKED: tl.constexpr):
    """How many keys a query sees of a window; CHUNKED: it begins at multiples of its size."""
    return position % window + 1 if CHUNKED else window


@triton.jit
def _sums_before(sinks, head, stored, counted, M: tl.constexpr, SINKS: tl.constexpr):
    """The softmax of M rows before a key is seen; `counted`: whether their sinks are in it."""
    m_i = tl.full([M], -1.0e30, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=stored, other=0.0).to(tl.float32) * 1.4426950408889634
        m_i = tl.where(counted, sink, m_i)
        l_i = tl.where(counted, 1.0, l_i)
    return m_i, l_i


@triton.jit
def _hidden(end, widest, N: tl.constexpr, WINDOWED: tl.constexpr):
    """The tiles of a row of `end` tokens that lie before the widest window."""
    return tl.maximum(end - widest, 0) // N if WINDOWED else 0


@triton.jit
def _ask_ahead(
    k_ptr, v_ptr, block, t0, end, base, block_stride,
    D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Ask the L2 for keys and values of at most TOKENS tokens from t0 on, all in `block`."""
    at = block.to(tl.int64) * block_stride + base
    inside = t0 % PAGE
    ask_tiles(k_ptr + at, v_ptr + at, inside, tl.minimum(PAGE, inside + end - t0), D, TOKENS)


@triton.jit(do_not_specialize=["num_rows", "columns", "window", "widest", "num_places"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, rows, table, slopes, sinks, out_ptr, work_split, part_ptr, lse_ptr,
    arrived, score_scale, cap, window, widest, num_rows, columns, block_stride, num_places,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr,
    N: tl.constexpr, PAGE: tl.constexpr, PROGRAMS: tl.constexpr, WORK_SPLIT: tl.constexpr,
    HEADS: tl.constexpr, MERGED: tl.constexpr, COUNTED: tl.constexpr, AHEAD: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    SINKS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """An equal share of all rows' key tiles, of one key/value head; zeros for padding."""
    C: tl.constexpr = H // G
    program = tl.program_id(0)
    group = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()

    # ---- this program's share of the line of tiles, and the first of the rows it runs over
    sums = rows + (6 if WINDOWED else 5) * num_rows
    own = work_split + ((PROGRAMS if WINDOWED else 0) + program) * WORK_SPLIT
    row_first = tl.load(own)
    row_last = tl.load(own + 1)
    last = tl.load(own + 2)
    share = tl.load(own + 3)
    row_begin = tl.load(own + 4)
    row_end = tl.load(own + 5)
    slot = tl.load(own + 6)
    end = tl.load(own + 7)
    first = program * share
    t0 = (first - row_begin + _hidden(end, widest, N, WINDOWED)) * N
    own_table = table + slot.to(tl.int64) * columns
    block = tl.load(own_table + t0 // PAGE, mask=first < last, other=0)
    place = tl.load(rows + 3 * num_rows + row_first).to(tl.int64)
    if AHEAD > 0 and first < last:
        _ask_ahead(k_ptr, v_ptr, block, t0, end, group * PAGE * D, block_stride, D, PAGE, AHEAD * N)
    # Padding stands behind the tokens of all rows; what memory held there may be no number.
    behind = rows + num_rows - 1
    count = tl.where(tl.load(behind) >= 0, tl.load(behind + 2 * num_rows), 0)
    used = tl.load(behind + 3 * num_rows) + count
    if PDL:
        gdc_wait()

    c = tl.arange(0, R)
    d = tl.arange(0, PADDED)
    head = group * C + c
    stored = (c < C)[:, None] & (d < D)[None, :]
    slope = tl.zeros([R], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=c < C, other=0.0).to(tl.float32) * 1.4426950408889634
    for row in range(row_first, row_last + 1):
        begin = tl.maximum(first, row_begin)
        stop = tl.minimum(last, row_end)
        # The next row's numbers, while this one's keys are on their way.
        after = tl.minimum(row + 1, num_rows - 1)
        after_row_end = tl.load(sums + after)
        after_slot = tl.load(rows + after)
        after_end = tl.load(rows + num_rows + after) + 1
        after_place = tl.load(rows + 3 * num_rows + after).to(tl.int64)
        after_table = table + tl.maximum(after_slot, 0).to(tl.int64) * columns
        after_tile = _hidden(after_end, widest, N, WINDOWED)
        after_block = tl.load(after_table + after_tile * N // PAGE)
        if begin < stop:
            position = tl.zeros([R], tl.int32) + (end - 1)
            at = (place * H + head)[:, None] * D + d[None, :]
            q = tl.load(q_ptr + at, mask=stored, other=0.0)
            m_i, l_i = _sums_before(sinks, head, c < C, begin == row_begin, R, SINKS)
            acc = tl.zeros([R, PADDED], tl.float32)
            from_tile = _hidden(end, widest, N, WINDOWED) - row_begin
            reach = reach_of(end - 1, window, CHUNKED)
            last_tile = stop + from_tile - 1
            for tile in tl.range(begin + from_tile, stop + from_tile, num_stages=STAGES):
                k, v = _load_tile(
                    k_ptr, v_ptr, block, tile * N, end, group * PAGE * D, block_stride, d,
                    D, N, PAGE,
                )  # fmt: skip
                block = tl.load(own_table + tl.minimum(tile + 1, last_tile) * N // PAGE)
                m_i, l_i, acc = _seen(
                    q, k, v, tile * N, position, slope, m_i, l_i, acc, score_scale, cap, reach,
                    N, ALIBI, CAPPED, WINDOWED,
                )  # fmt: skip
            out = acc / tl.maximum(l_i, 1e-30)[:, None]
            if stop - begin == row_end - row_begin:
                tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=stored)
            else:
                part = ((row + program).to(tl.int64) * G + group) * R + c
                tl.store(lse_ptr + part, m_i + tl.log2(tl.maximum(l_i, 1e-30)), mask=c < C)
                tl.store(part_ptr + part[:, None] * PADDED + d[None, :], out, mask=stored)
                if COUNTED:
                    tl.debug_barrier()  # every thread's part is written before the program counts
                    from_program = row_begin // share
                    to_program = (row_end - 1) // share
                    counter = arrived + row * G + group
                    if tl.atomic_add(counter, 1, sem="acq_rel") == to_program - from_program:
                        merge_parts(
                            part_ptr, lse_ptr, out_ptr, from_program, to_program, row, group, place,
                            0, H, G, D, PADDED, R, HEADS, MERGED, PADDED,
                        )  # fmt: skip
                        tl.store(counter, 0)
        row_begin, row_end = row_end, after_row_end
        end, place, own_table, block = after_end, after_place, after_table, after_block

    nothing = tl.zeros([R, PADDED], out_ptr.dtype.element_ty)
    for free in range(used + program, num_places, PROGRAMS):
        at = (free * H + head)[:, None].to(tl.int64) * D + d[None, :]
        tl.store(out_ptr + at, nothing, mask=stored)


@triton.jit(do_not_specialize=["num_rows", "columns", "window", "widest"])
def chunk_kernel(
    q_ptr, k_ptr, v_ptr, rows, table, slopes, sinks, out_ptr,
    score_scale, cap, window, widest, num_rows, columns, block_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    SINKS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TILE new tokens of a row of several, times the query heads of one key/value head."""
    C: tl.constexpr = H // G
    tile = tl.program_id(0)
    group = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = rows + 4 * num_rows
    if tile < tl.load(sums + num_rows - 1):
        r = tl.arange(0, ROWS)
        ends = tl.load(sums + r, mask=r < num_rows, other=2147483647)
        row = tl.sum((ends <= tile).to(tl.int32), 0)
        own_table = table + tl.load(rows + row).to(tl.int64) * columns
        start = tl.load(rows + num_rows + row)
        count = tl.load(rows + 2 * num_rows + row)
        place = tl.load(rows + 3 * num_rows + row)
        begin = (tile - tl.load(sums + row - 1, mask=row > 0, other=0)) * TILE

        # ---- queries: row m is head m % C of the group, new token begin + m // C
        m = tl.arange(0, M)
        new = begin + m // C
        used = (m < TILE * C) & (new < count)
        position = start + tl.minimum(new, count - 1)
        reach = reach_of(position[:, None], window, CHUNKED)
        end = start + tl.minimum(count, begin + TILE)
        d = tl.arange(0, PADDED)
        head = group * C + m % C
        at = ((place + new).to(tl.int64) * H + head)[:, None] * D + d[None, :]
        stored = used[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + at, mask=stored, other=0.0)
        slope = tl.zeros([M], tl.float32)
        if ALIBI:
            slope = tl.load(slopes + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        m_i, l_i = _sums_before(sinks, head, used, used, M, SINKS)
        acc = tl.zeros([M, PADDED], tl.float32)
        seen_first = tl.maximum(start + begin - window + 1, 0) // N * N if WINDOWED else 0
        block = tl.load(own_table + seen_first // PAGE)
        # Tiles before the tokens' own are seen whole, unless a window hides some of their keys.
        own_first = seen_first if WINDOWED else (start + begin + 1) // N * N
        for t0 in tl.range(seen_first, own_first, N, num_stages=STAGES):
            k, v = _load_tile(
                k_ptr, v_ptr, block, t0, end, group * PAGE * D, block_stride, d, D, N, PAGE, True
            )
            block = tl.load(own_table + tl.minimum(t0 + N, end - 1) // PAGE)
            m_i, l_i, acc = _seen(
                q, k, v, t0, position, slope, m_i, l_i, acc, score_scale, cap, reach,
                N, ALIBI, CAPPED, WINDOWED, True,
            )  # fmt: skip
        for t0 in tl.range(own_first, end, N, num_stages=STAGES):
            k, v = _load_tile(
                k_ptr, v_ptr, block, t0, end, group * PAGE * D, block_stride, d, D, N, PAGE
            )
            block = tl.load(own_table + tl.minimum(t0 + N, end - 1) // PAGE)
            m_i, l_i, acc = _seen(
                q, k, v, t0, position, slope, m_i, l_i, acc, score_scale, cap, reach,
                N, ALIBI, CAPPED, WINDOWED,
            )  # fmt: skip
        out = acc / tl.maximum(l_i, 1e-30)[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=stored)


def paged_attend(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows_FR: Tensor,
    work_split: Tensor,
    table_SM: Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    rule: ScoreRule = EVERYTHING,
    chunks: bool = True,
) -> Tensor:
    """Return o [T, H, D]; the step's own keys and values are in the pool already.

    `work_split`: as paged_rows.py has it, of the plan's programs. `rule`: its window is the plan's
    at most. `chunks`: whether a row may have several tokens. Padding gets zeros.
    """
    q_THD = q_THD.contiguous()
    _check(q_THD, k_pool, v_pool, plan, rule)
    out, num_rows = torch.empty_like(q_THD), rows_FR.shape[1]
    groups, pdl = plan.kv_heads, overlaps(q_THD.device)
    slopes = q_THD if alibi_slopes_H is None else alibi_slopes_H
    sinks = q_THD if rule.sinks_H is None else rule.sinks_H
    given = (q_THD, k_pool, v_pool, rows_FR, table_SM, slopes, sinks, out)
    score = (scale * LOG2_E, float(rule.cap or 1.0), rule.window, plan.window)
    numbers = (*score, num_rows, table_SM.shape[1], k_pool.stride(0))
    how = Scores(
        alibi=alibi_slopes_H is not None,
        capped=rule.cap > 0,
        windowed=rule.window > 0,
        chunked=rule.chunked,
        sinks=rule.sinks_H is not None,
    )
    decode = plan.decode_options(num_rows, how, pdl=pdl)
    parts = (num_rows + plan.programs) * groups * int(decode["R"])
    part = q_THD.new_empty(parts * int(decode["PADDED"]), dtype=torch.float32)
    lse = q_THD.new_empty(parts, dtype=torch.float32)
    counters = arrivals(q_THD.device, num_rows * groups)
    decode_kernel[(plan.programs, groups)](
        *(*given, work_split, part, lse, counters, *numbers, q_THD.shape[0]),
        **decode,
        launch_pdl=pdl,
    )
    if not decode["COUNTED"]:
        combine = plan.combine_options(num_rows, how, pdl=pdl)
        pieces = int(combine["PADDED"]) // int(combine["CHANNELS"])
        combine_kernel[(num_rows, groups, pieces)](
            *(part, lse, rows_FR, work_split, out, num_rows),
            **combine,
            launch_pdl=pdl,
        )
    if chunks:
        tiles = q_THD.shape[0] // plan.tile_queries + num_rows
        options = plan.chunk_options(num_rows, how, pdl=pdl)
        chunk_kernel[(tiles, groups)](*given, *numbers, **options, launch_pdl=pdl)
    return out


def _check(q_THD: Tensor, k_pool: Tensor, v_pool: Tensor, plan: PagedPlan, rule: ScoreRule) -> None:
    """Raise `ValueError` for pools, queries or windows that the kernels do not read."""
    if rule.window > plan.window:
        raise ValueError(
            f"a window may have the plan's {plan.window} tokens at most, got {rule.window}"
        )
    want = (plan.kv_heads, BLOCK_TOKENS, plan.head_dim)
    for name, pool in (("keys", k_pool), ("values", v_pool)):
        if tuple(pool.shape[1:]) != want or not pool.is_contiguous():
            raise ValueError(
                f"{name} must be [blocks, {', '.join(map(str, want))}], one block behind the "
                f"other, got {list(pool.shape)} with strides {pool.stride()}"
            )
    if tuple(q_THD.shape[1:]) != (plan.heads, plan.head_dim) or q_THD.dtype != k_pool.dtype:
        raise ValueError(
            f"queries must be [T, {plan.heads}, {plan.head_dim}] of {k_pool.dtype}, got "
            f"{list(q_THD.shape)} of {q_THD.dtype}"
        )

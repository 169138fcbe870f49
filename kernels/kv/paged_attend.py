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
line of tiles of their own, as long as the model's widest window.

Launches have shapes of their own, not the rows': lengths and tables are read on the device
(paged_rows.py), so a CUDA graph of a step serves any mix of as many places. No kernel writes them,
the host does before a step: they are read, and first keys asked of the L2, while the kernel in
front ends.

Cost: decode reads 2 D elements of the pool per token and key/value head once; a chunk reads them
once a tile, and does 4 D operations per query head, new token and key.

H query heads, G key/value heads, D head_dim, T places of a step, R rows.
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
from llmpq.kernels.kv.paged_merge import combine_kernel, merge_parts, share_of
from llmpq.kernels.kv.paged_plan import PagedPlan, Scores
from llmpq.kernels.kv.plain_attend import LOG2_E, ask_tiles
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.kernels.overlap import overlaps
from llmpq.kv_format import BLOCK_TOKENS


@triton.jit
def _load_tile(
    k_ptr, v_ptr, block, t0, end, base, block_stride, d,
    D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Keys and values of N tokens from t0 on, all in `block`.

    Loops read the number of a tile's block while the tile before is at work: a load whose address
    hangs on another load of its round is fetched half as far ahead.
    """
    n = tl.arange(0, N)
    live = (t0 + n < end)[:, None] & (d < D)[None, :]
    at = block.to(tl.int64) * block_stride + base + (t0 % PAGE + n)[:, None] * D + d[None, :]
    return tl.load(k_ptr + at, mask=live, other=0.0), tl.load(v_ptr + at, mask=live, other=0.0)


@triton.jit
def _seen(
    q, k, v, t0, position, slope, m_i, l_i, acc, score_scale, cap, window,
    N: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Take a tile of keys and values into the running softmax of some query rows."""
    t = t0 + tl.arange(0, N)
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
    if CAPPED:  # cap tanh(y / cap), x = y log2 e; tanh(z) = 1 - 2 / (2^(2 z log2 e) + 1)
        x = cap * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp2(x * (2.0 / cap)) + 1.0))
    behind = position[:, None] - t[None, :]
    if ALIBI:
        x -= slope[:, None] * behind.to(tl.float32)
    seen = behind >= 0
    if WINDOWED:
        seen &= behind < window
    x = tl.where(seen, x, -1.0e30)
    m_new = tl.maximum(m_i, tl.max(x, 1))
    alpha = tl.exp2(m_i - m_new)
    p = tl.where(seen, tl.exp2(x - m_new[:, None]), 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i * alpha + tl.sum(p, 1), acc


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
def _ask_ahead(
    k_ptr, v_ptr, own_table, t0, end, base, block_stride,
    D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Ask the L2 for keys and values of at most TOKENS tokens from t0 on, of its block."""
    block = tl.load(own_table + t0 // PAGE).to(tl.int64)
    at = block * block_stride + base
    inside = t0 % PAGE
    ask_tiles(k_ptr + at, v_ptr + at, inside, tl.minimum(PAGE, inside + end - t0), D, TOKENS)


@triton.jit(do_not_specialize=["num_rows", "columns", "window", "widest"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, rows, table, slopes, sinks, out_ptr, part_ptr, lse_ptr, arrived,
    score_scale, cap, window, widest, num_rows, columns, block_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr,
    N: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr, MERGED: tl.constexpr, COUNTED: tl.constexpr, AHEAD: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """An equal share of all rows' key tiles, of one key/value head; zeros for padding.

    Whatever memory held may be no number, which no router can choose by.
    """
    C: tl.constexpr = H // G
    program = tl.program_id(0)
    group = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()

    # ---- this program's share of the line of tiles, and the rows it runs over
    sums = rows + (6 if WINDOWED else 5) * num_rows
    ends, total, share = share_of(sums, num_rows, ROWS, PROGRAMS)
    r = tl.arange(0, ROWS)
    first = program * share
    last = tl.minimum(total, first + share)
    row_first = tl.sum((ends <= first).to(tl.int32), 0)
    row_last = tl.where(first < last, tl.sum((ends < last).to(tl.int32), 0), -1)
    if AHEAD > 0 and first < last:
        own_table = table + tl.load(rows + row_first).to(tl.int64) * columns
        end = tl.load(rows + num_rows + row_first) + 1
        hidden = tl.maximum(end - widest, 0) // N if WINDOWED else 0
        t0 = (first + hidden - tl.max(tl.where(r < row_first, ends, 0), 0)) * N
        _ask_ahead(
            k_ptr, v_ptr, own_table, t0, end, group * PAGE * D, block_stride, D, PAGE, AHEAD * N
        )
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
        row_begin = tl.max(tl.where(r < row, ends, 0), 0)
        row_end = tl.load(sums + row)
        begin = tl.maximum(first, row_begin)
        stop = tl.minimum(last, row_end)
        if begin < stop:
            own_table = table + tl.load(rows + row).to(tl.int64) * columns
            end = tl.load(rows + num_rows + row) + 1
            position = tl.zeros([R], tl.int32) + (end - 1)
            place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
            at = (place * H + head)[:, None] * D + d[None, :]
            q = tl.load(q_ptr + at, mask=stored, other=0.0)
            m_i, l_i = _sums_before(sinks, head, c < C, begin == row_begin, R, SINKS)
            acc = tl.zeros([R, PADDED], tl.float32)
            hidden = tl.maximum(end - widest, 0) // N if WINDOWED else 0
            from_tile = hidden - row_begin
            last_tile = stop + from_tile - 1
            block = tl.load(own_table + (begin + from_tile) * N // PAGE)
            for tile in tl.range(begin + from_tile, stop + from_tile, num_stages=STAGES):
                k, v = _load_tile(
                    k_ptr, v_ptr, block, tile * N, end, group * PAGE * D, block_stride, d,
                    D, N, PAGE,
                )  # fmt: skip
                block = tl.load(own_table + tl.minimum(tile + 1, last_tile) * N // PAGE)
                m_i, l_i, acc = _seen(
                    q, k, v, tile * N, position, slope, m_i, l_i, acc, score_scale, cap, window,
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
                            H, G, D, PADDED, R, HEADS, MERGED,
                        )  # fmt: skip
                        tl.store(counter, 0)

    # ---- padding stands behind the tokens of all rows
    slot = tl.load(rows + r, mask=r < num_rows, other=0)
    count = tl.load(rows + 2 * num_rows + r, mask=r < num_rows, other=0)
    used = tl.sum(tl.where(slot >= 0, count, 0), 0)
    places = used + tl.sum(tl.where(slot < 0, count, 0), 0)
    nothing = tl.zeros([R, PADDED], out_ptr.dtype.element_ty)
    for place in range(used + program, places, PROGRAMS):
        at = (place * H + head)[:, None].to(tl.int64) * D + d[None, :]
        tl.store(out_ptr + at, nothing, mask=stored)


@triton.jit(do_not_specialize=["num_rows", "columns", "window", "widest"])
def chunk_kernel(
    q_ptr, k_ptr, v_ptr, rows, table, slopes, sinks, out_ptr,
    score_scale, cap, window, widest, num_rows, columns, block_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
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
        for t0 in tl.range(seen_first, end, N, num_stages=STAGES):
            k, v = _load_tile(
                k_ptr, v_ptr, block, t0, end, group * PAGE * D, block_stride, d, D, N, PAGE
            )
            block = tl.load(own_table + tl.minimum(t0 + N, end - 1) // PAGE)
            m_i, l_i, acc = _seen(
                q, k, v, t0, position, slope, m_i, l_i, acc, score_scale, cap, window,
                N, ALIBI, CAPPED, WINDOWED,
            )  # fmt: skip
        out = acc / tl.maximum(l_i, 1e-30)[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=stored)


def paged_attend(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows_FR: Tensor,
    table_SM: Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    rule: ScoreRule = EVERYTHING,
    chunks: bool = True,
) -> Tensor:
    """Return o [T, H, D]; the step's own keys and values are in the pool already.

    `rule`: its window is the plan's at most. `chunks`: whether a row may have several tokens.
    Padding gets zeros.
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
        sinks=rule.sinks_H is not None,
    )
    decode = plan.decode_options(num_rows, how, pdl=pdl)
    parts = (num_rows + plan.programs) * groups * int(decode["R"])
    part = q_THD.new_empty(parts * int(decode["PADDED"]), dtype=torch.float32)
    lse = q_THD.new_empty(parts, dtype=torch.float32)
    counters = arrivals(q_THD.device, num_rows * groups)
    decode_kernel[(plan.programs, groups)](
        *(*given, part, lse, counters, *numbers), **decode, launch_pdl=pdl
    )
    if not decode["COUNTED"]:
        combine_kernel[(num_rows, groups)](
            *(part, lse, rows_FR, out, num_rows),
            **plan.combine_options(num_rows, how, pdl=pdl),
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


def paged_attend_reference(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows_FR: Tensor,
    table_SM: Tensor,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    rule: ScoreRule = EVERYTHING,
) -> Tensor:
    """The twin: float64, one row at a time; zeros for padding."""
    out = torch.zeros_like(q_THD)
    rep = q_THD.shape[1] // k_pool.shape[1]
    for slot, start, count, first, *_ in rows_FR.T.tolist():
        if slot < 0 or count == 0:
            continue
        end, own = start + count, slice(first, first + count)
        blocks = table_SM[slot, : -(-end // BLOCK_TOKENS)].long()
        k, v = (
            pool[blocks].transpose(0, 1).flatten(1, 2)[:, :end].double().repeat_interleave(rep, 0)
            for pool in (k_pool, v_pool)
        )
        ahead = torch.arange(end, device=q_THD.device)
        ahead = ahead - torch.arange(start, end, device=q_THD.device)[:, None]
        x = q_THD[own].transpose(0, 1).double() @ k.transpose(1, 2) * scale
        if rule.cap:
            x = (x / rule.cap).tanh() * rule.cap
        if alibi_slopes_H is not None:
            x = x + alibi_slopes_H.double()[:, None, None] * ahead
        x = x.masked_fill((ahead > 0) | (ahead <= -(rule.window or end)), float("-inf"))
        if rule.sinks_H is not None:
            x = torch.cat((x, rule.sinks_H.double()[:, None, None].expand(-1, count, 1)), dim=-1)
        out[own] = (x.softmax(dim=-1)[..., :end] @ v).transpose(0, 1).to(out.dtype)
    return out

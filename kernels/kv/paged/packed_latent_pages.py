"""A pool of blocks of packed latents (MLA) on a GPU: a step's rows brought in and attended.

    packed_latent_append.py   rings, and the blocks that rows complete
    attend          rows of one token: program = HEADS query heads, one of `splits` shares of the
                    tokens, merged by paged_latents.combine_latents; rows of several: program = TILE
                    new tokens times HEADS query heads over all they see

What a query sees packed depends on its position alone, as packed_pages.py, whose twin is this one's
too. Codes meet tensor cores as latent_codes.py's do.

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
from llmpq.kernels.kv.low_bit.latent_codes import (
    LOOK,
    P_SHIFT,
    WARPS,
    _block,
    _by_channel,
    _take_newest,
    value_channel,
)
from llmpq.kernels.kv.low_bit.ring_attend import BLOCK, LOG2_E, LOWEST, RING, packed_line
from llmpq.kernels.kv.low_bit.unpack import TWO_24
from llmpq.kernels.kv.paged.packed_latent_append import append_latents, keep_newest, sizes_of
from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows
from llmpq.kernels.kv.paged.packed_pages_plan import WORD_K_WIDTH
from llmpq.kernels.kv.paged.paged_latents import LatentPlan, combine_latents
from llmpq.sizes.kv_format import BLOCK_TOKENS


@triton.jit(do_not_specialize=["num_rows", "columns", "splits"])
def attend(
    q_ptr, new, k_words, k_params, v_words, v_params, k_ring, v_ring, rows, table, to_ptr, lse_ptr,
    scale, num_rows, columns, splits, stride,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr,
    R: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, LOOK: tl.constexpr, KW: tl.constexpr, EMULATE: tl.constexpr,
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
        share = (blocks + (end - since + BLOCK - 1) // BLOCK + splits - 1) // splits
        first, last = split * share, split * share + share
        accs = ()
        for _ in tl.static_range(C // 64):
            accs += (tl.zeros([R, 64], tl.float32),)
        m_i = tl.full([R], LOWEST, tl.float32)
        l_p = tl.zeros([R, 64], tl.float32)
        z_p = tl.zeros([R, 64], tl.float32)
        for block in tl.range(first, tl.minimum(last, blocks), num_stages=1):
            page = tl.load(table + slot * columns + block).to(tl.int64)
            m_i, l_p, z_p, accs = _block(
                q_ptr, at, used, k_words + page * (4 * C * BITS), k_params + page * (2 * C),
                v_words + page * (4 * C * BITS), v_params + page * (2 * BLOCK),
                line <= block * BLOCK, (m_i, l_p, z_p, accs), score_unit * (TWO_24 / GAIN),
                score_unit, D, C, BITS, R, TILE if CHUNKS else 1, LOOK, KW, EMULATE,
            )  # fmt: skip
        made = ()
        for c in tl.static_range(C // 64):
            made += (accs[c] * (TWO_24 / GAIN),)
        accs = made
        ring = slot * (RING * D)
        t_first = since + (tl.maximum(first, blocks) - blocks) * BLOCK
        t_last = tl.minimum(end, since + (last - blocks) * BLOCK)
        for t0 in tl.range(t_first, t_last, 64, num_stages=1):
            m_i, l_p, z_p, accs = _take_newest(
                q_ptr, at, used, k_ring + ring, v_ring + ring, new + place * stride,
                t0 + tl.arange(0, 64), start, end, stride, position, line,
                (m_i, l_p, z_p, accs), score_unit, D, C, R,
            )  # fmt: skip
        l_i, z_i = tl.sum(l_p, 1), tl.sum(z_p, 1)
        norm = 1.0 / tl.maximum(l_i, 1e-30)
        lse = tl.where(l_i > 0, m_i - P_SHIFT + tl.log2(tl.maximum(l_i, 1e-30)), -1.0e30)
        if CHUNKS:
            out_at = at
        else:
            out_at = (row.to(tl.int64) * H + head) * splits + split
            tl.store(lse_ptr + out_at, lse, mask=used)
        for c in tl.static_range(C // 64):
            channel = value_channel(c, C)[None, :, :]
            live = used[:, None, None] & (channel < V)
            out = _by_channel(accs[c], z_i, norm, R).to(to_ptr.dtype.element_ty)
            tl.store(to_ptr + out_at[:, None, None] * V + channel, out, mask=live)


def append_packed_latents(
    new_TD: Tensor, pages: PackedPages, step: PackedRows, fmt: KVFormat
) -> None:
    """Append a step's latents; nothing attends to them yet."""
    new_TD = new_TD.contiguous()
    append_latents(new_TD, pages, step, fmt)
    if step.chunks:
        keep_newest(new_TD, pages, step)


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
    new_TD, (places, num_rows) = new_TD.contiguous(), (len(q_THD), step.rows_FR.shape[1])
    append_latents(new_TD, pages, step, fmt)
    layer, rows_FR, columns = pages.layer, step.rows_FR, step.table_SM.shape[1]
    q = q_THD.contiguous().to(torch.float16)
    out = q_THD.new_empty(places, plan.heads, plan.value_dim)
    splits = plan.splits(num_rows, columns * BLOCK_TOKENS)
    parts = num_rows * plan.heads * splits
    part = q_THD.new_empty(parts * plan.value_dim, dtype=torch.float32)
    lse = part.new_empty(parts)
    groups = triton.cdiv(plan.heads, plan.program_heads)
    packed = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
    rings = (layer.k_ring_SGRD, layer.v_ring_SGRD)
    given = (q, new_TD, *packed, *rings, rows_FR, step.table_SM)
    sizes = (float(scale), num_rows, columns)
    same = sizes_of(fmt, num_rows) | {"H": plan.heads, "V": plan.value_dim, "R": plan.rows}
    same |= {"HEADS": plan.program_heads, "LOOK": LOOK, "KW": WORD_K_WIDTH, "num_warps": WARPS}
    same["EMULATE"] = bool(triton.knobs.runtime.interpret)
    attend[(splits, groups, num_rows)](
        *(*given, part, lse, *sizes, splits, new_TD.stride(0)), **same, CHUNKS=False
    )
    combine_latents[(num_rows, plan.heads)](
        *(part, lse, rows_FR, out, num_rows, splits),
        H=plan.heads,
        V=plan.value_dim,
        PADDED=triton.next_power_of_2(plan.value_dim),
        X=triton.next_power_of_2(splits),
        num_warps=4,
    )
    if step.chunks:
        attend[(places // plan.tile_queries + num_rows, groups)](
            *(*given, out, lse, *sizes, 1, new_TD.stride(0)), **same, CHUNKS=True
        )
        keep_newest(new_TD, pages, step)
    return out

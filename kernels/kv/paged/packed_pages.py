"""A layer's pool of packed blocks on a GPU: a step's rows of any lengths brought in and attended.

    block   128 tokens of all key/value heads: codes, scales and zeros as kv_block.py draws them,
            and with a prefix cache the 16-bit tokens behind it, from which others may go on
    ring    of a running request (slot): its newest tokens in 16 bits, position p at p % RING

What a query sees packed depends on its position alone (llmpq/sizes/kv_format.py), so that rows may
come cut in any way: the query at p sees the same keys in the same bits.

    rows of one token   append_packed | decode_packed | combine_packed
    with chunks         append_packed | decode_packed | chunk_packed | combine_packed | write_rings

Launches have shapes of their own, not the rows', so a CUDA graph of a step serves any mix of as
many places. The twin is tests/reference/packed_pages.py.

T places of a step.  R rows.  S slots.  M blocks of a request.  H query heads.  G key/value heads.
D head_dim.  P blocks of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.kv.paged.packed_pages_append import append_packed, write_rings
from llmpq.kernels.kv.paged.packed_pages_chunk import chunk_packed
from llmpq.kernels.kv.paged.packed_pages_decode import combine_packed, decode_packed
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.kv.paged.paged_plan import Scores
from llmpq.kernels.kv.paged.tiles import LOG2_E
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.kernels.kv.storage import KVLayer
from llmpq.kernels.overlap import overlaps
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS


@dataclass(frozen=True, kw_only=True)
class PackedPages:
    """One layer's pool."""

    layer: KVLayer
    k_behind_PGTD: Tensor
    v_behind_PGTD: Tensor
    """The TAIL_TOKENS behind each block; of no blocks without a prefix cache."""

    @property
    def keeps_behind(self) -> bool:
        """Whether others may find blocks."""
        return self.k_behind_PGTD.shape[0] > 0


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """A step's rows, on the device."""

    rows_FR: Tensor
    """As `PackedPlan.table` says."""
    work_split: Tensor
    """As `PackedPlan.work_split` says; latents need none."""
    table_SM: Tensor
    """Every slot's blocks."""
    chunks: bool
    """Whether rows may have several tokens."""


def attend_packed_pages(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    pages: PackedPages,
    step: PackedRows,
    plan: PackedPlan,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    inv_freq: Tensor | None = None,
    factor: float = 1.0,
    rule: ScoreRule = EVERYTHING,
) -> Tensor:
    """Append a step's keys and values, then return its causal attention [T, H, D].

    With `inv_freq` queries and keys come without their positions, in steps without chunks only;
    `factor` is on their cosines. Padding gets zeros.
    """
    _check(q_THD, k_TGD, pages, plan)
    if step.chunks and inv_freq is not None:
        raise ValueError("steps with chunks take queries and keys with their positions")
    k_TGD, v_TGD = _alike(k_TGD, v_TGD)
    q_THD = _append(q_THD, k_TGD, v_TGD, pages, step, plan, inv_freq, factor)
    out = _attend(q_THD, k_TGD, v_TGD, pages, step, plan, scale, alibi_slopes_H, rule)
    if step.chunks:
        _write_rings(k_TGD, v_TGD, pages, step, plan)
    return out


def append_packed_pages(
    k_TGD: Tensor, v_TGD: Tensor, pages: PackedPages, step: PackedRows, plan: PackedPlan
) -> None:
    """Append a step's keys, with their positions, and values; nothing attends to them yet."""
    q_THD = k_TGD.new_empty(len(k_TGD), plan.heads, plan.head_dim)  # the kernel copies them, too
    _check(q_THD, k_TGD, pages, plan)
    k_TGD, v_TGD = _alike(k_TGD, v_TGD)
    _append(q_THD, k_TGD, v_TGD, pages, step, plan, None, 1.0)
    if step.chunks:
        _write_rings(k_TGD, v_TGD, pages, step, plan)


def _write_rings(
    k_TGD: Tensor, v_TGD: Tensor, pages: PackedPages, step: PackedRows, plan: PackedPlan
) -> None:
    """Launch `write_rings`, behind what still reads what it overwrites."""
    pdl, num_rows = overlaps(k_TGD.device), step.rows_FR.shape[1]
    options = plan.ring_options(pdl=pdl)
    rings = (pages.layer.k_ring_SGRD, pages.layer.v_ring_SGRD)
    write_rings[(RING_TOKENS // int(options["TOKENS"]), plan.kv_heads, num_rows)](
        *(k_TGD, v_TGD, *rings, step.rows_FR, num_rows, k_TGD.stride(0)),
        **options,
        launch_pdl=pdl,
    )


def _append(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    pages: PackedPages,
    step: PackedRows,
    plan: PackedPlan,
    inv_freq: Tensor | None,
    factor: float,
) -> Tensor:
    """Launch `append_packed`; return the queries, rotated if there are frequencies."""
    layer, num_rows, pdl = pages.layer, step.rows_FR.shape[1], overlaps(q_THD.device)
    if step.chunks or q_THD.stride()[1:] != (plan.head_dim, 1):
        q_THD = q_THD.contiguous()  # without chunks the copy is the kernel's
    q_out = q_THD if step.chunks else torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    programs = num_rows
    if step.chunks:
        programs += len(q_THD) // BLOCK_TOKENS + num_rows
    options = plan.append_options(
        num_rows,
        rotary=inv_freq is not None,
        chunks=step.chunks,
        behind=pages.keeps_behind,
        pdl=pdl,
    )
    half = plan.head_dim // 2 if inv_freq is None else len(inv_freq)
    packed = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
    append_packed[(plan.kv_heads, programs)](
        *(q_THD, q_out, step.rows_FR if inv_freq is None else inv_freq, k_TGD, v_TGD),
        *(layer.k_ring_SGRD, layer.v_ring_SGRD, *packed),
        *(pages.k_behind_PGTD, pages.v_behind_PGTD, step.rows_FR, step.table_SM),
        *(factor, num_rows, step.table_SM.shape[1], q_THD.stride(0), k_TGD.stride(0)),
        HALF=half,
        **options,
        launch_pdl=pdl,
    )
    return q_out


def _attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    pages: PackedPages,
    step: PackedRows,
    plan: PackedPlan,
    scale: float,
    slopes: Tensor | None,
    rule: ScoreRule,
) -> Tensor:
    """Launch attention of rows of one token, of chunks, and the merge of parts."""
    layer, rows_FR, table_SM = pages.layer, step.rows_FR, step.table_SM
    out, num_rows, pdl = torch.empty_like(q_THD), rows_FR.shape[1], overlaps(q_THD.device)
    plan = plan.for_rows(num_rows)
    packed = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
    rings = (layer.k_ring_SGRD, layer.v_ring_SGRD)
    alibi = slopes is not None
    slopes = q_THD if slopes is None else slopes
    numbers = (scale * LOG2_E, num_rows, table_SM.shape[1], float(rule.cap or 1.0), rule.window)
    sinks = q_THD if rule.sinks_H is None else rule.sinks_H
    how = Scores(
        alibi=alibi,
        capped=rule.cap > 0,
        windowed=rule.window > 0,
        chunked=rule.chunked,
        sinks=rule.sinks_H is not None,
    )
    emulate = q_THD.device.type == "cpu"
    # A part is a program's first, or a row's: of packed tiles and of rings.
    num_parts = 2 * (num_rows + plan.programs) * plan.head_parts * plan.columns
    part = q_THD.new_empty(num_parts * plan.register_channels, dtype=torch.float32)
    lse = q_THD.new_empty(num_parts, dtype=torch.float32)
    cap = {"maxnreg": plan.max_registers} if plan.max_registers and not emulate else {}
    decode_packed[(plan.head_parts, plan.programs)](
        *(q_THD, *packed, *rings, rows_FR, step.work_split, table_SM, slopes, part, lse, *numbers),
        **plan.decode_options(how, pdl=pdl),
        EMULATE=emulate,
        launch_pdl=pdl,
        **cap,
    )
    if step.chunks:
        tiles = len(q_THD) // plan.tile_queries + num_rows
        chunk_packed[(tiles, plan.kv_heads)](
            *(q_THD, k_TGD, v_TGD, *packed, *rings, rows_FR, table_SM, slopes, sinks, out),
            *(*numbers, k_TGD.stride(0)),
            **plan.chunk_options(num_rows, how, pdl=pdl),
            EMULATE=emulate,
            launch_pdl=pdl,
        )
    combine = plan.combine_options(num_rows, how, pdl=pdl)
    grid = (num_rows, -(-plan.heads // combine["N_STEP"]), -(-plan.head_dim // combine["D_STEP"]))
    combine_packed[grid](
        *(part, lse, rows_FR, sinks, out, num_rows),
        **combine,
        launch_pdl=pdl,
    )
    return out


def _alike(k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with heads one behind the other and as many elements to a token."""
    dim = k_TGD.shape[2]
    if k_TGD.stride() != v_TGD.stride() or k_TGD.stride()[1:] != (dim, 1):
        return k_TGD.contiguous(), v_TGD.contiguous()
    return k_TGD, v_TGD


def _check(q_THD: Tensor, k_TGD: Tensor, pages: PackedPages, plan: PackedPlan) -> None:
    """Raise `ValueError` for queries, keys or pools that the kernels do not read."""
    ring = pages.layer.k_ring_SGRD
    got = (q_THD.shape[1:], k_TGD.shape[1:], ring.shape[1:], q_THD.dtype, k_TGD.dtype)
    dim, groups = plan.head_dim, plan.kv_heads
    want = ((plan.heads, dim), (groups, dim), (groups, RING_TOKENS, dim), ring.dtype, ring.dtype)
    if tuple(map(tuple, got[:3])) + got[3:] != want:
        raise ValueError(
            f"queries, keys and rings must be [.., {want[0]}], [.., {want[1]}] and [.., {want[2]}] "
            f"of {ring.dtype}, got {[tuple(x) for x in got[:3]]} of {got[3]} and {got[4]}"
        )
    layer, fmt = pages.layer, plan.fmt
    held = (layer.k_words_PGW.shape[1:], layer.v_words_PGW.shape[1:])
    if held != ((groups, fmt.key_words), (groups, fmt.value_words)):
        raise ValueError(
            f"blocks of {fmt.precision.value} must have [{groups}, {fmt.key_words}] words of keys "
            f"and [{groups}, {fmt.value_words}] of values, got {[list(x) for x in held]}"
        )

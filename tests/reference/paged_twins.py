"""Plain-torch twins of the kernels over pools of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.kv.paged.paged_rows import TokenPlaces
from llmpq.kernels.kv.reference import (
    EVERYTHING,
    ChosenKeys,
    IndexQueries,
    ScoreRule,
    attend_chosen,
)
from llmpq.sizes.kv_format import BLOCK_TOKENS


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
    """The twin of `paged_attend`: float64, one row at a time; zeros for padding."""
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
        positions_Q1 = torch.arange(start, end, device=q_THD.device)[:, None]
        ahead = torch.arange(end, device=q_THD.device) - positions_Q1
        x = q_THD[own].transpose(0, 1).double() @ k.transpose(1, 2) * scale
        if rule.cap:
            x = (x / rule.cap).tanh() * rule.cap
        if alibi_slopes_H is not None:
            x = x + alibi_slopes_H.double()[:, None, None] * ahead
        unseen = ahead > 0
        if rule.window:
            unseen |= ahead <= -rule.away(positions_Q1)
        x = x.masked_fill(unseen, float("-inf"))
        if rule.sinks_H is not None:
            x = torch.cat((x, rule.sinks_H.double()[:, None, None].expand(-1, count, 1)), dim=-1)
        out[own] = (x.softmax(dim=-1)[..., :end] @ v).transpose(0, 1).to(out.dtype)
    return out


def chosen_latents_reference(
    q_THD: Tensor,
    index: IndexQueries,
    pool: Tensor,
    rows_FR: Tensor,
    table_SM: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The twin of `attend_chosen_latents`, [T, H, ENTRY]: as CPUs do it; zeros for padding."""
    dim, entry = q_THD.shape[-1], pool.shape[-1]
    heads, channels = index.q_TXC.shape[1:]
    own = torch.nn.functional.pad(index.q_TXC, (dim, 0))
    own[..., 0] = index.weights_TX
    queries = torch.cat((torch.nn.functional.pad(q_THD, (0, entry - dim)), own), dim=1)
    out = queries.new_zeros(*q_THD.shape[:2], entry)
    for slot, start, count, first, *_ in rows_FR.T.tolist():
        if slot < 0 or count == 0:
            continue
        end, part = start + count, slice(first, first + count)
        blocks = table_SM[slot, : -(-end // BLOCK_TOKENS)].long()
        k_TD = pool[blocks][:, 0].flatten(0, 1)[:end]
        seen_QT = torch.arange(end) <= torch.arange(start, end)[:, None]
        seen_QT = seen_QT.to(pool.device)
        chosen = ChosenKeys(heads, index.topk, channels)
        out[part] = attend_chosen(queries[part], k_TD, seen_QT, chosen, scale=scale)
    return out


def spread_reference(
    rows_FR: Tensor, table_SM: Tensor, num_places: int, *, padding_slot: int
) -> TokenPlaces:
    """The twin of `spread`, row by row on the host."""
    positions, slots, places = torch.zeros((3, num_places), dtype=torch.long)
    row_slots, lasts = torch.zeros((2, rows_FR.shape[1]), dtype=torch.long)
    for row, (slot, start, count, first, *_) in enumerate(rows_FR.T.tolist()):
        known = slot >= 0
        row_slots[row], lasts[row] = (slot, first + count - 1) if known else (padding_slot, 0)
        for i in range(count):
            p = start + i if known else 0
            block = int(table_SM[slot, p // BLOCK_TOKENS]) if known else 0
            positions[first + i], slots[first + i] = p, row_slots[row]
            places[first + i] = block * BLOCK_TOKENS + p % BLOCK_TOKENS if known else -1
    return TokenPlaces(
        positions_T=positions, slots_T=slots, places_T=places, slots_R=row_slots, last_R=lasts
    )

"""The twin of packed_pages.py: plain torch, one row at a time, attention in float64.

T places of a step.  Q tokens of a row.  N keys it sees.  H query heads.  G key/value heads.
D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows
from llmpq.kernels.kv.reference import (
    EVERYTHING,
    ScoreRule,
    append,
    unpack_key_block,
    unpack_value_block,
)
from llmpq.kernels.kv.step_view import Rows, completed_blocks
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS, TAIL_TOKENS, packed_end


def attend_packed_pages_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    pages: PackedPages,
    step: PackedRows,
    fmt: KVFormat,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    inv_freq: Tensor | None = None,
    factor: float = 1.0,
    rule: ScoreRule = EVERYTHING,
) -> Tensor:
    """Append a step's keys and values, then return its attention [T, H, D]; zeros for padding."""
    if inv_freq is not None:
        position_T = _positions(step.rows_FR, len(q_THD))
        q_THD, k_TGD = (_turned(x, position_T, inv_freq, factor) for x in (q_THD, k_TGD))
    out = torch.zeros_like(q_THD)
    for slot, start, count, first, *_ in step.rows_FR.T.tolist():
        if slot < 0 or count == 0:
            continue
        own = slice(first, first + count)
        k, v = k_TGD[own], v_TGD[own]
        since = packed_end(start)
        recent = [
            _recent(ring[slot], new, since, start)
            for ring, new in ((pages.layer.k_ring_SGRD, k), (pages.layer.v_ring_SGRD, v))
        ]
        device = q_THD.device
        rows = Rows(
            slots_B=torch.tensor([slot], device=device),
            start_B=torch.tensor([start], device=device),
            num_new_B=torch.tensor([count], device=device),
        )
        append(fmt, pages.layer, step.table_SM, k[None], v[None], rows)
        if pages.keeps_behind:
            for block in completed_blocks(start, start + count):
                page, begin = step.table_SM[slot, block].long(), (block + 1) * BLOCK_TOKENS - since
                for kept, x in zip((pages.k_behind_PGTD, pages.v_behind_PGTD), recent, strict=True):
                    kept[page] = x[begin : begin + TAIL_TOKENS].transpose(0, 1)
        blocks = step.table_SM[slot, : packed_end(start + count - 1) // BLOCK_TOKENS].long()
        old = (
            unpack(fmt, pages.layer, blocks, torch.float64).transpose(0, 1).flatten(1, 2)
            for unpack in (unpack_key_block, unpack_value_block)
        )
        k_GND, v_GND = (
            torch.cat((packed, x.double().transpose(0, 1)), dim=1)
            for packed, x in zip(old, recent, strict=True)
        )
        seen_QN, away_QN = _sight(start, count, len(blocks) * BLOCK_TOKENS, since, device)
        rep = q_THD.shape[1] // k_TGD.shape[1]
        x = q_THD[own].transpose(0, 1).double() @ k_GND.repeat_interleave(rep, 0).mT * scale
        if alibi_slopes_H is not None:
            x = x + alibi_slopes_H.double()[:, None, None] * away_QN
        if rule.window:
            positions_Q1 = torch.arange(start, start + count, device=device)[:, None]
            seen_QN = seen_QN & (away_QN > -rule.away(positions_Q1))
        share = _shares(x, seen_QN, rule)
        out[own] = (share @ v_GND.repeat_interleave(rep, 0)).transpose(0, 1).to(out.dtype)
    return out


def _shares(x_HQN: Tensor, seen_QN: Tensor, rule: ScoreRule) -> Tensor:
    """Return what each key weighs, under a rule's cap and sinks."""
    if rule.cap:
        x_HQN = (x_HQN / rule.cap).tanh() * rule.cap
    x_HQN = x_HQN.masked_fill(~seen_QN, float("-inf"))
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.double()[:, None, None].expand(-1, x_HQN.shape[1], 1)
        x_HQN = torch.cat((x_HQN, sinks), dim=-1)
    return x_HQN.softmax(dim=-1)[..., : seen_QN.shape[1]]


def _recent(ring_GRD: Tensor, new_QGD: Tensor, since: int, start: int) -> Tensor:
    """Return the 16-bit tokens [.., G, D] from position `since` on, the step's own behind."""
    old = torch.arange(since, start, device=ring_GRD.device) % RING_TOKENS
    return torch.cat((ring_GRD[:, old].transpose(0, 1), new_QGD))


def _sight(
    start: int, count: int, packed: int, since: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return which of `packed` packed keys and of those since a position queries see, how far."""
    position = torch.arange(start, start + count, device=device)[:, None]
    line = torch.tensor([packed_end(int(p)) for p in position], device=device)[:, None]
    below = torch.arange(packed, device=device)[None]
    newest = torch.arange(since, start + count, device=device)[None]
    seen = torch.cat((below < line, (newest >= line) & (newest <= position)), dim=1)
    return seen, torch.cat((below - position, newest - position), dim=1)


def _positions(rows_FR: Tensor, places: int) -> Tensor:
    """Return the position of every token [T]; 0 of padding."""
    position_T = torch.zeros(places, dtype=torch.long, device=rows_FR.device)
    for slot, start, count, first, *_ in rows_FR.T.tolist():
        if slot >= 0:
            position_T[first : first + count] = torch.arange(start, start + count)
    return position_T


def _turned(x_TND: Tensor, position_T: Tensor, inv_freq: Tensor, factor: float) -> Tensor:
    """Rotate the halves of the first channels by the tokens' positions, in float32."""
    angle = position_T[:, None, None].float() * inv_freq
    cos, sin = angle.cos() * factor, angle.sin() * factor
    width = 2 * len(inv_freq)
    a, b = x_TND[..., :width].float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_TND.dtype)
    return torch.cat((turned, x_TND[..., width:]), dim=-1)

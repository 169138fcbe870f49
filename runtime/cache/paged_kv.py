"""The KV cache of a stage of the paged engine: a pool of blocks, and who has which.

Which block a request has is the scheduler's to say (runtime/engine/block_tables.py); it comes with
the step, as numbers, and is the same on every stage. What a query sees packed and what in 16 bits
depends on its position alone (llmpq/kv_format.py), never on how its prompt was cut into chunks.

Legend: T tokens of a step, H query heads, G key/value heads, R = H / G, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.cpu.block_attention import BlockRows, attend_blocks, native_takes
from llmpq.kv_format import BLOCK_TOKENS
from llmpq.model_spec import ModelSpec
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.models.attention import (
    EVERYTHING,
    NEG_INF,
    ScoreRule,
    sinks_of,
    with_scores,
)
from llmpq.runtime.ragged_step import RaggedStep, Span
from llmpq.runtime.request import PagedRow
from llmpq.runtime.step import Step

PIECE_ELEMENTS = 1 << 22
"""Elements of keys that rows gather together."""


class BlockLists:
    """The block table of every slot, on the host."""

    def __init__(self, slots: int) -> None:
        self._blocks: list[list[int]] = [[] for _ in range(slots)]

    def take(self, row: PagedRow) -> None:
        """Take the blocks a row brings; what its slot had behind them was another request's."""
        table = self._blocks[row.slot]
        if row.first_block > len(table):
            raise ValueError(
                f"slot {row.slot} has {len(table)} blocks, its row brings those from "
                f"{row.first_block} on"
            )
        del table[row.first_block :]
        table += row.new_blocks

    def of(self, slot: int) -> Sequence[int]:
        """Return the blocks of a slot, in the order of its tokens."""
        return self._blocks[slot]


class PagedPlainKV(PagedKV):
    """Unquantised keys and values: token p of a request is at p % 128 of its block p // 128."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_layers: int,
        slots: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_blocks * BLOCK_TOKENS, spec.kv_heads, spec.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = self.k  # MLA's latents are keys and values at once
        if spec.kv_vectors == 2:
            self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._tables = BlockLists(slots)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return self.k.nbytes + (0 if self.v is self.k else self.v.nbytes)

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Take note of the blocks that a step's rows got."""
        for row in rows:
            self._tables.take(row)

    def attend(
        self,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        step: Step,
        *,
        scale: float,
        alibi_slopes_H: Tensor | None = None,
        rule: ScoreRule = EVERYTHING,
    ) -> Tensor:
        """Append the step's keys and values, then return its causal attention [1, T, H, D]."""
        assert isinstance(step, RaggedStep)
        k_pool, v_pool = self.k[layer], self.v[layer]
        places_T = step.once("places", lambda: self._places(step))
        k_pool.index_copy_(0, places_T, k_BQGD[0, : len(places_T)])
        if self.v is not self.k:
            v_pool.index_copy_(0, places_T, v_BQGD[0, : len(places_T)])
        decode = partial(
            self._decode,
            k_pool=k_pool,
            v_pool=v_pool,
            step=step,
            scale=scale,
            alibi_slopes_H=alibi_slopes_H,
            rule=rule,
        )
        single = step.once("single", lambda: [span for span in step.spans if span.count == 1])
        gathers = rule.is_explicit or not native_takes(q_BQHD, k_pool)
        width = k_pool.shape[1] * k_pool.shape[2]
        groups = _pieces(single, PIECE_ELEMENTS // width) if gathers else [single] if single else []
        if len(groups) == 1 and len(single) == step.q_len:
            return decode(q_BQHD[0], group=single)[None]
        out = torch.zeros(q_BQHD.shape, dtype=q_BQHD.dtype, device=q_BQHD.device)
        for group in groups:
            at = [span.first for span in group]
            out[0, at] = decode(q_BQHD[0, at], group=group)
        for span in step.spans:
            if span.count > 1:
                part = slice(span.first, span.first + span.count)
                own = (k_BQGD[0, part], v_BQGD[0, part])
                if span.start > 0:
                    places_N = step.once(f"context {span.slot}", partial(self._upto, span))
                    own = (k_pool[places_N], v_pool[places_N])
                out[0, part] = attend_chunk(
                    q_BQHD[0, part],
                    *own,
                    span,
                    step,
                    scale=scale,
                    alibi_slopes_H=alibi_slopes_H,
                    rule=rule,
                )
        return out

    def _decode(
        self,
        q_BHD: Tensor,
        *,
        k_pool: Tensor,
        v_pool: Tensor,
        group: Sequence[Span],
        step: RaggedStep,
        scale: float,
        alibi_slopes_H: Tensor | None,
        rule: ScoreRule,
    ) -> Tensor:
        """Return [B, H, D] of rows of one token, over their blocks."""
        rows = step.once(f"blocks {group[0].first}", lambda: self._rows(group))
        if not rule.is_explicit:
            return attend_blocks(
                q_BHD,
                k_pool,
                v_pool,
                rows,
                scale=scale,
                window=rule.window,
                alibi_slopes_H=alibi_slopes_H,
            )
        (batch, heads, dim), kv_heads = q_BHD.shape, k_pool.shape[1]
        seen_BN = rows.seen(rule.window)
        bias = torch.zeros(seen_BN.shape).masked_fill_(~seen_BN, NEG_INF)[:, None, None]
        q = q_BHD.view(batch, kv_heads, heads // kv_heads, dim)
        k, v = rows.gathered(k_pool), rows.gathered(v_pool)
        sinks = sinks_of(rule, kv_heads, 1)
        out = with_scores(q, k, v, bias, sinks, scale=scale, cap=rule.cap)
        return out.reshape(batch, heads, dim)

    def _places(self, step: RaggedStep) -> Tensor:
        """Return [T]: where in the pool each token of a step goes."""
        places = []
        for span in step.spans:
            table = self._tables.of(span.slot)
            places += [
                table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
                for p in range(span.start, span.end)
            ]
        return torch.tensor(places, device=self.k.device)

    def _upto(self, span: Span) -> Tensor:
        """Return [N]: where the tokens of a row's request are, its new ones included."""
        first_M1 = self._rows([span]).tables_BM[0, :, None] * BLOCK_TOKENS
        places = (first_M1 + torch.arange(BLOCK_TOKENS)).flatten()[: span.end]
        return places.to(self.k.device)

    def _rows(self, group: Sequence[Span]) -> BlockRows:
        """Return the blocks of rows' requests; block 0 where there is none."""
        tables = [self._tables.of(span.slot)[: -(-span.end // BLOCK_TOKENS)] for span in group]
        longest = max(map(len, tables))
        padded = [[*table, *[0] * (longest - len(table))] for table in tables]
        ends = torch.tensor([span.end for span in group])
        return BlockRows(torch.tensor(padded), ends)


def attend_chunk(
    q_QHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    span: Span,
    step: RaggedStep,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    rule: ScoreRule = EVERYTHING,
) -> Tensor:
    """Return [Q, H, D] of a chunk's queries over its request's keys, the chunk's own the last."""
    num_keys, gqa = len(k_NGD), q_QHD.shape[1] != k_NGD.shape[1]
    bias = None
    window = rule.window if 0 < rule.window < num_keys else 0
    if span.start > 0 or alibi_slopes_H is not None or window or rule.is_explicit:
        bias = step.once(
            f"bias of row {span.first} {window}",
            lambda: _chunk_bias(span, num_keys, alibi_slopes_H, window),
        )
    if rule.is_explicit:
        assert bias is not None
        return _chunk_with_scores(q_QHD, k_NGD, v_NGD, bias, scale, rule)
    bias = None if bias is None else bias.to(q_QHD.dtype)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_QHD, k_NGD, v_NGD))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


def _chunk_with_scores(
    q_QHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, bias_QN: Tensor, scale: float, rule: ScoreRule
) -> Tensor:
    """Return [Q, H, D] of a chunk's queries where scores are capped or have sinks."""
    (q_len, heads, dim), groups = q_QHD.shape, k_NGD.shape[1]
    rep = heads // groups
    q = q_QHD.view(q_len, groups, rep, dim).permute(1, 2, 0, 3).reshape(1, groups, -1, dim)
    k, v = (x.transpose(0, 1)[None] for x in (k_NGD, v_NGD))
    sinks = sinks_of(rule, groups, q_len)
    out = with_scores(q, k, v, bias_QN.repeat(rep, 1), sinks, scale=scale, cap=rule.cap)
    return out.view(groups, rep, q_len, dim).permute(2, 0, 1, 3).reshape(q_len, heads, dim)


def _chunk_bias(
    span: Span, num_keys: int, alibi_slopes_H: Tensor | None, window: int = 0
) -> Tensor:
    """Return [Q, N] or [H, Q, N]: -inf at keys a query does not see, plus ALiBi's slopes."""
    away_QN = torch.arange(num_keys) - torch.arange(span.start, span.end)[:, None]
    bias = torch.zeros(away_QN.shape)
    if alibi_slopes_H is not None:
        bias = alibi_slopes_H.cpu()[:, None, None] * away_QN
    return bias.masked_fill_(_unseen(away_QN, window), NEG_INF)


def _unseen(away: Tensor, window: int) -> Tensor:
    """Return which keys a query does not see, by how far behind it they are."""
    return away > 0 if window == 0 else (away > 0) | (away <= -window)


def _pieces(spans: Sequence[Span], num_keys: int) -> list[list[Span]]:
    """Split rows so that each part, padded to its longest, gathers about `num_keys` keys."""
    pieces: list[list[Span]] = []
    longest = 0
    for span in spans:
        longest = max(longest, span.end)
        if not pieces or longest * (len(pieces[-1]) + 1) > num_keys:
            pieces.append([])
            longest = span.end
        pieces[-1].append(span)
    return pieces

"""The KV cache of a stage of the paged engine: a pool of blocks, and who has which.

Which block a request has is the scheduler's to say (runtime/engine/block_tables.py); it comes with
the step, as numbers, and is the same on every stage. What a query sees packed and what in 16 bits
depends on its position alone (llmpq/sizes/kv_format.py), never on how its prompt was cut up.

Legend: T tokens of a step, H query heads, G key/value heads, R = H / G, D head_dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.cpu.block_attention import BlockRows, attend_blocks, native_takes
from llmpq.kernels.cpu.native_layer import PoolPlace, PoolPlaces
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.model_spec import ModelSpec
from llmpq.runtime.cache.kv_cache import PagedKV
from llmpq.runtime.cache.layer_pool import LayerPool
from llmpq.runtime.models.attention import NEG_INF, sinks_of, with_scores
from llmpq.runtime.ragged_step import RaggedStep, Span
from llmpq.runtime.request import PagedRow
from llmpq.runtime.step import Step
from llmpq.sizes.pool_size import PoolSize

PIECE_ELEMENTS = 1 << 22
"""Elements of keys that rows gather together."""


class PagedPlainKV(PagedKV):
    """Unquantised keys and values: one pool of all layers, or one for each kind (layer_pool.py)."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: Sequence[int],
        size: PoolSize,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """`layers`: their numbers in the model."""
        windowed = [bool(size.window) and spec.is_windowed(layer) for layer in layers]

        def pool(num_layers: int, num_blocks: int, window: int) -> LayerPool:
            return LayerPool(
                spec,
                num_layers=num_layers,
                num_blocks=num_blocks,
                slots=size.slots,
                window=window,
                dtype=dtype,
                device=device,
            )

        self._whole = pool(windowed.count(False), size.num_blocks, 0)
        self._windowed = pool(windowed.count(True), size.window_blocks, size.window)
        places = [windowed[:index].count(kind) for index, kind in enumerate(windowed)]
        pools = [self._windowed if kind else self._whole for kind in windowed]
        self._layers = list(zip(pools, places, strict=True))
        """Of each layer its pool, and its number there."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return self._whole.nbytes + self._windowed.nbytes

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Take note of the blocks that a step's rows got."""
        for row in rows:
            self._whole.tables.take(row.slot, row.first_block, row.new_blocks)
            self._windowed.tables.take(
                row.slot, row.first_window_block, row.new_window_blocks, gaps=True
            )

    def place_of_tokens(self, layer: int, step: Step, rule: ScoreRule) -> PoolPlace | None:
        """Return where a step of one token a row goes, if our own code may attend to it there."""
        pool, place = self._layers[layer]
        if rule.is_explicit or pool.v is pool.k or not isinstance(step, RaggedStep):
            return None
        if not step.once("all single", lambda: all(span.count == 1 for span in step.spans)):
            return None
        return PoolPlace(pool.k[place], pool.v[place], *self._places_and_rows(pool, step))

    def places_of_tokens(self, step: Step) -> PoolPlaces | None:
        """Return the same of all layers, whose scores are plain or windows'."""
        pools = [self._whole, self._windowed]
        if self._whole.v is self._whole.k or not isinstance(step, RaggedStep):
            return None
        if not step.once("all single", lambda: all(span.count == 1 for span in step.spans)):
            return None
        taken: list[tuple[Tensor, BlockRows] | None] = [None, None]
        k_L, v_L, pool_L, used = self._addresses
        for number in used:
            taken[number] = self._places_and_rows(pools[number], step)
        return PoolPlaces(k_L, v_L, pool_L, taken)

    @cached_property
    def _addresses(self) -> tuple[Any, Any, Any, set[int]]:
        """Where each layer's keys and values lie, in which of the two pools, and which are used."""
        array = ctypes.c_size_t * len(self._layers)
        k_L = array(*(pool.k[place].data_ptr() for pool, place in self._layers))
        v_L = array(*(pool.v[place].data_ptr() for pool, place in self._layers))
        numbers = [int(pool is self._windowed) for pool, _ in self._layers]
        return k_L, v_L, (ctypes.c_int64 * len(numbers))(*numbers), set(numbers)

    @staticmethod
    def _places_and_rows(pool: LayerPool, step: RaggedStep) -> tuple[Tensor, BlockRows]:
        places_T = step.once(f"places {pool.window}", lambda: pool.places(step))
        return places_T, step.once(f"blocks 0 {pool.window}", lambda: pool.rows(step.spans))

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
        pool, place = self._layers[layer]
        k_pool, v_pool = pool.k[place], pool.v[place]
        places_T = step.once(f"places {pool.window}", lambda: pool.places(step))
        for stored, news in ((k_pool, k_BQGD), (v_pool, v_BQGD))[: 1 if pool.v is pool.k else 2]:
            stored.index_copy_(0, places_T, news[0, : len(places_T)])
        decode = partial(
            self._decode,
            pool=pool,
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
        groups = [single] if single else []
        if gathers:
            groups = _pieces(single, PIECE_ELEMENTS // width, pool)
        if len(groups) == 1 and len(single) == step.q_len:
            return decode(q_BQHD[0], group=single)[None]
        out = torch.zeros(q_BQHD.shape, dtype=q_BQHD.dtype, device=q_BQHD.device)
        for group in groups:
            at = [span.first for span in group]
            out[0, at] = decode(q_BQHD[0, at], group=group)
        for span in step.spans:
            if span.count > 1:
                part = slice(span.first, span.first + span.count)
                own, seen = (k_BQGD[0, part], v_BQGD[0, part]), span
                if span.start > 0:
                    key = f"context {span.slot} {pool.window}"
                    places_N = step.once(key, partial(pool.in_sight, span))
                    own = (k_pool[places_N], v_pool[places_N])
                    seen = replace(span, start=span.start - pool.first_position(span))
                out[0, part] = attend_chunk(
                    q_BQHD[0, part],
                    *own,
                    seen,
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
        pool: LayerPool,
        k_pool: Tensor,
        v_pool: Tensor,
        group: Sequence[Span],
        step: RaggedStep,
        scale: float,
        alibi_slopes_H: Tensor | None,
        rule: ScoreRule,
    ) -> Tensor:
        """Return [B, H, D] of rows of one token, over their blocks."""
        rows = step.once(f"blocks {group[0].first} {pool.window}", lambda: pool.rows(group))
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


def _pieces(spans: Sequence[Span], num_keys: int, pool: LayerPool) -> list[list[Span]]:
    """Split rows so that each part, padded to its longest, gathers about `num_keys` keys."""
    pieces: list[list[Span]] = []
    longest = 0
    for span in spans:
        own = pool.num_keys(span)
        longest = max(longest, own)
        if not pieces or longest * (len(pieces[-1]) + 1) > num_keys:
            pieces.append([])
            longest = own
        pieces[-1].append(span)
    return pieces

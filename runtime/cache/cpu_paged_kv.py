"""The KV cache of a stage: a pool of blocks, and who has which.

Which block a request has is the scheduler's to say (runtime/engine/block_tables.py); it comes with
the step, as numbers, and is the same on every stage. What a query sees packed and what in 16 bits
depends on its position alone (llmpq/sizes/kv_format.py), never on how its prompt was cut up.

Token p of a request is at p % 128 of its block p // 128. Layers with a window have a pool of their
own where that takes less: blocks that have left the window are given to other requests, so what a
step reads begins with the first block in sight, and positions count from there.

Legend: N places of a pool, M blocks of a request, T tokens of a step, H query heads,
G key/value heads, R = H / G, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from llmpq.kernels.cpu.block_attention import BlockRows, attend_blocks, native_takes
from llmpq.kernels.cpu.native_layer import PoolPlace, PoolPlaces
from llmpq.kernels.kv.reference import ScoreRule, Scoring, attend_chosen
from llmpq.kernels.native import huge_pages
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.cache.attention import NEG_INF, sinks_of, with_scores
from llmpq.runtime.cache.kv_cache import AttentionInputs, PagedKV
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.step import RaggedStep, Span
from llmpq.sizes.kv_format import BLOCK_TOKENS, first_seen_block
from llmpq.sizes.pool_size import PoolSize
from llmpq.sizes.workspace import CHUNK_ELEMENTS, LEAST_KEYS


class BlockLists:
    """The block table of every slot, on the host."""

    def __init__(self, slots: int) -> None:
        self._blocks: list[list[int]] = [[] for _ in range(slots)]

    def take(self, slot: int, first: int, blocks: Sequence[int], *, gaps: bool = False) -> None:
        """Take the blocks a row brings; what its slot had behind them was another request's.

        `gaps`: a request may begin behind blocks that its window does not reach.
        """
        table = self._blocks[slot]
        if first > len(table):
            if not gaps:
                raise ValueError(
                    f"slot {slot} has {len(table)} blocks, its row brings those from {first} on"
                )
            table += [0] * (first - len(table))
        del table[first:]
        table += blocks

    def of(self, slot: int) -> Sequence[int]:
        """Return the blocks of a slot, in the order of its tokens."""
        return self._blocks[slot]


class BlockStorage:
    """Keys and values [layers, N, G, D] of a stage's layers of one kind, and who has what."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_layers: int,
        num_blocks: int,
        slots: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`window`: tokens that queries see and blocks are kept for; 0 for all."""
        shape = (num_layers, num_blocks * BLOCK_TOKENS, spec.kv_heads, spec.head_dim)
        self.k = huge_pages.zeros(shape, dtype, device)
        self.v = self.k  # MLA's latents are keys and values at once
        if spec.kv_vectors == 2:
            self.v = huge_pages.zeros(shape, dtype, device)
        self.window, self.tables = window, BlockLists(slots)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all layers."""
        return self.k.nbytes + (0 if self.v is self.k else self.v.nbytes)

    def places(self, step: RaggedStep) -> Tensor:
        """Return [T]: where in the pool each token of a step goes."""
        spans = step.spans
        rows = [self.places_of(span.slot, range(span.start, span.end)) for span in spans]
        return torch.tensor([place for row in rows for place in row], device=self.k.device)

    def places_of(self, slot: int, positions: Sequence[int]) -> list[int]:
        """Return where in the pool a request's tokens at these positions go."""
        table = self.tables.of(slot)
        return [table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in positions]

    def first_position(self, span: Span) -> int:
        """Return the position that what a row reads begins with."""
        return first_seen_block(span.start, self.window) * BLOCK_TOKENS if self.window else 0

    def num_keys(self, span: Span) -> int:
        """Return how many tokens a row reads, its new ones included."""
        return span.end - self.first_position(span)

    def in_sight(self, span: Span) -> Tensor:
        """Return [num_keys]: where the tokens are that a row reads."""
        first_M1 = self.rows([span]).tables_BM[0, :, None] * BLOCK_TOKENS
        places = (first_M1 + torch.arange(BLOCK_TOKENS)).flatten()[: self.num_keys(span)]
        return places.to(self.k.device)

    def rows(self, group: Sequence[Span]) -> BlockRows:
        """Return the blocks that rows read; block 0 where there is none."""
        tables = []
        for span in group:
            first = self.first_position(span) // BLOCK_TOKENS
            tables.append(self.tables.of(span.slot)[first : -(-span.end // BLOCK_TOKENS)])
        longest = max(map(len, tables))
        padded = [[*table, *[0] * (longest - len(table))] for table in tables]
        ends = torch.tensor([self.num_keys(span) for span in group])
        return BlockRows(torch.tensor(padded), ends)


PIECE_ELEMENTS = 1 << 22
"""Elements of keys that rows gather together."""


class CpuPagedKV(PagedKV[RaggedStep]):
    """Unquantised keys and values: one pool of all layers, or one for each kind of layer."""

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

        def pool(num_layers: int, num_blocks: int, window: int) -> BlockStorage:
            return BlockStorage(
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

    def stored_tokens(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, N, G, D]; of blocks that left a window whatever is there."""
        pool, place = self._layers[layer]
        places_N = torch.tensor(pool.places_of(slot, range(count)))
        return pool.k[place][places_N][None], pool.v[place][places_N][None]

    def place_of_tokens(self, layer: int, step: RaggedStep, rule: ScoreRule) -> PoolPlace | None:
        """Return where a step of one token a row goes, if our own code may attend to it there."""
        pool, place = self._layers[layer]
        if rule.needs_mask or pool.v is pool.k:
            return None
        if not step.once("all single", lambda: all(span.count == 1 for span in step.spans)):
            return None
        return PoolPlace(pool.k[place], pool.v[place], *self._places_and_rows(pool, step))

    def places_of_tokens(self, step: RaggedStep) -> PoolPlaces | None:
        """Return the same of all layers, whose scores are plain or windows'."""
        pools = [self._whole, self._windowed]
        if self._whole.v is self._whole.k:
            return None
        if not step.once("all single", lambda: all(span.count == 1 for span in step.spans)):
            return None
        taken: list[tuple[Tensor, BlockRows] | None] = [None, None]
        k_L, v_L, pool_L, used = self._addresses
        for number in used:
            taken[number] = self._places_and_rows(pools[number], step)
        return PoolPlaces(k_L, v_L, pool_L, taken)

    @cached_property
    def _addresses(self) -> tuple[list[int], list[int], list[int], set[int]]:
        """Where each layer's keys and values lie, in which of the two pools, and which are used."""
        k_L = [pool.k[place].data_ptr() for pool, place in self._layers]
        v_L = [pool.v[place].data_ptr() for pool, place in self._layers]
        numbers = [int(pool is self._windowed) for pool, _ in self._layers]
        return k_L, v_L, numbers, set(numbers)

    @staticmethod
    def _places_and_rows(pool: BlockStorage, step: RaggedStep) -> tuple[Tensor, BlockRows]:
        places_T = step.once(f"places {pool.window}", lambda: pool.places(step))
        return places_T, step.once(f"blocks 0 {pool.window}", lambda: pool.rows(step.spans))

    def attend(self, layer: int, inputs: AttentionInputs, step: RaggedStep) -> Tensor:
        """Append the step's keys and values, then return its causal attention [1, T, H, D]."""
        q_BQHD, k_BQGD, v_BQGD = inputs.q_BQHD, inputs.k_BQGD, inputs.v_BQGD
        scoring = inputs.scoring
        pool, place = self._layers[layer]
        k_pool, v_pool = pool.k[place], pool.v[place]
        places_T = step.once(f"places {pool.window}", lambda: pool.places(step))
        for stored, news in ((k_pool, k_BQGD), (v_pool, v_BQGD))[: 1 if pool.v is pool.k else 2]:
            stored.index_copy_(0, places_T, news[0, : len(places_T)])
        if scoring.rule.chosen is not None:
            return self._chosen(q_BQHD, pool, k_pool, step, scoring)
        decode = partial(
            self._decode,
            pool=pool,
            k_pool=k_pool,
            v_pool=v_pool,
            step=step,
            scoring=scoring,
        )
        single = step.once("single", lambda: [span for span in step.spans if span.count == 1])
        gathers = scoring.rule.needs_mask or not native_takes(q_BQHD, k_pool)
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
                out[0, part] = attend_chunk(
                    q_BQHD[0, part],
                    k_BQGD[0, part],
                    v_BQGD[0, part],
                    partial(self._past, pool, k_pool, v_pool, span, step),
                    span.start,
                    scoring,
                )
        return out

    @staticmethod
    def _chosen(
        q_BQHD: Tensor,
        pool: BlockStorage,
        k_pool: Tensor,
        step: RaggedStep,
        scoring: Scoring,
    ) -> Tensor:
        """Return [1, T, H, D] over the keys that an indexer chooses, row by row."""
        rule = scoring.rule
        assert rule.chosen is not None
        shape = (*q_BQHD.shape[:2], rule.heads_of(q_BQHD), q_BQHD.shape[3])
        out = torch.zeros(shape, dtype=q_BQHD.dtype, device=q_BQHD.device)
        for span in step.spans:
            part = slice(span.first, span.first + span.count)
            k_ND = k_pool[step.once(f"context {span.slot} 0", partial(pool.in_sight, span))][:, 0]
            seen_QN = torch.arange(len(k_ND)) <= torch.arange(span.start, span.end)[:, None]
            given = (q_BQHD[0, part], k_ND, seen_QN, rule.chosen)
            out[0, part] = attend_chosen(*given, scale=scoring.scale)
        return out

    @staticmethod
    def _past(
        pool: BlockStorage, k_pool: Tensor, v_pool: Tensor, span: Span, step: RaggedStep, most: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield position, keys and values [N, G, D] that a row sees before it, in pieces."""
        if span.start == 0:
            return
        key = f"context {span.slot} {pool.window}"
        places_N = step.once(key, partial(pool.in_sight, span))
        first = pool.first_position(span)
        for at in range(first, span.start, most):
            own_N = places_N[at - first : min(at + most, span.start) - first]
            yield at, k_pool[own_N], v_pool[own_N]

    def _decode(
        self,
        q_BHD: Tensor,
        *,
        pool: BlockStorage,
        k_pool: Tensor,
        v_pool: Tensor,
        group: Sequence[Span],
        step: RaggedStep,
        scoring: Scoring,
    ) -> Tensor:
        """Return [B, H, D] of rows of one token, over their blocks."""
        rule = scoring.rule
        rows = step.once(f"blocks {group[0].first} {pool.window}", lambda: pool.rows(group))
        if not rule.needs_mask:
            return attend_blocks(
                q_BHD,
                k_pool,
                v_pool,
                rows,
                scale=scoring.scale,
                window=rule.window,
                alibi_slopes_H=scoring.alibi_slopes_H,
            )
        (batch, heads, dim), kv_heads = q_BHD.shape, k_pool.shape[1]
        seen_BN = rows.seen(rule.window)
        if rule.chunked:
            first_B = torch.tensor(
                [rule.first_seen(s.start) - pool.first_position(s) for s in group]
            )
            seen_BN &= torch.arange(seen_BN.shape[1]) >= first_B[:, None]
        bias = torch.zeros(seen_BN.shape).masked_fill_(~seen_BN, NEG_INF)[:, None, None]
        q = q_BHD.view(batch, kv_heads, heads // kv_heads, dim)
        k, v = rows.gathered(k_pool), rows.gathered(v_pool)
        sinks = sinks_of(rule, kv_heads, 1)
        out = with_scores(q, k, v, bias, sinks, scale=scoring.scale, cap=rule.cap)
        return out.reshape(batch, heads, dim)


Past = Callable[[int], Iterator[tuple[int, Tensor, Tensor]]]
"""Number of keys -> position, keys and values [N, G, D] of so many, until the chunk begins."""


def attend_chunk(
    q_QHD: Tensor,
    k_QGD: Tensor,
    v_QGD: Tensor,
    past: Past,
    start: int,
    scoring: Scoring,
) -> Tensor:
    """Return [Q, H, D] of a chunk's queries from position `start` on, over its request's keys.

    The chunk's own keys come first, then those before it in pieces, whose shares are added up by
    their softmax's sums: what is held does not grow with the context.
    """
    piece, rule = partial(_attend_piece, q_QHD, start, scoring), scoring.rule
    out, total = piece(k_QGD, v_QGD, start)
    heads, groups = q_QHD.shape[1], k_QGD.shape[1]
    most = CHUNK_ELEMENTS // (groups * q_QHD.shape[2])
    if rule.is_explicit or scoring.alibi_slopes_H is not None:
        most = min(most, CHUNK_ELEMENTS // (heads * len(q_QHD)))
    for at, k_NGD, v_NGD in past(max(most, LEAST_KEYS)):
        if at + len(k_NGD) <= rule.first_seen(start):
            continue
        more, own = piece(k_NGD, v_NGD, at)
        del k_NGD, v_NGD  # before the next are gathered
        both = torch.logaddexp(total, own)
        out = out.float().mul_((total - both).exp_()[..., None])
        out += more.float().mul_((own - both).exp_()[..., None])
        total = both
        del more
    if rule.sinks_H is not None:
        out = out * torch.sigmoid(total - rule.sinks_H.float()[:, None])[..., None]
    return out.transpose(0, 1).to(q_QHD.dtype)


def _attend_piece(
    q_QHD: Tensor, start: int, scoring: Scoring, k_NGD: Tensor, v_NGD: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Return [H, Q, D] over keys from position `first` on, and [H, Q]: the log of softmax's sum."""
    scale, slopes_H, rule = scoring.scale, scoring.alibi_slopes_H, scoring.rule
    (q_len, heads, dim), groups = q_QHD.shape, k_NGD.shape[1]
    own = first == start
    seen = own or first < rule.first_seen(start + q_len - 1)
    bias = None
    if slopes_H is not None or (seen and rule.window) or (own and rule.cap):
        bias = _bias(start, q_len, first, len(k_NGD), slopes_H, rule).to(q_QHD.dtype)[None]
    k, v = (x.transpose(0, 1)[None] for x in (k_NGD, v_NGD))
    q = q_QHD.transpose(0, 1)[None]
    if rule.cap:
        by_group = q.reshape(groups, -1, q_len, dim)
        scores = torch.matmul(by_group, k[0][:, None].transpose(-1, -2)).float().mul_(scale)
        scores.div_(rule.cap).tanh_().mul_(rule.cap)
        if bias is not None:
            scores += bias[0]
        total = scores.logsumexp(dim=-1, keepdim=True)
        share = scores.sub_(total.clamp(min=torch.finfo(torch.float32).min)).exp_()
        out = torch.matmul(share.to(v.dtype), v[0][:, None])
        return out.view(heads, q_len, dim), total.view(heads, q_len)
    if own or bias is not None:  # queries differ in what they see, or heads in their bias
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    else:
        q = q.reshape(1, groups, -1, dim)
    # torch's public operator keeps the sum of its softmax to itself.
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=own and bias is None, attn_mask=bias, scale=scale
    )
    total = total.reshape(heads, q_len)
    if rule.window:  # of a query that sees none of the keys the operator says 0
        total[:, max(0, rule.unseen_from(first + len(k_NGD) - 1) - start) :] = NEG_INF
    return out.reshape(heads, q_len, dim), total


def _bias(
    start: int, q_len: int, first: int, num_keys: int, slopes_H: Tensor | None, rule: ScoreRule
) -> Tensor:
    """Return [1, Q, N] or [H, Q, N]: -inf at keys a query does not see, plus ALiBi's slopes."""
    keys_N, queries_Q1 = (
        torch.arange(at, at + count, dtype=torch.int32)
        for at, count in ((first, num_keys), (start, q_len))
    )
    away_QN = keys_N - queries_Q1[:, None]
    unseen = away_QN > 0
    if rule.window:
        unseen |= away_QN <= -rule.away(queries_Q1[:, None])
    if slopes_H is None:
        return torch.zeros(away_QN.shape).masked_fill_(unseen, NEG_INF)[None]
    return (slopes_H.cpu()[:, None, None] * away_QN).masked_fill_(unseen, NEG_INF)


def _pieces(spans: Sequence[Span], num_keys: int, pool: BlockStorage) -> list[list[Span]]:
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

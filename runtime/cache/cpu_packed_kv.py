"""The pool of packed blocks: 8, 4 or 2-bit keys and values, a 16-bit ring per running request.

The packing and the attention are `QuantizedKVCache`'s, whose page table the step's rows fill. For
the prefix cache a block has the `TAIL_TOKENS` tokens behind it in 16 bits, too: a request that hits
it starts right behind those, where a query sees every hit block packed and these tokens not.

Legend: T tokens of a step, Q tokens of a row, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache, StepPlan
from llmpq.kernels.kv.step_view import completed_blocks
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import AttentionInputs, PagedKV
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.step import RaggedStep, Span
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS, TAIL_TOKENS, packed_blocks
from llmpq.sizes.pool_size import PoolSize
from llmpq.sizes.workspace import QUERIES_AT_ONCE


def _pieces(span: Span) -> list[Span]:
    """Split a chunk: which keys each of its queries sees is a table of all of them."""
    return [
        Span(span.slot, span.start + at, min(QUERIES_AT_ONCE, span.count - at), span.first + at)
        for at in range(0, span.count, QUERIES_AT_ONCE)
    ]


class CpuPackedKV(PagedKV[RaggedStep]):
    """Packed keys and values of one stage, the newest tokens in 16 bits."""

    def __init__(
        self,
        spec: ModelSpec,
        kv: KVPrecision,
        *,
        layers: Sequence[int],
        size: PoolSize,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """`layers`: their numbers in the model."""
        columns = packed_blocks(size.max_len)
        self._table_SN = torch.zeros((size.slots, columns), dtype=torch.int32, device=device)
        self.cache = QuantizedKVCache(
            KVFormat(precision=kv, head_dim=spec.head_dim),
            num_layers=len(layers),
            kv_heads=spec.kv_heads,
            slots=size.slots,
            max_len=size.max_len,
            dtype=dtype,
            device=device,
            table_SN=self._table_SN,
            pages=size.num_blocks,
        )
        behind = (len(layers), size.num_blocks if size.prefix_cache else 0, TAIL_TOKENS)
        shape = (*behind, spec.kv_heads, spec.head_dim)
        self._k_behind = torch.zeros(shape, dtype=dtype, device=device)
        self._v_behind = torch.zeros(shape, dtype=dtype, device=device)
        """[layers, blocks, 17, G, D]: the tokens behind each block; no blocks without prefixes."""
        self._step: RaggedStep | None = None
        self._parts: list[tuple[Sequence[Span], StepPlan]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of blocks, of what is behind them, and of rings, all layers."""
        return self.cache.nbytes + self._k_behind.nbytes + self._v_behind.nbytes

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Take note of the blocks that a step's rows got; found ones bring what is behind them."""
        for row, start in zip(rows, starts, strict=True):
            if row.new_blocks:
                end = row.first_block + len(row.new_blocks)
                blocks = torch.tensor(row.new_blocks, dtype=torch.int32)
                self._table_SN[row.slot, row.first_block : end] = blocks
            if row.resumes:
                self._resume(row.slot, start)

    def attend(self, layer: int, inputs: AttentionInputs, step: RaggedStep) -> Tensor:
        """Append the step's keys and values, then return its causal attention [1, T, H, D]."""
        q_BQHD, scoring = inputs.q_BQHD, inputs.scoring
        if step is not self._step:
            self._step, self._parts = step, self._planned(step)
        shape = (*q_BQHD.shape[:2], scoring.rule.heads_of(q_BQHD), q_BQHD.shape[3])
        out = torch.zeros(shape, dtype=q_BQHD.dtype, device=q_BQHD.device)
        for spans, plan in self._parts:
            places = torch.tensor([range(s.first, s.first + s.count) for s in spans])
            q, k, v = (x[0, places] for x in (q_BQHD, inputs.k_BQGD, inputs.v_BQGD))
            for row, span in enumerate(spans):
                self._keep_behind(layer, span, k[row], v[row])
            out[0, places] = self.cache.run(plan, layer, q, k, v, scoring)
        return out

    def keep_for_readers(self, layer: int, step: RaggedStep) -> None:
        """Keep the newest tokens of a layer as they are before the chunks of a step."""
        rings = self.cache.layers[layer]
        step.memo[f"rings {id(rings)}"] = [
            (span.slot, rings.k_ring_SGRD[span.slot].clone(), rings.v_ring_SGRD[span.slot].clone())
            for span in step.spans
            if span.count > 1
        ]

    def attend_again(self, layer: int, inputs: AttentionInputs, step: RaggedStep) -> Tensor:
        """Return the attention of other queries; the step is appended again to what it found."""
        rings = self.cache.layers[layer]
        for slot, keys, values in step.memo[f"rings {id(rings)}"]:
            rings.k_ring_SGRD[slot], rings.v_ring_SGRD[slot] = keys, values
        return self.attend(layer, inputs, step)

    def append(self, layer: int, k_BQGD: Tensor, v_BQGD: Tensor, step: RaggedStep) -> None:
        """Append the step's keys and values; nothing attends to them yet."""
        self._append(layer, k_BQGD, v_BQGD, step.once("packed parts", lambda: self._planned(step)))

    def _append(
        self,
        layer: int,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        parts: Sequence[tuple[Sequence[Span], StepPlan]],
    ) -> None:
        for spans, plan in parts:
            places = torch.tensor([range(s.first, s.first + s.count) for s in spans])
            k, v = (x[0, places] for x in (k_BQGD, v_BQGD))
            for row, span in enumerate(spans):
                self._keep_behind(layer, span, k[row], v[row])
            self.cache.append(plan, layer, k, v)

    def take_tokens_of(self, other: PagedKV, slot: int, count: int) -> None:
        """Append a request's first tokens as another pool has them."""
        parts = [([piece], self._plan([piece])) for piece in _pieces(Span(slot, 0, count, 0))]
        for layer in range(len(self.cache.layers)):
            self._append(layer, *other.stored_tokens(layer, slot, count), parts)

    def _planned(self, step: RaggedStep) -> list[tuple[Sequence[Span], StepPlan]]:
        """Return the rows of one token together and each chunk in pieces, ready for every layer."""
        single = [span for span in step.spans if span.count == 1]
        parts = [single] if single else []
        for span in step.spans:
            if span.count > 1:
                parts += [[piece] for piece in _pieces(span)]
        return [(spans, self._plan(spans)) for spans in parts]

    def _plan(self, spans: Sequence[Span]) -> StepPlan:
        device = self.cache.device
        slots, starts, counts = (
            torch.tensor(values, device=device)
            for values in zip(*((s.slot, s.start, s.count) for s in spans), strict=True)
        )
        return self.cache.plan(
            slots,
            starts,
            counts,
            q_len=spans[0].count,
            max_end=max(span.end for span in spans),
        )

    def _keep_behind(self, layer: int, span: Span, k_QGD: Tensor, v_QGD: Tensor) -> None:
        """Keep the tokens behind every block that a row is about to have packed.

        Before the step is appended: the ring still has what the row's own tokens would overwrite.
        """
        if not self._k_behind.shape[1]:
            return
        for block in completed_blocks(span.start, span.end):
            first = (block + 1) * BLOCK_TOKENS
            page = self._table_SN[span.slot, block].long()
            old = max(span.start - first, 0)
            places = torch.arange(first, first + old) % RING_TOKENS
            new = slice(first + old - span.start, first + TAIL_TOKENS - span.start)
            rings = self.cache.layers[layer]
            for kept, ring, fresh in (
                (self._k_behind, rings.k_ring_SGRD, k_QGD),
                (self._v_behind, rings.v_ring_SGRD, v_QGD),
            ):
                kept[layer, page, :old] = ring[span.slot][:, places].transpose(0, 1)
                kept[layer, page, old:] = fresh[new]

    def _resume(self, slot: int, start: int) -> None:
        """Put the tokens behind the last block found into a request's ring."""
        page = self._table_SN[slot, start // BLOCK_TOKENS - 1].long()
        places = torch.arange(start - TAIL_TOKENS, start) % RING_TOKENS
        for layer, rings in enumerate(self.cache.layers):
            rings.k_ring_SGRD[slot][:, places] = self._k_behind[layer, page].transpose(0, 1)
            rings.v_ring_SGRD[slot][:, places] = self._v_behind[layer, page].transpose(0, 1)

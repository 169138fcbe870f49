"""The pool of packed blocks of a stage on a GPU: keys and values of 8, 4 or 2 bits, each its own.

    pool   [layers, blocks, G, ...]      codes, scales and zeros (kernels/formats/kv_block.py), and
                                         for the prefix cache the 16-bit tokens behind each block
    ring   [layers, slots, G, 160, D]    of each running request its newest tokens in 16 bits

It stores what CpuPackedKV stores on a CPU. A request whose prefix was found gets the 16-bit tokens
behind the last found block copied to its ring, and is computed from the token behind those on. A
step's kernels are called through kernels/kv/paged/packed_pages.py.

Legend: T tokens of a step, H query heads, G key/value heads, D head_dim, S slots, M blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat, pool_format
from llmpq.kernels.fused.rope_append import rope_append_pages
from llmpq.kernels.kv.paged.packed_pages import (
    PackedPages,
    PackedRows,
    append_packed_pages,
    attend_packed_pages,
)
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.kv.paged.paged_rows import Ints, TokenPlaces
from llmpq.kernels.kv.storage import KVLayer
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase, Numbers, write_blocks
from llmpq.runtime.cache.kv_cache import AttentionInputs, PagedKV
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.device_copies import upload
from llmpq.runtime.steps.paged_step import PagedStep
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS, TAIL_TOKENS, pool_blocks
from llmpq.sizes.pool_size import PoolSize


class GpuPackedKV(GpuPagedKVBase):
    """Packed keys and values of one stage in blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        kv: KVPrecision,
        *,
        layers: Sequence[int],
        size: PoolSize,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`layers`: their numbers in the model."""
        assert not size.window, "llmpq/plans/capabilities.py refuses before"
        fmt = self._format(spec, kv)
        self._device = torch.device(device)
        # As many columns as at 16 bits: `spread` also looks up the newest tokens, not packed yet.
        self.columns = pool_blocks(KVPrecision.KV16, size.max_len)
        self._table_SM = torch.zeros(
            (size.slots, self.columns), dtype=torch.int32, device=self._device
        )
        heads = (spec.kv_heads,)
        blocks = (len(layers), size.num_blocks, *heads)
        behind = (len(layers), size.num_blocks if size.prefix_cache else 0, *heads, TAIL_TOKENS)
        ring = (len(layers), size.slots, *heads, RING_TOKENS, spec.head_dim)

        def pair(shape: tuple[int, ...], kind: torch.dtype) -> tuple[Tensor, Tensor]:
            first, second = (torch.zeros(shape, dtype=kind, device=device) for _ in "kv")
            return first, second

        self._words = (
            torch.zeros(
                (*blocks, fmt.key_words),
                dtype=dtype if fmt.plain_keys else torch.int32,
                device=device,
            ),
            torch.zeros((*blocks, fmt.value_words), dtype=torch.int32, device=device),
        )
        self._params = (
            torch.zeros((*blocks, *fmt.key_param_shape), dtype=torch.float16, device=device),
            torch.zeros((*blocks, 2, BLOCK_TOKENS), dtype=torch.float16, device=device),
        )
        self._behind = pair((*behind, spec.head_dim), dtype)
        self._rings = pair(ring, dtype)
        self._layers = [self._layer(index) for index in range(len(layers))]
        self.launches = self._planned(spec, fmt, dtype)
        self.num_work_split = self.launches.num_work_split

    def _format(self, spec: ModelSpec, kv: KVPrecision) -> KVFormat:
        """Return how blocks are packed."""
        return pool_format(kv, spec.head_dim)

    def _planned(self, spec: ModelSpec, fmt: KVFormat, dtype: torch.dtype) -> Any:
        """Return how steps are launched."""
        return PackedPlan.of(fmt, spec.heads, spec.kv_heads, dtype, self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' blocks, of the 16-bit tokens behind blocks, and of rings."""
        parts = (*self._words, *self._params, *self._behind, *self._rings)
        return sum(part.nbytes for part in parts)

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Write the blocks that a step's rows got to the table, and rings of found prefixes."""
        write_blocks(self._table_SM, [(row.slot, row.first_block, row.new_blocks) for row in rows])
        for row, start in zip(rows, starts, strict=True):
            if row.resumes:
                # A request's first row has all the blocks that it hit.
                found = row.new_blocks[start // BLOCK_TOKENS - 1 - row.first_block]
                self._resume(row.slot, start, found)

    def work_split(self, table: Ints) -> Numbers:
        """Return which rows and blocks of a step's table each of attention's programs computes."""
        values: Numbers = self.launches.work_split(table)
        return values

    def attend(self, layer: int, inputs: AttentionInputs, step: PagedStep) -> Tensor:
        """Append the step's keys and values, then return its causal attention [1, T, H, D]."""
        rotation, scoring = inputs.rotation, inputs.scoring
        if rotation is not None and (step.chunks or rotation.inv_freq.dim() > 1):
            inputs, rotation = rotated(inputs, step), None
        out_THD = attend_packed_pages(
            inputs.q_BQHD[0],
            inputs.k_BQGD[0],
            inputs.v_BQGD[0],
            self._layers[layer],
            self._rows(step),
            self.launches,
            scale=scoring.scale,
            alibi_slopes_H=scoring.alibi_slopes_H,
            inv_freq=None if rotation is None else rotation.inv_freq,
            factor=1.0 if rotation is None else rotation.factor,
            rule=scoring.rule,
        )
        return out_THD[None]

    def _rows(self, step: PagedStep) -> PackedRows:
        """Return a step's rows as the kernels of packed blocks take them."""
        return PackedRows(
            rows_FR=step.rows_FR,
            work_split=step.work_split,
            table_SM=self._table_SM,
            chunks=step.chunks,
        )

    def keep_for_readers(self, layer: int, step: PagedStep) -> None:
        """Copy a layer's rings as they are before the chunks of a step overwrite their tokens."""
        if step.chunks:
            rings = [ring[layer].clone() for ring in self._rings]
            step.memo[f"rings {id(self)} {layer}"] = rings

    def attend_again(self, layer: int, inputs: AttentionInputs, step: PagedStep) -> Tensor:
        """Return the attention of another layer's queries to this layer's keys and values.

        The rings are put back as `keep_for_readers` copied them, and the step is appended again.
        """
        for ring, kept in zip(
            self._rings, step.memo.get(f"rings {id(self)} {layer}", ()), strict=False
        ):
            ring[layer].copy_(kept)
        return self.attend(layer, inputs, step)

    def append(self, layer: int, k_BQGD: Tensor, v_BQGD: Tensor, step: PagedStep) -> None:
        """Append the step's keys, with their positions, and values; nothing attends to them yet."""
        self._append(layer, k_BQGD[0], v_BQGD[0], self._rows(step))

    def take_tokens_of(self, other: PagedKV, slot: int, count: int) -> None:
        """Append a request's first tokens as another pool has them; not in a captured step."""
        num_rows = self._table_SM.shape[0] + 1  # as steps with chunks have, whose kernels are there
        table = self.launches.table([slot], [0], [count], num_rows=num_rows, num_places=count)
        rows_FR = torch.tensor(table, dtype=torch.int32, device=self._device)
        rows = PackedRows(rows_FR=rows_FR, work_split=rows_FR, table_SM=self._table_SM, chunks=True)
        for layer in range(len(self._layers)):
            k_BQGD, v_BQGD = other.stored_tokens(layer, slot, count)
            self._append(layer, k_BQGD[0], v_BQGD[0], rows)

    def _append(self, layer: int, k_TGD: Tensor, v_TGD: Tensor, rows: PackedRows) -> None:
        append_packed_pages(k_TGD, v_TGD, self._layers[layer], rows, self.launches)

    def _layer(self, index: int) -> PackedPages:
        layer = KVLayer(
            k_words_PGW=self._words[0][index],
            k_params_PG=self._params[0][index],
            v_words_PGW=self._words[1][index],
            v_params_PG=self._params[1][index],
            k_ring_SGRD=self._rings[0][index],
            v_ring_SGRD=self._rings[1][index],
        )
        return PackedPages(
            layer=layer, k_behind_PGTD=self._behind[0][index], v_behind_PGTD=self._behind[1][index]
        )

    def _resume(self, slot: int, start: int, block: int) -> None:
        """Put the tokens behind the last block found into a request's ring, in all layers."""
        tokens = [position % RING_TOKENS for position in range(start - TAIL_TOKENS, start)]
        places = upload(tokens, torch.long, self._device)
        for ring, behind in zip(self._rings, self._behind, strict=True):
            ring[:, slot].index_copy_(2, places, behind[:, block])


def rotated(inputs: AttentionInputs, step: PagedStep) -> AttentionInputs:
    """Return a step's inputs with queries and keys rotated, where that was left to the cache."""
    rotation = inputs.rotation
    if rotation is None:
        return inputs
    q_THD, k_TGD, v_TGD = inputs.q_BQHD[0], inputs.k_BQGD[0], inputs.v_BQGD[0]
    # They lie as a pool of blocks of one token, in the step's order.
    shape = (*k_TGD.shape[:2], 1, k_TGD.shape[2])
    k_new, v_new = (torch.empty(shape, dtype=k_TGD.dtype, device=k_TGD.device) for _ in "kv")
    places_T = step.once("new places", lambda: _new_places(step.where))
    at = (places_T, step.where.positions_T, rotation.inv_freq, rotation.factor)
    q_THD = rope_append_pages(q_THD, k_TGD, v_TGD, k_new, v_new, *at)
    k_BQGD, v_BQGD = k_new[None, :, :, 0], v_new[None, :, :, 0]
    return AttentionInputs(q_THD[None], k_BQGD, v_BQGD, inputs.scoring)


def _new_places(where: TokenPlaces) -> Tensor:
    """Return each token's own place in the step, -1 for padding."""
    numbers = torch.arange(len(where.places_T), device=where.places_T.device)
    return torch.where(where.places_T < 0, -1, numbers)

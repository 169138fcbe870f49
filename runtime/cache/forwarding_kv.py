"""Pools that forward to others: of unlike heads under one block table, or with a copy for drafts.

Where layers differ in heads there is a pool for every shape. Which blocks a request has is the same
in all of them, so each takes note of the same rows.

Drafts that read few bits read a 4-bit copy of the pool, under the same block tables. Every step of
the model appends to both; a draft step appends to the copy only, and the verify that follows
overwrites what it left. The copy packs accepted tokens only: it holds back more of the newest
tokens than a draft is long. A request that starts from blocks of the prefix cache finds its tokens
in the pool; the copy is made of them anew, since another request may have ended before its last
block was packed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import MAX_GAMMA
from llmpq.runtime.cache.kv_cache import AttentionInputs, PagedKV, StepT
from llmpq.runtime.requests.request import PagedRow
from llmpq.sizes.kv_format import HOLDBACK_TOKENS


class ForwardingKV(PagedKV[StepT]):
    """A pool whose layers are those of other pools."""

    @abstractmethod
    def part(self, layer: int) -> tuple[PagedKV[StepT], int]:
        """Return the pool that has a layer, and its place there."""

    def step_of(self, layer: int, step: StepT) -> StepT:  # type: ignore[misc]
        """Return a step as the layer's own pool takes it."""
        return step

    def attend(self, layer: int, inputs: AttentionInputs, step: StepT) -> Tensor:
        """As of the layer's own pool."""
        kv, place = self.part(layer)
        return kv.attend(place, inputs, self.step_of(layer, step))

    def keep_for_readers(self, layer: int, step: StepT) -> None:
        """As of the layer's own pool."""
        kv, place = self.part(layer)
        kv.keep_for_readers(place, self.step_of(layer, step))

    def attend_again(self, layer: int, inputs: AttentionInputs, step: StepT) -> Tensor:
        """As of the layer's own pool."""
        kv, place = self.part(layer)
        return kv.attend_again(place, inputs, self.step_of(layer, step))

    def append(self, layer: int, k_BQGD: Tensor, v_BQGD: Tensor, step: StepT) -> None:
        """As of the layer's own pool."""
        kv, place = self.part(layer)
        kv.append(place, k_BQGD, v_BQGD, self.step_of(layer, step))

    def stored_tokens(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """As of the layer's own pool."""
        kv, place = self.part(layer)
        return kv.stored_tokens(place, slot, count)


def by_shape(
    spec: ModelSpec, layers: Sequence[int], make: Callable[[ModelSpec, Sequence[int]], PagedKV]
) -> list[tuple[PagedKV, int]]:
    """Return of every layer its cache and its place there; `make`: one of layers of one shape.

    `layers`: their numbers in the model.
    """
    shapes = [spec.kv_shape(layer) for layer in layers]
    parts: dict[tuple[int, int], PagedKV] = {}
    for heads, dim in dict.fromkeys(shapes):
        own = [n for n, shape in zip(layers, shapes, strict=True) if shape == (heads, dim)]
        alike = replace(spec, kv_heads=heads, head_dim=dim, global_head_dim=None)
        parts[heads, dim] = make(replace(alike, global_kv_heads=None), own)
    return [(parts[shape], shapes[:place].count(shape)) for place, shape in enumerate(shapes)]


class KVByShape(ForwardingKV[StepT]):
    """Pools of layers of unlike heads as one."""

    def __init__(self, layers: Sequence[tuple[PagedKV[StepT], int]]) -> None:
        """`layers`: of each its pool and its place there."""
        self._layers = list(layers)
        self._parts = list({id(part): part for part, _ in layers}.values())

    def part(self, layer: int) -> tuple[PagedKV[StepT], int]:
        """Return the pool of layers of its shape, and its place there."""
        return self._layers[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(part.nbytes for part in self._parts)

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Take note of the blocks that a step's rows got, in all."""
        for part in self._parts:
            part.take_rows(rows, starts)

    def take_tokens_of(self, other: PagedKV, slot: int, count: int) -> None:
        """Append a request's first tokens as another pool of the same shapes has them."""
        for mine, theirs in zip(self._parts, cast(KVByShape, other)._parts, strict=True):
            mine.take_tokens_of(theirs, slot, count)


assert MAX_GAMMA < HOLDBACK_TOKENS, "drafts must never be packed"


class DraftedKV(ForwardingKV[StepT]):
    """The model's side: attends to `inner`, keeps `copy` up to date."""

    def __init__(self, inner: PagedKV[StepT], copy: PagedKV[StepT]) -> None:
        self.inner, self.copy, self.states = inner, copy, inner.states

    def part(self, layer: int) -> tuple[PagedKV[StepT], int]:
        """Return the inner one."""
        return self.inner, layer

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.inner.nbytes + self.copy.nbytes

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Take note of the blocks that a step's rows got, in both."""
        self.inner.take_rows(rows, starts)
        self.copy.take_rows([replace(row, resumes=False) for row in rows], starts)
        for row, start in zip(rows, starts, strict=True):
            if row.resumes:
                self.copy.take_tokens_of(self.inner, row.slot, start)

    def attend(self, layer: int, inputs: AttentionInputs, step: StepT) -> Tensor:
        """Append the step's keys and values to both, then return attention over the inner one."""
        self.copy.append(layer, inputs.k_BQGD, inputs.v_BQGD, step)
        return super().attend(layer, inputs, step)

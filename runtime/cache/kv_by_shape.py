"""A stage's cache where layers differ in heads: one cache for every shape, all under one table.

Which blocks a request has is the same in all of them, so each takes note of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from llmpq.model_spec import ModelSpec
from llmpq.runtime.cache.kv_cache import KVCache, PagedKV
from llmpq.runtime.request import PagedRow
from llmpq.runtime.step import Step

Part = TypeVar("Part", bound=KVCache)


def by_shape(
    spec: ModelSpec, layers: Sequence[int], make: Callable[[ModelSpec, Sequence[int]], Part]
) -> list[tuple[Part, int]]:
    """Return of every layer its cache and its place there; `make`: one of layers of one shape.

    `layers`: their numbers in the model.
    """
    shapes = [spec.kv_shape(layer) for layer in layers]
    parts: dict[tuple[int, int], Part] = {}
    for heads, dim in dict.fromkeys(shapes):
        own = [n for n, shape in zip(layers, shapes, strict=True) if shape == (heads, dim)]
        alike = replace(spec, kv_heads=heads, head_dim=dim, global_head_dim=None)
        parts[heads, dim] = make(replace(alike, global_kv_heads=None), own)
    return [(parts[shape], shapes[:place].count(shape)) for place, shape in enumerate(shapes)]


class KVByShape(KVCache, Generic[Part]):
    """Caches of layers of unlike heads as one."""

    def __init__(self, layers: Sequence[tuple[Part, int]]) -> None:
        """`layers`: of each its cache and its place there."""
        self._layers = list(layers)
        self._parts = list({id(part): part for part, _ in layers}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(part.nbytes for part in self._parts)

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
        **options: Any,
    ) -> Tensor:
        """Append the step's keys and values, then return its causal attention [B, Q, H, D]."""
        part, place = self._layers[layer]
        given = (place, q_BQHD, k_BQGD, v_BQGD, step)
        return part.attend(*given, scale=scale, alibi_slopes_H=alibi_slopes_H, **options)

    def keep_for_readers(self, layer: int, step: Step) -> None:
        """Keep what a step of a layer overwrites and `attend_again` needs."""
        part, place = self._layers[layer]
        part.keep_for_readers(place, step)

    def attend_again(
        self,
        layer: int,
        q_BQHD: Tensor,
        k_BQGD: Tensor,
        v_BQGD: Tensor,
        step: Step,
        *,
        scale: float,
        alibi_slopes_H: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the attention of other queries over a layer that has had the step already."""
        part, place = self._layers[layer]
        given = (place, q_BQHD, k_BQGD, v_BQGD, step)
        return part.attend_again(*given, scale=scale, alibi_slopes_H=alibi_slopes_H, **options)

    def truncate(self, slots_B: Tensor, length_B: Tensor) -> None:
        """Forget the tokens of these slots from `length` on."""
        for part in self._parts:
            part.truncate(slots_B, length_B)


class PagedKVByShape(KVByShape[PagedKV], PagedKV):
    """Pools of layers of unlike heads as one."""

    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Take note of the blocks that a step's rows got, in all."""
        for part in self._parts:
            part.take_rows(rows, starts)

    def append(self, layer: int, k_BQGD: Tensor, v_BQGD: Tensor, step: Step) -> None:
        """Append the step's keys and values; packed pools only, as copies for drafts."""
        part, place = self._layers[layer]
        part.append(place, k_BQGD, v_BQGD, step)

    def stored_tokens(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, N, G, D] of a request's first tokens; 16-bit pools only."""
        part, place = self._layers[layer]
        return part.stored_tokens(place, slot, count)

    def take_tokens_of(self, other: PagedKV, slot: int, count: int) -> None:
        """Append a request's first tokens as another pool of the same shapes has them."""
        for mine, theirs in zip(self._parts, cast(PagedKVByShape, other)._parts, strict=True):
            mine.take_tokens_of(theirs, slot, count)

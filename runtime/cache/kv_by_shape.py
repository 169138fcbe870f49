"""A stage's cache where layers differ in heads: one cache for every shape, all under one table.

Which blocks a request has is the same in all of them, so each takes note of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from llmpq.model_spec import ModelSpec
from llmpq.runtime.cache.kv_cache import ForwardingKV, PagedKV
from llmpq.runtime.request import PagedRow


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


class KVByShape(ForwardingKV):
    """Pools of layers of unlike heads as one."""

    def __init__(self, layers: Sequence[tuple[PagedKV, int]]) -> None:
        """`layers`: of each its pool and its place there."""
        self._layers = list(layers)
        self._parts = list({id(part): part for part, _ in layers}.values())

    def part(self, layer: int) -> tuple[PagedKV, int]:
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

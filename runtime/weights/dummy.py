"""Dummy weights in a moment: one layer of every precision is made, the others are copies of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from llmpq.precision import WeightScheme
from llmpq.runtime.weights.quantizing_source import QuantizingSource
from llmpq.runtime.weights.sources import RandomSource


class CopiedLayers(QuantizingSource):
    """Random weights of an architecture; layers of one scheme are equal, each in its own memory."""

    def __init__(
        self,
        source: RandomSource,
        schemes: Mapping[int, WeightScheme | None],
        device: torch.device,
    ) -> None:
        """`schemes`: how each layer of the stage is stored."""
        super().__init__(source, schemes, device)
        self._first: dict[tuple[WeightScheme | None, str], dict[str, Any]] = {}

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return a layer's parts, its linears quantised as its scheme says."""
        alike = (self._schemes[index], self._source.spec.of_layer(index).fingerprint())
        first = self._first.get(alike)
        if first is not None:
            return {name: copy.deepcopy(part) for name, part in first.items()}
        made = self._first[alike] = self.quantized(index, dtype)
        return made

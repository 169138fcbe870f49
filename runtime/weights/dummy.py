"""Dummy weights in a moment: one layer of every precision is made, the others are copies of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from llmpq.precision import WeightScheme
from llmpq.runtime.models.layer_tensors import LayerTensors
from llmpq.runtime.weights.sources import RandomSource
from llmpq.tensor_parallel import Member


class CopiedLayers:
    """Random weights of an architecture; layers of one scheme are equal, each in its own memory."""

    def __init__(
        self,
        source: RandomSource,
        schemes: Mapping[int, WeightScheme | None],
        device: torch.device,
    ) -> None:
        """`schemes`: how each layer of the stage is stored."""
        self._source = source
        self._schemes = schemes
        self._device = device
        self._first: dict[tuple[WeightScheme | None, str], dict[str, Any]] = {}

    def embedding(self, dtype: torch.dtype) -> dict[str, Any]:
        """Make the embedding's parts."""
        return self._source.embedding(dtype)

    def head(self, dtype: torch.dtype, *, with_output: bool = True) -> dict[str, Any]:
        """Make the head's parts."""
        return self._source.head(dtype, with_output=with_output)

    def mtp(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the head that predicts a further token, as it is stored."""
        return self._source.mtp(dtype)

    def keep_codes(self, schemes: Mapping[int, WeightScheme | None]) -> None:
        """Do nothing: no random weight is stored as codes."""

    def take_member(self, member: Member) -> None:
        """Hand out of decoder layers what one device of a stage in tensor parallel holds."""
        self._source.take_member(member)

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return a layer's parts, its linears quantised as its scheme says."""
        scheme = self._schemes[index]
        alike = (scheme, self._source.spec.of_layer(index).fingerprint())
        first = self._first.get(alike)
        if first is not None:
            return {name: copy.deepcopy(part) for name, part in first.items()}
        tensors: dict[str, Any] = self._source.layer(index, dtype)
        if scheme is not None:
            parts = LayerTensors(
                tensors=tensors, scheme=scheme, dtype=dtype, device=self._device, norm_eps=0.0
            )
            spec = self._source.spec.of_layer(index)
            names = [f"{shape.name}.weight" for shape in spec.linears()]
            linears = {name: name.removesuffix(".weight") for name in names if name in tensors}
            tensors |= {name: parts.linear(stem).weight for name, stem in linears.items()}
        self._first[alike] = tensors
        return tensors

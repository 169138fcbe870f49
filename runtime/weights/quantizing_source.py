"""A source of weights that quantises the linears of another source's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmpq.models.tensor_parallel import Member
from llmpq.precision import WeightScheme
from llmpq.runtime.models.layer_tensors import LayerTensors
from llmpq.runtime.weights.sources import CheckpointSource, RandomSource


class QuantizingSource:
    """Quantises decoder layers as they are read; embedding, head and MTP head stay as stored."""

    def __init__(
        self,
        source: CheckpointSource | RandomSource,
        schemes: Mapping[int, WeightScheme | None],
        device: torch.device,
    ) -> None:
        """`schemes`: how each layer of the stage is stored."""
        self._source: CheckpointSource | RandomSource = source
        self._schemes = schemes
        self._device = device

    def embedding(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the embedding's parts."""
        return self._source.embedding(dtype)

    def head(self, dtype: torch.dtype, *, with_output: bool = True) -> dict[str, Any]:
        """Return the head's parts."""
        return self._source.head(dtype, with_output=with_output)

    def mtp(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the head that predicts a further token, as it is stored."""
        return self._source.mtp(dtype)

    def keep_codes(self, schemes: Mapping[int, WeightScheme | None]) -> None:
        """Do nothing: the schemes of the stage are known since the constructor."""

    def take_member(self, member: Member) -> None:
        """Hand out of decoder layers what one device of a stage in tensor parallel holds."""
        self._source.take_member(member)

    def quantized(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return a layer's parts, its linears quantised as its scheme says."""
        tensors: dict[str, Any] = self._source.layer(index, dtype)
        scheme = self._schemes[index]
        if scheme is None:
            return tensors
        parts = LayerTensors(
            tensors=tensors, scheme=scheme, dtype=dtype, device=self._device, norm_eps=0.0
        )
        names = [f"{shape.name}.weight" for shape in self._source.spec.of_layer(index).linears()]
        linears = {name: name.removesuffix(".weight") for name in names if name in tensors}
        return tensors | {name: parts.linear(stem).weight for name, stem in linears.items()}

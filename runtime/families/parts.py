"""The tensors of one layer (or embedding, or head), handed to a family's wiring by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.quantize import quantize_weight
from llmpq.precision import WeightScheme
from llmpq.runtime.layers import Linear, Norm


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Host tensors by part name, and how linears made of them are stored."""

    tensors: Mapping[str, Tensor]
    scheme: WeightScheme | None
    """None keeps linears dense."""
    dtype: torch.dtype
    device: torch.device
    norm_eps: float

    def tensor(self, name: str) -> Tensor:
        """Return a part on the stage's device, in the stage's dtype."""
        return self.tensors[name].to(self.device, self.dtype)

    def optional(self, name: str) -> Tensor | None:
        """Return a part, or None where the architecture has none."""
        return self.tensor(name) if name in self.tensors else None

    def norm(self, name: str) -> Norm:
        """Return a norm; the bias tells LayerNorm from RMSNorm."""
        return Norm(self.tensor(f"{name}.weight"), self.optional(f"{name}.bias"), self.norm_eps)

    def linear(self, name: str) -> Linear:
        """Return a linear, quantised on the stage's device when the layer has a scheme."""
        bias = self.optional(f"{name}.bias")
        if self.scheme is None:
            return Linear(self.tensor(f"{name}.weight"), bias)
        weight_NK = self.tensors[f"{name}.weight"].to(self.device)
        return Linear(quantize_weight(weight_NK, self.scheme, dtype=self.dtype), bias)

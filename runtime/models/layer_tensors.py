"""The tensors of one layer (or embedding, or head), handed to the wiring by name; their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from llmpq.kernels.formats.atom_scheme import atom_scheme
from llmpq.kernels.weights.atom_weight import quantize_atom
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.kernels.weights.weight import Weight
from llmpq.models.tensor_parallel import Member
from llmpq.precision import WeightScheme
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.norms import Norm


class TensorSource(Protocol):
    """Hands out a model's parts, each as [rows, ...] tensors of the asked dtype."""

    def keep_codes(self, schemes: Mapping[int, WeightScheme | None]) -> None:
        """Hand out linears as the codes they are stored in where a layer's scheme holds those.

        `schemes`: by layer, counted over the whole model; None for 16 bits.
        """

    def take_member(self, member: Member) -> None:
        """Hand out of decoder layers what one device of a stage in tensor parallel holds."""

    def embedding(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the parts of the embedding."""

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the parts of decoder layer `index`, counted over the whole model."""

    def head(self, dtype: torch.dtype, *, with_output: bool = True) -> dict[str, Tensor]:
        """Return the final norm and the output matrix (the embedding's, when tied)."""

    def mtp(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the parts of the head that predicts a further token, where there is one."""


@dataclass(frozen=True, kw_only=True)
class LayerTensors:
    """Host tensors by part name, and how linears made of them are stored."""

    tensors: Mapping[str, Tensor | Weight]
    """Only a linear's weight may come quantised already."""
    scheme: WeightScheme | None
    """None keeps linears dense."""
    dtype: torch.dtype
    device: torch.device
    norm_eps: float
    input_schemes: Mapping[str, WeightScheme] = field(default_factory=dict)
    """Of linears that a device has some of the inputs of, by name; of others as `scheme`."""
    shared: frozenset[str] = frozenset()
    """Parts that something else holds, too (a tied output matrix): left as they are."""
    on_matrix: Callable[[], None] | None = None
    """Hears of every matrix before it is made; what it raises ends the load."""

    def tensor(self, name: str) -> Tensor:
        """Return a part on the stage's device, in the stage's dtype."""
        tensor = self.tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor.to(self.device, self.dtype)

    def float32(self, name: str) -> Tensor:
        """Return a part on the stage's device in float32."""
        tensor = self.tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor.to(self.device, torch.float32)

    def optional(self, name: str) -> Tensor | None:
        """Return a part, or None where the architecture has none."""
        return self.tensor(name) if name in self.tensors else None

    def norm(self, name: str, *, centred: bool = False, of_each: int = 0, eps: float = 0.0) -> Norm:
        """Return a norm: LayerNorm if `centred` or with a bias, else RMSNorm.

        `of_each`: channels of a head, where every head has weights of its own. `eps`: what it adds
        if not what the model's norms add.
        """
        weight, bias = self.tensor(f"{name}.weight"), self.optional(f"{name}.bias")
        if of_each:
            weight = weight.view(-1, of_each)
            bias = None if bias is None else bias.view(-1, of_each)
        return Norm(weight, bias, eps or self.norm_eps, centred=centred)

    def linear(self, name: str) -> Linear:
        """Return a linear, quantised on the stage's device when the layer has a scheme."""
        if self.on_matrix is not None:
            self.on_matrix()
        bias = self.optional(f"{name}.bias")
        return Linear(self._weight(name), bias)

    def _weight(self, name: str) -> Weight:
        stored = self.tensors[f"{name}.weight"]
        if isinstance(stored, Weight):
            return stored.for_scheme(self.scheme, name).to(self.device).packed()
        if self.scheme is None:
            dense = DenseWeight(self.tensor(f"{name}.weight"))
            return dense if f"{name}.weight" in self.shared else dense.packed()
        weight_NK = stored.to(self.device)
        scheme = self.input_schemes.get(name, self.scheme)
        if scheme.activation_bits < 16:
            return quantize_atom(weight_NK, atom_scheme(scheme), dtype=self.dtype).packed()
        return quantize_weight(weight_NK, scheme, dtype=self.dtype)

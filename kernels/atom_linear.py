"""atom_linear(x, weight): the product of rounded activations and an Atom weight, by device."""

from __future__ import annotations

from torch import Tensor

from llmpq.kernels.atom_formats import AtomWeight
from llmpq.kernels.atom_reference import atom_linear_reference

__all__ = ["AtomWeight", "atom_linear"]


def atom_linear(x: Tensor, weight: AtomWeight, bias: Tensor | None = None) -> Tensor:
    """y = x w^T + bias, x [..., K]; y [..., N] in x's dtype."""
    if x.shape[-1] != weight.in_features or x.device.type != weight.device.type:
        raise ValueError(
            f"atom_linear: got x with K = {x.shape[-1]} on {x.device}, expected K = "
            f"{weight.in_features} on {weight.device}. Move one with .to(device)."
        )
    return atom_linear_reference(x, weight, bias)

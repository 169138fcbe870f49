"""Plain-torch twin of the Atom products: rounds the input as the scheme says, then multiplies.

    y = restore(round(x[..., index_K])) @ w^T + bias

It is the oracle of the Triton kernels and what the CPU runs: the products of restored values equal
the integer products times the scales but for float rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.atom_rounding import Codes, restore, round_activations, stored_integers
from llmpq.kernels.formats.atom_scheme import AtomScheme

if TYPE_CHECKING:
    from llmpq.kernels.weights.atom_weight import AtomWeight


def atom_linear_reference(
    x: Tensor, weight: AtomWeight, bias: Tensor | None = None, *, exact: bool = False
) -> Tensor:
    """y = x w^T + bias, x [..., K]; y [..., N] in x's dtype, or `exact`: float32 from the codes on.

    What codes and scales are may depend on x's dtype (`activation_rule`).
    """
    x, weight = weight.in_order(x)
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], weight.out_features)
    x_MK = x.reshape(-1, weight.in_features)
    w_NK = restore(codes_for(weight, x_MK.shape[0])).to(torch.float32 if exact else x.dtype)
    y = functional.linear(rounded(x_MK, weight.scheme).to(w_NK.dtype), w_NK, bias)
    return y.view(*x.shape[:-1], weight.out_features)


def rounded(x_MK: Tensor, scheme: AtomScheme) -> Tensor:
    """Return reordered activations as the product sees them, in float32 unless 16 bits stay."""
    if scheme.activation_bits == 16:
        return x_MK
    return restore(round_activations(x_MK, scheme))


def codes_for(weight: AtomWeight, rows: int) -> Codes:
    """Return a weight's codes, with the scales that a product of so many tokens takes."""
    codes = weight.unpacked()
    if not weight.scheme.takes_integers(rows):
        return codes
    steps_NG, unit_N1 = stored_integers(codes.scale)
    return replace(codes, scale=steps_NG * unit_N1)

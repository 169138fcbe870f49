"""atom_linear(x, weight): the product of rounded activations and an Atom weight, by device.

CPU                     the twin: restore what rounding leaves, multiply
Hopper, W4A4            one form for few and many tokens, 16-bit inputs too (hopper.py)
other CUDA, W8A8        round x in Triton, integer product by groups (portable.py)
other forms             the twin (3 bits, e2m1, 16-bit outliers: for the paper's tables only)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from llmpq.kernels.atom.reference import atom_linear_reference
from llmpq.kernels.formats.atom_rounding import integer_scales, normal_channels
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.atom_tiles import AtomTiles
from llmpq.kernels.formats.atom_weight import AtomWeight

__all__ = ["AtomWeight", "atom_linear"]


def atom_linear(x: Tensor, weight: AtomWeight, bias: Tensor | None = None) -> Tensor:
    """y = x w^T + bias, x [..., K]; y [..., N] in x's dtype."""
    if x.shape[-1] != weight.in_features or x.device.type != weight.device.type:
        raise ValueError(
            f"atom_linear: got x with K = {x.shape[-1]} on {x.device}, expected K = "
            f"{weight.in_features} on {weight.device}. Move one with .to(device)."
        )
    if not x.is_cuda or not (isinstance(weight, AtomTiles) or has_kernel(weight.scheme)):
        return atom_linear_reference(x, weight, bias)
    x_MK = x.reshape(-1, weight.in_features)
    if isinstance(weight, AtomTiles):
        # Triton and Gluon are imported where they are needed: the CPU path runs without them.
        from llmpq.kernels.atom.hopper import tiles_linear

        y_MN = tiles_linear(x_MK, weight, bias)
    else:
        y_MN = integer_linear(x_MK, weight, bias)
    return y_MN.view(*x.shape[:-1], weight.out_features)


def has_kernel(scheme: AtomScheme) -> bool:
    """Whether the integer kernels compute this scheme."""
    if scheme.number != "int" or scheme.outlier_bits != 8 or scheme.outliers > 128:
        return False
    bits = (scheme.weight_bits, scheme.activation_bits)
    return bits == (4, 4) and scheme.group_size in (64, 128, None) or bits == (8, 8)


def integer_linear(x_MK: Tensor, weight: AtomWeight, bias: Tensor | None = None) -> Tensor:
    """Return y [M, N] by the Triton kernels."""
    from llmpq.kernels.atom.portable import atom_gemm, norm_round

    scheme, index_K = weight.scheme, weight.index_K
    if scheme.rotation:
        x_MK = rotated_channels(x_MK if index_K is None else x_MK[:, index_K.long()], scheme)
        scheme, index_K = replace(scheme, rotation=False), None
    rounded = norm_round(x_MK.contiguous(), scheme, index_K=index_K)
    if scheme.takes_integers(x_MK.shape[0]):
        steps, unit = integer_scales(rounded.scales[:, :-1])
        scales = torch.cat((steps * unit, rounded.scales[:, -1:]), dim=1)
        rounded = replace(rounded, scales=scales)
    return atom_gemm(rounded, weight, dtype=x_MK.dtype, bias=bias)


def rotated_channels(x_MK: Tensor, scheme: AtomScheme) -> Tensor:
    """Return ordered channels, the normal ones padded and rotated, the outliers behind them."""
    outliers_MO = x_MK[:, scheme.normal_features(x_MK.shape[1]) :]
    return torch.cat((normal_channels(x_MK, scheme).to(x_MK.dtype), outliers_MO), dim=1)

"""Plain-torch twins of what the W4A4 and W8A8 kernels do around `atom_linear_reference`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.atom.reference import codes_for
from llmpq.kernels.formats.atom_rounding import Codes, round_activations
from llmpq.kernels.weights.atom_weight import AtomWeight


def integer_product(x_MK: Tensor, weight: AtomWeight) -> Tensor:
    """Return x w^T [M, N] in float64 by exact integer products per group, as the kernels form it.

    x comes reordered; the weight's outliers have 8 bits.
    """
    x, w = round_activations(x_MK, weight.scheme), codes_for(weight, x_MK.shape[0])
    assert x.outlier_scale is not None and w.outlier_scale is not None
    groups = w.scale.shape[1]
    x_MGk = x.codes.view(x_MK.shape[0], groups, -1).double()
    w_NGk = w.codes.view(weight.out_features, groups, -1).double()
    products_GMN = torch.einsum("mgk,ngk->gmn", x_MGk, w_NGk)
    scales_GMN = torch.einsum("mg,ng->gmn", x.scale.double(), w.scale.double())
    y_MN = (products_GMN * scales_GMN).sum(0)
    outliers_MN = x.outliers.double() @ w.outliers.double().t()
    return y_MN + outliers_MN * x.outlier_scale.double()[:, None] * w.outlier_scale.double()


def norm_reference(
    x_MK: Tensor, kind: str, weight_K: Tensor | None, bias_K: Tensor | None, eps: float
) -> Tensor:
    """Return the norm's float32 output: "none", "rms" or "layer"."""
    x = x_MK.float()
    if kind == "none" or weight_K is None:
        return x
    shape = weight_K.shape
    if kind == "rms":
        return functional.rms_norm(x, shape, weight_K.float(), eps)
    bias = None if bias_K is None else bias_K.float()
    return functional.layer_norm(x, shape, weight_K.float(), bias, eps)


def activation_reference(x: Tensor, kind: str) -> Tensor:
    """Return the activation's float32 output: "silu" of [gate | up], "relu" or "gelu"."""
    x = x.float()
    if kind == "silu":
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return functional.relu(x) if kind == "relu" else functional.gelu(x, approximate="tanh")


def rounded_layout(codes: Codes) -> tuple[Tensor, Tensor]:
    """Return what the kernels hand on: int8 [M, Kp + Op] and float32 scales [M, G + 1]."""
    assert codes.outlier_scale is not None
    outliers = codes.outliers
    if outliers.shape[1]:
        outliers = functional.pad(outliers, (0, 128 - outliers.shape[1]))
    scales = torch.cat((codes.scale, codes.outlier_scale[:, None]), dim=1)
    return torch.cat((codes.codes, outliers), dim=1), scales

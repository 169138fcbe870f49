"""Plain-torch twins of the products with packed weights: slow, clear, the oracle of every check."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.weights.fp8_weight import Fp8Weight
from llmpq.kernels.weights.quantized_weight import QuantizedWeight


def linear_reference(
    x: Tensor,
    qweight: QuantizedWeight | Fp8Weight,
    bias: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """y = x w^T + bias with the dequantised weight; `exact` computes and returns float64."""
    wide = torch.float64 if exact else torch.float32
    y = x.to(wide) @ qweight.dequantize(wide).t()
    if bias is not None:
        y = y + bias.to(wide)
    return y if exact else y.to(x.dtype)


def rounded_to_bytes(x: Tensor) -> Tensor:
    """x [M, K] in float64, each group of 128 rounded to 127ths of its largest."""
    groups = functional.pad(x.double(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((groups * (127 / largest)).round() * (largest / 127)).flatten(1)[:, : x.shape[1]]


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the error over that of `exact`; NaN if anything is NaN."""
    exact = exact.double()
    return float((got.double() - exact).norm() / exact.norm())


def experts_reference(
    x: Tensor,
    weights: list[Tensor],
    expert_TK: Tensor,
    *,
    biases: list[Tensor] | None = None,
    back: bool = False,
) -> Tensor:
    """The twin of experts/expert_rows_launch.py, in float64: weights [N, K] of each expert."""
    flat, per_token = expert_TK.flatten(), expert_TK.shape[1]
    order = flat.argsort(stable=True)
    y = x.new_empty(flat.numel(), weights[0].shape[0])
    for place, pair in enumerate(order.tolist()):
        e = int(flat[pair])
        row = x[place] if back else x[pair // per_token]
        made = weights[e].double() @ row.double()
        if biases is not None:
            made = made + biases[e].double()
        y[pair if back else place] = made.to(y.dtype)
    return y

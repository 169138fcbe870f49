"""A layer's linears quantised in turn, each one asked to undo the rounding of what came before.

Let x be the input that a linear had in the unquantised layer and z the one it will get: made by
the linears already quantised, and rounded. The weight that gives W x from z with the least error is

    W* = W (X^T Z + d I) (Z^T Z + d I)^-1          d = damping * mean(diag Z^T Z)

and GPTQ rounds W* by the Hessian Z^T Z. Rounding noise is white over channels while inputs are
not, so W* also filters some of it out. Costs nothing when the model runs.

K = in_features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.atom.reference import rounded
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.profiler.quantize.layer_walk import CalibrationRun, Hessian, LayerView
from llmpq.profiler.quantize.one_layer import (
    Recipe,
    balanced,
    folded,
    quantize_layer,
    quantize_linear,
)


def refuse_experts(spec: ModelSpec) -> None:
    """Refuse a mixture of experts."""
    if spec.experts:
        raise ValueError(
            f"{spec.name}: linears of experts cannot be quantised in turn, since rounding "
            "changes which tokens an expert gets; leave out --in-turn"
        )


def quantize(
    run: CalibrationRun, view: LayerView, recipe: Recipe, *, dtype: torch.dtype
) -> dict[str, Tensor | Weight]:
    """Return a layer's tensors quantised as the recipe says, at once or in turn."""
    if not recipe.compensated:
        return quantize_layer(view, recipe, dtype=dtype)
    refuse_experts(run.spec)
    view = balanced(view, recipe)
    tensors, orders = folded(view, recipe)
    current: dict[str, Tensor | Weight] = {**tensors}
    for name in view.hessians:
        chosen, order = recipe.for_linear(name), orders.get(name)
        z_KK, xz_KK = _moments(run, tensors, current, name, order, chosen)
        weight_NK = tensors[f"{name}.weight"].to(z_KK.device)
        if order is not None:
            weight_NK = weight_NK[:, order]
        target_NK = compensated(weight_NK, z_KK, xz_KK, recipe.damping)
        current[f"{name}.weight"] = quantize_linear(target_NK, z_KK, chosen, dtype, order)
    return current


def compensated(weight_NK: Tensor, z_KK: Tensor, xz_KK: Tensor, damping: float) -> Tensor:
    """Return the weight that makes the most of Z: W (X^T Z + d I) (Z^T Z + d I)^-1."""
    d = damping * float(z_KK.diagonal().mean())
    # One float64 [K, K] at a time: 1.6 GB each at K = 14336.
    cross_KK = xz_KK.double()
    cross_KK.diagonal().add_(d)
    right_NK = weight_NK.double() @ cross_KK
    del cross_KK
    # A never-active channel has a zero row; d keeps it solvable.
    damped_KK = z_KK.double()
    damped_KK.diagonal().add_(d)
    factor_KK = torch.linalg.cholesky(damped_KK)
    del damped_KK
    return torch.cholesky_solve(right_NK.t(), factor_KK).t().float()


def _moments(
    run: CalibrationRun,
    tensors: dict[str, Tensor],
    current: dict[str, Tensor | Weight],
    name: str,
    order: Tensor | None,
    recipe: Recipe,
) -> tuple[Tensor, Tensor]:
    """Return Z^T Z and X^T Z of one linear, channels in order."""
    z_sum = xz_sum = None
    for x, z in zip(run.inputs(tensors, name), run.inputs(current, name), strict=True):
        if order is not None:
            x, z = x[:, order], z[:, order]
        if isinstance(recipe.scheme, AtomScheme):
            z = rounded(z, recipe.scheme)
        if z_sum is None or xz_sum is None:
            z_sum, xz_sum = (Hessian(z.shape[1], z.device) for _ in range(2))
        z_sum.add(z)
        xz_sum.add(x, z)
    assert z_sum is not None and xz_sum is not None
    return z_sum.sum_KK, xz_sum.sum_KK

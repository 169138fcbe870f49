"""One layer quantised by a recipe: Atom's channel order, folds and rounding, or plain GPTQ.

Channel order (w4a4): input channels of each linear sorted by their sum of squares, so that the
outliers come last. What puts them there:

    qkv, gate_up    a gather where the norm's output is rounded; q, k, v share it, gate, up too
    o               a gather of the attention output
    down            nothing at run time: the rows of gate and up (their biases too) are stored in
                    its order, which passes through the elementwise activation

All experts of a layer share the order of gate_up, so that the norm's output is rounded once for
all of them; each has its own order of `down`. An expert that no calibration token was sent to is
rounded to nearest.

K = in_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from llmpq.kernels.formats.atom_rounding import round_weight
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.weights.atom_weight import atom_weight
from llmpq.kernels.weights.quantized_weight import from_codes
from llmpq.kernels.weights.round_to_nearest import quantize_codes
from llmpq.kernels.weights.weight import Weight
from llmpq.precision import WeightScheme
from llmpq.profiler.quantize.gptq import DAMPING, gptq_atom, gptq_codes
from llmpq.profiler.quantize.layer_walk import Hessian, LayerView
from llmpq.profiler.quantize.smooth_channels import smoothed


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the linears of a layer are quantised."""

    scheme: AtomScheme | WeightScheme
    method: Literal["rtn", "gptq"] = "gptq"
    damping: float = DAMPING
    compensated: bool = False
    """Quantise a layer's linears in turn, each to undo the rounding before (linears_in_turn)."""
    smoothing: float | None = None
    """Share of large channels' size that norms hand over to weights first (smooth_channels.py)."""
    rotated: tuple[str, ...] = ()
    """Linears whose input is rotated before it is rounded (AtomScheme.rotation)."""

    @property
    def reorders(self) -> bool:
        """Whether input channels are sorted by their sums of squares."""
        return isinstance(self.scheme, AtomScheme) and self.scheme.outliers > 0

    def for_linear(self, name: str) -> Recipe:
        """Return the recipe of one linear."""
        if kind(name) not in self.rotated or not isinstance(self.scheme, AtomScheme):
            return self
        return replace(self, scheme=replace(self.scheme, rotation=True))


def quantize_layer(
    view: LayerView, recipe: Recipe, *, dtype: torch.dtype
) -> dict[str, Tensor | Weight]:
    """Return the layer's tensors with every linear's weight quantised; `dtype` is the scales'."""
    view = balanced(view, recipe)
    tensors, orders = folded(view, recipe)
    quantized: dict[str, Tensor | Weight] = {**tensors}
    for name, hessian in view.hessians.items():
        device = hessian.sum_KK.device
        weight_NK, h_KK = tensors[f"{name}.weight"].to(device), hessian.sum_KK
        order = orders.get(name)
        if order is not None:
            weight_NK, h_KK = weight_NK[:, order], h_KK[order][:, order]
        elif folds(name) and recipe.reorders:
            h_KK = _sorted(h_KK)
        chosen = recipe.for_linear(name)
        if hessian.tokens == 0:
            chosen = replace(chosen, method="rtn")
        quantized[f"{name}.weight"] = quantize_linear(weight_NK, h_KK, chosen, dtype, order)
    return quantized


def balanced(view: LayerView, recipe: Recipe) -> LayerView:
    """Return the same layer with norms' channels balanced, if the recipe says so."""
    return view if recipe.smoothing is None else smoothed(view, share=recipe.smoothing)


def folded(view: LayerView, recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the layer with the orders that fold into it applied, and the other linears' orders.

    The layer computes what it did before: `down`'s columns and the rows that feed them move alike.
    """
    tensors: dict[str, Tensor] = dict(view.tensors)
    if not recipe.reorders:
        return tensors, {}
    orders = {}
    for name, order in channel_orders(view.hessians).items():
        if not folds(name):
            orders[name] = order
            continue
        columns = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = columns[:, order.to(columns.device)]
        for feeding in ("gate_up", "up"):
            _reorder_rows(tensors, name.removesuffix("down") + feeding, order)
    return tensors, orders


def kind(name: str) -> str:
    """Return what a linear is, whichever expert it belongs to: qkv, o, gate_up, up, down."""
    return name.rpartition(".")[2]


def folds(name: str) -> bool:
    """Whether a linear's channel order is folded into the rows of the linears before it."""
    return kind(name) == "down"


def channel_orders(hessians: Mapping[str, Hessian]) -> dict[str, Tensor]:
    """Return every linear's channel order; linears that read the same channels share one."""
    read_alike: dict[str, list[str]] = {}
    for name in hessians:
        read_alike.setdefault(name if folds(name) else kind(name), []).append(name)
    return {
        name: channel_order(*(hessians[other].sum_KK for other in alike))
        for alike in read_alike.values()
        for name in alike
    }


def quantize_linear(
    weight_NK: Tensor, h_KK: Tensor, recipe: Recipe, dtype: torch.dtype, index_K: Tensor | None
) -> Weight:
    """Quantise one weight whose channels are in their final order."""
    scheme = recipe.scheme
    if isinstance(scheme, AtomScheme):
        if recipe.method == "rtn":
            return atom_weight(round_weight(weight_NK, scheme, scale_dtype=dtype), scheme, index_K)
        codes = gptq_atom(weight_NK, h_KK, scheme, scale_dtype=dtype, damping=recipe.damping)
        return atom_weight(codes, scheme, index_K)
    if recipe.method == "rtn":
        found = quantize_codes(weight_NK, scheme, scale_dtype=dtype)
    else:
        found = gptq_codes(weight_NK, h_KK, scheme, scale_dtype=dtype, damping=recipe.damping)
    return from_codes(
        *found,
        bits=scheme.bits,
        group_size=scheme.group_size,
        in_features=weight_NK.shape[1],
    )


def channel_order(*h_KK: Tensor) -> Tensor:
    """Return the channels sorted by their sum of squares over all inputs, the largest last."""
    return torch.stack([h.diagonal() for h in h_KK]).sum(0).argsort(stable=True)


def _sorted(h_KK: Tensor) -> Tensor:
    order = channel_order(h_KK)
    return h_KK[order][:, order]


def _reorder_rows(tensors: dict[str, Tensor], name: str, order_K: Tensor) -> None:
    """Put the output rows of a linear in order; gate and up one below the other, each."""
    for kind in ("weight", "bias"):
        rows = tensors.get(f"{name}.{kind}")
        if rows is None:
            continue
        order = order_K.to(rows.device)
        whole = torch.cat([order + start for start in range(0, rows.shape[0], len(order))])
        tensors[f"{name}.{kind}"] = rows[whole]

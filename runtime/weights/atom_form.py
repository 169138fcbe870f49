"""A layer in Atom's form, and 8-bit codes of compressed-tensors that meet rounded activations.

llmpq.layers.I.LINEAR.codes    atom_weight.py: scale, outliers, outlier_scale, index_K
llmpq.layers.I.PART            norms and biases, their channels already reordered
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.atom_rounding import Codes
from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.kernels.weights.atom_weight import AtomWeight, atom_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import padded_k


def atom_parts(
    stored: Mapping[str, Tensor],
    schemes: Mapping[str, Mapping[str, Any]],
    spec: ModelSpec,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return a layer's parts of its tensors by part and field; `spec` is of that layer."""
    fields: dict[str, dict[str, Tensor]] = {linear: {} for linear in schemes}
    parts: dict[str, Any] = {}
    for name, tensor in stored.items():
        part, _, field = name.rpartition(".")
        if is_field(name, schemes):
            fields[part][field] = tensor
        else:
            parts[name] = tensor.to(dtype)
    in_features = {linear.name: linear.in_features for linear in spec.linears()}
    for linear, tensors in fields.items():
        scales = {key: tensors[key].to(dtype) for key in ("scale", "outlier_scale")}
        parts[f"{linear}.weight"] = AtomWeight(
            scheme=AtomScheme(**schemes[linear]),
            out_features=tensors["codes"].shape[0],
            in_features=in_features[linear],
            **{**tensors, **scales},
        )
    return parts


def is_field(name: str, schemes: Mapping[str, Any]) -> bool:
    """Whether `PART.FIELD` is of a quantised linear's weight."""
    part, _, field = name.rpartition(".")
    return part in schemes and field != "bias"


def channel_weight(codes_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> AtomWeight:
    """Return 8-bit weights with one scale a row that meet inputs rounded per token."""
    n, k = codes_NK.shape
    codes = Codes(
        rotated=False,
        in_features=k,
        codes=functional.pad(codes_NK, (0, padded_k(k) - k)),
        scale=scale_N1.to(dtype),
        outliers=torch.empty(n, 0, dtype=torch.int8),
        outlier_scale=torch.ones(n, dtype=dtype),
    )
    return atom_weight(codes, W8A8)

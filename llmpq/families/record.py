"""What a model family is: one record, read by the spec, the runtime, checkpoints and exports.

A part is one tensor of ours: a norm's weight, a fused matrix, a bias. A family's `NameTable` says
what each is called in a Hugging Face checkpoint; what parts there are, the spec's fields decide.
Sources of one part are stacked along its first dimension. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmpq.families.config_values import Config

Arrange = Callable[[Any, Any], Any]
"""A tensor and the spec to the tensor with its rows in our order."""


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """Checkpoint names of a family: part -> the tensors it is stacked from."""

    roots: tuple[str, ...]
    """Prefixes a checkpoint may keep everything under; the first that has the embedding counts."""
    embedding: Mapping[str, tuple[str, ...]]
    layer: Mapping[str, tuple[str, ...]]
    """`{i}` is the layer's number; parts and names with `{e}` stand for one of every expert."""
    head: Mapping[str, tuple[str, ...]]
    output: str = "lm_head.weight"
    """The untied output matrix, beside the root."""
    arrange: Mapping[str, Arrange] = field(default_factory=dict)
    """Parts whose rows are stored in another order than ours (q, then k, then v)."""

    def of_layer(self, spec: Any, index: int) -> dict[str, tuple[str, ...]]:
        """Return the entries of decoder layer `index`, those of every expert spelled out."""
        table: dict[str, tuple[str, ...]] = {}
        for part, names in self.layer.items():
            for expert in range(spec.experts) if "{e}" in part else (0,):
                table[part.format(e=expert)] = tuple(n.format(i=index, e=expert) for n in names)
        return table

    @property
    def layer_prefix(self) -> str:
        """What every tensor of a layer is called up to the layer's number."""
        return self.layer["attn_norm.weight"][0].partition("{i}")[0]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in `config.json`."""
    fields: Callable[[Config], dict[str, Any]]
    """`config.json` to the fields of `ModelSpec`: activation, norms, biases, positions, experts."""
    names: NameTable
    layers_at: str
    """What Transformers calls the list of decoder layers."""
    before: tuple[str, ...]
    """Its modules in front of the layers."""
    behind: tuple[str, ...]
    """And behind them."""


def norm_names(*parts: tuple[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the entries of norms: (ours, theirs), weight and bias each."""
    return {
        f"{ours}.{kind}": (f"{theirs}.{kind}",)
        for ours, theirs in parts
        for kind in ("weight", "bias")
    }


def linear_names(*parts: tuple[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the entries of fused linears: (ours, theirs in stacking order)."""
    return {
        f"{ours}.{kind}": tuple(f"{name}.{kind}" for name in theirs)
        for ours, theirs in parts
        for kind in ("weight", "bias")
    }

"""Which checkpoint tensors make up each part of a model, as data.

A part is one tensor of ours: a norm's weight, a fused matrix, a bias. `part_shapes` says which
parts an architecture has and how large they are; a family's `NameTable` says what they are called
in a Hugging Face checkpoint. Sources of one part are stacked along its first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from llmpq.model_spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]
Arrange = Callable[[Tensor, ModelSpec], Tensor]


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

    def of_layer(self, spec: ModelSpec, index: int) -> dict[str, tuple[str, ...]]:
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


def layer_shapes(spec: ModelSpec) -> Shapes:
    """Return the parts of one decoder layer; their sizes sum to `spec.layer_params`."""
    shapes = norm_shapes("attn_norm", spec) | norm_shapes("mlp_norm", spec)
    for linear in spec.linears():
        shapes[f"{linear.name}.weight"] = (linear.out_features, linear.in_features)
        if linear.bias:
            shapes[f"{linear.name}.bias"] = (linear.out_features,)
    if spec.experts:
        shapes["router.weight"] = (spec.experts, spec.hidden)
    if spec.qk_norm:
        shapes |= {"q_norm.weight": (spec.head_dim,), "k_norm.weight": (spec.head_dim,)}
    return shapes


def embedding_shapes(spec: ModelSpec) -> Shapes:
    """Return the parts of the first stage beyond layers; they sum to `spec.embedding_params`."""
    shapes: Shapes = {"tokens.weight": (spec.vocab, spec.hidden)}
    if spec.positions == "learned":
        shapes["positions.weight"] = (spec.max_positions + 2, spec.hidden)
    if spec.embedding_norm:
        shapes |= norm_shapes("norm", spec)
    return shapes


def head_shapes(spec: ModelSpec) -> Shapes:
    """Return the parts of the last stage beyond layers; they sum to `spec.head_params`."""
    return norm_shapes("norm", spec) | {"output.weight": (spec.vocab, spec.hidden)}


def norm_shapes(name: str, spec: ModelSpec) -> Shapes:
    """Return weight, and bias where the model's norms have one."""
    shapes: Shapes = {f"{name}.weight": (spec.hidden,)}
    if spec.norm == "layernorm":
        shapes[f"{name}.bias"] = (spec.hidden,)
    return shapes

"""Which parts an architecture has and how large they are; a family's record names their sources.

A part is one tensor of ours: a norm's weight, a fused matrix, a bias.
"""

from __future__ import annotations

from llmpq.models.model_spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(spec: ModelSpec) -> Shapes:
    """Return the parts of a layer like `spec`'s (`ModelSpec.of_layer`), `layer_params` in all."""
    shapes: Shapes = {}
    for name in spec.layer_norms:
        shapes |= norm_shapes(name, spec)
    for linear in spec.linears():
        shapes[f"{linear.name}.weight"] = (linear.out_features, linear.in_features)
        if linear.bias:
            shapes[f"{linear.name}.bias"] = (linear.out_features,)
    return shapes | spec.kept_whole


def embedding_shapes(spec: ModelSpec) -> Shapes:
    """Return the parts of the first stage beyond layers; they sum to `spec.embedding_params`."""
    shapes: Shapes = {"tokens.weight": (spec.vocab, spec.hidden)}
    if spec.positions == "learned":
        shapes["positions.weight"] = (spec.max_positions + spec.position_offset, spec.hidden)
    if spec.embedding_norm:
        shapes |= norm_shapes("norm", spec)
    if spec.per_layer_dim:
        wide = spec.num_layers * spec.per_layer_dim
        shapes["per_layer.weight"] = (spec.per_layer_vocab, wide)
        shapes["per_layer_in.weight"] = (wide, spec.hidden)
        shapes["per_layer_norm.weight"] = (spec.per_layer_dim,)
    return shapes | stream_shapes("stream_in", spec)


def head_shapes(spec: ModelSpec) -> Shapes:
    """Return the parts of the last stage beyond layers; they sum to `spec.head_params`."""
    shapes = norm_shapes("norm", spec) | {"output.weight": (spec.vocab, spec.hidden)}
    bias: Shapes = {"output.bias": (spec.vocab,)} if spec.head_bias else {}
    return shapes | bias | stream_shapes("stream_out", spec)


def stream_shapes(name: str, spec: ModelSpec) -> Shapes:
    """Return the matrices of a token's streams but the first, where it has several."""
    others = range(1, 1 if spec.altup is None else spec.altup.streams)
    return {f"{name}.{i}.weight": (spec.hidden, spec.hidden) for i in others}


def mtp_shapes(spec: ModelSpec) -> Shapes:
    """Return the parts of a head that predicts a further token, its layer's among them."""
    join = spec.mtp_join
    shapes: Shapes = {"join.weight": (join.out_features, join.in_features)}
    for name in ("token_norm", "hidden_norm", "norm"):
        shapes |= norm_shapes(name, spec)
    return shapes | layer_shapes(spec.of_mtp())


def norm_shapes(name: str, spec: ModelSpec) -> Shapes:
    """Return weight, and bias where the model's norms have one."""
    shapes: Shapes = {f"{name}.weight": (spec.hidden,)}
    if spec.norm == "layernorm" and spec.norm_bias:
        shapes[f"{name}.bias"] = (spec.hidden,)
    return shapes

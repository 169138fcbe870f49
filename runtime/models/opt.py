"""OPT: LayerNorm, learned positions stored with an offset of two, ReLU MLP."""

from __future__ import annotations

import torch

from llmpq.model_spec import ModelSpec
from llmpq.runtime.models.layer_tensors import Parts
from llmpq.runtime.models.layers import MLP, Attention, DecoderLayer, Embedding, Head
from llmpq.runtime.models.tensor_names import NameTable, linear_names, norm_names


class OPT:
    """Wiring of one OPT model."""

    names = NameTable(
        roots=("model.decoder.", "decoder.", ""),
        embedding={
            "tokens.weight": ("embed_tokens.weight",),
            "positions.weight": ("embed_positions.weight",),
        },
        layer=norm_names(
            ("attn_norm", "layers.{i}.self_attn_layer_norm"),
            ("mlp_norm", "layers.{i}.final_layer_norm"),
        )
        | linear_names(
            (
                "qkv",
                (
                    "layers.{i}.self_attn.q_proj",
                    "layers.{i}.self_attn.k_proj",
                    "layers.{i}.self_attn.v_proj",
                ),
            ),
            ("o", ("layers.{i}.self_attn.out_proj",)),
            ("up", ("layers.{i}.fc1",)),
            ("down", ("layers.{i}.fc2",)),
        ),
        head=norm_names(("norm", "final_layer_norm")),
    )

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.spec = spec

    def embedding(self, parts: Parts) -> Embedding:
        """Tokens plus learned positions."""
        return Embedding(parts.tensor("tokens.weight"), parts.tensor("positions.weight"))

    def layer(self, parts: Parts) -> DecoderLayer:
        """Attention without positions of its own, and a ReLU MLP."""
        return DecoderLayer(
            attn_norm=parts.norm("attn_norm"),
            attention=Attention(self.spec, parts.linear("qkv"), parts.linear("o")),
            mlp_norm=parts.norm("mlp_norm"),
            mlp=MLP(parts.linear("up"), parts.linear("down"), "relu"),
        )

    def head(self, parts: Parts) -> Head:
        """Norm and output matrix."""
        return Head(parts.norm("norm"), parts.linear("output"))

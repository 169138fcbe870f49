"""Llama 2 and 3: RMSNorm, rotary positions, grouped key/value heads, gated SiLU MLP."""

from __future__ import annotations

import torch

from llmpq.model_spec import ModelSpec
from llmpq.runtime.models.layer_tensors import Parts
from llmpq.runtime.models.layers import Attention, DecoderLayer, Embedding, GatedMLP, Head, Rotary
from llmpq.runtime.models.tensor_names import NameTable, linear_names, norm_names


class Llama:
    """Wiring of one Llama model."""

    names = NameTable(
        roots=("model.", ""),
        embedding={"tokens.weight": ("embed_tokens.weight",)},
        layer=norm_names(
            ("attn_norm", "layers.{i}.input_layernorm"),
            ("mlp_norm", "layers.{i}.post_attention_layernorm"),
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
            ("o", ("layers.{i}.self_attn.o_proj",)),
            ("gate_up", ("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj")),
            ("down", ("layers.{i}.mlp.down_proj",)),
        ),
        head=norm_names(("norm", "norm")),
    )

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.spec, self.rotary = spec, Rotary(spec, device)

    def embedding(self, parts: Parts) -> Embedding:
        """Tokens only."""
        return Embedding(parts.tensor("tokens.weight"))

    def layer(self, parts: Parts) -> DecoderLayer:
        """Rotary attention and a gated MLP."""
        return DecoderLayer(
            attn_norm=parts.norm("attn_norm"),
            attention=Attention(
                self.spec, parts.linear("qkv"), parts.linear("o"), rotary=self.rotary
            ),
            mlp_norm=parts.norm("mlp_norm"),
            mlp=GatedMLP(parts.linear("gate_up"), parts.linear("down")),
        )

    def head(self, parts: Parts) -> Head:
        """Norm and output matrix."""
        return Head(parts.norm("norm"), parts.linear("output"))

"""BLOOM: LayerNorm (after the embedding too), ALiBi, GELU MLP, qkv interleaved per head."""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.model_spec import ModelSpec
from llmpq.runtime.models.attention import alibi_slopes
from llmpq.runtime.models.layer_tensors import Parts
from llmpq.runtime.models.layers import MLP, Attention, DecoderLayer, Embedding, Head
from llmpq.runtime.models.tensor_names import NameTable, linear_names, norm_names


def apart(qkv: Tensor, spec: ModelSpec) -> Tensor:
    """Return the fused rows as q, k, v; a checkpoint has q, k, v of head 0, of head 1, ..."""
    by_head = qkv.view(spec.heads, 3, spec.head_dim, -1)
    return by_head.transpose(0, 1).reshape(qkv.shape)


class Bloom:
    """Wiring of one BLOOM model."""

    names = NameTable(
        roots=("transformer.", ""),
        embedding={"tokens.weight": ("word_embeddings.weight",)}
        | norm_names(("norm", "word_embeddings_layernorm")),
        layer=norm_names(
            ("attn_norm", "h.{i}.input_layernorm"),
            ("mlp_norm", "h.{i}.post_attention_layernorm"),
        )
        | linear_names(
            ("qkv", ("h.{i}.self_attention.query_key_value",)),
            ("o", ("h.{i}.self_attention.dense",)),
            ("up", ("h.{i}.mlp.dense_h_to_4h",)),
            ("down", ("h.{i}.mlp.dense_4h_to_h",)),
        ),
        head=norm_names(("norm", "ln_f")),
        arrange={"qkv.weight": apart, "qkv.bias": apart},
    )

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.spec, self.slopes_H = spec, alibi_slopes(spec.heads).to(device)

    def embedding(self, parts: Parts) -> Embedding:
        """Tokens, normalised."""
        return Embedding(parts.tensor("tokens.weight"), norm=parts.norm("norm"))

    def layer(self, parts: Parts) -> DecoderLayer:
        """ALiBi attention and a GELU MLP."""
        return DecoderLayer(
            attn_norm=parts.norm("attn_norm"),
            attention=Attention(
                self.spec, parts.linear("qkv"), parts.linear("o"), alibi_slopes_H=self.slopes_H
            ),
            mlp_norm=parts.norm("mlp_norm"),
            mlp=MLP(parts.linear("up"), parts.linear("down"), "gelu"),
        )

    def head(self, parts: Parts) -> Head:
        """Norm and output matrix."""
        return Head(parts.norm("norm"), parts.linear("output"))

"""Qwen3: Llama's layer with RMSNorm on every query and key head before rotation."""

from __future__ import annotations

from dataclasses import replace

from llmpq.runtime.models.layer_tensors import Parts
from llmpq.runtime.models.layers import Attention, DecoderLayer, GatedMLP
from llmpq.runtime.models.llama import Llama


class Qwen3(Llama):
    """Wiring of one Qwen3 model."""

    names = replace(
        Llama.names,
        layer={
            **Llama.names.layer,
            "q_norm.weight": ("layers.{i}.self_attn.q_norm.weight",),
            "k_norm.weight": ("layers.{i}.self_attn.k_norm.weight",),
        },
    )

    def layer(self, parts: Parts) -> DecoderLayer:
        """Rotary attention with q/k norms, and a gated MLP."""
        return DecoderLayer(
            attn_norm=parts.norm("attn_norm"),
            attention=Attention(
                self.spec,
                parts.linear("qkv"),
                parts.linear("o"),
                rotary=self.rotary,
                q_norm=parts.norm("q_norm"),
                k_norm=parts.norm("k_norm"),
            ),
            mlp_norm=parts.norm("mlp_norm"),
            mlp=GatedMLP(parts.linear("gate_up"), parts.linear("down")),
        )

"""Mixtral: Llama's layer with a router and experts in the MLP's place."""

from __future__ import annotations

from dataclasses import replace

from llmpq.runtime.models.layer_tensors import Parts
from llmpq.runtime.models.layers import Attention, DecoderLayer, GatedMLP, SparseMLP
from llmpq.runtime.models.llama import Llama
from llmpq.runtime.models.tensor_names import linear_names

_MOE = "layers.{i}.block_sparse_moe"
_EXPERT = f"{_MOE}.experts.{{e}}"
_ATTENTION = {
    part: names
    for part, names in Llama.names.layer.items()
    if not part.startswith(("gate_up.", "down."))
}


class Mixtral(Llama):
    """Wiring of one Mixtral model."""

    names = replace(
        Llama.names,
        layer={**_ATTENTION, "router.weight": (f"{_MOE}.gate.weight",)}
        | linear_names(
            ("experts.{e}.gate_up", (f"{_EXPERT}.w1", f"{_EXPERT}.w3")),
            ("experts.{e}.down", (f"{_EXPERT}.w2",)),
        ),
    )

    def layer(self, parts: Parts) -> DecoderLayer:
        """Rotary attention, and the experts that each token's router chooses."""
        experts = [
            GatedMLP(parts.linear(f"experts.{e}.gate_up"), parts.linear(f"experts.{e}.down"))
            for e in range(self.spec.experts)
        ]
        return DecoderLayer(
            attn_norm=parts.norm("attn_norm"),
            attention=Attention(
                self.spec, parts.linear("qkv"), parts.linear("o"), rotary=self.rotary
            ),
            mlp_norm=parts.norm("mlp_norm"),
            mlp=SparseMLP(parts.tensor("router.weight"), experts, self.spec.experts_per_token),
        )

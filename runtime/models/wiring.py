"""How the parts of a model go together: what its spec says, whatever family it is of.

    layer   x += attention(norm(x)); x += mlp(norm(x))   norms, biases, activation by the spec
rotary, ALiBi or learned positions; norms of query and key heads; gated MLPs; experts
"""

from __future__ import annotations

import torch

from llmpq.model_spec import ModelSpec
from llmpq.runtime.models.attention import alibi_slopes
from llmpq.runtime.models.layer_tensors import Parts
from llmpq.runtime.models.layers import (
    MLP,
    Attention,
    DecoderLayer,
    Embedding,
    GatedMLP,
    Head,
    LayerRunner,
    PlainLayers,
    Rotary,
    SparseMLP,
)


class Wiring:
    """Wiring of one model on one device."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, runner: LayerRunner | None = None
    ) -> None:
        """`runner`: who computes the layers; torch's operators unless told otherwise."""
        self._spec, self._runner = spec, runner or PlainLayers()
        self._rotary = Rotary(spec, device) if spec.positions == "rotary" else None
        self._slopes_H = None
        if spec.positions == "alibi":
            self._slopes_H = alibi_slopes(spec.heads).to(device)

    def embedding(self, parts: Parts) -> Embedding:
        """Wire the first stage's embedding."""
        learned = self._spec.positions == "learned"
        return Embedding(
            parts.tensor("tokens.weight"),
            parts.tensor("positions.weight") if learned else None,
            parts.norm("norm") if self._spec.embedding_norm else None,
        )

    def layer(self, parts: Parts) -> DecoderLayer:
        """Wire one decoder layer."""
        head_norms = self._spec.qk_norm
        return DecoderLayer(
            attn_norm=parts.norm("attn_norm"),
            attention=Attention(
                self._spec,
                parts.linear("qkv"),
                parts.linear("o"),
                rotary=self._rotary,
                alibi_slopes_H=self._slopes_H,
                q_norm=parts.norm("q_norm") if head_norms else None,
                k_norm=parts.norm("k_norm") if head_norms else None,
            ),
            mlp_norm=parts.norm("mlp_norm"),
            mlp=self._mlp(parts),
            runner=self._runner,
        )

    def head(self, parts: Parts) -> Head:
        """Wire the last stage's norm and output matrix."""
        return Head(parts.norm("norm"), parts.linear("output"), self._runner)

    def _mlp(self, parts: Parts) -> MLP | GatedMLP | SparseMLP:
        if not self._spec.experts:
            return self._dense_mlp(parts, "")
        experts = [self._dense_mlp(parts, owner) for owner in self._spec.mlps()]
        router = parts.tensor("router.weight")
        return SparseMLP(router, experts, self._spec.experts_per_token)

    def _dense_mlp(self, parts: Parts, owner: str) -> MLP | GatedMLP:
        down, activation = parts.linear(f"{owner}down"), self._spec.activation
        if self._spec.gated:
            return GatedMLP(parts.linear(f"{owner}gate_up"), down, activation)
        return MLP(parts.linear(f"{owner}up"), down, activation)

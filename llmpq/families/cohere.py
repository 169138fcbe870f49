"""Cohere's Command R and A: attention and MLP side by side on one LayerNorm without a bias.

    x += o(attention(rope(q), rope(k), v)) + down(silu(gate) * up), all of norm(x);  logits times s

Channels are rotated in pairs. Command R+ norms every query and key head by weights of its own.
Since Command R7B (`cohere2`) three layers of four see a window; the others have no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import glm4, llama
from llmpq.families.common.config_values import Config, flag, number, size
from llmpq.families.common.record import Arrange
from llmpq.families.common.rotary_families import (
    SLIDING,
    alternating,
    layer_kinds,
    pairs_to_halves,
    rotary_fields,
    window_size,
)

FULL_EVERY = 4


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bias = flag(config, "attention_bias")
    found = {
        **rotary_fields(config, eps_key="layer_norm_eps"),
        "norm": "layernorm",
        "norm_bias": False,
        "parallel_norms": 1,
        "qkv_bias": bias,
        "o_bias": bias or None,
        "logit_factor": number(config, "logit_scale"),
    }
    if config.get("model_type") == "cohere2":
        return {**found, **_windows(config)}
    if flag(config, "use_qk_norm"):
        found |= {"qk_norm": True, "qk_norm_centred": True, "qk_norm_apart": True}
    return found


def _windows(config: Config) -> dict[str, Any]:
    """Return which layers see a window; those that do not have no positions."""
    window = window_size(config)
    config.get("head_dim")  # the class takes hidden / heads, whatever it says
    every = size(config, "sliding_window_pattern", default=FULL_EVERY)
    kinds = layer_kinds(config, alternating(config, every))
    seen = tuple(window if kind == SLIDING else 0 for kind in kinds)
    bare = tuple(i for i, width in enumerate(seen) if not width)
    hidden, heads = (size(config, key) for key in ("hidden_size", "num_attention_heads"))
    whole = {} if hidden % heads else {"head_dim": hidden // heads}
    return {"windows": seen if any(seen) else (), "without_positions": bare, **whole}


def _halves_of(heads: str) -> Arrange:
    """Return how norms of heads, weights of each head apart, follow the rotated channels."""

    def rows(weight: Any, spec: Any) -> Any:
        return pairs_to_halves(weight, getattr(spec, heads), spec.head_dim, spec.head_dim)

    return Arrange(rows=rows)


_LAYER = {part: names for part, names in llama.FAMILY.names.layer.items() if "mlp_norm" not in part}
FAMILY = replace(
    llama.FAMILY,
    name="cohere",
    model_types=("cohere", "cohere2"),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **_LAYER,
            "q_norm.weight": ("layers.{i}.self_attn.q_norm.weight[{h}]",),
            "k_norm.weight": ("layers.{i}.self_attn.k_norm.weight[{h}]",),
        },
        arrange={
            **{f"qkv.{kind}": glm4.HALVES for kind in ("weight", "bias")},
            "q_norm.weight": _halves_of("heads"),
            "k_norm.weight": _halves_of("kv_heads"),
        },
    ),
)

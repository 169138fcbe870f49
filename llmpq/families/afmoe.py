"""AFMoE (Arcee Trinity): gated attention, norms before and behind, DeepSeek-V3's kind of mixture.

    x = sqrt(h) * embedding, if mup_enabled
    x += norm(o(sigmoid(gate) * attention(rope(norm(q)), rope(norm(k)), v)) of norm(x))
    x += norm(mlp(norm(x)))

Every fourth layer sees all tokens and has no positions; the others see a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect, flag, number, size
from llmpq.families.common.mixture_config import counts, dense_fields, expert_names
from llmpq.families.common.record import linear_names, norm_names
from llmpq.families.common.rotary_families import (
    SLIDING,
    alternating,
    layer_kinds,
    rotary_fields,
    windows,
)
from llmpq.families.common.spec_values import Router

FULL_EVERY = 4


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "attention_bias", False, default=False)
    base, wide = rotary_fields(config), size(config, "moe_intermediate_size")
    every = size(config, "global_attn_every_n_layers", default=FULL_EVERY)
    kinds = layer_kinds(config, alternating(config, every))
    dense = size(config, "num_dense_layers") if config.get("num_dense_layers") else 0
    return {
        **base,
        **counts(config, "num_experts"),
        "ffn": wide,
        "shared_ffn": wide * size(config, "num_shared_experts"),
        "router": Router(score="sigmoid", scale=number(config, "route_scale"), correction=True),
        **dense_fields(range(min(dense, base["num_layers"])), base["ffn"]),
        "norm_order": "both",
        "qk_norm": True,
        "attention_gate": True,
        "windows": windows(config, kinds),
        "without_positions": tuple(i for i, kind in enumerate(kinds) if kind != SLIDING),
        "embedding_factor": base["hidden"] ** 0.5 if flag(config, "mup_enabled") else 1.0,
    }


_SELF, _MLP = "layers.{i}.self_attn", "layers.{i}.mlp"
_ATTENTION = {
    **norm_names(
        ("attn_norm", "layers.{i}.input_layernorm"),
        ("attn_out_norm", "layers.{i}.post_attention_layernorm"),
        ("mlp_norm", "layers.{i}.pre_mlp_layernorm"),
        ("mlp_out_norm", "layers.{i}.post_mlp_layernorm"),
    ),
    **linear_names(
        ("qkv", tuple(f"{_SELF}.{part}_proj" for part in ("q", "k", "v", "gate"))),
    ),
    **llama.OUT,
    **llama.HEAD_NORMS,
}
FAMILY = replace(
    llama.FAMILY,
    name="afmoe",
    model_types=("afmoe",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **_ATTENTION,
            **expert_names(_MLP, shared=True),
            "router.weight": (f"{_MLP}.router.gate.weight",),
            "router.correction": (f"{_MLP}.expert_bias",),
        },
        dense={**_ATTENTION, **llama.MLP},
    ),
)

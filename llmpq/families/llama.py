"""Llama 2 and 3, Mistral: RMSNorm, rotary positions, grouped heads, gated SiLU."""

from __future__ import annotations

from typing import Any

from llmpq.families.config_values import Config, expect, rotary_fields
from llmpq.families.record import Family, NameTable, linear_names, norm_names


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "attention_bias", False, default=False)
    expect(config, "mlp_bias", False, default=False)
    if config.get("model_type") == "mistral":  # a window over the last tokens is not supported
        expect(config, "sliding_window", None, default=None)
    return rotary_fields(config)


FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral"),
    fields=fields,
    names=NameTable(
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
    ),
    layers_at="model.layers",
    before=("model.embed_tokens", "model.rotary_emb"),
    behind=("model.norm", "lm_head"),
)

"""Phi 1, 1.5 and 2: attention and MLP side by side on one LayerNorm, biases everywhere.

    x += dense(attention(rope(q), rope(k), v)) + fc2(gelu(fc1)), all of norm(x);  logits + b

A part of each head is rotated; with `qk_layernorm` queries and keys pass a LayerNorm first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.record import linear_names, norm_names
from llmpq.families.common.rotary_families import plain_rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    found = {
        **plain_rotary_fields(config),
        "parallel_norms": 1,
        "qkv_bias": True,
        "linear_bias": True,
        "head_bias": True,
    }
    if flag(config, "qk_layernorm"):
        found |= {"qk_norm": True, "qk_norm_centred": True, "qk_norm_bias": True}
    return found


FAMILY = replace(
    llama.FAMILY,
    name="phi",
    model_types=("phi",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **norm_names(
                ("attn_norm", "layers.{i}.input_layernorm"),
                ("q_norm", "layers.{i}.self_attn.q_layernorm"),
                ("k_norm", "layers.{i}.self_attn.k_layernorm"),
            ),
            **llama.QKV,
            **linear_names(
                ("o", ("layers.{i}.self_attn.dense",)),
                ("up", ("layers.{i}.mlp.fc1",)),
                ("down", ("layers.{i}.mlp.fc2",)),
            ),
        },
        head=norm_names(("norm", "final_layernorm")),
    ),
    before=("model.embed_tokens", "model.rotary_emb"),
    behind=("model.final_layernorm", "lm_head"),
)

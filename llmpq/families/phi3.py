"""Phi-3, Phi-3.5 and Phi-4: Llama's layer with queries, keys and values in one stored matrix.

Gate and up are one, too. Longer texts have other frequencies (longrope); Phi-4-mini rotates a
part of each head's channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect
from llmpq.families.common.record import linear_names
from llmpq.families.common.rotary_families import everywhere, rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        expect(config, key, False, default=False)
    config.get("original_max_position_embeddings")  # longrope reads it
    base = rotary_fields(config, partial_rotary=True)
    return {**base, "windows": everywhere(config)}


FAMILY = replace(
    llama.FAMILY,
    name="phi3",
    model_types=("phi3",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **llama.NORMS,
            **linear_names(("qkv", ("layers.{i}.self_attn.qkv_proj",))),
            **llama.OUT,
            **linear_names(
                ("gate_up", ("layers.{i}.mlp.gate_up_proj",)),
                ("down", ("layers.{i}.mlp.down_proj",)),
            ),
        },
    ),
)

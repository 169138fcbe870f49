"""Solar Open: Llama's attention, and GLM-4.5's mixture in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import glm4_moe
from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = rotary_fields(config, ffn_key="moe_intermediate_size")
    bias = flag(config, "attention_bias")
    config.get("intermediate_size")  # read, and without effect: no layer is dense
    return {**base, "qkv_bias": bias, **glm4_moe.mixture(config, base["ffn"], dense=())}


FAMILY = replace(glm4_moe.FAMILY, name="solar_open", model_types=("solar_open",), fields=fields)

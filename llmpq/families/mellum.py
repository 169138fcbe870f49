"""Mellum 2: Qwen3's mixture with windows, whose layers rotate by a theta of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import deepseek, qwen3, qwen3_moe
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.mixture_config import counts, dense_fields
from llmpq.families.common.rope import window_theta
from llmpq.families.common.rotary_families import FULL, layer_kinds, windows
from llmpq.families.common.spec_values import Router


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = qwen3.fields(config)
    for key in ("mtp_layer_types", "mtp_mlp_layer_types"):
        config.get(key)  # of layers that are left out
    seen = windows(config, layer_kinds(config, [FULL] * base["num_layers"]))
    return {
        **base,
        "windows": seen,
        "window_rope_theta": window_theta(config, beside="rope_theta") if seen else None,
        **counts(config, "num_experts", "num_local_experts"),
        "ffn": size(config, "moe_intermediate_size"),
        "router": Router(normalise=flag(config, "norm_topk_prob")),
        **dense_fields(deepseek.listed_dense(config) or (), base["ffn"]),
    }


FAMILY = replace(qwen3_moe.FAMILY, name="mellum", model_types=("mellum",), fields=fields)

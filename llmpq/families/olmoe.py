"""OLMoE: Llama's layer with norms over all query or key heads at once, and Qwen3's mixture.

Queries, keys (behind their norms) and values may be kept within a limit, `clip_qkv`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama, qwen3_moe
from llmpq.families.common.config_values import Config, flag, is_given, number
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.common.spec_values import Router


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    limit = config.get("clip_qkv")
    return {
        **rotary_fields(config),
        **llama.bias_fields(config),
        **counts(config, "num_experts", "num_local_experts"),
        "qk_norm": True,
        "qk_norm_whole": True,
        "qkv_limit": number(config, "clip_qkv") if is_given(limit) else 0.0,
        "router": Router(normalise=flag(config, "norm_topk_prob")),
    }


FAMILY = replace(qwen3_moe.FAMILY, name="olmoe", model_types=("olmoe",), fields=fields)

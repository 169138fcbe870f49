"""Qwen1.5's and Qwen2's mixtures: Qwen2's attention, and Qwen3-Next's mixture with a gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama, qwen2, qwen3_next
from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = rotary_fields(config)
    return {
        **base,
        "qkv_bias": flag(config, "qkv_bias"),
        "windows": qwen2.late_windows(config),
        **qwen3_next.mixture(config, base["ffn"]),
    }


_ATTENTION = {**llama.NORMS, **llama.QKV, **llama.OUT}
FAMILY = replace(
    llama.FAMILY,
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={**_ATTENTION, **qwen3_next.EXPERTS},
        dense={**_ATTENTION, **llama.MLP},
    ),
)

"""dots.llm1: Qwen3's attention, and DeepSeek-V3's mixture behind the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import glm4_moe, qwen3
from llmpq.families.common.config_values import Config, size
from llmpq.families.common.rotary_families import FULL, SLIDING, layer_kinds, windows


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = qwen3.fields(config)
    first, count = (size(config, key) for key in ("max_window_layers", "num_hidden_layers"))
    default = [SLIDING if index >= first else FULL for index in range(count)]
    return {
        **base,
        "windows": windows(config, layer_kinds(config, default)),
        **glm4_moe.mixture(config, base["ffn"]),
    }


FAMILY = replace(
    glm4_moe.FAMILY,
    name="dots1",
    model_types=("dots1",),
    fields=fields,
    names=replace(glm4_moe.FAMILY.names, mtp=None),
)

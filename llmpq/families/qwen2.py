"""Qwen2 and Qwen2.5: Llama's layer with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.config_values import Config, expect, rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "use_sliding_window", False, default=False)
    return {**rotary_fields(config), "qkv_bias": True}


FAMILY = replace(llama.FAMILY, name="qwen2", model_types=("qwen2",), fields=fields)

"""Qwen3, and Qwen3-VL's text: Llama's layer, RMSNorm on every query and key head before RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.qwen2 import late_windows


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    own = {"qk_norm": True, "windows": late_windows(config)}
    return {**rotary_fields(config), **llama.bias_fields(config), **own}


_NAMES = llama.FAMILY.names
FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    model_types=("qwen3", "qwen3_vl_text"),
    fields=fields,
    names=replace(_NAMES, layer={**_NAMES.layer, **llama.HEAD_NORMS}),
)

"""Qwen2, Qwen2.5, their VL models' text, MiMo 7B: Llama's layer, with biases on q, k and v.

With `use_sliding_window` the layers from `max_window_layers` on see a window of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.record import Family
from llmpq.families.common.rotary_families import FULL, SLIDING, layer_kinds, rotary_fields, windows


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    biased = flag(config, "attention_bias", default=True) if _is_mimo(config) else True
    return {**rotary_fields(config), "qkv_bias": biased, "windows": late_windows(config)}


def _is_mimo(config: Config) -> bool:
    if config.get("model_type") != "mimo":
        return False
    config.get("use_mrope")  # of text alone, positions count alike in every direction
    return True


def late_windows(config: Config) -> tuple[int, ...]:
    """Return each layer's window: layers from `max_window_layers` on have one, if any has."""
    if not flag(config, "use_sliding_window", default=False):
        for key in ("sliding_window", "layer_types", "max_window_layers"):
            config.get(key)  # read, and without effect
        return ()
    first = config.get("max_window_layers")
    first = first if type(first) is int else size(config, "num_hidden_layers")
    count = size(config, "num_hidden_layers")
    default = [SLIDING if index >= first else FULL for index in range(count)]
    return windows(config, layer_kinds(config, default))


FAMILY: Family = replace(
    llama.FAMILY,
    name="qwen2",
    model_types=("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "mimo"),
    fields=fields,
)

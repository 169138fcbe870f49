"""Qwen3: Llama's layer with RMSNorm on every query and key head before rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.config_values import Config, expect, rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "attention_bias", False, default=False)
    expect(config, "use_sliding_window", False, default=False)
    return {**rotary_fields(config), "qk_norm": True}


_HEAD_NORMS = {
    f"{part}_norm.weight": (f"layers.{{i}}.self_attn.{part}_norm.weight",) for part in ("q", "k")
}
_NAMES = llama.FAMILY.names
FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    model_types=("qwen3",),
    fields=fields,
    names=replace(_NAMES, layer={**_NAMES.layer, **_HEAD_NORMS}),
)

"""Helium: Llama's layer; the channels of a head are rotated in pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import glm4, llama
from llmpq.families.common.config_values import Config
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    return {**rotary_fields(config), **llama.bias_fields(config), "o_bias": False}


FAMILY = replace(
    llama.FAMILY,
    name="helium",
    model_types=("helium",),
    fields=fields,
    names=replace(
        llama.FAMILY.names, arrange={f"qkv.{kind}": glm4.HALVES for kind in ("weight", "bias")}
    ),
)

"""Arcee (AFM): Llama's attention, and an MLP without a gate whose activation is relu(x) squared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config
from llmpq.families.common.record import linear_names
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    found = {**rotary_fields(config, activation="relu2"), **llama.bias_fields(config)}
    return {**found, "gated": False}


FAMILY = replace(
    llama.FAMILY,
    name="arcee",
    model_types=("arcee",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **llama.NORMS,
            **llama.QKV,
            **llama.OUT,
            **linear_names(
                ("up", ("layers.{i}.mlp.up_proj",)), ("down", ("layers.{i}.mlp.down_proj",))
            ),
        },
    ),
)

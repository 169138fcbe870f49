"""Nemotron 3 and 4, Minitron; Jais 2: LayerNorms and MLPs whose activation is relu(x) squared.

    x += o(attention(rope(q), rope(k), v)) of norm(x);  x += down(relu(up)^2) of norm(x)

Nemotron rotates a part of each head, and its norms store what their weights exceed one by.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import arcee, llama
from llmpq.families.common.config_values import Config
from llmpq.families.common.record import ABOVE_ONE
from llmpq.families.common.rotary_families import plain_rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    return {**plain_rotary_fields(config, eps_key="norm_eps"), **llama.bias_fields(config)}


def jais_fields(config: Config) -> dict[str, Any]:
    """Return the fields of Jais 2."""
    return {**plain_rotary_fields(config), **llama.bias_fields(config)}


JAIS = replace(arcee.FAMILY, name="jais2", model_types=("jais2",), fields=jais_fields)
FAMILY = replace(
    arcee.FAMILY,
    name="nemotron",
    model_types=("nemotron",),
    fields=fields,
    names=replace(
        arcee.FAMILY.names,
        arrange={f"{part}.weight": ABOVE_ONE for part in ("attn_norm", "mlp_norm", "norm")},
    ),
)

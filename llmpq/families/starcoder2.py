"""StarCoder2: Mistral's attention with LayerNorm and biases, and an MLP of GELU without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.record import linear_names
from llmpq.families.common.rotary_families import everywhere, plain_rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bias = flag(config, "use_bias", default=True)
    return {
        **plain_rotary_fields(config, eps_key="norm_epsilon"),
        "qkv_bias": bias,
        "linear_bias": bias,
        "windows": everywhere(config),
    }


FAMILY = replace(
    llama.FAMILY,
    name="starcoder2",
    model_types=("starcoder2",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **llama.NORMS,
            **llama.QKV,
            **llama.OUT,
            **linear_names(("up", ("layers.{i}.mlp.c_fc",)), ("down", ("layers.{i}.mlp.c_proj",))),
        },
    ),
)

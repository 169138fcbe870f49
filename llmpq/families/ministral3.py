"""Ministral 3 and Mistral 4: queries that grow with their position.

Ministral 3   Mistral's layer; the rotated queries times 1 + beta log(1 + floor(p / original))
Mistral 4     DeepSeek's latents with the same; w = the k largest of softmax(router(x)), of the
              groups whose two best are best, made to sum to one, times a scale
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import deepseek, llama
from llmpq.families.common.config_values import Config, flag, number, size
from llmpq.families.common.mixture_config import counts, first_layers, groups
from llmpq.families.common.record import linear_names
from llmpq.families.common.rope import GROWTH, query_growth
from llmpq.families.common.rotary_families import rotary_fields, window_size
from llmpq.families.common.spec_values import Router


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = rotary_fields(config, knows=(GROWTH,))
    window = window_size(config)
    return {
        **base,
        "windows": (window,) * base["num_layers"] if window else (),
        "query_growth": query_growth(config),
    }


def latent_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a model with latents."""
    base = deepseek.latent_fields(config, knows=(GROWTH,))
    number_of, kept = groups(config, size(config, "n_routed_experts", "num_local_experts"))
    wide = size(config, "moe_intermediate_size")
    return {
        **base,
        **counts(config, "n_routed_experts", "num_local_experts"),
        "ffn": wide,
        "shared_ffn": wide * size(config, "n_shared_experts"),
        "router": Router(
            normalise=flag(config, "norm_topk_prob"),
            scale=number(config, "routed_scaling_factor"),
            group_score="top2",
            groups=number_of,
            groups_kept=kept,
        ),
        **first_layers(config, base["ffn"]),
        "query_growth": query_growth(config),
    }


FAMILY = replace(llama.FAMILY, name="ministral3", model_types=("ministral3",), fields=fields)
_NAMES = deepseek.FAMILY.names
_EXPERTS = "layers.{i}.mlp.experts"
LATENT = replace(
    deepseek.FAMILY,
    name="mistral4",
    model_types=("mistral4",),
    fields=latent_fields,
    codes_unread="experts",
    names=replace(
        _NAMES,
        layer={
            **_NAMES.layer,
            "experts.{e}.gate_up.weight": (f"{_EXPERTS}.gate_up_proj[{{e}}]",),
            "experts.{e}.down.weight": (f"{_EXPERTS}.down_proj[{{e}}]",),
        },
        apart=dict(
            linear_names(
                (
                    "experts.{e}.gate_up",
                    (f"{_EXPERTS}.{{e}}.gate_proj", f"{_EXPERTS}.{{e}}.up_proj"),
                ),
                ("experts.{e}.down", (f"{_EXPERTS}.{{e}}.down_proj",)),
            )
        ),
    ),
)

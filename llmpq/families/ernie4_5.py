"""ERNIE 4.5, dense and its mixtures: Llama's layer whose channels are rotated in pairs.

A mixture chooses experts by softmax(router(x)) + c and weighs the chosen by softmax alone, made to
sum to one, beside experts that all tokens share; its first layers are dense.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import glm4, llama
from llmpq.families.common.config_values import Config, expect, flag, number, size
from llmpq.families.common.mixture_config import counts, dense_fields, expert_names
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.common.spec_values import Router

LEAST_SUM = 1e-6
"""Sums of chosen experts' weights are above this, so that a smaller `moe_norm_min` does nothing."""


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bias = flag(config, "use_bias", default=False)
    return {**rotary_fields(config), "qkv_bias": bias, "linear_bias": bias}


def mixture_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a mixture."""
    expect(config, "use_bias", False, default=False)
    least = number(config, "moe_norm_min")
    if least > LEAST_SUM:
        raise ValueError(
            f"config.json: moe_norm_min={least:g} would change the experts' weights; expected at "
            f"most {LEAST_SUM:g}"
        )
    base, wide = rotary_fields(config), size(config, "moe_intermediate_size")
    shared = config.get("moe_num_shared_experts")
    return {
        **base,
        **counts(config, "moe_num_experts", "num_experts", per_token=("moe_k",)),
        "ffn": wide,
        "shared_ffn": wide * size(config, "moe_num_shared_experts") if shared else 0,
        "router": Router(correction=True),
        **_dense_layers(config, base["ffn"]),
    }


def _dense_layers(config: Config, ffn: int) -> dict[str, Any]:
    """Return the layers without experts: those outside of first and last, and between each n."""
    count, every = size(config, "num_hidden_layers"), size(config, "moe_layer_interval")
    first, last = config.get("moe_layer_start_index"), config.get("moe_layer_end_index")
    if type(first) is not int or type(last) is not int:
        raise ValueError(
            f"config.json: moe_layer_start_index={first!r} and moe_layer_end_index={last!r} must "
            "be numbers of layers; correct them or download config.json again"
        )
    last = count - 1 if last == -1 else last
    dense = (i for i in range(count) if (i + 1) % every or not first <= i <= last)
    return dense_fields(dense, ffn)


_ARRANGE = {f"qkv.{kind}": glm4.HALVES for kind in ("weight", "bias")}
_ATTENTION = {**llama.NORMS, **llama.QKV, **llama.OUT}
_CORRECTION = "layers.{i}.mlp.moe_statics.e_score_correction_bias[0]"
FAMILY = replace(
    llama.FAMILY,
    name="ernie4_5",
    model_types=("ernie4_5",),
    fields=fields,
    names=replace(llama.FAMILY.names, arrange=_ARRANGE),
)
MIXTURE = replace(
    llama.FAMILY,
    name="ernie4_5_moe",
    model_types=("ernie4_5_moe",),
    fields=mixture_fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **_ATTENTION,
            **expert_names("layers.{i}.mlp", shared=True),
            "router.correction": (_CORRECTION,),
        },
        dense={**_ATTENTION, **llama.MLP},
        arrange=_ARRANGE,
    ),
)

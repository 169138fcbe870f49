"""Flint: windows that are rotated, full layers without positions, sinks, and Qwen3's mixture.

p = sigmoid(router(x));  y = sum of w_e expert_e(x) + shared(x),  w = the k largest, their sum one
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama, qwen3_moe
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.mixture_config import counts, expert_names
from llmpq.families.common.record import linear_names
from llmpq.families.common.rotary_families import (
    FULL,
    SLIDING,
    layer_kinds,
    rotary_fields,
    windows,
)
from llmpq.families.common.spec_values import Router

FULL_EVERY, FIRST_DENSE = 4, (0, 1)
"""Of a config that does not list its layers: every fourth from the second on sees all tokens, so do
the first two, which have no experts, and the last."""


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base, bias = rotary_fields(config), flag(config, "attention_bias")
    count = base["num_layers"]
    kinds = layer_kinds(config, [FULL if _sees_all(i, count) else SLIDING for i in range(count)])
    if config.get("mlp_only_layers") is None:
        config = {**config, "mlp_only_layers": list(FIRST_DENSE)}
    return {
        **base,
        **counts(config, "num_experts"),
        "qkv_bias": bias,
        "o_bias": bias or None,
        "qk_norm": True,
        "windows": windows(config, kinds),
        "without_positions": tuple(i for i, kind in enumerate(kinds) if kind == FULL),
        "sinks": True,
        "ffn": size(config, "moe_intermediate_size"),
        "shared_ffn": size(config, "shared_expert_intermediate_size"),
        "router": Router(score="sigmoid", normalise=flag(config, "norm_topk_prob")),
        **qwen3_moe.dense_layers(config, base["ffn"]),
    }


def _sees_all(layer: int, count: int) -> bool:
    return layer < 2 or layer % FULL_EVERY == 1 or layer == count - 1


_SHARED = "layers.{i}.mlp.shared_expert"
_ATTENTION = {
    **llama.NORMS,
    **llama.QKV,
    **llama.OUT,
    **llama.HEAD_NORMS,
    "sinks": ("layers.{i}.self_attn.softmax_offset",),
}
FAMILY = replace(
    llama.FAMILY,
    name="flint",
    model_types=("flint",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **_ATTENTION,
            **expert_names("layers.{i}.mlp"),
            **linear_names(
                ("shared.gate_up", (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj")),
                ("shared.down", (f"{_SHARED}.down_proj",)),
            ),
        },
        dense={**_ATTENTION, **llama.MLP},
    ),
)

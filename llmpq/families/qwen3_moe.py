"""Qwen3's mixtures, and Qwen3-VL's: Qwen3's attention, experts that a router chooses per token.

w = the k largest of softmax(router(x)), made to sum to one if `norm_topk_prob` (Qwen3-VL: always)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama, qwen3
from llmpq.families.common.config_values import Config, expect, flag, size
from llmpq.families.common.mixture_config import counts, expert_names
from llmpq.families.common.rotary_families import SLIDING, rotary_fields, windows
from llmpq.families.common.spec_values import Router


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "mlp_bias", False, default=False)
    base = qwen3.fields(config)
    return {
        **base,
        "windows": _windows(config),
        **counts(config, "num_experts", "num_local_experts"),
        "ffn": size(config, "moe_intermediate_size"),
        "router": Router(normalise=flag(config, "norm_topk_prob")),
        **dense_layers(config, base["ffn"]),
    }


def _windows(config: Config) -> tuple[int, ...]:
    """Return each layer's window: all have it or none, whatever `max_window_layers` says."""
    config.get("max_window_layers")
    if not flag(config, "use_sliding_window", default=False):
        return ()
    return windows(config, [SLIDING] * size(config, "num_hidden_layers"))


def dense_layers(config: Config, ffn: int) -> dict[str, Any]:
    """Return the layers without experts: those listed, and all but every n-th."""
    every = size(config, "decoder_sparse_step", default=1)
    listed = config.get("mlp_only_layers") or []
    count = size(config, "num_hidden_layers")
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < count for i in listed):
        raise ValueError(
            f"config.json: 'mlp_only_layers' must be numbers of layers below {count}, got {listed}"
        )
    dense = tuple(i for i in range(count) if i in listed or (i + 1) % every)
    return {"dense_layers": dense, "dense_ffn": ffn} if dense else {}


def vision_fields(config: Config) -> dict[str, Any]:
    """Return the fields of the text model of a Qwen3-VL with experts: no layer has a window."""
    for key in ("norm_topk_prob", "use_sliding_window", "sliding_window", "max_window_layers"):
        config.get(key)  # without effect there
    base = {**rotary_fields(config), **llama.bias_fields(config), "qk_norm": True}
    return {
        **base,
        **counts(config, "num_experts", "num_local_experts"),
        "ffn": size(config, "moe_intermediate_size"),
        "router": Router(),
        **dense_layers(config, base["ffn"]),
    }


_ATTENTION = {**llama.NORMS, **llama.QKV, **llama.OUT, **llama.HEAD_NORMS}
FAMILY = replace(
    llama.FAMILY,
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={**_ATTENTION, **expert_names("layers.{i}.mlp")},
        dense={**_ATTENTION, **llama.MLP},
    ),
)
_EXPERTS = expert_names("layers.{i}.mlp")
VISION = replace(
    FAMILY,
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe_text",),
    fields=vision_fields,
    codes_unread="experts",
    names=replace(
        FAMILY.names,
        layer={
            **_ATTENTION,
            **_EXPERTS,
            "experts.{e}.gate_up.weight": ("layers.{i}.mlp.experts.gate_up_proj[{e}]^T",),
            "experts.{e}.down.weight": ("layers.{i}.mlp.experts.down_proj[{e}]^T",),
        },
        apart={part: names for part, names in _EXPERTS.items() if part.startswith("experts.")},
    ),
)

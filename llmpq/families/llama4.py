"""Llama 4: chunks of tokens, layers without positions, experts that are given less.

    x += o(attention(unit(rope(q)), unit(rope(k)), v)) of norm(x)
    x += sum of expert_e(s_e x) + shared(x) of norm(x);  s = sigmoid of the k largest of router(x)

unit: each head normalised, without a weight. Most layers attend within chunks: from the last
multiple of the chunk's size on. Every fourth has no positions and sees all tokens; its queries are
multiplied by 1 + attn_scale log(1 + floor((p + 1) / floor_scale)). Channels are rotated in pairs.
Layers without experts have one wider MLP. The vision tower is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import glm4, llama
from llmpq.families.common.config_values import Config, flag, is_given, number, size
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.record import linear_names
from llmpq.families.common.rotary_families import FULL, layer_kinds, rotary_fields
from llmpq.families.common.spec_values import QueryGrowth, Router

CHUNKED = "chunked_attention"
NO_ROPE_EVERY = 4


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bias = flag(config, "attention_bias")
    base = rotary_fields(config)
    without_rope = _without_rope(config, base["num_layers"])
    default = [FULL if i in without_rope else CHUNKED for i in range(base["num_layers"])]
    kinds = layer_kinds(config, default, windowed=CHUNKED)
    chunk = size(config, "attention_chunk_size") if CHUNKED in kinds else 0
    config.get("attention_chunk_size")  # no layer has it
    growth = _growth(config)
    return {
        **base,
        "qkv_bias": bias,
        "o_bias": bias or None,
        "windows": tuple(chunk if kind == CHUNKED else 0 for kind in kinds) if chunk else (),
        "chunked_windows": chunk > 0,
        "without_positions": without_rope,
        "qk_unit_norm": flag(config, "use_qk_norm"),
        "query_growth": growth if without_rope else None,
        **_mixture(config, base["ffn"], base["num_layers"]),
    }


def _without_rope(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers without positions: listed, or one of so many."""
    every = size(config, "no_rope_layer_interval", default=NO_ROPE_EVERY)
    listed = config.get("no_rope_layers")
    if not is_given(listed):
        return tuple(i for i in range(num_layers) if (i + 1) % every == 0)
    if not isinstance(listed, list) or len(listed) < num_layers:
        raise ValueError(
            f"config.json: 'no_rope_layers' must say 0 or 1 of each of {num_layers} layers; "
            "correct it or download config.json again"
        )
    return tuple(i for i in range(num_layers) if not listed[i])


def _growth(config: Config) -> QueryGrowth | None:
    """Return how queries grow on layers without positions."""
    length, beta = size(config, "floor_scale"), number(config, "attn_scale")
    if not flag(config, "attn_temperature_tuning"):
        return None
    return QueryGrowth(beta=beta, length=length, ahead=1, unturned_only=True)


def _mixture(config: Config, ffn: int, num_layers: int) -> dict[str, Any]:
    """Return the fields of layers with experts, and of those with one MLP."""
    wide, step = size(config, "intermediate_size_mlp"), size(config, "interleave_moe_layer_step")
    listed = config.get("moe_layers")
    routed = range(step - 1, num_layers, step) if listed is None else listed
    dense = tuple(i for i in range(num_layers) if i not in routed)
    if len(dense) == num_layers:
        config.get("num_local_experts")
        config.get("num_experts_per_tok")
        return {"ffn": wide}
    return {
        **counts(config, "num_local_experts"),
        "shared_ffn": ffn,
        "router": Router(score="sigmoid", normalise=False, weighs_input=True),
        **({"dense_layers": dense, "dense_ffn": wide} if dense else {}),
    }


_MLP = "layers.{i}.feed_forward"
_SHARED, _EXPERTS = f"{_MLP}.shared_expert", f"{_MLP}.experts"
_ATTENTION = {**llama.NORMS, **llama.QKV, **llama.OUT}
_DENSE = linear_names(
    ("gate_up", (f"{_MLP}.gate_proj", f"{_MLP}.up_proj")), ("down", (f"{_MLP}.down_proj",))
)
FAMILY = replace(
    llama.FAMILY,
    name="llama4",
    model_types=("llama4_text",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **_ATTENTION,
            **_DENSE,
            "router.weight": (f"{_MLP}.router.weight",),
            "experts.{e}.gate_up.weight": (f"{_EXPERTS}.gate_up_proj[{{e}}]^T",),
            "experts.{e}.down.weight": (f"{_EXPERTS}.down_proj[{{e}}]^T",),
            **linear_names(
                ("shared.gate_up", (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj")),
                ("shared.down", (f"{_SHARED}.down_proj",)),
            ),
        },
        dense={**_ATTENTION, **_DENSE},
        apart=dict(
            linear_names(
                (
                    "experts.{e}.gate_up",
                    (f"{_EXPERTS}.{{e}}.gate_proj", f"{_EXPERTS}.{{e}}.up_proj"),
                ),
                ("experts.{e}.down", (f"{_EXPERTS}.{{e}}.down_proj",)),
            )
        ),
        arrange=glm4.FAMILY.names.arrange,
    ),
)

"""Hunyuan (V1), dense and its mixtures: Llama's layer with norms of heads behind their rotation.

    x += o(attention(norm(rope(q)), norm(rope(k)), v)) of norm(x)

`alpha` in the rope section stretches theta once: theta * alpha ^ (D / (D - 2)). A mixture's experts
are chosen by softmax and stand beside an MLP of the same width that all tokens share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.mixture_config import expert_names
from llmpq.families.common.record import linear_names
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bias = flag(config, "attention_bias")
    return {
        **rotary_fields(config, fixed_alpha=True),
        "qkv_bias": bias,
        "o_bias": bias or None,
        "qk_norm": True,
        "qk_norm_late": True,
    }


def mixture_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a mixture."""
    base = fields(config)
    experts = _of_all(config, "num_experts", "num_local_experts")
    per_token = _of_all(config, "moe_topk", "num_experts_per_tok")
    if per_token > experts:
        raise ValueError(
            f"config.json: moe_topk={per_token} of num_experts={experts}; expected at most all of "
            "them"
        )
    own = {"experts": experts, "experts_per_token": per_token, "shared_ffn": base["ffn"]}
    return {**base, **own}


def _of_all(config: Config, *keys: str) -> int:
    """Return the number of the first key that is there: one, or a list with one for every layer."""
    given = {key: config.get(key) for key in keys}
    key, value = next(((k, v) for k, v in given.items() if v is not None), (keys[0], None))
    if not isinstance(value, list) or not value:
        return size(config, key)
    if any(one != value[0] for one in value):
        raise ValueError(
            f"config.json: '{key}' differs from layer to layer ({min(value)} to {max(value)}), "
            "which llmpq does not run; expected one number for all"
        )
    return size({key: value[0]}, key)


_SELF = "layers.{i}.self_attn"
_ATTENTION = {
    **llama.NORMS,
    **llama.QKV,
    **llama.OUT,
    "q_norm.weight": (f"{_SELF}.query_layernorm.weight",),
    "k_norm.weight": (f"{_SELF}.key_layernorm.weight",),
}
_MLP = "layers.{i}.mlp"
FAMILY = replace(
    llama.FAMILY,
    name="hunyuan",
    model_types=("hunyuan_v1_dense",),
    fields=fields,
    names=replace(llama.FAMILY.names, layer={**_ATTENTION, **llama.MLP}),
)
MIXTURE = replace(
    llama.FAMILY,
    name="hunyuan_moe",
    model_types=("hunyuan_v1_moe",),
    fields=mixture_fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **_ATTENTION,
            **expert_names(_MLP),
            "router.weight": (f"{_MLP}.gate.wg.weight",),
            **linear_names(
                ("shared.gate_up", (f"{_MLP}.shared_mlp.gate_proj", f"{_MLP}.shared_mlp.up_proj")),
                ("shared.down", (f"{_MLP}.shared_mlp.down_proj",)),
            ),
        },
    ),
)

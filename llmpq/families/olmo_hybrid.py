"""OLMo Hybrid: layers of the gated delta rule between OLMo 3's layers of attention.

    delta rule   x += delta(norm(x));       x += mlp(norm(x))
    attention    x += norm(attention(x));   x += norm(mlp(x))

A share of what is forgotten and taken may exceed one, up to two (`linear_allow_neg_eigval`);
attention may have no positions (a `rope_theta` that is null).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama, olmo2
from llmpq.families.common.config_values import Config, expect, flag, section, size
from llmpq.families.common.record import norm_names
from llmpq.families.common.recurrent_config import gated_delta, mixer_names, mixers
from llmpq.families.common.rotary_families import rotary_fields

ATTENTION_EVERY = 4
GATED_NORM_EPS = 1e-5
"""Of the norm behind the delta rule, whatever `rms_norm_eps` says."""
ROTATED = 1e4
"""Any theta: positions are left out."""
WITHOUT_THETA = {"positions": "none", "rope_theta": None, "rope_scaling": None, "rotary_dim": None}


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "attention_bias", False, default=False)
    for key in ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"):
        config.get(key)  # where training began
    config.get("linear_dt_init_floor")
    rope = section(config, "rope_parameters") or {}
    bare = rope.get("rope_theta", ROTATED) is None
    base = rotary_fields({**config, "rope_parameters": {"rope_theta": ROTATED}} if bare else config)
    heads = size(config, "linear_num_value_heads", default=base["heads"])
    key_heads = size(config, "linear_num_key_heads", default=base["heads"])
    key_dim = size(config, "linear_key_head_dim", default=int(0.75 * base["hidden"] / key_heads))
    value_dim = size(config, "linear_value_head_dim", default=2 * key_dim)
    return {
        **base,
        **(WITHOUT_THETA if bare else {}),
        "norm_order": "post",
        "recurrent_norm_order": "pre",
        "qk_norm": True,
        "qk_norm_whole": True,
        "mixers": mixers(config, _kinds(base["num_layers"]), recurrent={"linear_attention"}),
        "recurrent": replace(
            gated_delta(
                config, heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim
            ),
            norm_eps=GATED_NORM_EPS,
            beta_factor=2.0 if flag(config, "linear_allow_neg_eigval") else 1.0,
        ),
    }


def _kinds(count: int) -> list[str]:
    """Return the kinds of layers of a config that does not list them."""
    kinds = [
        "linear_attention" if (i + 1) % ATTENTION_EVERY else "full_attention" for i in range(count)
    ]
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


_DELTA = "layers.{i}.linear_attn"
_PARTS = ("q", "k", "v")
FAMILY = replace(
    llama.FAMILY,
    name="olmo_hybrid",
    model_types=("olmo_hybrid",),
    fields=fields,
    codes_unread="convolutions beside codes",
    names=replace(
        llama.FAMILY.names,
        layer={
            **olmo2.FAMILY.names.layer,
            **norm_names(
                ("attn_norm", "layers.{i}.attention_layer_norm"),
                ("mlp_norm", "layers.{i}.feedforward_layer_norm"),
            ),
            **mixer_names(_DELTA, **{"mixer_norm.weight": "o_norm.weight"}),
            "mixer_in.weight": tuple(f"{_DELTA}.{part}_proj.weight" for part in (*_PARTS, "g")),
            "mixer_out.weight": (f"{_DELTA}.o_proj.weight",),
            "conv.weight": tuple(f"{_DELTA}.{part}_conv1d.weight" for part in _PARTS),
            "step.weight": tuple(f"{_DELTA}.{part}_proj.weight" for part in ("b", "a")),
        },
        otherwise={"attn_out_norm.weight": ("layers.{i}.feedforward_layer_norm.weight",)},
    ),
)

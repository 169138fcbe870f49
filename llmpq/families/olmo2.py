"""OLMo 2 and 3: norms behind attention and MLP only, and over all query or key heads at once.

    x += norm(o(attention(rope(norm(q)), rope(norm(k)), v)));  x += norm(down(silu(gate) * up))

OLMo 3 sees a window of tokens but for every fourth layer; only those layers' positions are scaled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect
from llmpq.families.common.record import norm_names
from llmpq.families.common.rope import window_theta
from llmpq.families.common.rotary_families import alternating, layer_kinds, rotary_fields, windows

FULL_EVERY = 4


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "attention_bias", False, default=False)
    found = {
        **rotary_fields(config),
        "norm_order": "post",
        "qk_norm": True,
        "qk_norm_whole": True,
    }
    if config.get("model_type") == "olmo3":
        found["windows"] = windows(config, layer_kinds(config, alternating(config, FULL_EVERY)))
        found["window_rope_theta"] = window_theta(config, beside="rope_theta")
    return found


FAMILY = replace(
    llama.FAMILY,
    name="olmo2",
    model_types=("olmo2", "olmo3"),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **norm_names(
                ("attn_out_norm", "layers.{i}.post_attention_layernorm"),
                ("mlp_out_norm", "layers.{i}.post_feedforward_layernorm"),
            ),
            **llama.QKV,
            **llama.OUT,
            **llama.MLP,
            **llama.HEAD_NORMS,
        },
    ),
)

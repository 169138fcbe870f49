"""LFM3: short convolutions between layers of attention, of which most see a window.

    x += norm(mixer(norm(x)));  x += norm(w2(silu(w1) * w3) of norm(x))
    attention: Qwen3's, each head's output times the sigmoid of a number made of what is read

Layers that see all tokens rotate a part of a head's frequencies, the others have a theta of their
own. Short convolution: runtime/models/recurrent.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import lfm2, llama
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.record import norm_names
from llmpq.families.common.recurrent_config import mixers
from llmpq.families.common.rope import window_theta
from llmpq.families.common.rotary_families import FULL, SLIDING, rotary_fields, windows
from llmpq.families.common.spec_values import Recurrent

CONV, EVERY = "conv", 4


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = rotary_fields(config, eps_key="norm_eps")
    kinds = _kinds(config)
    conv_bias, bias = (flag(config, f"{part}_bias") for part in ("conv", "attention"))
    return {
        **base,
        "norm_order": "both" if flag(config, "use_sandwich_norm") else "pre",
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "head_gate": flag(config, "use_attention_gate"),
        "mixers": mixers(config, kinds, recurrent={CONV}, windowed=SLIDING),
        "windows": windows(config, kinds),
        "window_rope_theta": window_theta(config, beside="rope_local_base_freq"),
        "recurrent": Recurrent(
            kind="short_conv",
            taps=size(config, "conv_L_cache"),
            channels=base["hidden"],
            bias=conv_bias,
            conv_bias=conv_bias,
        ),
    }


def _kinds(config: Config) -> list[str]:
    """Return the kind of each layer: of four one sees all tokens, one a window (not the first)."""
    given = config.get("layer_types")
    if isinstance(given, list):
        return given
    count = size(config, "num_hidden_layers")
    kinds = {0: SLIDING, EVERY // 2: FULL}
    return [kinds.get(i % EVERY, CONV) if i else CONV for i in range(count)]


_SELF = "layers.{i}.self_attn"
FAMILY = replace(
    lfm2.FAMILY,
    name="lfm3",
    model_types=("lfm3",),
    fields=fields,
    names=replace(
        lfm2.FAMILY.names,
        layer={
            **lfm2.FAMILY.names.layer,
            **llama.OUT,
            **llama.HEAD_NORMS,
            **norm_names(
                ("attn_out_norm", "layers.{i}.post_operator_norm"),
                ("mlp_out_norm", "layers.{i}.post_ffn_norm"),
            ),
            "head_gate.weight": (f"{_SELF}.gate_proj.weight",),
        },
    ),
)

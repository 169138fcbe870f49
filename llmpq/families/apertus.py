"""Apertus: Llama's attention with Qwen3's norms of heads, and an MLP without a gate, of xIELU.

    xielu(x) = p x^2 + x / 2 above zero, n (e^x - 1 - x) + x / 2 below, p and n learned by layer

Stored are what p = log(1 + e^s) and n = 1/2 + log(1 + e^s) are made of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.record import Arrange, linear_names, norm_names
from llmpq.families.common.rotary_families import rotary_fields

SLOPE, BELOW = 0.5, -1e-6
"""xIELU's slope, and the number that it takes in place of larger ones in e^x: both constant."""


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bias = flag(config, "attention_bias")
    return {
        **rotary_fields(config, activation="xielu"),
        "gated": False,
        "qkv_bias": bias,
        "o_bias": bias or None,
        "qk_norm": True,
    }


def _positive(stored: Any, spec: Any) -> Any:
    return stored.exp().log1p()


def _stored_positive(ours: Any, spec: Any) -> Any:
    return ours.expm1().log()


def _negative(stored: Any, spec: Any) -> Any:
    return _positive(stored, spec) + SLOPE


def _stored_negative(ours: Any, spec: Any) -> Any:
    return _stored_positive(ours - SLOPE, spec)


_ACTIVATION = "layers.{i}.mlp.act_fn"
FAMILY = replace(
    llama.FAMILY,
    name="apertus",
    model_types=("apertus",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **norm_names(
                ("attn_norm", "layers.{i}.attention_layernorm"),
                ("mlp_norm", "layers.{i}.feedforward_layernorm"),
            ),
            **llama.QKV,
            **llama.OUT,
            **llama.HEAD_NORMS,
            **linear_names(
                ("up", ("layers.{i}.mlp.up_proj",)), ("down", ("layers.{i}.mlp.down_proj",))
            ),
            "xielu.positive": (f"{_ACTIVATION}.alpha_p",),
            "xielu.negative": (f"{_ACTIVATION}.alpha_n",),
        },
        arrange={
            "xielu.positive": Arrange(values=(_positive, _stored_positive)),
            "xielu.negative": Arrange(values=(_negative, _stored_negative)),
        },
        buffers={"beta": SLOPE, "eps": BELOW},
    ),
)

"""Hy3 (Tencent): Qwen3's attention, and DeepSeek-V3's mixture, of one group, behind a dense layer.

The layer behind the last one, which predicts a further token, is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import deepseek, glm4_moe, llama
from llmpq.families.common.config_values import Config, expect, flag, number, size
from llmpq.families.common.mixture_config import counts, dense_fields, expert_names
from llmpq.families.common.record import linear_names
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.common.spec_values import Router


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "mlp_bias", False, default=False)
    config.get("enable_moe_fp32_combine")  # in which dtype two of the sums are added
    base, bias = rotary_fields(config), flag(config, "attention_bias")
    wide, dense = size(config, "moe_intermediate_size"), deepseek.listed_dense(config)
    return {
        **base,
        **counts(config, "num_experts", "num_local_experts"),
        **dense_fields((0,) if dense is None else dense, base["ffn"]),
        "qkv_bias": bias,
        "o_bias": bias or None,
        "qk_norm": True,
        "ffn": wide,
        "shared_ffn": wide * size(config, "num_shared_experts"),
        "router": Router(
            score="sigmoid", correction=True, scale=number(config, "router_scaling_factor")
        ),
    }


_MLP = "layers.{i}.mlp"
_ATTENTION = {**llama.NORMS, **llama.QKV, **llama.OUT, **llama.HEAD_NORMS}
FAMILY = replace(
    glm4_moe.FAMILY,
    name="hy_v3",
    model_types=("hy_v3",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **_ATTENTION,
            **expert_names(_MLP),
            "router.weight": (f"{_MLP}.router.gate.weight",),
            "router.correction": (f"{_MLP}.expert_bias",),
            **linear_names(
                (
                    "shared.gate_up",
                    (f"{_MLP}.shared_mlp.gate_proj", f"{_MLP}.shared_mlp.up_proj"),
                ),
                ("shared.down", (f"{_MLP}.shared_mlp.down_proj",)),
            ),
        },
        dense={**_ATTENTION, **llama.MLP},
    ),
)

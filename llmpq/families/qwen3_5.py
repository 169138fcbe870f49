"""Qwen3.5: Qwen3-Next's layers, their matrices apart; dense MLPs, or its mixture.

The text model inside the wrapper of pictures too: of text alone, positions count alike in every
direction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama, qwen3_next
from llmpq.families.common.config_values import Config, size
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.record import MODULE_MTP
from llmpq.families.common.recurrent_config import mixer_names
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.common.spec_values import Router
from llmpq.families.qwen3_next import ARRANGE, EXPERTS, hybrid_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    return {**rotary_fields(config, partial_rotary=True), **hybrid_fields(config)}


def mixture_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a model with a mixture on every layer."""
    config.get("intermediate_size")  # no layer has it
    return {
        **rotary_fields(config, partial_rotary=True, ffn_key="moe_intermediate_size"),
        **hybrid_fields(config),
        **counts(config, "num_experts"),
        "shared_ffn": size(config, "shared_expert_intermediate_size"),
        "shared_gate": True,
        "router": Router(),
    }


_LINEAR, _MLP = "layers.{i}.linear_attn", "layers.{i}.mlp"
_LAYER = {
    **qwen3_next.ATTENTION,
    **mixer_names(_LINEAR),
    "mixer_in.weight": (f"{_LINEAR}.in_proj_qkv.weight", f"{_LINEAR}.in_proj_z.weight"),
    "step.weight": (f"{_LINEAR}.in_proj_b.weight", f"{_LINEAR}.in_proj_a.weight"),
}
FAMILY = replace(
    qwen3_next.FAMILY,
    name="qwen3_5",
    model_types=("qwen3_5_text",),
    fields=fields,
    names=replace(
        llama.FAMILY.names, layer={**_LAYER, **llama.MLP}, arrange=ARRANGE, mtp=MODULE_MTP
    ),
)
_APART = {part: names for part, names in EXPERTS.items() if part.startswith("experts.")}
MIXTURE = replace(
    FAMILY,
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe_text",),
    fields=mixture_fields,
    names=replace(
        FAMILY.names,
        layer={
            **_LAYER,
            **EXPERTS,
            "experts.{e}.gate_up.weight": (f"{_MLP}.experts.gate_up_proj[{{e}}]",),
            "experts.{e}.down.weight": (f"{_MLP}.experts.down_proj[{{e}}]",),
        },
        apart=_APART,
    ),
)

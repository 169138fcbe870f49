"""Granite 3, and those of Granite 4 that are attention throughout: Llama's layer, four factors.

x = e * embedding;  x += r * attention(norm(x)), scores times a;  x += r * mlp(norm(x))
logits = head(norm(x)) / l
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.errors import short_repr
from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect, number, size
from llmpq.families.common.rotary_families import FULL, rotary_fields
from llmpq.families.not_run import RECURRENT
from llmpq.families.record import linear_names


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""

    def factor(key: str) -> float:
        return number(config, key)

    return {
        **rotary_fields(config),
        **llama.bias_fields(config),
        "embedding_factor": factor("embedding_multiplier"),
        "score_factor": factor("attention_multiplier"),
        "residual_factor": factor("residual_multiplier"),
        "logit_factor": 1.0 / factor("logits_scaling"),
    }


def dense_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a Granite 4 whose layers all have attention, positions and one MLP."""
    if config.get("num_local_experts"):
        raise ValueError(
            "config.json: granitemoehybrid with num_local_experts="
            f"{short_repr(config['num_local_experts'])} is not supported: llmpq lacks a mixture "
            "of experts stored as one tensor a layer beside a shared MLP"
        )
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["linear_attention"]
    if not set(kinds) <= {"attention", FULL}:
        raise ValueError(f"config.json: granitemoehybrid is not supported: llmpq lacks {RECURRENT}")
    expect(config, "position_embedding_type", "rope", default=None)
    for key in config:
        if key.startswith(("mamba_", "time_step_")) or key == "num_experts_per_tok":
            config.get(key)  # read, and without effect
    return {**fields(config), "ffn": size(config, "shared_intermediate_size")}


FAMILY = replace(llama.FAMILY, name="granite", model_types=("granite",), fields=fields)
DENSE_HYBRID = replace(
    llama.FAMILY,
    name="granite4",
    model_types=("granitemoehybrid",),
    fields=dense_fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **llama.NORMS,
            **llama.QKV,
            **llama.OUT,
            **linear_names(
                ("gate_up", ("layers.{i}.shared_mlp.input_linear",)),
                ("down", ("layers.{i}.shared_mlp.output_linear",)),
            ),
        },
    ),
)

"""Granite 3 and 4: Llama's layer with four factors; of Granite 4 most layers are Mamba-2.

x = e * embedding;  x += r * attention(norm(x)), scores times a;  x += r * mlp(norm(x))
logits = head(norm(x)) / l

Granite 4 has experts beside an MLP that all tokens share, or that MLP alone; its attention has no
positions, or Llama's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect, number, size
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.recurrent_config import mamba2, mixer_names, mixers
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.record import linear_names

SHARED = "shared."


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


def hybrid_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a Granite 4."""
    base = fields(config)
    kinds = ["linear_attention"] * base["num_layers"]
    key = "layer_types" if config.get("layer_types") else "layers_block_type"
    found = mixers(config, kinds, recurrent={"mamba", "linear_attention"}, key=key)
    for key in config:
        if key.startswith(("mamba_", "time_step_")) or key == "num_experts_per_tok":
            config.get(key)  # read, and without effect where all layers are attention
    if "recurrent" in found:
        base |= {"mixers": found, "recurrent": mamba2(config)}
    if config.get("position_embedding_type") is None:
        base |= {"positions": "none", "rope_theta": None, "rope_scaling": None, "rotary_dim": None}
    else:
        expect(config, "position_embedding_type", "rope", default=None)
    shared = size(config, "shared_intermediate_size")
    if not config.get("num_local_experts"):
        return {**base, "ffn": shared}
    return {**base, **counts(config, "num_local_experts"), "shared_ffn": shared}


FAMILY = replace(llama.FAMILY, name="granite", model_types=("granite",), fields=fields)
_EXPERTS = "layers.{i}.block_sparse_moe"
_ONE = f"{_EXPERTS}.experts.{{e}}"
_LAYER = {**llama.NORMS, **llama.QKV, **llama.OUT, **mixer_names("layers.{i}.mamba")}
HYBRID = replace(
    llama.FAMILY,
    name="granite4",
    model_types=("granitemoehybrid",),
    fields=hybrid_fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **_LAYER,
            **linear_names(
                *(
                    (f"{owner}{part}", (f"layers.{{i}}.shared_mlp.{theirs}_linear",))
                    for owner in ("", SHARED)
                    for part, theirs in (("gate_up", "input"), ("down", "output"))
                )
            ),
            "router.weight": (f"{_EXPERTS}.router.layer.weight",),
            "experts.{e}.gate_up.weight": (f"{_EXPERTS}.input_linear.weight[{{e}}]",),
            "experts.{e}.down.weight": (f"{_EXPERTS}.output_linear.weight[{{e}}]",),
        },
        apart=dict(
            linear_names(
                ("experts.{e}.gate_up", (f"{_ONE}.gate_proj", f"{_ONE}.up_proj")),
                ("experts.{e}.down", (f"{_ONE}.down_proj",)),
            )
        ),
    ),
)

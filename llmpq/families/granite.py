"""Granite 3 and 4: Llama's layer with four factors; of Granite 4 most layers are Mamba-2.

x = e * embedding;  x += r * attention(norm(x)), scores times a;  x += r * mlp(norm(x))
logits = head(norm(x)) / l

Granite 4 has experts beside an MLP that all tokens share, or that MLP alone; its attention has no
positions, or Llama's. The mixtures of Granite 3 have experts, with that MLP or without.
HyperCLOVA X has norms behind attention and MLP as well, and its logits are multiplied by
`logits_scaling`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import (
    Config,
    flag,
    head_size,
    is_given,
    number,
    size,
)
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.record import linear_names, norm_names
from llmpq.families.common.recurrent_config import mamba2, mixer_names, mixers
from llmpq.families.common.rotary_families import rotary_fields

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
    layer_types = "layer_types" if config.get("layer_types") else "layers_block_type"
    found = mixers(config, kinds, recurrent={"mamba", "linear_attention"}, key=layer_types)
    for key in config:
        if key.startswith(("mamba_", "time_step_")) or key == "num_experts_per_tok":
            config.get(key)  # read, and without effect where all layers are attention
    if "recurrent" in found:
        base |= {"mixers": found, "recurrent": mamba2(config)}
    if config.get("position_embedding_type") != "rope":  # published: "nope"
        base |= {"positions": "none", "rope_theta": None, "rope_scaling": None, "rotary_dim": None}
    shared = size(config, "shared_intermediate_size")
    if not config.get("num_local_experts"):
        return {**base, "ffn": shared}
    return {**base, **counts(config, "num_local_experts"), "shared_ffn": shared}


def mixture_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a mixture of Granite 3."""
    key = "shared_intermediate_size"
    shared = size(config, key) if is_given(config.get(key)) else 0
    return {**fields(config), **counts(config, "num_local_experts"), "shared_ffn": shared}


def clova_fields(config: Config) -> dict[str, Any]:
    """Return the fields of HyperCLOVA X."""
    head = head_size(config)
    if config.get("attention_multiplier") is None:
        config = {**config, "attention_multiplier": head**-0.5}
    both = flag(config, "use_post_norm", default=True)
    return {
        **fields(config),
        "logit_factor": number(config, "logits_scaling"),
        "norm_order": "both" if both else "pre",
    }


FAMILY = replace(llama.FAMILY, name="granite", model_types=("granite",), fields=fields)
CLOVA = replace(
    llama.FAMILY,
    name="hyperclovax",
    model_types=("hyperclovax",),
    fields=clova_fields,
    names=replace(
        llama.FAMILY.names,
        layer={
            **llama.FAMILY.names.layer,
            **norm_names(
                ("attn_out_norm", "layers.{i}.post_norm1"),
                ("mlp_out_norm", "layers.{i}.post_norm2"),
            ),
        },
    ),
)
_EXPERTS = "layers.{i}.block_sparse_moe"
_ONE = f"{_EXPERTS}.experts.{{e}}"
_LAYER = {**llama.NORMS, **llama.QKV, **llama.OUT, **mixer_names("layers.{i}.mamba")}
HYBRID = replace(
    llama.FAMILY,
    name="granite4",
    model_types=("granitemoehybrid",),
    fields=hybrid_fields,
    codes_unread="experts",
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
MIXTURE = replace(
    HYBRID,
    name="granitemoe",
    model_types=("granitemoe", "granitemoeshared"),
    fields=mixture_fields,
)

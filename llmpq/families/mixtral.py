"""Mixtral: Llama's attention, and experts that a router chooses from for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.config_values import Config, expect, rotary_fields, size
from llmpq.families.record import linear_names

_MOE = "layers.{i}.block_sparse_moe"
_EXPERT = f"{_MOE}.experts.{{e}}"
_NAMES = llama.FAMILY.names
_ATTENTION = {
    part: names
    for part, names in _NAMES.layer.items()
    if not part.startswith(("gate_up.", "down."))
}


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "sliding_window", None, default=None)
    experts = size(config, "num_local_experts")
    per_token = size(config, "num_experts_per_tok")
    if per_token > experts:
        raise ValueError(
            f"config.json: num_experts_per_tok={per_token} of num_local_experts={experts}; "
            "expected at most all of them"
        )
    counts = {"experts": experts, "experts_per_token": per_token}
    return {**rotary_fields(config), **counts}


FAMILY = replace(
    llama.FAMILY,
    name="mixtral",
    model_types=("mixtral",),
    fields=fields,
    names=replace(
        _NAMES,
        layer={**_ATTENTION, "router.weight": (f"{_MOE}.gate.weight",)}
        | linear_names(
            ("experts.{e}.gate_up", (f"{_EXPERT}.w1", f"{_EXPERT}.w3")),
            ("experts.{e}.down", (f"{_EXPERT}.w2",)),
        ),
    ),
)

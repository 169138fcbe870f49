"""Mixtral: Llama's attention, and experts that a router chooses from for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.record import linear_names
from llmpq.families.common.rotary_families import everywhere, rotary_fields

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
    own = {**counts(config, "num_local_experts"), "windows": everywhere(config)}
    return {**rotary_fields(config), **own}


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

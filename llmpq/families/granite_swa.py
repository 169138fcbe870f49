"""Granite with windows (Swash) and its mixtures: heads have sinks, every fourth layer sees all.

Layers rotate by thetas of their own (`layer_rope_theta`), by none where that is 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import granite, llama
from llmpq.families.common.config_values import Config
from llmpq.families.common.rotary_families import FULL, SLIDING, layer_kinds, windows

FULL_EVERY = 4
SINKS = {"sinks": ("layers.{i}.self_attn.sinks",)}


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    return {**granite.fields(config), **_attention(config, granite.fields(config))}


def mixture_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a mixture."""
    base = granite.mixture_fields(config)
    return {**base, **_attention(config, base)}


def _attention(config: Config, base: dict[str, Any]) -> dict[str, Any]:
    """Return windows, sinks and the thetas of layers."""
    count = base["num_layers"]
    default = [SLIDING if i % FULL_EVERY else FULL for i in range(count)]
    kinds = layer_kinds(config, default)
    found = {"sinks": True, "windows": windows(config, kinds)}
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return found
    known = isinstance(thetas, list) and len(thetas) == count
    if not known or any(type(theta) not in (int, float) or theta < 0 for theta in thetas):
        raise ValueError(
            f"config.json: 'layer_rope_theta' must be a number for each of {count} layers, 0 for "
            "no positions; correct it or download config.json again"
        )
    by_kind = [
        {theta for theta, kind in zip(thetas, kinds, strict=True) if theta and kind == own}
        for own in (FULL, SLIDING)
    ]
    full, sliding = by_kind
    apart = bool(full) and bool(sliding) and full != sliding
    if max(map(len, by_kind)) > 1 or (apart and base["rope_scaling"] is not None):
        raise ValueError(
            "config.json: 'layer_rope_theta' has several thetas for layers of one kind, or scaled "
            "ones for two; llmpq runs one theta of layers that see all tokens and one of the others"
        )
    bare = tuple(i for i, theta in enumerate(thetas) if not theta)
    (theta,) = full or sliding or {base["rope_theta"]}
    return {
        **found,
        "rope_theta": float(theta),
        "window_rope_theta": float(next(iter(sliding))) if apart else None,
        "without_positions": bare,
    }


FAMILY = replace(
    llama.FAMILY,
    name="granite_swa",
    model_types=("granite_swa",),
    fields=fields,
    names=replace(llama.FAMILY.names, layer={**llama.FAMILY.names.layer, **SINKS}),
)
_MOE = "layers.{i}.block_sparse_moe"
MIXTURE = replace(
    granite.MIXTURE,
    name="granitemoe_swa",
    codes_unread="experts",
    model_types=("granitemoe_swa",),
    fields=mixture_fields,
    names=replace(
        granite.MIXTURE.names,
        layer={
            **granite.MIXTURE.names.layer,
            **SINKS,
            "router.weight": (f"{_MOE}.router.weight",),
            "experts.{e}.gate_up.weight": (f"{_MOE}.experts.gate_up_proj[{{e}}]",),
            "experts.{e}.down.weight": (f"{_MOE}.experts.down_proj[{{e}}]",),
        },
    ),
)

"""MiniMax-M2: Mixtral's layer; norms over all query or key heads at once, a sigmoid router.

p = sigmoid(router(x)), the k largest of p + c; w = p of the chosen, made to sum to one
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama, mixtral
from llmpq.families.common.config_values import Config, expect, head_size, is_given, size
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.common.spec_values import Router


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "use_qk_norm", True, default=True)
    expect(config, "qk_norm_type", "per_layer", default="per_layer")
    expect(config, "scoring_func", "sigmoid", default="sigmoid")
    expect(config, "use_routing_bias", True, default=True)
    expect(config, "shared_intermediate_size", 0, default=0)
    base = rotary_fields(config, partial_rotary=True)
    if is_given(config.get("rotary_dim")) and base["rotary_dim"] is None:
        base["rotary_dim"] = rotated_channels(config)
    return {
        **base,
        **counts(config, "num_local_experts", "num_experts"),
        "qk_norm": True,
        "qk_norm_whole": True,
        "router": Router(score="sigmoid", correction=True),
    }


def rotated_channels(config: Config) -> int | None:
    """Return how many channels the older key `rotary_dim` rotates, None for all."""
    rotated, all_of = size(config, "rotary_dim"), head_size(config)
    if rotated % 2 or rotated > all_of:
        raise ValueError(
            f"config.json: rotary_dim={rotated} of {all_of} channels of a head; expected an even "
            "number of them"
        )
    return None if rotated == all_of else rotated


_NAMES = mixtral.FAMILY.names
_CORRECTION = "layers.{i}.block_sparse_moe.e_score_correction_bias"
FAMILY = replace(
    mixtral.FAMILY,
    name="minimax_m2",
    model_types=("minimax_m2",),
    fields=fields,
    names=replace(
        _NAMES,
        layer={**_NAMES.layer, **llama.HEAD_NORMS, "router.correction": (_CORRECTION,)},
    ),
)

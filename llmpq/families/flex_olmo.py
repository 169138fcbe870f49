"""FlexOlmo: OLMo 2's layer, and OLMoE's mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import olmo2
from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.mixture_config import counts, expert_names
from llmpq.families.common.spec_values import Router


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    return {
        **olmo2.fields(config),
        **counts(config, "num_experts", "num_local_experts"),
        "router": Router(normalise=flag(config, "norm_topk_prob")),
    }


_LAYER = {
    part: names
    for part, names in olmo2.FAMILY.names.layer.items()
    if not part.startswith(("gate_up.", "down."))
}
FAMILY = replace(
    olmo2.FAMILY,
    name="flex_olmo",
    model_types=("flex_olmo",),
    fields=fields,
    names=replace(olmo2.FAMILY.names, layer={**_LAYER, **expert_names("layers.{i}.mlp")}),
)

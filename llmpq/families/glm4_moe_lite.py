"""GLM-4.7-Flash (`glm4_moe_lite`): DeepSeek-V3's latent attention and mixture, dense by list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import deepseek
from llmpq.families.common.config_values import Config, size

DENSE, SPARSE = "dense", "sparse"


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    count = size(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types")
    kinds = [DENSE] + [SPARSE] * (count - 1) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {DENSE, SPARSE}:
        raise ValueError(
            f"config.json: 'mlp_layer_types' must give each of {count} layers '{DENSE}' or "
            f"'{SPARSE}'; correct it or download config.json again"
        )
    dense = tuple(i for i, kind in enumerate(kinds) if kind == DENSE)
    return deepseek.fields(config, dense=dense)


FAMILY = replace(
    deepseek.FAMILY, name="glm4_moe_lite", model_types=("glm4_moe_lite",), fields=fields
)

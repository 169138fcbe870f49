"""K-EXAONE: EXAONE 4's attention with norms in front, and DeepSeek-V3's mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import deepseek, exaone4, glm4_moe
from llmpq.families.common.config_values import Config
from llmpq.families.common.plain_families import Renamed


def fields(given: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    config = Renamed(given, {"n_shared_experts": "num_shared_experts"})
    base = {**exaone4.fields(config), "norm_order": "pre"}
    return {**base, **glm4_moe.mixture(config, base["ffn"], deepseek.listed_dense(config))}


FAMILY = replace(
    glm4_moe.FAMILY,
    name="exaone_moe",
    model_types=("exaone_moe",),
    fields=fields,
    names=replace(
        glm4_moe.FAMILY.names,
        mtp=None,
        otherwise={"router.correction": ("layers.{i}.mlp.e_score_correction_bias",)},
    ),
)

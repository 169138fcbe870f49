"""Granite 3: Llama's layer with four factors.

x = e * embedding;  x += r * attention(norm(x)), scores times a;  x += r * mlp(norm(x))
logits = head(norm(x)) / l
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, number
from llmpq.families.common.rotary_families import rotary_fields


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


FAMILY = replace(llama.FAMILY, name="granite", model_types=("granite",), fields=fields)

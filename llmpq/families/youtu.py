"""Youtu-LLM: DeepSeek-V3's latent attention, and Llama's MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import deepseek, llama
from llmpq.families.common.config_values import Config
from llmpq.families.deepseek import ATTENTION


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    return deepseek.latent_fields(config)


FAMILY = replace(
    llama.FAMILY,
    name="youtu",
    model_types=("youtu",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={**ATTENTION, **llama.MLP},
        arrange=deepseek.FAMILY.names.arrange,
    ),
)

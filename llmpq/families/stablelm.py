"""StableLM 3B, Zephyr and 1.6B: Llama's layer with LayerNorm, a quarter of each head turned.

The 12B's norms of each head and its parallel residual are not run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, expect, flag
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    for key in ("qk_layernorm", "use_parallel_residual"):
        expect(config, key, False, default=False)
    return {
        **rotary_fields(config, eps_key="layer_norm_eps", turns_in_part=True),
        "norm": "layernorm",
        "qkv_bias": flag(config, "use_qkv_bias"),
    }


FAMILY = replace(llama.FAMILY, name="stablelm", model_types=("stablelm",), fields=fields)

"""StableLM 2 and 3B: Llama's layer with LayerNorm, a quarter of each head rotated.

    x += o(attention(...)) + down(silu(gate) * up), all of norm(x)         use_parallel_residual

The 12B norms every query and key head by weights of its own, and runs attention and MLP side by
side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    found = {
        **rotary_fields(config, eps_key="layer_norm_eps", partial_rotary=True),
        "norm": "layernorm",
        "qkv_bias": flag(config, "use_qkv_bias"),
        "parallel_norms": 1 if flag(config, "use_parallel_residual") else 0,
    }
    if flag(config, "qk_layernorm"):
        found |= {"qk_norm": True, "qk_norm_centred": True, "qk_norm_apart": True}
    return found


_NAMES = llama.FAMILY.names
_NORMS = {
    f"{part}_norm.weight": (f"layers.{{i}}.self_attn.{part}_layernorm.norms.{{h}}.weight",)
    for part in ("q", "k")
}
FAMILY = replace(
    llama.FAMILY,
    name="stablelm",
    model_types=("stablelm",),
    fields=fields,
    names=replace(_NAMES, layer={**_NAMES.layer, **_NORMS}),
)

"""GLM-4.5 and 4.6: Llama's layer, half of each head rotated, and a mixture behind the first layers.

    p = sigmoid(router(x));  chosen = the k largest of p + c, of the best groups
    y = scale * sum of w_e expert_e(x) + shared(x),  w = p of the chosen, made to sum to one

So is the text of GLM-4.5V and 4.6V. The layer behind the last one predicts a further token (MTP);
it drafts, where it is asked to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag, size
from llmpq.families.common.mixture_config import (
    counts,
    dense_fields,
    expert_names,
    first_layers,
    sigmoid_router,
)
from llmpq.families.common.record import LAYER_MTP
from llmpq.families.common.rotary_families import rotary_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = rotary_fields(config, partial_rotary=True)
    return {
        **base,
        "qkv_bias": flag(config, "attention_bias"),
        "qk_norm": flag(config, "use_qk_norm", default=False),
        **mixture(config, base["ffn"]),
    }


def mixture(config: Config, ffn: int, dense: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return the fields of a mixture as DeepSeek-V3's, from a config's keys.

    `dense`: the layers without experts; None: the first ones, as many as the config says.
    """
    found = counts(config, "n_routed_experts", "num_local_experts", "num_experts")
    wide = size(config, "moe_intermediate_size")
    return {
        **found,
        "ffn": wide,
        "shared_ffn": wide * size(config, "n_shared_experts"),
        "router": sigmoid_router(config, found["experts"]),
        **(first_layers(config, ffn) if dense is None else dense_fields(dense, ffn)),
    }


_ATTENTION = {**llama.NORMS, **llama.QKV, **llama.OUT, **llama.HEAD_NORMS}
FAMILY = replace(
    llama.FAMILY,
    name="glm4_moe",
    model_types=("glm4_moe", "glm4v_moe_text"),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={**_ATTENTION, **expert_names("layers.{i}.mlp", shared=True)},
        dense={**_ATTENTION, **llama.MLP},
        mtp=LAYER_MTP,
    ),
)

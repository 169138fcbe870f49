"""MiniCPM3: DeepSeek's latent attention, halves rotated, Llama's MLP, and three factors.

x = scale_emb * embedding;  x += s * attention(norm(x));  x += s * mlp(norm(x))
logits = head(norm(x)) * dim_model_base / hidden,  s = scale_depth / sqrt(layers)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from llmpq.families import youtu
from llmpq.families.common.config_values import Config, is_given, number, size
from llmpq.families.deepseek import latent_fields


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    if not is_given(config.get("v_head_dim")):
        whole = size(config, "hidden_size") // size(config, "num_attention_heads")
        config = {**config, "v_head_dim": whole}
    base = latent_fields(config)
    layers, hidden = base["num_layers"], base["hidden"]
    depth = number(config, "scale_depth") if is_given(config.get("scale_depth")) else layers**0.5
    wide = number(config, "dim_model_base") if is_given(config.get("dim_model_base")) else hidden
    return {
        **base,
        "embedding_factor": number(config, "scale_emb"),
        "residual_factor": depth / math.sqrt(layers),
        "logit_factor": wide / hidden,
    }


FAMILY = replace(
    youtu.FAMILY,
    name="minicpm3",
    model_types=("minicpm3",),
    fields=fields,
    names=replace(youtu.FAMILY.names, arrange={}),
)

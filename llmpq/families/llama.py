"""Llama 2 and 3, Mistral, Ministral, Seed-OSS, CWM: RMSNorm, rotary, grouped heads, gated SiLU.

    x += o(attention(rope(q), rope(k), v)) of norm(x);  x += down(silu(gate) * up) of norm(x)

Mistral's layers see a window of tokens where the config gives one, CWM's but for every fourth.
"""

from __future__ import annotations

from typing import Any

from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.record import Family, NameTable, linear_names, norm_names
from llmpq.families.common.rotary_families import (
    FULL,
    SLIDING,
    everywhere,
    layer_kinds,
    rotary_fields,
    windows,
)

CWM_FULL_EVERY = 4


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    found = {**rotary_fields(config), **bias_fields(config)}
    if config.get("model_type") == "mistral":
        found["windows"] = everywhere(config)
    if config.get("model_type") == "ministral":
        found["windows"] = windows(config, layer_kinds(config, [SLIDING] * found["num_layers"]))
    if config.get("model_type") == "cwm":
        kinds = [SLIDING if i % CWM_FULL_EVERY else FULL for i in range(found["num_layers"])]
        found["windows"] = windows(config, layer_kinds(config, kinds))
    return found


def bias_fields(config: Config) -> dict[str, Any]:
    """Return which linears have biases: attention's, its output's, the MLP's."""
    attention, mlp = (flag(config, f"{part}_bias", default=False) for part in ("attention", "mlp"))
    out = flag(config, "attention_out_bias", default=attention)
    o_bias = out if out != mlp else None
    return {"qkv_bias": attention, "linear_bias": mlp, "o_bias": o_bias}


QKV = linear_names(
    (
        "qkv",
        (
            "layers.{i}.self_attn.q_proj",
            "layers.{i}.self_attn.k_proj",
            "layers.{i}.self_attn.v_proj",
        ),
    )
)
OUT = linear_names(("o", ("layers.{i}.self_attn.o_proj",)))
MLP = linear_names(
    ("gate_up", ("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj")),
    ("down", ("layers.{i}.mlp.down_proj",)),
)
NORMS = norm_names(
    ("attn_norm", "layers.{i}.input_layernorm"),
    ("mlp_norm", "layers.{i}.post_attention_layernorm"),
)
HEAD_NORMS = {
    f"{part}_norm.weight": (f"layers.{{i}}.self_attn.{part}_norm.weight",) for part in ("q", "k")
}
ROOTS = (*("model.", "model.language_model.", "language_model.model.", "model.text_model.", ""),)

FAMILY = Family(
    name="llama",
    model_types=(
        *("llama", "mistral", "ministral", "seed_oss", "cwm", "internlm3", "iquestcoder"),
    ),
    fields=fields,
    names=NameTable(
        roots=ROOTS,
        embedding={"tokens.weight": ("embed_tokens.weight",)},
        layer={**NORMS, **QKV, **OUT, **MLP},
        head=norm_names(("norm", "norm")),
    ),
    layers_at="model.layers",
    before=("model.embed_tokens", "model.rotary_emb"),
    behind=("model.norm", "lm_head"),
)

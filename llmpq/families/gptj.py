"""GPT-J and CodeGen: attention and MLP side by side on one LayerNorm, channels rotated in pairs.

    x += o(attention(rope(q), rope(k), v)) + down(gelu(up)), all of norm(x);  logits + b

CodeGen stores queries, values and keys in one matrix, a quarter of the heads after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import glm4
from llmpq.families.common.config_values import Config, size
from llmpq.families.common.plain_families import gpt_fields
from llmpq.families.common.record import Arrange, Family, NameTable, linear_names, norm_names

THETA = 10000.0
QUARTERS = 4
"""Parts in which CodeGen stores its heads: the cores that it was trained on."""


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    found = gpt_fields(config)
    dim, rotated = found["hidden"] // found["heads"], size(config, "rotary_dim")
    if rotated % 2 or rotated > dim:
        raise ValueError(
            f"config.json: rotary_dim={rotated} of {dim} channels of a head; expected an even "
            "number of them"
        )
    if config.get("model_type") == "codegen" and found["heads"] % QUARTERS:
        raise ValueError(
            f"config.json: CodeGen stores its heads in {QUARTERS} equal parts, got n_head="
            f"{found['heads']}"
        )
    return {
        **found,
        "positions": "rotary",
        "rope_theta": THETA,
        "rotary_dim": None if rotated == dim else rotated,
        "parallel_norms": 1,
        "qkv_bias": False,
        "o_bias": False,
        "head_bias": True,
    }


def _in_order(qkv: Any, spec: Any) -> Any:
    """Return the fused rows as q, k, v, rotated channels as halves."""
    parts = qkv.view(QUARTERS, 3, -1, *qkv.shape[1:])
    out = qkv.clone()
    for place, stored in enumerate((0, 2, 1)):
        out.view(3, -1, *qkv.shape[1:])[place] = parts[:, stored].reshape(-1, *qkv.shape[1:])
    return glm4.HALVES.ours(out, spec)


_LAYER = norm_names(("attn_norm", "h.{i}.ln_1")) | linear_names(
    (
        "qkv",
        ("h.{i}.attn.q_proj", "h.{i}.attn.k_proj", "h.{i}.attn.v_proj"),
    ),
    ("o", ("h.{i}.attn.out_proj",)),
    ("up", ("h.{i}.mlp.fc_in",)),
    ("down", ("h.{i}.mlp.fc_out",)),
)
FAMILY = Family(
    name="gptj",
    model_types=("gptj",),
    fields=fields,
    names=NameTable(
        roots=("transformer.", ""),
        embedding={"tokens.weight": ("wte.weight",)},
        layer=_LAYER,
        head=norm_names(("norm", "ln_f")),
        arrange={"qkv.weight": glm4.HALVES},
    ),
    layers_at="transformer.h",
    before=("transformer.wte",),
    behind=("transformer.ln_f", "lm_head"),
)
CODEGEN = replace(
    FAMILY,
    name="codegen",
    model_types=("codegen",),
    names=replace(
        FAMILY.names,
        layer={**_LAYER, **linear_names(("qkv", ("h.{i}.attn.qkv_proj",)))},
        arrange={"qkv.weight": Arrange(rows=_in_order)},
    ),
)

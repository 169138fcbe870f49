"""GPT-2 and StarCoder 1 (`gpt_bigcode`): LayerNorm, learned positions, biases everywhere.

    x = token + position;  x += o(attention(q, k, v)) of norm(x);  x += down(gelu(up)) of norm(x)

GPT-2 stores its matrices transposed, [in, out]. StarCoder's queries share one key and value, or q,
k and v are stored head by head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families.common.config_values import Config, expect, flag
from llmpq.families.common.plain_families import by_head, gpt_fields
from llmpq.families.common.record import Arrange, Family, NameTable, linear_names, norm_names

SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
"""Keys `summary_...` of a classifier's head."""


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "add_cross_attention", False, default=False)
    expect(config, "scale_attn_by_inverse_layer_idx", False, default=False)
    for key in ("reorder_and_upcast_attn", *(f"summary_{part}" for part in SUMMARY)):
        config.get(key)  # read, and without effect on a language model in float32
    scaled = flag(config, "scale_attn_weights", default=True)
    return {
        **gpt_fields(config),
        "positions": "learned",
        "position_offset": 0,
        "score_factor": None if scaled else 1.0,
    }


def bigcode_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a StarCoder 1."""
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        config.get(key)  # read, and without effect in float32
    found = fields(config)
    one = flag(config, "multi_query", default=True)
    return {**found, "kv_heads": 1 if one else found["heads"]}


def _in_order(qkv: Any, spec: Any) -> Any:
    return qkv if spec.kv_heads == 1 else by_head(qkv, spec)


_NORMS = norm_names(("attn_norm", "h.{i}.ln_1"), ("mlp_norm", "h.{i}.ln_2"))
_LINEARS = linear_names(
    ("qkv", ("h.{i}.attn.c_attn",)),
    ("o", ("h.{i}.attn.c_proj",)),
    ("up", ("h.{i}.mlp.c_fc",)),
    ("down", ("h.{i}.mlp.c_proj",)),
)
_TRANSPOSED = {
    part: tuple(f"{name}^T" if part.endswith(".weight") else name for name in names)
    for part, names in _LINEARS.items()
}
FAMILY = Family(
    name="gpt2",
    codes_unread="linears",
    model_types=("gpt2",),
    fields=fields,
    names=NameTable(
        roots=("transformer.", ""),
        embedding={"tokens.weight": ("wte.weight",), "positions.weight": ("wpe.weight",)},
        layer={**_NORMS, **_TRANSPOSED},
        head=norm_names(("norm", "ln_f")),
    ),
    layers_at="transformer.h",
    before=("transformer.wte", "transformer.wpe"),
    behind=("transformer.ln_f", "lm_head"),
)
BIGCODE = replace(
    FAMILY,
    name="gpt_bigcode",
    codes_unread="linears",
    model_types=("gpt_bigcode",),
    fields=bigcode_fields,
    names=replace(
        FAMILY.names,
        layer={**_NORMS, **_LINEARS},
        arrange={f"qkv.{kind}": Arrange(rows=_in_order) for kind in ("weight", "bias")},
    ),
)

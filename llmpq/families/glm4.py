"""GLM-4: norms before and behind attention and MLP, half of each head's channels rotated in pairs.

    x += norm(o(attention(norm(x))));  x += norm(down(silu(gate(n)) * up(n))), n = norm(x)

GLM (`glm`, GLM-4-9b of 2024) is the same without the norms behind. Gate and up are stored as one.
GLM-4.1V's text has biases of queries, keys and values in every size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.record import Arrange, linear_names, norm_names
from llmpq.families.common.rotary_families import pairs_to_halves, rotary_fields, rotated_channels


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    kind = config.get("model_type")
    return {
        **rotary_fields(config, partial_rotary=True),
        "qkv_bias": flag(config, "attention_bias", default=kind == "glm4v_text"),
        "norm_order": "pre" if kind == "glm" else "both",
    }


def _halves(qkv: Any, spec: Any) -> Any:
    """Return q, k, v rows with the rotated channels of q and k as halves."""
    rows = [spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2]
    q, k, v = qkv.split(rows)
    out = qkv.clone()
    rotated = rotated_channels(spec)
    out[: rows[0]] = pairs_to_halves(q, spec.heads, spec.head_dim, rotated)
    out[rows[0] : rows[0] + rows[1]] = pairs_to_halves(k, spec.kv_heads, spec.head_dim, rotated)
    out[rows[0] + rows[1] :] = v
    return out


HALVES = Arrange(rows=_halves)
"""Of queries, keys and values whose rotated channels lie in pairs."""
_LAYER = {
    **norm_names(
        ("attn_norm", "layers.{i}.input_layernorm"),
        ("attn_out_norm", "layers.{i}.post_self_attn_layernorm"),
        ("mlp_norm", "layers.{i}.post_attention_layernorm"),
        ("mlp_out_norm", "layers.{i}.post_mlp_layernorm"),
    ),
    **llama.QKV,
    **llama.OUT,
    **linear_names(
        ("gate_up", ("layers.{i}.mlp.gate_up_proj",)),
        ("down", ("layers.{i}.mlp.down_proj",)),
    ),
}
FAMILY = replace(
    llama.FAMILY,
    name="glm4",
    model_types=("glm4", "glm", "glm4v_text"),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer=_LAYER,
        arrange={f"qkv.{kind}": HALVES for kind in ("weight", "bias")},
    ),
)

"""Falcon: attention and MLP side by side; few key heads, or one; no biases in published models.

    x += dense(attention(rope(q), rope(k), v)) + down(gelu(up)), all of norm(x)       7B
    x += dense(attention(...) of norm(x)) + down(gelu(up)) of norm'(x)               40B, 180B

Older models without `parallel_attn` run the MLP behind attention. ALiBi (Falcon RW) is not run.
"""

from __future__ import annotations

from typing import Any

from llmpq.families.common.config_values import Config, expect, flag, size
from llmpq.families.common.plain_families import Renamed, by_head
from llmpq.families.common.record import Arrange, Family, NameTable, linear_names, norm_names
from llmpq.families.common.rotary_families import plain_rotary_fields

ONE, TWO = 1, 2
CALLED = {
    "hidden_act": "activation",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "hidden_size": "n_embed",
}


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "alibi", False, default=False)
    named = Renamed(config, CALLED)
    hidden, heads = size(named, "hidden_size"), size(config, "num_attention_heads")
    groups, bias = _key_heads(config, heads), flag(config, "bias", default=False)
    return {
        **plain_rotary_fields(named, eps_key="layer_norm_epsilon", ffn=4 * hidden),
        "kv_heads": groups,
        "parallel_norms": _norms(config),
        "qkv_bias": bias,
        "linear_bias": bias,
        **({} if hidden % heads else {"head_dim": hidden // heads}),
    }


def _key_heads(config: Config, heads: int) -> int:
    given = size(config, "num_kv_heads", default=heads)
    many = flag(config, "multi_query", default=True)
    if flag(config, "new_decoder_architecture", default=False):
        return given
    return 1 if many else heads


def _norms(config: Config) -> int:
    """Return how many norms stand in front of attention and MLP that run side by side."""
    parallel = flag(config, "parallel_attn", default=True)
    norms = size(config, "num_ln_in_parallel_attn", default=TWO)
    if not flag(config, "new_decoder_architecture", default=False):
        return ONE if parallel else 0
    if not parallel or norms > TWO:
        raise ValueError(
            f"config.json: parallel_attn={parallel} with num_ln_in_parallel_attn={norms} is not "
            "supported in Falcon's new_decoder_architecture; expected true, with 1 or 2 norms"
        )
    return norms


def _in_order(qkv: Any, spec: Any) -> Any:
    """Return the fused rows as q, k, v.

    Stored are all queries, then the only key and value; or of each group its queries, key and
    value, which is q, k, v of every head where each has its own.
    """
    if spec.kv_heads == 1:
        return qkv
    if spec.kv_heads == spec.heads:
        return by_head(qkv, spec)
    shared = spec.heads // spec.kv_heads
    groups = qkv.view(spec.kv_heads, shared + 2, spec.head_dim, *qkv.shape[1:])
    q, k, v = groups.split([shared, 1, 1], dim=1)
    out = qkv.clone()
    start = 0
    for part in (q, k, v):
        rows = part.reshape(-1, *qkv.shape[1:])
        out[start : start + rows.shape[0]] = rows
        start += rows.shape[0]
    return out


_LAYER = norm_names(
    ("attn_norm", "h.{i}.input_layernorm"),
    ("mlp_norm", "h.{i}.post_attention_layernorm"),
) | linear_names(
    ("qkv", ("h.{i}.self_attention.query_key_value",)),
    ("o", ("h.{i}.self_attention.dense",)),
    ("up", ("h.{i}.mlp.dense_h_to_4h",)),
    ("down", ("h.{i}.mlp.dense_4h_to_h",)),
)
FAMILY = Family(
    name="falcon",
    codes_unread="linears",
    model_types=("falcon",),
    fields=fields,
    names=NameTable(
        roots=("transformer.", ""),
        embedding={"tokens.weight": ("word_embeddings.weight",)},
        layer=_LAYER,
        two_norms=norm_names(("attn_norm", "h.{i}.ln_attn"), ("mlp_norm", "h.{i}.ln_mlp")),
        head=norm_names(("norm", "ln_f")),
        arrange={f"qkv.{kind}": Arrange(rows=_in_order) for kind in ("weight", "bias")},
    ),
    layers_at="transformer.h",
    before=("transformer.word_embeddings", "transformer.rotary_emb"),
    behind=("transformer.ln_f", "lm_head"),
)

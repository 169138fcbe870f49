"""BLOOM: LayerNorm, ALiBi, GELU, biases everywhere, normalised embeddings."""

from __future__ import annotations

from typing import Any

from llmpq.families.common.config_values import Config, expect, flag, number, size
from llmpq.families.common.plain_families import by_head
from llmpq.families.common.record import Arrange, Family, NameTable, linear_names, norm_names


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    expect(config, "apply_residual_connection_post_layernorm", False, default=False)
    hidden = size(config, "n_embed", "hidden_size")
    heads = size(config, "n_head", "num_attention_heads")
    return {
        "num_layers": size(config, "n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": 4 * hidden,
        "vocab": size(config, "vocab_size"),
        "max_positions": size(config, "seq_length", default=2048),
        "positions": "alibi",
        "norm": "layernorm",
        "norm_eps": number(config, "layer_norm_epsilon"),
        "activation": "gelu",
        "gated": False,
        "qkv_bias": True,
        "linear_bias": True,
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
        "embedding_norm": True,
    }


FAMILY = Family(
    name="bloom",
    model_types=("bloom",),
    fields=fields,
    names=NameTable(
        roots=("transformer.", ""),
        embedding={"tokens.weight": ("word_embeddings.weight",)}
        | norm_names(("norm", "word_embeddings_layernorm")),
        layer=norm_names(
            ("attn_norm", "h.{i}.input_layernorm"),
            ("mlp_norm", "h.{i}.post_attention_layernorm"),
        )
        | linear_names(
            ("qkv", ("h.{i}.self_attention.query_key_value",)),
            ("o", ("h.{i}.self_attention.dense",)),
            ("up", ("h.{i}.mlp.dense_h_to_4h",)),
            ("down", ("h.{i}.mlp.dense_4h_to_h",)),
        ),
        head=norm_names(("norm", "ln_f")),
        arrange={"qkv.weight": Arrange(rows=by_head), "qkv.bias": Arrange(rows=by_head)},
    ),
    layers_at="transformer.h",
    before=("transformer.word_embeddings", "transformer.word_embeddings_layernorm"),
    behind=("transformer.ln_f", "lm_head"),
)

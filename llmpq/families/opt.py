"""OPT: LayerNorm, learned positions, ReLU, biases everywhere."""

from __future__ import annotations

from typing import Any

from llmpq.families.common.config_values import Config, expect, flag, size
from llmpq.families.common.record import Family, NameTable, linear_names, norm_names


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    hidden = size(config, "hidden_size")
    expect(config, "word_embed_proj_dim", hidden, default=hidden)
    expect(config, "layer_norm_elementwise_affine", True, default=True)
    expect(config, "_remove_final_layer_norm", False, default=False)
    expect(config, "do_layer_norm_before", True, default=True)
    expect(config, "activation_function", "relu", default="relu")
    bias = flag(config, "enable_bias", default=True)
    heads = size(config, "num_attention_heads")
    return {
        "num_layers": size(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": size(config, "ffn_dim"),
        "vocab": size(config, "vocab_size"),
        "max_positions": size(config, "max_position_embeddings"),
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "relu",
        "gated": False,
        "qkv_bias": bias,
        "linear_bias": bias,
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
    }


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    fields=fields,
    names=NameTable(
        roots=("model.decoder.", "decoder.", ""),
        embedding={
            "tokens.weight": ("embed_tokens.weight",),
            "positions.weight": ("embed_positions.weight",),
        },
        layer=norm_names(
            ("attn_norm", "layers.{i}.self_attn_layer_norm"),
            ("mlp_norm", "layers.{i}.final_layer_norm"),
        )
        | linear_names(
            (
                "qkv",
                (
                    "layers.{i}.self_attn.q_proj",
                    "layers.{i}.self_attn.k_proj",
                    "layers.{i}.self_attn.v_proj",
                ),
            ),
            ("o", ("layers.{i}.self_attn.out_proj",)),
            ("up", ("layers.{i}.fc1",)),
            ("down", ("layers.{i}.fc2",)),
        ),
        head=norm_names(("norm", "final_layer_norm")),
    ),
    layers_at="model.decoder.layers",
    before=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    behind=("model.decoder.final_layer_norm", "lm_head"),
)

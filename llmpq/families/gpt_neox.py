"""GPT-NeoX, Pythia, Dolly: LayerNorm, biases, a quarter of each head rotated.

    x += dense(attention(rope(q), rope(k), v) of norm(x)) + down(gelu(up)) of norm'(x)

Without `use_parallel_residual` the MLP follows attention. Queries, keys and values are stored head
by head in one matrix.
"""

from __future__ import annotations

from typing import Any

from llmpq.families.common.config_values import Config, flag
from llmpq.families.common.plain_families import Renamed, by_head
from llmpq.families.common.record import Arrange, Family, NameTable, linear_names, norm_names
from llmpq.families.common.rotary_families import plain_rotary_fields

OLDER = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bias = flag(config, "attention_bias", default=True)
    base = plain_rotary_fields(Renamed(config, OLDER))
    hidden, heads = base["hidden"], base["heads"]
    return {
        **base,
        "kv_heads": heads,  # whatever else the config says
        **({} if hidden % heads else {"head_dim": hidden // heads}),
        "parallel_norms": 2 if flag(config, "use_parallel_residual", default=True) else 0,
        "qkv_bias": bias,
        "linear_bias": True,
        "o_bias": bias,
    }


FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    fields=fields,
    names=NameTable(
        roots=("gpt_neox.", ""),
        embedding={"tokens.weight": ("embed_in.weight",)},
        layer=norm_names(
            ("attn_norm", "layers.{i}.input_layernorm"),
            ("mlp_norm", "layers.{i}.post_attention_layernorm"),
        )
        | linear_names(
            ("qkv", ("layers.{i}.attention.query_key_value",)),
            ("o", ("layers.{i}.attention.dense",)),
            ("up", ("layers.{i}.mlp.dense_h_to_4h",)),
            ("down", ("layers.{i}.mlp.dense_4h_to_h",)),
        ),
        head=norm_names(("norm", "final_layer_norm")),
        output="embed_out.weight",
        arrange={f"qkv.{kind}": Arrange(rows=by_head) for kind in ("weight", "bias")},
    ),
    layers_at="gpt_neox.layers",
    before=("gpt_neox.embed_in", "gpt_neox.rotary_emb"),
    behind=("gpt_neox.final_layer_norm", "lm_head", "embed_out"),  # newer and older classes
)

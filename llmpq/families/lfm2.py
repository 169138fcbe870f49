"""LFM2: short convolutions between layers of attention; its mixtures behind the first layers.

attention: Llama's, with norms of query and key heads
short convolution: runtime/models/recurrent.py
mixture: p = sigmoid(router(x)), chosen by p + c; w = p of the chosen, made to sum to one
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, flag, number, size
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.record import linear_names, norm_names
from llmpq.families.common.recurrent_config import mixer_names, mixers
from llmpq.families.common.rotary_families import rotary_fields
from llmpq.families.common.spec_values import Recurrent, Router


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    base = shared_fields(config)
    return {**base, "ffn": _ffn(config, base["ffn"])}


def shared_fields(config: Config) -> dict[str, Any]:
    """Return the fields that both forms have."""
    base = rotary_fields(config, eps_key="norm_eps")
    for key in ("tie_embedding", "block_dim", "conv_dim", "conv_dim_out", "block_norm_eps"):
        config.get(key)  # other names, of the first configs
    if config.get("tie_embedding") is not None:
        base["tied_embeddings"] = flag(config, "tie_embedding")
    count = size(config, "num_hidden_layers")
    listed = config.get("full_attn_idxs")
    attention = range(count) if listed is None else listed
    default = ["full_attention" if i in attention else "conv" for i in range(count)]
    return {
        **base,
        "qk_norm": True,
        "mixers": mixers(config, default, recurrent={"conv"}),
        "recurrent": Recurrent(
            kind="short_conv",
            taps=size(config, "conv_L_cache"),
            channels=base["hidden"],
            bias=flag(config, "conv_bias"),
            conv_bias=flag(config, "conv_bias"),
        ),
    }


def _ffn(config: Config, ffn: int) -> int:
    """Return the MLP's width: two thirds of the config's, times a factor, rounded up."""
    for key in ("block_use_swiglu", "block_mlp_init_scale", "block_out_init_scale"):
        config.get(key)
    if config.get("block_ff_dim") is not None:
        ffn = size(config, "block_ff_dim")
    if not flag(config, "block_auto_adjust_ff_dim"):
        return ffn
    ffn = int(2 * ffn / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return ffn
    multiple = size(config, "block_multiple_of")
    return -(-int(number(config, "block_ffn_dim_multiplier") * ffn) // multiple) * multiple


def mixture_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a mixture behind the first layers."""
    base = shared_fields(config)
    dense = size(config, "num_dense_layers") if config.get("num_dense_layers") else 0
    wide = size(config, "moe_intermediate_size")
    return {
        **base,
        **counts(config, "num_experts"),
        "ffn": wide,
        **({"dense_layers": tuple(range(dense)), "dense_ffn": base["ffn"]} if dense else {}),
        "router": Router(
            score="sigmoid",
            normalise=flag(config, "norm_topk_prob"),
            scale=number(config, "routed_scaling_factor"),
            correction=flag(config, "use_expert_bias"),
        ),
    }


_ATTENTION, _MLP = "layers.{i}.self_attn", "layers.{i}.feed_forward"
_LAYER = {
    **norm_names(("attn_norm", "layers.{i}.operator_norm"), ("mlp_norm", "layers.{i}.ffn_norm")),
    **llama.QKV,
    **linear_names(("o", (f"{_ATTENTION}.out_proj",))),
    **{f"{part}_norm.weight": (f"{_ATTENTION}.{part}_layernorm.weight",) for part in ("q", "k")},
    **mixer_names(
        "layers.{i}.conv", **{f"conv.{kind}": f"conv.{kind}" for kind in ("weight", "bias")}
    ),
}
_DENSE = linear_names(("gate_up", (f"{_MLP}.w1", f"{_MLP}.w3")), ("down", (f"{_MLP}.w2",)))
_ONE = f"{_MLP}.experts.{{e}}"
FAMILY = replace(
    llama.FAMILY,
    name="lfm2",
    model_types=("lfm2",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        layer={**_LAYER, **_DENSE},
        head=norm_names(("norm", "embedding_norm")),
    ),
    behind=("model.embedding_norm", "lm_head"),
)
MIXTURE = replace(
    FAMILY,
    name="lfm2_moe",
    before=("model.embed_tokens", "model.pos_emb"),
    model_types=("lfm2_moe",),
    fields=mixture_fields,
    names=replace(
        FAMILY.names,
        layer={
            **_LAYER,
            "router.weight": (f"{_MLP}.gate.weight",),
            "router.correction": (f"{_MLP}.expert_bias",),
            **linear_names(
                ("experts.{e}.gate_up", (f"{_ONE}.w1", f"{_ONE}.w3")),
                ("experts.{e}.down", (f"{_ONE}.w2",)),
            ),
        },
        dense={**_LAYER, **_DENSE},
    ),
)

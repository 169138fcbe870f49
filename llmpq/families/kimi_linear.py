"""Kimi Linear: delta attention with a decay per channel (KDA), every fourth layer latents.

KDA: runtime/models/recurrent.py;  latents: runtime/models/latent_attention.py, no positions
mixture: DeepSeek-V3's
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import deepseek, llama
from llmpq.families.common.config_values import Config, epsilon, expect, section, size
from llmpq.families.common.mixture_config import expert_names
from llmpq.families.common.plain_families import Renamed
from llmpq.families.common.record import linear_names
from llmpq.families.common.recurrent_config import mixer_names, mixers
from llmpq.families.common.spec_values import Recurrent
from llmpq.families.glm4_moe import mixture

ATTENTION_EVERY = 4
"""Where config.json lists no kinds: layers 4, 8, ..., counted from 0, are attention."""

THEIRS = {
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "max_position_embeddings": "model_max_length",
}
"""What DeepSeek's configs call it -> what these do."""


def fields(given: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    config = Renamed(given, THEIRS)
    expect(config, "attention_bias", False, default=False)
    expect(config, "hidden_act", "silu", default="silu")
    expect(config, "mla_use_nope", True, default=True)
    expect(config, "moe_router_activation_func", "sigmoid", default="sigmoid")
    expect(config, "moe_layer_freq", 1, default=1)
    for key in ("head_dim", "qk_head_dim", "num_key_value_heads", "use_grouped_topk"):
        config.get(key)  # the sum of others, unread, or said by `n_group`
    config.get("tie_word_embeddings")  # its class has an output matrix whatever this says
    latent = deepseek.latent_of(config)
    ffn, delta = size(config, "intermediate_size"), section(config, "linear_attn_config") or {}
    where = "config.json, linear_attn_config"
    heads, dim, taps = (
        size(delta, inner, default=size(config, outer), where=where)
        for inner, outer in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    return {
        "num_layers": size(config, "num_hidden_layers"),
        "hidden": size(config, "hidden_size"),
        "heads": size(config, "num_attention_heads"),
        "kv_heads": 1,
        "head_dim": latent.dim,
        "vocab": size(config, "vocab_size"),
        "max_positions": size(config, "max_position_embeddings"),
        "positions": "none",
        "norm": "rmsnorm",
        "norm_eps": epsilon(config, "rms_norm_eps"),
        "activation": "silu",
        "gated": True,
        "qkv_bias": False,
        "linear_bias": False,
        "tied_embeddings": False,
        "latent": latent,
        "score_factor": latent.q_head_dim**-0.5,
        "mixers": _mixers(config, delta),
        "recurrent": Recurrent(
            kind="kda",
            taps=taps,
            channels=3 * heads * dim,
            heads=heads,
            key_heads=heads,
            key_dim=dim,
            value_dim=dim,
            norm_first=True,
            gate="sigmoid",
            low_rank=dim,
        ),
        **mixture(config, ffn, _dense(config)),
    }


def _dense(config: Config) -> tuple[int, ...]:
    """Return the layers with one MLP: those that the config lists, or the first ones."""
    listed = deepseek.listed_dense(config)
    first = config.get("first_k_dense_replace", 1)
    if listed is not None:
        return listed
    if type(first) is not int or first < 0:
        raise ValueError(
            f"config.json: 'first_k_dense_replace' must be a number of layers, got {first!r}; "
            "correct it or download config.json again"
        )
    return tuple(range(min(first, size(config, "num_hidden_layers"))))


def _mixers(config: Config, delta: Config) -> Any:
    """Return what mixes each layer's tokens: listed by kind, or by number, which counts from 1."""
    count = size(config, "num_hidden_layers")
    kinds = ["linear_attention" if i % ATTENTION_EVERY or not i else "full_attention"
             for i in range(count)]  # fmt: skip
    listed = [delta.get(key) for key in ("full_attn_layers", "kda_layers")]
    if config.get("layer_types") is None and None not in listed:
        full, kda = (list(layers) for layers in listed if layers is not None)
        if sorted([*full, *kda]) != list(range(1, count + 1)):
            raise ValueError(
                "config.json: 'full_attn_layers' and 'kda_layers' of 'linear_attn_config' must "
                f"name each of {count} layers once, from 1 on; correct them or download "
                "config.json again"
            )
        kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
    return mixers(config, kinds, recurrent={"linear_attention"})


_SELF, _MOE = "layers.{i}.self_attn", "layers.{i}.block_sparse_moe"
_ONE = f"{_MOE}.experts.{{e}}"
_CONVOLUTION = tuple(f"{_SELF}.{part}_conv1d.weight" for part in ("q", "k", "v"))
_ATTENTION = {
    **deepseek.ATTENTION,
    **mixer_names(_SELF, **{"mixer_norm.weight": "o_norm.weight"}),
    "mixer_in.weight": tuple(f"{_SELF}.{part}_proj.weight" for part in ("q", "k", "v")),
    "mixer_out.weight": (f"{_SELF}.o_proj.weight",),
    "conv.weight": _CONVOLUTION,
    "step.weight": tuple(f"{_SELF}.{part}_proj.weight" for part in ("b", "f_a", "g_a")),
    "mixer_decay.weight": (f"{_SELF}.f_b_proj.weight",),
    "mixer_gate.weight": (f"{_SELF}.g_b_proj.weight",),
}
FAMILY = replace(
    llama.FAMILY,
    name="kimi_linear",
    model_types=("kimi_linear",),
    fields=fields,
    codes_unread="convolutions beside codes",
    names=replace(
        llama.FAMILY.names,
        layer={
            **_ATTENTION,
            **expert_names(_MOE, shared=True),
            **linear_names(
                ("experts.{e}.gate_up", (f"{_ONE}.w1", f"{_ONE}.w3")),
                ("experts.{e}.down", (f"{_ONE}.w2",)),
            ),
        },
        dense={**_ATTENTION, **llama.MLP},
        otherwise=linear_names(
            ("gate_up", (f"{_MOE}.gate_proj", f"{_MOE}.up_proj")),
            ("down", (f"{_MOE}.down_proj",)),
        ),
    ),
    before=("model.embed_tokens",),
)

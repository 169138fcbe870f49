"""Gemma 4: Gemma 3's layers of two shapes, shared caches, inputs of layers, a mixture beside.

    x += norm(o(attention(rope(norm(q)), rope(norm(k)), norm'(v))) of norm(x)), scores unscaled
    x += norm(MLP(norm(x))), or norm(norm_1(MLP(norm(x))) + norm_2(experts(norm_3(x)) by x))
    x += norm(out(gelu(gate(x)) * the layer's own input));  x *= the layer's number

norm' has no weight. Layers that see all tokens have heads of their own size and number, rotate the
fastest frequencies of theirs alone, and may take their keys, as they come, for values. The last
layers make queries and attend to the cache of the last layer of their kind in front of them; their
MLPs may be twice as wide. Its towers for pictures and sound are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import gemma, llama
from llmpq.families.common.config_values import (
    Config,
    expect,
    flag,
    is_given,
    section,
    size,
)
from llmpq.families.common.mixture_config import counts
from llmpq.families.common.record import linear_names, norm_names
from llmpq.families.common.rope import window_theta
from llmpq.families.common.rotary_families import (
    FULL,
    SLIDING,
    alternating,
    layer_kinds,
    rotary_fields,
    windows,
)
from llmpq.families.common.spec_values import Router

FULL_EVERY = 6
GLOBAL_HEAD_DIM = 512


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    bidirectional = config.get("use_bidirectional_attention")
    if bidirectional != "vision":  # of pictures alone
        expect(config, "use_bidirectional_attention", None, default=None)
    base = rotary_fields(config, activation="gelu_tanh")
    kinds = [*layer_kinds(config, alternating(config, FULL_EVERY))]
    kinds[-1] = FULL
    shared = shared_layers(config)
    found = {
        **attention_fields(config, base, kinds),
        "layer_scalar": True,
        **_global_heads(config, kinds, base["kv_heads"]),
        **sharing(kinds, shared),
        **per_layer_inputs(config),
    }
    ffn = base["ffn"]
    wide = flag(config, "use_double_wide_mlp") and shared
    if wide:
        first = len(kinds) - shared
        found["ffns"] = tuple(ffn if i < first else 2 * ffn for i in range(len(kinds)))
    return {**found, **_mixture(config, ffn)}


def attention_fields(config: Config, base: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Return `base` with the norms, the windows and the scales that Gemma 3n has, too."""
    bias = flag(config, "attention_bias")
    return {
        **base,
        "qkv_bias": bias,
        "o_bias": bias or None,
        "norm_order": "both",
        "qk_norm": True,
        "value_norm": True,
        "score_factor": 1.0,
        "windows": windows(config, kinds),
        "window_rope_theta": window_theta(config, beside="rope_local_base_freq"),
        "embedding_factor": base["hidden"] ** 0.5,
        "logit_cap": gemma.cap(config, "final_logit_softcapping"),
    }


def _global_heads(config: Config, kinds: list[str], kv_heads: int) -> dict[str, Any]:
    """Return what layers that see all tokens have otherwise: heads, and values that are keys."""
    same = flag(config, "attention_k_eq_v")
    wide = size(config, "global_head_dim", default=GLOBAL_HEAD_DIM)
    heads = config.get("num_global_key_value_heads")
    own = size(config, "num_global_key_value_heads") if heads is not None and same else kv_heads
    listed = section(config, "per_layer_config")
    if listed is not None:
        wide, own = _listed_heads(config, listed, kinds, kv_heads)
    head_dim = size(config, "head_dim")
    if SLIDING not in kinds:
        return {"head_dim": wide, "kv_heads": own, "value_is_key": same}
    return {
        "head_dim": head_dim,
        "global_head_dim": wide if wide != head_dim else None,
        "global_kv_heads": own if own != kv_heads else None,
        "value_is_key": same,
    }


def _listed_heads(
    config: Config, listed: Config, kinds: list[str], kv_heads: int
) -> tuple[int, int]:
    """Return channels and heads of layers that see all, as newer files list them by layer."""
    head_dim = size(config, "head_dim")
    plain = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
    found: dict[str, set[tuple[int, int]]] = {FULL: set(), SLIDING: set()}
    by_layer = {int(layer): own for layer, own in listed.items() if str(layer).isdecimal()}
    for layer, kind in enumerate(kinds):  # "05" as Transformers saves it
        own = by_layer.get(layer) or {}
        other = sorted(set(own) - set(plain))
        if other:
            raise ValueError(
                f"config.json: per_layer_config of layer {layer} has '{other[0]}', which llmpq "
                "does not run; expected head_dim and num_key_value_heads"
            )
        merged = {**plain, **own}
        found[kind].add((size(merged, "head_dim"), size(merged, "num_key_value_heads")))
    if len(found[FULL]) > 1 or found[SLIDING] - {(head_dim, kv_heads)}:
        raise ValueError(
            "config.json: per_layer_config gives layers of one kind unlike heads, which llmpq does "
            "not run; expected all windowed layers alike, and all others"
        )
    return next(iter(found[FULL]))


def shared_layers(config: Config) -> int:
    """Return how many layers, the last ones, have no cache of their own."""
    given = config.get("num_kv_shared_layers")
    return size(config, "num_kv_shared_layers") if is_given(given) else 0


def sharing(kinds: list[str], shared: int) -> dict[str, Any]:
    """Return whose cache each layer reads: the last `shared` ones read that of a layer in front.

    Of the last one of their kind that has a cache of its own.
    """
    if not shared:
        return {}
    first = len(kinds) - shared
    if first <= 0 or set(kinds[:first]) != set(kinds):
        raise ValueError(
            f"config.json: the last {shared} of {len(kinds)} layers share caches "
            "(num_kv_shared_layers), but no layer in front of them has a cache of each of their "
            "kinds (layer_types); correct one of them or download config.json again"
        )
    last = {kind: first - 1 - kinds[:first][::-1].index(kind) for kind in kinds[:first]}
    return {"kv_sources": (*range(first), *(last[kind] for kind in kinds[first:]))}


def per_layer_inputs(config: Config) -> dict[str, Any]:
    """Return the size of the layers' own inputs, and of the table that they come of."""
    rows = size(config, "vocab_size_per_layer_input", default=size(config, "vocab_size"))
    if not is_given(config.get("hidden_size_per_layer_input")):
        return {}
    return {
        "per_layer_dim": size(config, "hidden_size_per_layer_input"),
        "per_layer_vocab": rows,
    }


def _mixture(config: Config, ffn: int) -> dict[str, Any]:
    """Return the fields of experts beside the MLP, where the model has them."""
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size")
    if not flag(config, "enable_moe_block", default=False):
        for key in keys:
            config.get(key)  # no layer has them
        return {}
    found = counts(config, "num_experts", per_token=("top_k_experts",))
    return {
        **found,
        "ffn": size(config, "moe_intermediate_size", "expert_intermediate_size"),
        "shared_ffn": ffn,
        "mixture_beside": True,
        "router": Router(normed=True, expert_scale=True),
    }


_I, _SELF = "layers.{i}", "layers.{i}.self_attn"
_OWN = {
    **linear_names(
        ("q", (f"{_SELF}.q_proj",)),
        ("qk", (f"{_SELF}.q_proj", f"{_SELF}.k_proj")),
        ("per_layer_gate", (f"{_I}.per_layer_input_gate",)),
        ("per_layer_out", (f"{_I}.per_layer_projection",)),
        ("shared.gate_up", (f"{_I}.mlp.gate_proj", f"{_I}.mlp.up_proj")),
        ("shared.down", (f"{_I}.mlp.down_proj",)),
    ),
    **norm_names(
        ("per_layer_out_norm", f"{_I}.post_per_layer_input_norm"),
        ("shared_out_norm", f"{_I}.post_feedforward_layernorm_1"),
        ("experts_norm", f"{_I}.pre_feedforward_layernorm_2"),
        ("experts_out_norm", f"{_I}.post_feedforward_layernorm_2"),
    ),
    "scalar": (f"{_I}.layer_scalar",),
    "router.weight": (f"{_I}.router.proj.weight",),
    "router.scale": (f"{_I}.router.scale",),
    "router.expert_scale": (f"{_I}.router.per_expert_scale",),
    "experts.{e}.gate_up.weight": (f"{_I}.experts.gate_up_proj[{{e}}]",),
    "experts.{e}.down.weight": (f"{_I}.experts.down_proj[{{e}}]",),
}
_EXPERT = f"{_I}.experts.{{e}}"
PER_LAYER = {
    "per_layer.weight": ("embed_tokens_per_layer.weight",),
    "per_layer_in.weight": ("per_layer_model_projection.weight",),
    "per_layer_norm.weight": ("per_layer_projection_norm.weight",),
}
BEFORE = (
    *gemma.FAMILY.before,
    "model.embed_tokens_per_layer",
    "model.per_layer_model_projection",
    "model.per_layer_projection_norm",
)
FAMILY = replace(
    gemma.FAMILY,
    name="gemma4",
    before=BEFORE,
    model_types=("gemma4_text", "gemma4_unified_text"),
    fields=fields,
    codes_unread="experts",
    names=replace(
        gemma.FAMILY.names,
        embedding={**llama.FAMILY.names.embedding, **PER_LAYER},
        layer={**gemma.FAMILY.names.layer, **_OWN},
        arrange={},
        apart=dict(
            linear_names(
                ("experts.{e}.gate_up", (f"{_EXPERT}.gate_proj", f"{_EXPERT}.up_proj")),
                ("experts.{e}.down", (f"{_EXPERT}.down_proj",)),
            )
        ),
    ),
)

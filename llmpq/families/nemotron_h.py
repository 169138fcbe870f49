"""Nemotron-H and Nemotron 3: layers that are one of Mamba-2, attention, an MLP, a mixture.

    x += one(norm(x)); attention has no positions, MLPs and experts are down(relu(up(x))^2)
    p = sigmoid(router(x)); chosen = the k largest of p + c, of the best groups
    y = scale * sum of w_e expert_e(x) + shared(x),  w = p of the chosen, made to sum to one
    Nemotron 3 Super and Ultra: y = B sum of w_e expert_e(A x) + shared(x), A x being narrow

A lower limit of time steps changes nothing here, as in other engines. Layers that predict further
tokens (MTP) are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.families import llama
from llmpq.families.common.config_values import Config, epsilon, expect, flag, size
from llmpq.families.common.mixture_config import counts, sigmoid_router
from llmpq.families.common.record import linear_names
from llmpq.families.common.recurrent_config import mixer_names
from llmpq.families.common.spec_values import Mixer, Recurrent

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(("linear_attention", "mamba"), "recurrent"),
    **dict.fromkeys(("full_attention", "attention"), "attention"),
    **dict.fromkeys(("mlp", "moe"), "none"),
}


def fields(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    config.get("tie_word_embeddings")  # its class has an output matrix whatever this says
    expect(config, "mlp_hidden_act", "relu2", default="relu2")
    expect(config, "mamba_hidden_act", "silu", default="silu")
    expect(config, "attention_bias", False, default=False)
    for key in (
        "residual_in_fp32",
        "time_step_limit",
        "time_step_min",
        "time_step_max",
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
    ):
        config.get(key)  # of training, or of kernels
    kinds, hidden = _kinds(config), size(config, "hidden_size")
    heads, mlp_bias = size(config, "num_attention_heads"), flag(config, "mlp_bias")
    found: dict[str, Any] = {
        "num_layers": len(kinds),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": size(config, "num_key_value_heads", default=heads),
        "head_dim": size(config, "head_dim", default=hidden // heads),
        "ffn": size(config, "intermediate_size"),
        "vocab": size(config, "vocab_size"),
        "max_positions": size(config, "max_position_embeddings"),
        "positions": "none",
        "norm": "rmsnorm",
        "norm_eps": epsilon(config, "layer_norm_epsilon"),
        "activation": "relu2",
        "gated": False,
        "qkv_bias": False,
        "linear_bias": mlp_bias,
        "o_bias": False if mlp_bias else None,
        "tied_embeddings": False,
        "mixers": tuple(MIXERS[kind] for kind in kinds),
        "without_mlp": tuple(i for i, kind in enumerate(kinds) if MIXERS[kind] != "none"),
        "recurrent": _mamba2(config),
    }
    if "recurrent" not in found["mixers"]:
        found["recurrent"] = None
    return {**found, **(_mixture(config, kinds, found["ffn"]) if "moe" in kinds else {})}


def _kinds(config: Config) -> list[str]:
    """Return what each layer is: of `layers_block_type`, or a letter each in one word."""
    for key in ("num_hidden_layers", "layer_types"):
        config.get(key)  # how many those are; another name
    pattern = config.get("hybrid_override_pattern")
    kinds = config.get("layers_block_type")
    if kinds is None and isinstance(pattern, str):
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    kinds = ["linear_attention", "moe", "full_attention", "mlp"] if kinds is None else kinds
    wrong = [k for k in kinds if k not in MIXERS] if isinstance(kinds, list) else [kinds]
    if wrong or not kinds:
        raise ValueError(
            "config.json: 'layers_block_type' must name each layer linear_attention, "
            f"full_attention, mlp or moe, got {wrong[:1]}; correct it or download config.json again"
        )
    return list(kinds)


def _mamba2(config: Config) -> Recurrent:
    config.get("expand")
    config.get("chunk_size")
    heads, groups_ = size(config, "mamba_num_heads"), size(config, "n_groups")
    value_dim, state = size(config, "mamba_head_dim"), size(config, "ssm_state_size")
    return Recurrent(
        kind="mamba2",
        taps=size(config, "conv_kernel"),
        channels=heads * value_dim + 2 * groups_ * state,
        heads=heads,
        key_heads=groups_,
        key_dim=state,
        value_dim=value_dim,
        bias=flag(config, "use_bias"),
        conv_bias=flag(config, "use_conv_bias"),
        norm_groups=groups_,
    )


def _mixture(config: Config, kinds: list[str], ffn: int) -> dict[str, Any]:
    found = counts(config, "n_routed_experts", "num_local_experts")
    expect(config, "mlp_bias", False, default=False)  # of all matrices but the experts'
    expect(config, "n_shared_experts", 1, default=1)
    dense = tuple(i for i, kind in enumerate(kinds) if kind == "mlp")
    return {
        **found,
        "ffn": size(config, "moe_intermediate_size"),
        "shared_ffn": size(config, "moe_shared_expert_intermediate_size"),
        "latent_experts": size(config, "moe_latent_size", default=0),
        "router": sigmoid_router(config, found["experts"]),
        **({"dense_layers": dense, "dense_ffn": ffn} if dense else {}),
    }


_MIXER = "layers.{i}.mixer"
_ONE, _SHARED = f"{_MIXER}.experts.{{e}}", f"{_MIXER}.shared_experts"
_MLP = linear_names(("up", (f"{_MIXER}.up_proj",)), ("down", (f"{_MIXER}.down_proj",)))
_NORMS = {f"{part}_norm.weight": ("layers.{i}.norm.weight",) for part in ("attn", "mlp")}
FAMILY = replace(
    llama.FAMILY,
    name="nemotron_h",
    model_types=("nemotron_h",),
    fields=fields,
    names=replace(
        llama.FAMILY.names,
        roots=("backbone.", "model.", "language_model.backbone.", "language_model.model."),
        embedding={"tokens.weight": ("embeddings.weight",)},
        layer={
            **_NORMS,
            **linear_names(
                ("qkv", tuple(f"{_MIXER}.{part}_proj" for part in ("q", "k", "v"))),
                ("o", (f"{_MIXER}.o_proj",)),
            ),
            **mixer_names(_MIXER),
            **_MLP,
            "router.weight": (f"{_MIXER}.gate.weight",),
            "router.correction": (f"{_MIXER}.gate.e_score_correction_bias",),
            **linear_names(
                ("latent_in", (f"{_MIXER}.fc1_latent_proj",)),
                ("latent_out", (f"{_MIXER}.fc2_latent_proj",)),
                ("experts.{e}.up", (f"{_ONE}.up_proj",)),
                ("experts.{e}.down", (f"{_ONE}.down_proj",)),
                ("shared.up", (f"{_SHARED}.up_proj",)),
                ("shared.down", (f"{_SHARED}.down_proj",)),
            ),
        },
        dense={**_NORMS, **_MLP},
        head={"norm.weight": ("norm_f.weight",)},
    ),
    before=("model.embeddings",),
    behind=("model.norm_f", "lm_head"),
)

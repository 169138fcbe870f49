"""GGUF keys of models with recurrent layers: short convolutions and Mamba-2.

A layer without key and value heads (`attention.head_count_kv` is a list) is a recurrent one.
"""

from __future__ import annotations

from typing import Any

from llmpq.checkpoints.gguf_metadata import REAL, Metadata

SOFTMAX, SIGMOID = 1, 2
"""`expert_gating_func`."""


def lfm2(metadata: Metadata, config: dict[str, Any]) -> None:
    """LFM2 and its mixtures."""
    conv = "shortconv.conv"
    config |= {
        "layer_types": _kinds(metadata, config, "conv"),
        "conv_L_cache": metadata.number("shortconv.l_cache"),
        "conv_bias": any(f".{conv}.bias" in name for name in metadata.file.tensors),
        "norm_eps": config.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,  # the file has the width as it is
        "block_ff_dim": config["intermediate_size"],
    }
    for key in ("attention_bias", "mlp_bias"):
        config.pop(key)


def lfm2_moe(metadata: Metadata, config: dict[str, Any]) -> None:
    """LFM2's mixtures behind their dense layers; the chosen experts' weights sum to one."""
    lfm2(metadata, config)
    for key in ("block_auto_adjust_ff_dim", "block_ff_dim"):
        config.pop(key)
    if metadata.get("expert_gating_func") != SIGMOID:
        raise ValueError(
            f"'{metadata.file.path}': experts are not chosen by sigmoid, as LFM2's are; get the "
            "model as safetensors"
        )
    config |= {
        "num_dense_layers": metadata.get("leading_dense_block_count") or 0,
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "use_expert_bias": any("exp_probs_b" in name for name in metadata.file.tensors),
    }


def granite_hybrid(metadata: Metadata, config: dict[str, Any]) -> None:
    """Granite 4: Mamba-2 among attention, rotary where `rope.scaling.finetuned` is set."""
    for key, ours, default in (
        ("embedding_scale", "embedding_multiplier", 1.0),
        ("attention.scale", "attention_multiplier", config["head_dim"] ** -0.5),
        ("residual_scale", "residual_multiplier", 1.0),
        ("logit_scale", "logits_scaling", 1.0),
    ):
        config[ours] = metadata.number(key, REAL, default=default)
    experts = metadata.get("expert_count")
    shared = metadata.get("expert_shared_feed_forward_length")
    config |= {
        **_mamba2(metadata, config),
        "layer_types": _kinds(metadata, config, "mamba"),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else None,
        "num_local_experts": experts or 0,
        "num_experts_per_tok": metadata.get("expert_used_count") or 0,
        "shared_intermediate_size": (experts and shared) or config["intermediate_size"],
    }
    config.pop("partial_rotary_factor")


def _mamba2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of Mamba-2 layers; `ssm.time_step_rank` is the number of heads."""
    inner, heads = metadata.number("ssm.inner_size"), metadata.number("ssm.time_step_rank")
    hidden = config["hidden_size"]
    if inner % hidden or inner % heads:
        raise ValueError(
            f"'{metadata.file.path}': ssm.inner_size={inner} is no multiple of {hidden} channels "
            f"and {heads} heads; the file is damaged, or of a kind that llmpq does not run"
        )
    names = metadata.file.tensors
    return {
        "mamba_expand": inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": metadata.number("ssm.state_size"),
        "mamba_n_groups": metadata.number("ssm.group_count"),
        "mamba_d_conv": metadata.number("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in names),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in names),
    }


def _kinds(metadata: Metadata, config: dict[str, Any], recurrent: str) -> list[str]:
    """Return what each layer is, by its number of key and value heads."""
    heads = metadata.get("attention.head_count_kv")
    count = config["num_hidden_layers"]
    if not isinstance(heads, list):
        return ["full_attention"] * count
    if len(heads) != count:
        raise ValueError(
            f"'{metadata.file.path}': attention.head_count_kv has {len(heads)} numbers for {count} "
            "layers; the file is damaged: download it again"
        )
    return ["full_attention" if own else recurrent for own in heads]

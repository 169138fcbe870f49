"""GGUF keys of models with recurrent layers: short convolutions, Mamba-2 and the delta rule.

A layer without key and value heads (`attention.head_count_kv` is a list) is a recurrent one.
"""

from __future__ import annotations

from typing import Any

from llmpq.checkpoints.gguf_metadata import REAL, Metadata
from llmpq.checkpoints.gguf_mixtures import SIGMOID, experts_behind_dense, latent, require_gate


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
    inner, hidden = metadata.number("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise ValueError(
            f"'{metadata.file.path}': ssm.inner_size={inner} is no multiple of {hidden} channels; "
            "the file is damaged, or of a kind that llmpq does not run"
        )
    config |= {
        **_mamba2(metadata),
        "mamba_expand": inner // hidden,
        "layer_types": _kinds(metadata, config, "mamba"),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else None,
        "num_local_experts": experts or 0,
        "num_experts_per_tok": metadata.get("expert_used_count") or 0,
        "shared_intermediate_size": (experts and shared) or config["intermediate_size"],
    }
    config.pop("partial_rotary_factor")


def qwen3_5(metadata: Metadata, config: dict[str, Any]) -> None:
    """Qwen3.5; of the delta rule, `time_step_rank` is the heads of values, `group_count` of keys.

    The layers behind the last one predict further tokens; a file may be without them.
    """
    inner, heads = metadata.number("ssm.inner_size"), metadata.number("ssm.time_step_rank")
    key_heads = metadata.number("ssm.group_count")
    if inner % heads or heads % key_heads:
        raise ValueError(
            f"'{metadata.file.path}': ssm.inner_size={inner} is no multiple of {heads} heads, or "
            f"those of {key_heads} heads of keys; the file is damaged"
        )
    config |= {
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.number("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "full_attention_interval": metadata.number("full_attention_interval", default=4),
    }
    config.pop("mlp_bias")
    metadata.get("rope.dimension_sections")  # of text alone, positions count alike in all
    if metadata.get("nextn_predict_layers"):
        further = metadata.number("nextn_predict_layers")
        config["num_hidden_layers"] -= further
        config["num_nextn_predict_layers"] = further


def qwen3_5_moe(metadata: Metadata, config: dict[str, Any]) -> None:
    """Qwen3.5's mixtures."""
    qwen3_5(metadata, config)
    wide = metadata.number("expert_feed_forward_length")
    config |= {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": wide,
        "shared_expert_intermediate_size": metadata.number(
            "expert_shared_feed_forward_length", default=wide
        ),
    }


def qwen3_next(metadata: Metadata, config: dict[str, Any]) -> None:
    """Qwen3-Next."""
    qwen3_5_moe(metadata, config)
    config["norm_topk_prob"] = True


def falcon_h1(metadata: Metadata, config: dict[str, Any]) -> None:
    """Falcon-H1, whose files have its factors in their matrices; outputs are gated, then normed."""
    found = _mamba2(metadata)
    config |= {
        **found,
        "mamba_d_ssm": metadata.number("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in metadata.file.tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": found["mamba_proj_bias"],
    }
    config.pop("partial_rotary_factor")


def kimi_linear(metadata: Metadata, config: dict[str, Any]) -> None:
    """Kimi Linear: KDA, and latents in layers with heads of keys, which have no positions."""
    require_gate(metadata, SIGMOID, default=SIGMOID)
    kinds = _kinds(metadata, config, "kda")
    numbered = list(enumerate(kinds, 1))
    config |= {
        **latent(metadata, config),
        **experts_behind_dense(metadata),
        "norm_topk_prob": metadata.get("expert_weights_norm") is not False,
        "linear_attn_config": {
            "num_heads": config["num_attention_heads"],
            "head_dim": metadata.number("kda.head_dim"),
            "short_conv_kernel_size": metadata.number("ssm.conv_kernel"),
            "full_attn_layers": [number for number, kind in numbered if kind != "kda"],
            "kda_layers": [number for number, kind in numbered if kind == "kda"],
        },
    }
    config["num_experts"] = config.pop("n_routed_experts")
    for key in ("partial_rotary_factor", "rope_theta", "mlp_bias"):
        config.pop(key)


def _mamba2(metadata: Metadata) -> dict[str, Any]:
    """Return the keys of Mamba-2 layers; `ssm.time_step_rank` is the number of heads."""
    inner, heads = metadata.number("ssm.inner_size"), metadata.number("ssm.time_step_rank")
    if inner % heads:
        raise ValueError(
            f"'{metadata.file.path}': ssm.inner_size={inner} is no multiple of {heads} heads; the "
            "file is damaged"
        )
    names = metadata.file.tensors
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": metadata.number("ssm.state_size"),
        "mamba_n_groups": metadata.number("ssm.group_count"),
        "mamba_d_conv": metadata.number("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in names),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in names),
    }


def nemotron_h(metadata: Metadata, config: dict[str, Any]) -> None:
    """Nemotron-H and its mixtures: a layer is Mamba-2, attention, or what it has feed-forward.

    What a layer is, its own numbers of heads and of feed-forward channels say.
    """
    count = config["num_hidden_layers"]
    heads = metadata.of_layers("attention.head_count_kv", count)
    wide = metadata.of_layers("feed_forward_length", count)
    experts = metadata.get("expert_count")
    feed = "moe" if experts else "mlp"
    mamba = _mamba2(metadata)
    further = metadata.number("nextn_predict_layers") if metadata.get("nextn_predict_layers") else 0
    kinds = [
        "full_attention" if own else feed if channels else "linear_attention"
        for own, channels in zip(heads, wide, strict=True)
    ][: count - further]
    metadata.get("attention.layer_norm_epsilon")  # the norms are RMSNorms, of the other key
    names = metadata.file.tensors
    config |= {
        "num_hidden_layers": len(kinds),
        "num_nextn_predict_layers": further,
        "layers_block_type": kinds,
        "intermediate_size": max(wide) or config["hidden_size"],
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "ssm_state_size": mamba["mamba_d_state"],
        "n_groups": mamba["mamba_n_groups"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
        "mlp_bias": any(name.endswith("ffn_down.bias") for name in names),
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
    }
    for key in ("rope_theta", "partial_rotary_factor"):  # there are no positions
        config.pop(key)
    if experts:
        config |= {
            "n_routed_experts": metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
            "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": metadata.number(
                "expert_shared_feed_forward_length"
            ),
            "n_shared_experts": metadata.number("expert_shared_count", default=1),
            "norm_topk_prob": metadata.get("expert_weights_norm") is not False,
            "routed_scaling_factor": metadata.number("expert_weights_scale", REAL, default=1.0),
            "n_group": metadata.number("expert_group_count", default=1),
            "topk_group": metadata.number("expert_group_used_count", default=1),
            "moe_latent_size": metadata.get("moe_latent_size"),
        }


def _kinds(metadata: Metadata, config: dict[str, Any], recurrent: str) -> list[str]:
    """Return what each layer is, by its number of key and value heads."""
    heads = metadata.of_layers("attention.head_count_kv", config["num_hidden_layers"])
    return ["full_attention" if own else recurrent for own in heads]

"""GGUF files of mixtures, from metadata to `config.json`'s keys.

A key that old files lack is taken as llama.cpp takes it: no groups of experts, no scale.
"""

from __future__ import annotations

from typing import Any

from llmpq.checkpoints.gguf_metadata import Metadata

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
YARN_STEP = 0.1
"""deepseek2's yarn_log_multiplier is this times `mscale_all_dim`."""


def gpt_oss(metadata: Metadata, config: dict[str, Any]) -> None:
    """gpt-oss; its yarn does not round its ends, of which the format says nothing."""
    config |= {
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "intermediate_size": metadata.number("expert_feed_forward_length"),
        "sliding_window": metadata.number("attention.sliding_window"),
        "yarn": {"truncate": False},
    }
    config.pop("mlp_bias", None)


def glm4moe(metadata: Metadata, config: dict[str, Any]) -> None:
    """GLM-4.5 and 4.6."""
    require_gate(metadata, SIGMOID, default=SIGMOID)
    rotated = metadata.number("rope.dimension_count", default=config["head_dim"])
    config |= {
        **experts_behind_dense(metadata),
        "norm_topk_prob": metadata.get("expert_weights_norm") is not False,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.file.tensors,
        "partial_rotary_factor": rotated / config["head_dim"],
    }
    further = metadata.get("nextn_predict_layers")
    if further:
        config["num_hidden_layers"] -= metadata.number("nextn_predict_layers")
        config["num_nextn_predict_layers"] = further


def deepseek2(metadata: Metadata, config: dict[str, Any]) -> None:
    """DeepSeek-V2 and V3, R1 and others of their kind."""
    sigmoid = metadata.get("expert_gating_func") == SIGMOID
    if not sigmoid:
        require_gate(metadata, SOFTMAX, default=SOFTMAX)
    config |= {
        **experts_behind_dense(metadata),
        **latent(metadata, config),
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "norm_topk_prob": metadata.get("expert_weights_norm") is True,
    }
    config.pop("partial_rotary_factor", None)
    if not sigmoid and config["n_group"] > 1:
        config["topk_method"] = "group_limited_greedy"
    over = metadata.get("rope.scaling.yarn_log_multiplier")
    if over:
        mscale = round(float(over) / YARN_STEP, 6)
        config["yarn"] = {"mscale": mscale, "mscale_all_dim": mscale}


def dots1(metadata: Metadata, config: dict[str, Any]) -> None:
    """dots.llm1."""
    require_gate(metadata, SIGMOID, default=SIGMOID)
    normalised = metadata.get("expert_weights_norm") is not False
    config |= {**experts_behind_dense(metadata), "norm_topk_prob": normalised}


def ernie4_5_moe(metadata: Metadata, config: dict[str, Any]) -> None:
    """ERNIE 4.5's mixtures: experts behind the dense layers, in every n-th layer."""
    require_gate(metadata, SOFTMAX, default=SOFTMAX)
    wide = metadata.number("expert_feed_forward_length")
    shared = metadata.get("expert_shared_feed_forward_length")
    count = metadata.get("expert_shared_count")
    config |= {
        "moe_num_experts": metadata.number("expert_count"),
        "moe_k": metadata.number("expert_used_count"),
        "moe_intermediate_size": wide,
        "moe_num_shared_experts": shared // wide if shared else count or 0,
        "moe_layer_start_index": metadata.get("leading_dense_block_count") or 0,
        "moe_layer_interval": metadata.number("interleave_moe_layer_step", default=1),
        "moe_layer_end_index": -1,
        "use_bias": config.pop("attention_bias"),
    }
    config.pop("mlp_bias")


def hunyuan_moe(metadata: Metadata, config: dict[str, Any]) -> None:
    """Hunyuan's mixtures: experts and the MLP beside them are equally wide."""
    require_gate(metadata, SOFTMAX, default=SOFTMAX)
    wide = metadata.number("expert_feed_forward_length", default=config["intermediate_size"])
    if metadata.number("expert_shared_feed_forward_length", default=wide) != wide:
        raise ValueError(
            f"'{metadata.file.path}': shared and routed experts of different sizes are not "
            "supported in Hunyuan's mixtures; get the model as safetensors"
        )
    config |= {
        "num_experts": metadata.number("expert_count"),
        "moe_topk": metadata.number("expert_used_count"),
        "intermediate_size": wide,
    }


LLAMA4_CHUNK = 8192
"""Tokens of a chunk, and by how many llama.cpp lets queries of all tokens grow once more."""
LLAMA4_GROWTH, LLAMA4_WITHOUT_NORMS = 0.1, 128
"""What it multiplies that by; the number of experts of the size whose heads have no norm."""


def llama4(metadata: Metadata, config: dict[str, Any]) -> None:
    """Llama 4, whose files say nothing of chunks, of positions, or of norms."""
    require_gate(metadata, SIGMOID, default=SIGMOID)
    if metadata.get("attention.sliding_window") == 0:
        raise ValueError(
            f"'{metadata.file.path}': attention.sliding_window=0 (Llama 4 without chunks) is not "
            "read from GGUF files; get the model as safetensors"
        )
    for key in ("leading_dense_block_count", "expert_shared_count"):
        metadata.get(key)  # llama.cpp heeds neither: every n-th layer has experts, and one shared
    experts = metadata.number("expert_count")
    config |= {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": metadata.number("expert_feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "interleave_moe_layer_step": metadata.number("interleave_moe_layer_step"),
        "use_qk_norm": experts != LLAMA4_WITHOUT_NORMS,
        "attention_chunk_size": LLAMA4_CHUNK,
        "floor_scale": LLAMA4_CHUNK,
        "attn_scale": LLAMA4_GROWTH,
        "attn_temperature_tuning": True,
    }
    for key in ("partial_rotary_factor", "mlp_bias"):
        config.pop(key)


def minimax_m2(metadata: Metadata, config: dict[str, Any]) -> None:
    """MiniMax-M2."""
    require_gate(metadata, SIGMOID, default=SIGMOID)
    config |= {
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "intermediate_size": metadata.number(
            "expert_feed_forward_length", default=config["intermediate_size"]
        ),
    }


def olmoe(metadata: Metadata, config: dict[str, Any]) -> None:
    """OLMoE; llama.cpp does not make the chosen experts' weights sum to one."""
    require_gate(metadata, SOFTMAX, default=SOFTMAX)
    config |= {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "norm_topk_prob": metadata.get("expert_weights_norm") is True,
        "clip_qkv": metadata.get("attention.clamp_kqv"),
    }


def latent(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of attention over latents.

    Newer files give the sizes of a cached latent as those of keys and values, and a head's beside.
    """
    rotated = metadata.number("rope.dimension_count")
    keys = metadata.number("attention.key_length_mla", default=config["head_dim"])
    values = metadata.number("attention.value_length", default=config["head_dim"])
    if keys <= rotated:
        raise ValueError(
            f"'{metadata.file.path}': heads of {keys} channels of which {rotated} are rotated; "
            "expected more than those: the file is damaged"
        )
    small = metadata.get("attention.q_lora_rank")
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": metadata.number("attention.q_lora_rank") if small else None,
        "kv_lora_rank": metadata.number("attention.kv_lora_rank"),
        "qk_nope_head_dim": keys - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": metadata.number("attention.value_length_mla", default=values),
    }


def experts_behind_dense(metadata: Metadata) -> dict[str, Any]:
    """Return what mixtures with shared experts behind dense layers have."""
    return {
        "n_routed_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "n_shared_experts": metadata.number("expert_shared_count"),
        "first_k_dense_replace": metadata.get("leading_dense_block_count") or 0,
        "routed_scaling_factor": metadata.get("expert_weights_scale") or 1.0,
        "n_group": metadata.number("expert_group_count", default=1),
        "topk_group": metadata.number("expert_group_used_count", default=1),
    }


def require_gate(metadata: Metadata, gate: int, *, default: int) -> None:
    """Refuse a file whose experts are chosen in another way than `gate`."""
    got = metadata.get("expert_gating_func")
    if (default if got in (None, 0) else got) != gate:
        raise ValueError(
            f"'{metadata.file.path}': expert_gating_func={got!r}, expected {gate}: llmpq does not "
            "choose this model's experts in that way; get the model as safetensors"
        )

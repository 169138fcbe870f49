"""Models of the families of the last years: tiny, random, every option of a family switched on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.backends import stage_runner
from llmpq.runtime.models.part_shapes import layer_shapes

VOCAB, WINDOW, TRAINED, NEW = 199, 6, 32, 12
DEPTH = 2 if os.environ.get("TRITON_INTERPRET") == "1" else 4
"""Layers of a model, of every kind that it has: the interpreter takes seconds for each."""
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
ALTERNATING = ["sliding_attention", "full_attention"] * (DEPTH // 2)
MIXTURE = {
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": TRAINED,
}
GEMMA = {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
}
"""The smallest tower: it is left out."""
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
"""What Hunyuan's theta is stretched by."""
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}
PARTIAL_MROPE = {
    "rope_type": "default",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}
DELTA_RULE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"] * (DEPTH // 2),
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
SHORT_CONV = {
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention"] * (DEPTH // 2),
    "tie_word_embeddings": False,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
NEMOTRON = ["linear_attention", "full_attention", "moe", "mlp"]
NEMOTRON_H: dict[str, Any] = {
    **{k: v for k, v in MIXTURE.items() if k != "first_k_dense_replace"},
    "layers_block_type": NEMOTRON,
    "num_hidden_layers": None,
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 10,
    "moe_shared_expert_intermediate_size": 48,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
KIMI_CALLS = {"n_routed_experts": "num_local_experts", "first_k_dense_replace": ""}
"""What other mixtures call it, and what Kimi Linear does, if at all."""
GATED_MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": ALTERNATING,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}
SPARSE: dict[str, Any] = {
    **MIXTURE,
    **LATENT,
    "n_shared_experts": 1,
    "q_lora_rank": 20,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
}
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": [48, 80, 64, 80],
    "sliding_window": WINDOW,
    "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
    "altup_num_inputs": 3,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.5],
    "attention_bias": True,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}
LLAMA4: dict[str, Any] = {
    "head_dim": 32,
    "intermediate_size_mlp": 80,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 7,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}
MIXTURE_BESIDE = {key: value for key, value in GEMMA4.items() if "experts" in key or "moe" in key}
SHARED: dict[str, Any] = {
    **GEMMA4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "attention_bias": True,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e4,
            "factor": 2.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
CORRECTIONS = ("correction_bias", "expert_bias", "layer_scalar")
"""Buffers that routers choose by, or layers are scaled by."""
CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "llama with biases, linear rope": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
        },
    ),
    "llama with dynamic rope": (
        "Llama",
        {
            "max_position_embeddings": 10,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "llama with yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2 with late windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": DEPTH // 2},
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": ALTERNATING, "rope_parameters": BY_LAYER}),
    "gemma3 with yarn, untied": (
        "Gemma3Text",
        {
            **GEMMA,
            "layer_types": ALTERNATING,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            "original_max_position_embeddings": TRAINED,
            "sliding_window": 9,
            "pad_token_id": 0,
            "rope_parameters": LONGROPE,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}),
    "glm": ("Glm", {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}),
    "granite": (
        "Granite",
        GRANITE,
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe with windows, every other layer dense": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2, all experts alike": (
        "DeepseekV2",
        {
            **LATENT,
            **MIXTURE,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "q_lora_rank": 20,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe without norms of heads": (
        "Glm4Moe",
        {
            **MIXTURE,
            "head_dim": 24,
            "first_k_dense_replace": DEPTH - 1,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **MIXTURE,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **MIXTURE,
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "qwen3_next": ("Qwen3Next", {**DELTA_RULE, **GATED_MIXTURE, "head_dim": 32}),
    "qwen3_next with biases, every other layer dense": (
        "Qwen3Next",
        {
            **DELTA_RULE,
            **GATED_MIXTURE,
            "head_dim": 24,
            "layer_types": ["full_attention", "linear_attention"] * (DEPTH // 2),
            "linear_key_head_dim": 12,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5": ("Qwen3_5Text", {**DELTA_RULE, "head_dim": 32}),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**DELTA_RULE, **GATED_MIXTURE, "head_dim": 32}),
    "lfm2": ("Lfm2", {**SHORT_CONV, "conv_bias": True, "block_multiple_of": 16}),
    "lfm3": (
        "Lfm3",
        {
            "num_hidden_layers": 4,
            "conv_L_cache": 7,
            "conv_bias": True,
            "attention_bias": True,
            "head_dim": 32,
            "pad_token_id": 0,
            "sliding_window": WINDOW,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **SHORT_CONV,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
        },
    ),
    "bamba": (
        "Bamba",
        {
            **MAMBA2,
            "attn_layer_indices": list(range(1, DEPTH, 2)),
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **MAMBA2,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.7, 1.3],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.6,
        },
    ),
    "falcon_h1 without its norm": (
        "FalconH1",
        {**MAMBA2, "mamba_d_ssm": 128, "mlp_bias": True, "head_dim": 24},
    ),
    "nemotron_h": ("NemotronH", NEMOTRON_H),
    "nemotron_h with experts on few features": (
        "NemotronH",
        {
            **{k: v for k, v in MIXTURE.items() if k != "first_k_dense_replace"},
            "layers_block_type": NEMOTRON,
            "num_hidden_layers": None,
            "head_dim": 24,
            "mamba_num_heads": 4,
            "mamba_head_dim": 12,
            "n_groups": 1,
            "ssm_state_size": 10,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 40,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {**{k: v for k, v in DELTA_RULE.items() if k != "rope_parameters"}, "pad_token_id": 0},
    ),
    "olmo_hybrid without positions": (
        "OlmoHybrid",
        {
            **DELTA_RULE,
            "pad_token_id": 0,
            "linear_key_head_dim": 12,
            "linear_allow_neg_eigval": False,
            "layer_types": ["full_attention", "linear_attention"] * (DEPTH // 2),
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "minimax": (
        "MiniMax",
        {
            "head_dim": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "block_size": 8,
            "layer_types": ["full_attention", "linear_attention"] * (DEPTH // 2),
            "sliding_window": WINDOW,
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.3,
            "linear_attn_beta_factor": 1.7,
            "mlp_alpha_factor": 0.6,
            "mlp_beta_factor": 1.2,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **{k: v for k, v in MIXTURE.items() if k not in KIMI_CALLS},
            **{theirs: MIXTURE[ours] for ours, theirs in KIMI_CALLS.items() if theirs},
            **LATENT,
            "layer_types": ["linear_attention", "full_attention"] * (DEPTH // 2),
            "linear_num_heads": 3,
            "linear_head_dim": 16,
            "bos_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA2,
            **GRANITE,
            "layer_types": ["linear_attention", "full_attention"] * (DEPTH // 2),
            "mamba_conv_bias": False,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
        },
    ),
    "granitemoehybrid with positions, dense": (
        "GraniteMoeHybrid",
        {
            **MAMBA2,
            **GRANITE,
            "layer_types": ["full_attention", "linear_attention"] * (DEPTH // 2),
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
        },
    ),
    "deepseek_v32": ("DeepseekV32", {**SPARSE, "rope_parameters": YARN}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {**SPARSE, "index_head_dim": 24, "n_group": 1, "topk_group": 1, "index_topk": 3},
    ),
    "gemma3n": ("Gemma3nText", GEMMA3N),
    "gemma3n with shared caches of both kinds": (
        "Gemma3nText",
        {
            **GEMMA3N,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": 80,
            "altup_num_inputs": 2,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
        },
    ),
    "llama4": ("Llama4Text", LLAMA4),
    "llama4 in its wrapper, without chunks": (
        "Llama4",
        {
            "text_config": {
                **LLAMA4,
                "head_dim": 24,
                "layer_types": ["full_attention"] * DEPTH,
                "no_rope_layers": [1, 0, 0, 1],
                "use_qk_norm": False,
                "interleave_moe_layer_step": 1,
                "num_experts_per_tok": 1,
            },
            "vision_config": {**VISION, "vision_output_dim": 32, "projector_input_dim": 32},
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **MIXTURE,
            **LATENT,
            "n_shared_experts": 1,
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4 with shared caches": (
        "Gemma4Text",
        {**SHARED, "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2]},
    ),
    "gemma4 in its wrapper": (
        "Gemma4",
        {
            "text_config": {**SHARED, **MIXTURE_BESIDE, "num_kv_shared_layers": 2},
            "vision_config": None,
            "audio_config": None,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **MIXTURE,
            **LATENT,
            "n_shared_experts": 1,
            "q_lora_rank": 20,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "kimi_k2": (
        "DeepseekV3",
        {
            **MIXTURE,
            **LATENT,
            "model_type": "kimi_k2",
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "q_lora_rank": 20,
            "rope_parameters": {**YARN, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "dots1": (
        "Dots1",
        {
            **MIXTURE,
            "head_dim": 32,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
        },
    ),
    "arcee": (
        "Arcee",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "rope_parameters": YARN},
    ),
    "gemma": ("Gemma", {"head_dim": 32, "hidden_act": "gelu"}),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["attention"] * DEPTH,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "stablelm": (
        "StableLm",
        {
            "use_qkv_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "seed_oss": (
        "SeedOss",
        {"head_dim": 24, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ministral": (
        "Ministral",
        {"head_dim": 32, "sliding_window": WINDOW, "layer_types": ALTERNATING[::-1]},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {
            "text_config": {"rope_parameters": MROPE},
            "vision_config": {**VISION, "embed_dim": 32, "hidden_size": 64},
        },
    ),
    "qwen2_5_vl with windows": (
        "Qwen2_5_VL",
        {
            "text_config": {
                "rope_parameters": MROPE,
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "max_window_layers": DEPTH // 2,
            },
            "vision_config": VISION,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": {
                "head_dim": 32,
                "attention_bias": True,
                "rope_parameters": {**MROPE, "mrope_section": [8, 4, 4]},
            },
            "vision_config": VISION,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "text_config": {
                "head_dim": 32,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "mlp_only_layers": [1],
                "rope_parameters": {**MROPE, "mrope_section": [8, 4, 4]},
            },
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layers": [1, 0] * (DEPTH // 2),
            "use_sliding_window": False,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING[::-1],
            "pad_token_id": 0,
        },
    ),
    "exaone4": ("Exaone4", {"head_dim": 24, "sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "minimax_m2": (
        "MiniMaxM2",
        {"head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 16},
    ),
    "olmoe": (
        "Olmoe",
        {
            "attention_bias": True,
            "clip_qkv": 0.7,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "pad_token_id": 0,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {"head_dim": 24, "attention_bias": True, "rope_parameters": ALPHA},
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1",
        {"head_dim": 16, "num_experts": 6, "moe_topk": [3] * DEPTH, "rope_parameters": ALPHA},
    ),
    "ernie4_5 with biases": ("Ernie4_5", {"head_dim": 24, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
        },
    ),
    "apertus": ("Apertus", {"attention_bias": True, "pad_token_id": 0}),
    "afmoe": (
        "Afmoe",
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "route_scale": 1.7,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "mup_enabled": True,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **{k: v for k, v in MIXTURE.items() if k != "first_k_dense_replace"},
            **LATENT,
            "q_lora_rank": 20,
            "mlp_layer_types": ["sparse", "dense"] * (DEPTH // 2),
            "norm_topk_prob": False,
        },
    ),
    "solar_open": (
        "SolarOpen",
        {
            **{k: v for k, v in MIXTURE.items() if k != "first_k_dense_replace"},
            "head_dim": 24,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "cohere": ("Cohere", {"attention_bias": True, "use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": (
        "Cohere2",
        {"sliding_window": WINDOW, "layer_types": ALTERNATING, "tie_word_embeddings": False},
    ),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5, "hidden_act": "gelu"}),
    "gpt_neox, one after the other": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "falcon": ("Falcon", {"multi_query": True, "bias": True, "ffn_hidden_size": 72}),
    "falcon of one norm for each": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "falcon, one after the other": ("Falcon", {"multi_query": False, "parallel_attn": False}),
    "phi": ("Phi", {"qk_layernorm": True}),
    "stablelm 12B": (
        "StableLm",
        {"qk_layernorm": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "gpt2": ("GPT2", {"n_inner": 64, "scale_attn_weights": False}),
    "gpt_bigcode": ("GPTBigCode", {}),
    "gpt_bigcode with heads apart": ("GPTBigCode", {"multi_query": False}),
    "gptj": ("GPTJ", {"rotary_dim": 8}),
    "codegen": ("CodeGen", {"rotary_dim": 16}),
    "cwm": ("Cwm", {"head_dim": 24, "sliding_window": WINDOW, "pad_token_id": 0}),
    "internlm3 with biases": (
        "InternLM3",
        {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "pad_token_id": 0},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **GATED_MIXTURE,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": DEPTH // 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "helium": ("Helium", {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True, "pad_token_id": 0}),
    "jais2": ("Jais2", {"head_dim": 24, "pad_token_id": 0}),
    "flex_olmo": (
        "FlexOlmo",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "pad_token_id": 0},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {
            **{k: v for k, v in MIXTURE.items() if k != "n_routed_experts"},
            "num_experts": 8,
            "num_shared_experts": 2,
            "head_dim": 24,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
        },
    ),
    "youtu": ("Youtu", {**LATENT, "q_lora_rank": 20, "rope_parameters": YARN}),
    "vaultgemma": (
        "VaultGemma",
        {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "granitemoe": (
        "GraniteMoe",
        {**GRANITE, "attention_bias": True, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            **GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
            "pad_token_id": 0,
        },
    ),
    "granite_swa": (
        "GraniteSWA",
        {
            **GRANITE,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "layer_rope_theta": [1e3, 1e4, 1e3, 0][:DEPTH],
            "pad_token_id": 0,
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {
            **GRANITE,
            "sliding_window": WINDOW,
            "layer_rope_theta": [0, 5e3, 5e3, 5e3][:DEPTH],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
        },
    ),
    "mellum": (
        "Mellum",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "mlp_layer_types": ["dense", "sparse"] * (DEPTH // 2),
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "hyperclovax": ("HyperCLOVAX", {**GRANITE, "head_dim": 24, "mlp_bias": True}),
    "hy_v3": (
        "HYV3",
        {
            "head_dim": 24,
            "attention_bias": True,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 40,
            "router_scaling_factor": 1.7,
            "mlp_layer_types": ["dense", "sparse"] * (DEPTH // 2),
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        {
            **LATENT,
            "q_lora_rank": 20,
            "scale_emb": 3.0,
            "scale_depth": 1.2,
            "dim_model_base": 16,
            "rope_parameters": YARN,
        },
    ),
    "flint": (
        "Flint",
        {
            "head_dim": 24,
            "attention_bias": True,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
        },
    ),
    "glm4v": (
        "Glm4v",
        {
            "text_config": {"pad_token_id": 0, "rope_parameters": PARTIAL_MROPE},
            "vision_config": VISION,
        },
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            "text_config": {
                **MIXTURE,
                "head_dim": 32,
                "n_shared_experts": 2,
                "pad_token_id": 0,
                "rope_parameters": {**PARTIAL_MROPE, "mrope_section": [4, 2, 2]},
            },
            "vision_config": VISION,
        },
    ),
    "minicpmv4_6": (
        "MiniCPMV4_6",
        {
            "text_config": {**DELTA_RULE, "head_dim": 32, "model_type": "qwen3_5_text"},
            "vision_config": VISION,
        },
    ),
    "qwen3_5 in its wrapper": (
        "Qwen3_5",
        {"text_config": {**DELTA_RULE, "head_dim": 32}, "vision_config": VISION},
    ),
    "qwen3_5_moe in its wrapper": (
        "Qwen3_5Moe",
        {"text_config": {**DELTA_RULE, **GATED_MIXTURE, "head_dim": 32}, "vision_config": VISION},
    ),
}


class Models:
    """Makes each model once: a directory, and the tokens that Transformers generates."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, {}
        self._greedy: dict[tuple[Any, ...], list[int]] = {}

    def reference(self, kind: str) -> Any:
        import transformers

        if kind not in self._made:
            torch.manual_seed(len(kind))
            name, options = KINDS[kind]
            said = {key: options[key] for key in ("model_type",) if key in options}
            options = {key: value for key, value in options.items() if key not in said}
            auto = transformers.AutoModelForCausalLM
            if "text_config" in options:
                auto = transformers.AutoModelForImageTextToText
                options = {**options, "text_config": {**BASE, **options["text_config"]}}
            else:
                options = {**BASE, **options}
            if not hasattr(transformers, f"{name}Config"):
                pytest.skip(f"Transformers {transformers.__version__} has no {name}")
            config = getattr(transformers, f"{name}Config")(**options)
            with torch.inference_mode(False), torch.no_grad():
                made = {"attn_implementation": "eager"}
                if type(config) in auto._model_mapping:
                    model = auto.from_config(config, **made).eval()
                else:  # mistral4: in no auto class's table
                    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, **made)
                    model.eval()
                buffers = [(n, b) for n, b in model.named_buffers() if n.endswith(CORRECTIONS)]
                for name, tensor in [*model.named_parameters(), *buffers]:
                    noise = torch.randn_like(tensor)
                    zeroed = tensor.ndim > 1 or "sinks" in name or "bias" in name
                    scale = 1.0 if "sinks" in name or name.endswith(CONVOLUTIONS) else 0.1
                    tensor.copy_(noise * scale if zeroed else tensor + noise * 0.1)
            model.save_pretrained(self._folder / kind)
            path = self._folder / kind / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
            self._made[kind] = model
        return self._made[kind]

    @cached_property
    def with_new_parts(self) -> set[str]:
        """Return few kinds that together have every option and pair of parts that any kind has."""
        parts = {}
        for kind in KINDS:
            with suppress(pytest.skip.Exception):  # this Transformers does not have it
                parts[kind] = options_and_parts(ModelSpec.from_directory(self.directory(kind)))
        left, found = set().union(*parts.values()), set()
        while left:
            most = max(parts, key=lambda kind: len(parts[kind] & left))
            left -= parts[most]
            found.add(most)
        return found

    def options(self, kind: str) -> tuple[str, dict[str, Any]]:
        """Return what Transformers' config is called, and its options."""
        name, options = KINDS[kind]
        return name, {**BASE, **options}

    def num_params(self, kind: str) -> int:
        """Return how many weights a language model has, without a tower and its projector."""
        model = self.reference(kind)
        towers = ("visual", "vision", "audio", "projector", "merger")
        own = [p for n, p in model.named_parameters() if not any(part in n for part in towers)]
        own += [b for name, b in model.named_buffers() if name.endswith(CORRECTIONS)]
        return sum(tensor.numel() for tensor in own)

    def cuts(self, kind: str, splits: tuple[int, ...]) -> tuple[int, ...]:
        """Return splits into stages, each where the model may be cut, as many as there are."""
        spec = ModelSpec.from_directory(self.directory(kind))
        left = [layer for layer in range(1, spec.num_layers) if spec.may_cut(layer)]
        found = []
        for split in splits[: len(left)]:
            found.append(min(left, key=lambda layer: abs(layer - split)))
            left.remove(found[-1])
        return tuple(sorted(found))

    def changes_by_length(self, kind: str) -> bool:
        return KINDS[kind][1].get("rope_parameters") is LONGROPE

    def directory(self, kind: str) -> Path:
        self.reference(kind)
        return self._folder / kind

    def greedy(self, kind: str, prompts: list[list[int]]) -> list[list[int]]:
        """Return what Transformers generates, one prompt at a time, each once per session."""

        def one(prompt: list[int]) -> list[int]:
            tokens = self.reference(kind).generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            return tokens[0, len(prompt) :].tolist()

        for prompt in prompts:
            if (kind, *prompt) not in self._greedy:
                self._greedy[kind, *prompt] = one(prompt)
        return [list(self._greedy[kind, *prompt]) for prompt in prompts]

    def choices(
        self, kind: str, prompts: list[list[int]], tokens: list[list[int]]
    ) -> list[list[int]]:
        """Return what Transformers picks behind each prompt and all but the last of its tokens.

        They are the tokens themselves where these are its greedy ones: a pass for each prompt
        tells, where `greedy` takes one for each token. Where keys turn with the length, as
        generation leaves them is not as one pass turns them.
        """
        if "dynamic" in kind:
            return self.greedy(kind, prompts)

        def one(prompt: list[int], found: list[int]) -> list[int]:
            text = torch.tensor([prompt + found[:-1]])
            logits = self.reference(kind)(text).logits[0, len(prompt) - 1 :]
            return logits.argmax(-1).tolist()

        with torch.no_grad():
            return [one(prompt, found) for prompt, found in zip(prompts, tokens, strict=True)]


@pytest.fixture(scope="session", autouse=True)
def warm_up() -> Iterator[None]:
    """Have stages of this process run one shape ahead, not all for 2 s (test_warm_up.py does)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_runner, "WARM_UP_S", 0.0)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return Models(tmp_path_factory.mktemp("kinds"))


def options_and_parts(spec: ModelSpec) -> set[tuple[str, str]]:
    """Return the options that a model has and others may lack, and the pairs of a layer's parts."""
    found = set()
    for option in fields(spec):
        value = getattr(spec, option.name)
        if option.name not in ("name", "family") and value != option.default:
            said = isinstance(value, (bool, str))
            found.add((option.name, str(value if said else getattr(value, "kind", None))))
    for layer in range(spec.num_layers):
        parts = {re.sub(r"\.\d+\.", ".", name) for name in layer_shapes(spec.of_layer(layer))}
        found |= {(one, other) for one in parts for other in parts}
    return found


@pytest.fixture
def with_new_parts(request: pytest.FixtureRequest, models: Models) -> None:
    """Leave out a kind whose options and pairs of parts are those of others in this test."""
    kind = request.getfixturevalue("family_kind")
    if "LLMPQ_ALL_TESTS" not in os.environ and kind not in models.with_new_parts:
        pytest.skip("other kinds have its options and parts")


@pytest.fixture(scope="session", autouse=True)
def _one_fork_server() -> Iterator[None]:
    """Fork the stages of all engines from one server, which imports for 3 s of a core but once."""
    from llmpq.runtime.launch import process_launcher
    from llmpq.runtime.launch.stages.forked_process import ForkServer

    server, path = ForkServer(), os.environ.get("PYTHONPATH")
    lent = SimpleNamespace(fork=server.fork, start=server.start, close=lambda: None)

    def one() -> Any:
        """Return the server, but where a test has another begin of every Python one of its own."""
        return lent if os.environ.get("PYTHONPATH") == path else ForkServer()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_launcher, "ForkServer", one)
        yield
    server.close()


@pytest.fixture(scope="session")
def in_processes() -> Callable[..., None]:
    """Return what runs `function(rank, *args)` in processes, forked where torch is imported.

    The process that they are forked from has no threads, unlike the one of the tests.
    """
    import multiprocessing

    from torch.multiprocessing.spawn import start_processes

    stage = "llmpq.runtime.backends.build_stage"
    multiprocessing.set_forkserver_preload([stage, "llmpq.runtime.links.device_links"])

    def run(function: Callable[..., None], args: tuple[Any, ...], *, count: int) -> None:
        start_processes(function, args, nprocs=count, start_method="forkserver")

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`family_kind`: a test for every kind."""
    if "family_kind" in metafunc.fixturenames:
        metafunc.parametrize("family_kind", KINDS)


FAR = 140
"""A window of more than a block of 128 tokens."""
FAR_BASE: dict[str, Any] = {
    **BASE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "sliding_window": FAR,
}
FAR_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {}),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": DEPTH - 1}),
}


@dataclass(frozen=True)
class WindowedModel:
    """A directory, and Transformers' model in it, whose windows are `FAR` tokens wide."""

    directory: Path
    made: Any
    window: int = FAR

    def greedy(self, prompts: list[list[int]], max_new: int) -> list[list[int]]:
        """Return what Transformers generates, one prompt at a time."""
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return [
            self.made.generate(torch.tensor([p]), max_new_tokens=max_new, **options)[
                0, len(p) :
            ].tolist()
            for p in prompts
        ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.seldom] * (kind in ("gemma2", "qwen2")))
        for kind in FAR_KINDS
    ],
)  # windows in all layers, and in every other one
def windowed_model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> WindowedModel:
    """Return a tiny model with windows that requests outgrow by blocks."""
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(1)
    name, options = FAR_KINDS[request.param]
    config = getattr(transformers, f"{name}Config")(**{**FAR_BASE, **options})
    with torch.inference_mode(False), torch.no_grad():
        made = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        for tensor in made.parameters():
            noise = torch.randn_like(tensor) * 0.2
            tensor.copy_(noise if tensor.ndim > 1 else tensor + noise)
    directory = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(directory)
    return WindowedModel(directory, made)

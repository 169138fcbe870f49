"""GGUF files, written here by the `gguf` package: the same tokens and logits as their originals."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from llmpq.checkpoints.gguf_file import BLOCKS, open_gguf
from llmpq.kernels.weights.codebook_weight import CodebookWeight
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.stored_precisions import keeps_gguf_codes, stored_layers
from llmpq.precision import Precision, WeightScheme
from llmpq.profiler.cli.quantize import main as quantize_main
from llmpq.runtime.steps.step import Step
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.weights.gguf_checkpoint import values_of
from llmpq.runtime.weights.gguf_codes import codes_of, kept_weight
from llmpq.runtime.weights.layer_cache import KeptLayers
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.sizes.memory import Quantization
from reference.pipeline import ReferencePipeline, pad

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.cpu
DEMO = Path(__file__).resolve().parents[3] / "examples/demo-7m"
TOKENS = [5, 30, 77, 120, 9, 61, 62, 63, 64, 11, 12, 13]
BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA = {"head_dim": 32, "sliding_window": 6, "num_hidden_layers": 7, "query_pre_attn_scalar": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
GRANITE_4 = {
    "layer_types": ["mamba", "attention"],
    "position_embedding_type": None,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
GRANITE_4_SAYS = {
    "attention.head_count_kv": [0, 2],
    "feed_forward_length": 96,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 8,
    "ssm.state_size": 12,
    "ssm.group_count": 2,
    "ssm.conv_kernel": 4,
    "embedding_scale": 3.0,
    "attention.scale": 0.2,
    "residual_scale": 0.5,
    "logit_scale": 4.0,
}
DELTA = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e5,
        "partial_rotary_factor": 0.25,
    },
}
DELTA_SAYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 192,
    "full_attention_interval": 2,
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
SHARED_EXPERT_SAYS = {
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 40,
    "expert_shared_feed_forward_length": 56,
}
NEMOTRON = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
}
NEMOTRON_SAYS = {
    "attention.head_count_kv": [0, 0, 2, 0],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "ssm.inner_size": 96,
    "ssm.time_step_rank": 8,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.conv_kernel": 4,
    "rope.dimension_count": 24,
}
FALCON_H1 = {
    "head_dim": 24,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.6,
}
FALCON_H1_SAYS = {
    "ssm.inner_size": 96,
    "ssm.time_step_rank": 8,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.conv_kernel": 4,
}
KIMI = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
KIMI_SAYS = {
    "attention.head_count_kv": [0, 1, 0, 1],
    "attention.kv_lora_rank": 64,
    "attention.key_length": 72,
    "attention.key_length_mla": 40,
    "attention.value_length": 8,
    "attention.value_length_mla": 24,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 32,
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.7,
    "expert_group_used_count": 1,
    "leading_dense_block_count": 1,
}
IN_ONE = "qwen3moe, gates above ups in one tensor"
SHARED_CACHES = "gemma4, shared caches, inputs of layers"
GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
GEMMA_4_SAYS: dict[str, Any] = {
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, False] * 2,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "rope.freq_base_swa": 1e3,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
}
GEMMA_3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": [96, 128, 96, 128],
    "sliding_window": 6,
    "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 150,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0],
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
GEMMA_3N_SAYS: dict[str, Any] = {
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, True, False, False],
    "attention.shared_kv_layers": 1,
    "rope.freq_base_swa": 1e3,
    "altup.active_idx": 0,
    "altup.num_inputs": 4,
    "embedding_length_per_layer_input": 8,
    "activation_sparsity_scale": [NormalDist().inv_cdf(0.95), 0.0, -math.inf, -math.inf],
    "final_logit_softcapping": 3.0,
}
LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
LLAMA_4_SAYS: dict[str, Any] = {
    "feed_forward_length": 80,
    "expert_feed_forward_length": 40,
    "expert_count": 6,
    "expert_used_count": 2,
    "interleave_moe_layer_step": 2,
    "leading_dense_block_count": 0,
}
SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # What it is: Transformers' class, the file's architecture, config, metadata beside the common.
    "llama": ("Llama", "llama", {}, {}),
    "llama with biases": ("Llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama, biases of q, k and v": ("SeedOss", "llama", {"attention_bias": True}, {}),
    "llama, biases of o and the MLP": (
        "SeedOss",
        "llama",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        {},
    ),
    "llama, a window, biases of q, k and v": (
        "Qwen2",
        "llama",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
        {"attention.sliding_window": 6},
    ),
    "llama 3": ("Llama", "llama", {"rope_parameters": LLAMA3, "head_dim": 32}, {}),
    "llama, linear": (
        "Llama",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    ),
    "qwen2, yarn, tied": (
        "Qwen2",
        "qwen2",
        {"rope_parameters": YARN, "tie_word_embeddings": True},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "lfm2": (
        "Lfm2",
        "lfm2",
        {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
        {
            "attention.head_count_kv": [0, 2],
            "shortconv.l_cache": 3,
            "feed_forward_length": 64,
        },
    ),
    "lfm2moe": (
        "Lfm2Moe",
        "lfm2moe",
        {
            "conv_L_cache": 4,
            "layer_types": ["full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
        },
        {
            "attention.head_count_kv": [2, 0],
            "shortconv.l_cache": 4,
            "leading_dense_block_count": 1,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "expert_gating_func": 2,
        },
    ),
    "qwen3next": (
        "Qwen3Next",
        "qwen3next",
        {**DELTA, **SHARED_EXPERT, "norm_topk_prob": True},
        {**DELTA_SAYS, **SHARED_EXPERT_SAYS},
    ),
    "qwen35": ("Qwen3_5Text", "qwen35", DELTA, {**DELTA_SAYS, **SECTIONS}),
    "qwen35moe": (
        "Qwen3_5MoeText",
        "qwen35moe",
        {**DELTA, **SHARED_EXPERT},
        {**DELTA_SAYS, **SHARED_EXPERT_SAYS, **SECTIONS},
    ),
    "nemotron_h": (
        "NemotronH",
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "use_bias": True,
        },
        {**NEMOTRON_SAYS, "feed_forward_length": [0, 96, 0, 96]},
    ),
    "nemotron_h_moe": (
        "NemotronH",
        "nemotron_h_moe",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "moe_latent_size": 32,
        },
        {
            **NEMOTRON_SAYS,
            "feed_forward_length": [0, 40, 0, 40],
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "expert_shared_feed_forward_length": 56,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_group_count": 1,
            "moe_latent_size": 32,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        "falcon-h1",
        {**FALCON_H1, "mamba_rms_norm": True, "mlp_bias": True},
        FALCON_H1_SAYS,
    ),
    "falcon-h1 without its norm": ("FalconH1", "falcon-h1", FALCON_H1, FALCON_H1_SAYS),
    "kimi-linear": ("KimiLinear", "kimi-linear", KIMI, KIMI_SAYS),
    "kimi-linear, latents of queries": (
        "KimiLinear",
        "kimi-linear",
        {**KIMI, "q_lora_rank": 20, "n_shared_experts": 2},
        {**KIMI_SAYS, "attention.q_lora_rank": 20, "expert_shared_count": 2},
    ),
    "gemma4, its mixture, keys for values": (
        "Gemma4Text",
        "gemma4",
        {
            **GEMMA_4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 3.0,
        },
        {
            **GEMMA_4_SAYS,
            "attention.head_count_kv": [2, 1] * 2,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "final_logit_softcapping": 3.0,
        },
    ),
    SHARED_CACHES: (
        "Gemma4Text",
        "gemma4",
        {
            **GEMMA_4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 199,
        },
        {
            **GEMMA_4_SAYS,
            "attention.shared_kv_layers": 2,
            "feed_forward_length": [96, 96, 192, 192],
            "embedding_length_per_layer_input": 32,
        },
    ),
    "gemma3n": ("Gemma3nText", "gemma3n", GEMMA_3N, GEMMA_3N_SAYS),
    "llama4": ("Llama4Text", "llama4", LLAMA_4, LLAMA_4_SAYS),
    "llama4 without norms of heads": (
        "Llama4Text",
        "llama4",
        {
            **LLAMA_4,
            "num_local_experts": 128,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {
            **LLAMA_4_SAYS,
            "expert_count": 128,
            "expert_used_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "granitehybrid": ("GraniteMoeHybrid", "granitehybrid", GRANITE_4, GRANITE_4_SAYS),
    "granitehybrid with positions, a mixture": (
        "GraniteMoeHybrid",
        "granitehybrid",
        {
            **GRANITE_4,
            "position_embedding_type": "rope",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
        {
            **GRANITE_4_SAYS,
            "rope.scaling.finetuned": True,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 64,
            "feed_forward_length": 96,
        },
    ),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 32}, {}),
    "mistral": ("Mistral", "llama", {"sliding_window": 6}, {"attention.sliding_window": 6}),
    "mixtral": (
        "Mixtral",
        "llama",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen3moe": (
        "Qwen3Moe",
        "qwen3moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 40},
    ),
    IN_ONE: (
        "Qwen3Moe",
        "qwen3moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 40},
    ),
    "gemma2": (
        "Gemma2",
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {
            "attention.sliding_window": 6,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("Gemma3Text", "gemma3", GEMMA, {"attention.sliding_window": 6}),
    "phi3": (
        "Phi3",
        "phi3",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": 8,
            "sliding_window": 9,
            "pad_token_id": 0,
        },
        {"attention.sliding_window": 9, "rope.scaling.original_context_length": 8},
    ),
    "glm4": ("Glm4", "glm4", {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}, {}),
    "granite": (
        "Granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
        {
            "embedding_scale": 3.0,
            "attention.scale": 0.2,
            "residual_scale": 0.5,
            "logit_scale": 4.0,
        },
    ),
    "olmo2": ("Olmo2", "olmo2", {}, {}),
    "smollm3": ("SmolLM3", "smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}, {}),
    "exaone4": (
        "Exaone4",
        "exaone4",
        {"head_dim": 32, "sliding_window": 6, "sliding_window_pattern": 2},
        {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [True, False],
        },
    ),
    "arcee": ("Arcee", "arcee", {}, {}),
    "seed_oss": ("SeedOss", "seed_oss", {"attention_bias": True}, {}),
    "ernie4_5": ("Ernie4_5", "ernie4_5", {"head_dim": 32, "use_bias": True}, {}),
    "hunyuan": ("HunYuanDenseV1", "hunyuan-dense", {"head_dim": 32}, {"rope.scaling.type": "none"}),
    "hunyuan, experts": (
        "HunYuanMoEV1",
        "hunyuan-moe",
        {"head_dim": 32, "num_experts": 6, "moe_topk": 3},
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 96,
        },
    ),
    "olmoe": (
        "Olmoe",
        "olmoe",
        {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.7, "pad_token_id": 0},
        {"expert_count": 6, "expert_used_count": 3, "attention.clamp_kqv": 0.7},
    ),
    "command r": (
        "Cohere",
        "command-r",
        {"use_qk_norm": True, "logit_scale": 0.25},
        {"logit_scale": 0.25},
    ),
    "command r7b": (
        "Cohere2",
        "cohere2",
        {"sliding_window": 6, "num_hidden_layers": 4, "logit_scale": 0.25},
        {"logit_scale": 0.25, "attention.sliding_window": 6},
    ),
    "stablelm": (
        "StableLm",
        "stablelm",
        {
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        },
        {"use_parallel_residual": True},
    ),
    "starcoder2": (
        "Starcoder2",
        "starcoder2",
        {"sliding_window": 6},
        {"attention.sliding_window": 6},
    ),
}
IN_PAIRS = ("granitehybrid", "llama", "granite", "smollm3", "arcee")
"""Architectures whose files have rows in pairs where Transformers has halves."""


def random_model(kind: str, sizes: dict[str, Any] | None = None, noise: float = 0.1) -> Any:
    import transformers

    name, _, changes, _ = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**BASE, **changes, **(sizes or {})})
    model_class = f"{name.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, model_class)(config).float().eval()
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's heads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * noise)
    return model


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's order: channel i of a head's first half, then channel i of its second."""
    by_half = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return by_half.transpose(1, 2).reshape(rows.shape)


HYBRID: dict[str, tuple[str, Callable[[Tensor, Any], Tensor]]] = {
    "mixer.conv1d.weight": ("ssm_conv1d.weight", lambda t, _: t[:, 0]),
    "mixer.A_log": ("ssm_a", lambda t, _: -t.exp()[:, None]),
    "mixer.D": ("ssm_d", lambda t, _: t[:, None]),
    "mixer.dt_bias": ("ssm_dt.bias", lambda t, _: t),
    "mixer.norm.weight": ("ssm_norm.weight", lambda t, c: t.view(c.n_groups, -1)),
    "mixer.gate.e_score_correction_bias": ("exp_probs_b.bias", lambda t, _: t),
    "mixer.experts.up_proj": ("ffn_up_exps.weight", lambda t, _: t),
    "mixer.experts.down_proj": ("ffn_down_exps.weight", lambda t, _: t),
    "conv.conv.weight": ("shortconv.conv.weight", lambda t, _: t[:, 0]),
    "mamba.conv1d.weight": ("ssm_conv1d.weight", lambda t, _: t[:, 0]),
    "mamba.conv1d.bias": ("ssm_conv1d.bias", lambda t, _: t),
    "mamba.A_log": ("ssm_a", lambda t, _: -t.exp()[:, None]),
    "mamba.D": ("ssm_d", lambda t, _: t[:, None]),
    "mamba.dt_bias": ("ssm_dt.bias", lambda t, _: t),
    "mamba.norm.weight": ("ssm_norm.weight", lambda t, c: t.view(c.mamba_n_groups, -1)),
    "self_attn.A_log": ("ssm_a", lambda t, _: -t.exp()),
    "self_attn.dt_bias": ("ssm_dt.bias", lambda t, _: t),
    **{
        f"self_attn.{kind}_conv1d.weight": (
            f"ssm_conv1d_{kind}.weight",
            lambda t, _: t.reshape(1, t.shape[0], 1, -1),
        )
        for kind in ("q", "k", "v")
    },
    "router.scale": ("ffn_gate_inp.scale", lambda t, _: t),
    "router.per_expert_scale": ("ffn_down_exps.scale", lambda t, _: t),
}
"""A part of a recurrent layer -> what a file calls it, and its form there."""


def by_turns(tensor: Tensor, config: Any, dim: int = 0) -> Tensor:
    """A head of values of every key head in turn, where those of one key head lay together."""
    shared = config.linear_num_value_heads // config.linear_num_key_heads
    by_head = tensor.unflatten(dim, (config.linear_num_key_heads, shared, -1))
    return by_head.transpose(dim, dim + 1).flatten(dim, dim + 2)


def of_delta(name: str, tensor: Tensor, config: Any, arch: str) -> dict[str, Tensor]:
    """The tensors that a converter makes of one of the delta rule."""
    layer, part = name.split(".")[2], name.partition("linear_attn.")[2].removesuffix(".weight")
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if part == "in_proj_qkvz":
        by_head = tensor.unflatten(0, (config.linear_num_key_heads, -1))
        wide = config.linear_key_head_dim
        value = (by_head.shape[1] - 2 * wide) // 2
        q, k, v, z = (t.flatten(0, 1) for t in by_head.split([wide, wide, value, value], dim=1))
        made = {"attn_qkv.weight": torch.cat((q, k, v)), "attn_gate.weight": z}
        return {f"blk.{layer}.{own}": piece for own, piece in made.items()}
    tensor = {"A_log": lambda t: -t.exp(), "conv1d": lambda t: t[:, 0]}.get(part, lambda t: t)(
        tensor
    )
    if arch != "qwen3next":
        if part in ("in_proj_qkv", "conv1d"):
            tensor = torch.cat((tensor[:keys], by_turns(tensor[keys:], config)))
        elif part == "out_proj":
            tensor = by_turns(tensor, config, dim=1)
        elif part != "norm":
            tensor = by_turns(tensor, config)
    own = {
        "in_proj_qkv": "attn_qkv.weight",
        "in_proj_z": "attn_gate.weight",
        "in_proj_a": "ssm_alpha.weight",
        "in_proj_b": "ssm_beta.weight",
        "in_proj_ba": "ssm_ba.weight",
        "conv1d": "ssm_conv1d.weight",
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "norm": "ssm_norm.weight",
        "out_proj": "ssm_out.weight",
    }
    return {f"blk.{layer}.{own[part]}": tensor}


def converted(model: Any, kind: str) -> dict[str, Tensor]:
    """The tensors of a model as a converter names and turns them."""
    _, arch, _, _ = KINDS[kind]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    config = model.config
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    found = {}
    for name, tensor in published(model).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "falcon-h1":
            tensor = tensor * factor_of(name, tensor, config)
        if name.endswith("kv_b_proj.weight"):
            by_head = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            for part, piece in {"k": keys.transpose(1, 2), "v": values}.items():
                found[f"blk.{name.split('.')[2]}.attn_{part}_b.weight"] = piece
            continue
        one = re.fullmatch(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.\d+\.(w\d).*", name)
        if one:
            part = {"w1": "gate", "w2": "down", "w3": "up"}[one[2]]
            whole = f"blk.{one[1]}.ffn_{part}_exps.weight"
            rows = found.get(whole, torch.empty(0, *tensor.shape))
            found[whole] = torch.cat((rows, tensor[None]))
            continue
        turned = re.search(r"\.([qk])_proj\.", name)
        if turned and arch in IN_PAIRS:
            tensor = in_pairs(tensor, heads[turned[1]])
        if ".linear_attn." in name:
            found |= of_delta(name, tensor, config, arch)
            continue
        above_one = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
        if arch in above_one and name.endswith("norm.weight"):
            tensor = tensor + 1
        streams = re.fullmatch(r"model\.(altup_\w+)\.\d+\.weight", name)
        if streams:
            stored = table.get_name(f"model.{streams[1]}") + ".weight"
            rows = found.get(stored, torch.empty(0, *tensor.shape))
            found[stored] = torch.cat((rows, tensor[None]))
            continue
        if arch == "llama4" and ".experts." in name:  # stored as [in, out]
            tensor = tensor.transpose(1, 2)
        if name.endswith("experts.gate_up_proj") and kind == IN_ONE:
            found[f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight"] = tensor
        elif name.endswith("experts.gate_up_proj") and arch != "gemma4":
            layer = name.split(".")[2]
            gate, up = tensor.chunk(2, dim=1)
            found |= {
                f"blk.{layer}.ffn_gate_exps.weight": gate,
                f"blk.{layer}.ffn_up_exps.weight": up,
            }
        elif name.endswith(tuple(HYBRID)):
            part = next(part for part in HYBRID if name.endswith(part))
            stored, turn = HYBRID[part]
            found[f"blk.{name.split('.')[2]}.{stored}"] = turn(tensor, config)
        elif name.endswith("shared_mlp.input_linear.weight"):
            beside = "_shexp" if config.num_local_experts else ""
            for half, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[f"blk.{name.split('.')[2]}.ffn_{half}{beside}.weight"] = piece
        elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
            found[f"blk.{name.split('.')[2]}.ffn_down.weight"] = tensor
        elif name.endswith("experts.down_proj"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = tensor
        elif ".norms." in name:  # of every head apart, one below the other
            before, _, behind = name.partition(".norms.")
            stored = f"blk.{name.split('.')[2]}.attn_{before[-len('q_layernorm')]}_norm.weight"
            rows = found.get(stored, torch.empty(0, tensor.shape[0]))
            assert behind == f"{rows.shape[0]}.weight"
            found[stored] = torch.cat((rows, tensor[None]))
        else:
            called = name.replace("model.", "backbone.") if arch.startswith("nemotron_h") else name
            called = called.replace("e_score_correction_bias", "e_score_correction.bias")
            stored = table.get_name(called, try_suffixes=(".weight", ".bias"))
            if name.endswith("feed_forward.expert_bias"):
                stored = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
            gates = (".mlp.gate.", ".feed_forward.gate.", ".block_sparse_moe.router.")
            if stored is None and any(gate in name for gate in gates):
                stored = f"blk.{name.split('.')[2]}.ffn_gate_inp.weight"
            assert stored is not None, name
            if not stored.endswith((".weight", ".bias")):
                stored += ".weight"
            found[stored] = tensor
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for end in ("long", "short"):
            found[f"rope_factors_{end}.weight"] = torch.tensor(rope[f"{end}_factor"])
    if arch == "gemma4":
        pairs = GEMMA_4["global_head_dim"] // 2
        count = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        factors = [1.0] * count + [1e30] * (pairs - count)
        found["rope_freqs.weight"] = torch.tensor(factors)
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(config, rope)
    return found


def published(model: Any) -> dict[str, Tensor]:
    """A model's tensors by the names that its checkpoints have."""
    if model.config.model_type != "kimi_linear":
        return dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    # Moonshot's own call the dense layers' MLP so, and Transformers as those with experts.
    dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
    return {dense.sub("mlp.", name): tensor for name, tensor in stored.items()}


def factor_of(name: str, tensor: Tensor, config: Any) -> Any:
    """What a converter multiplies a matrix of Falcon-H1 by."""
    gate, down = config.mlp_multipliers
    of_input = config.attention_in_multiplier
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    rows = [inner, inner, state, state, config.mamba_n_heads]
    columns = [
        torch.full((count,), factor * config.ssm_in_multiplier)
        for count, factor in zip(rows, config.ssm_multipliers, strict=True)
    ]
    factors: dict[str, Any] = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * of_input,
        "q_proj": of_input,
        "v_proj": of_input,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": torch.cat(columns)[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return next((factor for part, factor in factors.items() if f".{part}." in f".{name}"), 1.0)


def llama3_factors(config: Any, rope: dict[str, Any]) -> Tensor:
    """By how much each frequency is divided, as the converter writes it."""
    plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    turned = model_frequencies(config)
    return plain / turned


def model_frequencies(config: Any) -> Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]


def common(config: Any, arch: str) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    theta = (rope.get("full_attention") or rope).get("rope_theta", 1e4)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor", 1.0)
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 1,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **norm_epsilon(config),
        "rope.dimension_count": int(head_dim * share),
        "rope.freq_base": float(theta),
        "vocab_size": config.vocab_size,
        "rope.scaling.finetuned": False,
    }


def norm_epsilon(config: Any) -> dict[str, float]:
    rms = getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None)
    if rms is not None and not hasattr(config, "layer_norm_eps"):
        return {"attention.layer_norm_rms_epsilon": rms}
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    found = next(getattr(config, name) for name in names if hasattr(config, name))
    return {"attention.layer_norm_epsilon": found}


def write(
    path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Tensor], form: str = "F32"
) -> None:
    """Write a file whose matrices have a type; `random:` ones are blocks of random bytes."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        full = key if key.startswith(("tokenizer.", "general.")) else f"{arch}.{key}"
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add = kinds.get(type(value), writer.add_string)
        (writer.add_array if isinstance(value, list) else add)(full, value)
    for name, tensor in tensors.items():
        array = tensor.detach().float().contiguous().numpy()
        number = gguf.GGMLQuantizationType[form]
        plain = any(part in name for part in ("norm", "_inp", "conv1d", "shortconv.conv."))
        if form != "F32" and array.ndim > 1 and name.endswith(".weight") and not plain:
            writer.add_tensor(name, stored_as(array, number), raw_dtype=number)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_as(array: Any, number: Any) -> Any:
    """Quantise an array; random valid blocks where the package cannot."""
    if array.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
        raise ValueError(f"{array.shape} in {number.name}")
    try:
        return gguf.quants.quantize(array, number)
    except NotImplementedError:
        return random_blocks(array.shape, number)


def random_blocks(shape: tuple[int, ...], number: Any) -> Any:
    """Blocks of random bytes, but for their fp16 scales, which are small."""
    weights, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(sum(shape))
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    for at in SCALES[number.name]:
        scale = rng.uniform(1e-4, 1e-3, blocks.shape[:-1]).astype("<f2")
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
"""Where a block's fp16 scales are."""


def write_model(kind: str, path: Path, form: str = "F32", model: Any = None) -> Any:
    model = random_model(kind) if model is None else model
    _, arch, _, more = KINDS[kind]
    write(path, arch, {**common(model.config, arch), **more}, converted(model, kind), form)
    return model


def logits(path: Path, **options: Any) -> Tensor:
    pipeline = ReferencePipeline.from_directory(path, **options)
    step = Step.of([0], [0], [len(TOKENS)])
    caches = pipeline.caches(1, len(TOKENS))
    return pipeline.logits(pad([TOKENS]), step, caches, all_positions=True)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("llama with biases", "blk.1.attn_k.bias"),
        pytest.param("llama with biases", "blk.0.ffn_gate.bias", marks=pytest.mark.seldom),
        ("llama, biases of q, k and v", "blk.1.attn_q.bias"),
        ("qwen2, yarn, tied", "blk.0.attn_v.bias"),
        ("llama", "blk.1.ffn_down.weight"),
    ],
)
def test_what_a_file_lacks_is_a_form_or_a_damage(kind: str, left_out: str, tmp_path: Path) -> None:
    """A bias that others have is one that the model has not; a weight is lost."""
    _, arch, _, more = KINDS[kind]
    model = random_model(kind)
    tensors = converted(model, kind)
    del tensors[left_out]
    write(tmp_path / "m.gguf", arch, {**common(model.config, arch), **more}, tensors)
    says = "Download it again" if left_out.endswith("weight") else "have biases and others none"
    with pytest.raises(ValueError, match=f"m.gguf.*layers.{left_out[4]}.* is missing.*{says}"):
        logits(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_gives_transformers_tokens(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_model(kind, path)
    prompts = [TOKENS, list(range(7, 16)), list(range(30, 50))]
    pipeline = ReferencePipeline.from_directory(path, max_len=64)
    with torch.no_grad():
        for prompt, got in zip(prompts, pipeline.generate(prompts, max_new=10), strict=True):
            # Greedy tokens are those that are picked behind themselves.
            picked = model(torch.tensor([prompt + got[:-1]])).logits[0].argmax(-1)
            assert len(got) == 10 and got == picked[len(prompt) - 1 :].tolist()
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(path, max_len=64)[0], want) < 2e-5


@pytest.mark.parametrize("stretched", [1.0, 4.0])
def test_factors_of_positions_that_no_rule_makes_are_heeded(
    tmp_path: Path, stretched: float
) -> None:
    path, model = tmp_path / "model.gguf", random_model("llama")
    factors = torch.linspace(1.0, 3.7, model.config.head_dim // 2)
    tensors = converted(model, "llama") | {"rope_freqs.weight": factors}
    says = {"rope.scaling.type": "linear", "rope.scaling.factor": stretched}
    more = says if stretched > 1 else {}
    write(path, "llama", common(model.config, "llama") | more, tensors)
    with torch.no_grad():
        plain = model(torch.tensor([TOKENS])).logits[0]
        model.model.rotary_emb.inv_freq /= factors * stretched
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(path, max_len=64)[0], want) < 2e-5
    assert relative(plain, want) > 1e-2


@pytest.mark.parametrize(
    ("says", "factors", "message"),
    [
        ({"rope.scaling.attn_factor": 1.2}, False, "attn_factor=1.2.* is not supported without"),
        ({"rope.scaling.attn_factor": 1.2}, True, "attn_factor=1.2.* is not supported without"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            True,
            "'yarn' rope scaling beside the tensor 'rope_freqs.weight'",
        ),
    ],
)
def test_what_would_stretch_positions_further_is_refused(
    tmp_path: Path, says: dict[str, Any], factors: bool, message: str
) -> None:
    path, model = tmp_path / "model.gguf", random_model("llama")
    more = {"rope_freqs.weight": torch.ones(model.config.head_dim // 2)} if factors else {}
    write(path, "llama", common(model.config, "llama") | says, converted(model, "llama") | more)
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_directory(path)


@pytest.mark.parametrize("factors", [[1.0] * 9, [-1.0] * 8, [0.0] * 8, [math.nan] * 8])
def test_factors_that_divide_no_frequency_are_named_by_their_tensor(
    tmp_path: Path, factors: list[float]
) -> None:
    path, model = tmp_path / "model.gguf", random_model("llama")
    tensors = converted(model, "llama") | {"rope_freqs.weight": torch.tensor(factors)}
    write(path, "llama", common(model.config, "llama"), tensors)
    with pytest.raises(ValueError, match="tensor 'rope_freqs.weight' must be 8 positive numbers"):
        ModelSpec.from_directory(path)


FORMS = [kind for kind, weights, _ in BLOCKS.values() if weights > 1]
COUNTED = ("MXFP4", "IQ4_NL", "IQ4_XS", "Q4_K", "Q8_0")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


@pytest.mark.parametrize("form", [*FORMS, "F16", "BF16"])
def test_blocks_are_the_numbers_that_gguf_says(form: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[form]
    array = np.random.default_rng(5).normal(size=(3, 512)).astype(np.float32)
    stored = stored_as(array, number)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf(tmp_path / "t.gguf").tensors["blk.0.attn_q.weight"]
    assert (tensor.kind, tensor.shape) == (form, (3, 512))
    want = torch.from_numpy(gguf.quants.dequantize(stored, number))
    assert torch.equal(values_of(tensor).float(), want)


@pytest.mark.parametrize("form", ["Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_the_planner_knows_which_codes_are_kept(form: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[form]
    array = np.random.default_rng(5).normal(size=(3, 512)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", stored_as(array, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    piece = codes_of(open_gguf(tmp_path / "t.gguf").tensors["blk.0.attn_q.weight"], None)
    for bits, group, symmetric in product((3, 4, 8), (32, 128), (False, True)):
        scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric)
        held = None
        if piece is not None:
            held = kept_weight([piece], [form], scheme, torch.float32, lambda rows: rows)
        assert keeps_gguf_codes(form, scheme) == (held is not None), scheme


def test_block_sizes_are_those_of_the_package() -> None:
    for number, (kind, weights, size) in BLOCKS.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (theirs.name, gguf.GGML_QUANT_SIZES[theirs]) == (kind, (weights, size))


def wide_llama(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**BASE, **WIDE, **changes})
    return transformers.LlamaForCausalLM(config).float().eval()


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_quantised_blocks_give_the_logits_of_their_numbers(form: str, tmp_path: Path) -> None:
    """The same model with the blocks' numbers as float32 is the reference: no second rounding."""
    model, path, plain = wide_llama(), tmp_path / "model.gguf", tmp_path / "plain.gguf"
    write_model("llama", path, form, model)
    file = open_gguf(path)
    numbers = {name: values_of(tensor).float() for name, tensor in file.tensors.items()}
    write(plain, "llama", common(model.config, "llama"), numbers)
    got, want = logits(path, dtype=torch.float32), logits(plain)
    assert torch.equal(got, want)


@pytest.mark.parametrize("form", ["MXFP4", "IQ4_NL", "IQ4_XS"])
def test_codes_of_a_table_are_kept(form: str, tmp_path: Path) -> None:
    """At 4 and at 8 bits in groups of 32; MXFP4's on any grid."""
    model, path, plain = wide_llama(), tmp_path / "model.gguf", tmp_path / "plain.gguf"
    write_model("llama", path, form, model)
    file = open_gguf(path)
    numbers = {name: values_of(tensor).float() for name, tensor in file.tensors.items()}
    write(plain, "llama", common(model.config, "llama"), numbers)
    want, fine = logits(plain), Quantization(group_size=32, symmetric=True)
    for grid in (fine, Quantization()):
        for bits in (Precision.W4A16, Precision.W8A16):
            how = {"precisions": [bits] * 2, "scheme": grid.scheme}
            found = relative(logits(path, dtype=torch.float32, **how), want)
            exact = form == "MXFP4" or grid is fine
            assert (found < 1e-4) == exact, (grid, bits, found)
    source = open_checkpoint(path, ModelSpec.from_directory(path))
    source.keep_codes({0: fine.scheme(Precision.W4A16)})
    for dtype, least in ((torch.float32, 1e-7), (torch.bfloat16, 2.0**-11)):
        part = source.layer(0, dtype)["down.weight"]
        assert isinstance(part, CodebookWeight)
        rest = part.dequantize(torch.float32)
        assert relative(rest, numbers["blk.0.ffn_down.weight"]) <= least
    cpu = torch.device("cpu")
    kept = KeptLayers(source, tmp_path / "kept", {0: fine.scheme(Precision.W4A16)}, cpu)
    assert isinstance(kept.layer(0, torch.float32)["down.weight"], CodebookWeight)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[] if form in COUNTED else pytest.mark.seldom)
        for form in (*FORMS, "F16")
    ],
)
def test_plans_count_what_codes_take(form: str, tmp_path: Path, planned_and_loaded: Any) -> None:
    path = tmp_path / "model.gguf"
    write_model("llama", path, form, wide_llama())
    for words in (["--dtype", "bfloat16"], ["--dtype", "float32"], ["--bits", "8"]):
        planned, loaded = planned_and_loaded(path, *words)
        assert loaded == planned, words


def test_layers_kept_on_disk_have_the_files_codes(tmp_path: Path) -> None:
    path, cpu = tmp_path / "model.gguf", torch.device("cpu")
    scheme = Quantization(group_size=32).scheme(Precision.W4A16)
    write_model("llama", path, "Q4_K", wide_llama())
    source = open_checkpoint(path, ModelSpec.from_directory(path))
    source.keep_codes({0: scheme})
    want = source.layer(0, torch.float32)["down.weight"]
    for number in (0, 1):
        kept = KeptLayers(source, tmp_path / "kept", {0: scheme}, cpu)
        got = kept.layer(0, torch.float32)["down.weight"]
        assert kept.num_read == number
        assert torch.equal(got.dequantize(torch.float32), want.dequantize(torch.float32))


def test_experts_are_read_one_at_a_time_from_quantised_blocks(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    import transformers

    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        **{**BASE, **WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    model = transformers.MixtralForCausalLM(config).float().eval()
    write_model("mixtral", path, "Q8_0", model)
    source = open_checkpoint(path, ModelSpec.from_directory(path))
    layer = source.layer(1, torch.float32)
    want = model.state_dict()["model.layers.1.mlp.experts.down_proj"][3]
    assert relative(layer["experts.3.down.weight"], want) < 0.01


def test_layers_are_planned_at_the_bits_of_most_of_their_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = wide_llama()
    for form, precision in [("Q8_0", "w8a16"), ("Q4_K", "w4a16"), ("Q6_K", "w8a16")]:
        write_model("llama", path, form, model)
        layers = stored_layers(path, ModelSpec.from_directory(path))
        assert layers is not None and [x.stored.value for x in layers] == [precision] * 2
        assert layers[0].served == tuple(Precision)
    write_model("llama", path, "F16", model)
    assert stored_layers(path, ModelSpec.from_directory(path)) is None


@pytest.mark.parametrize(("form", "symmetric"), [("Q4_0", True), ("Q4_K", False)])
def test_plans_for_cpus_keep_the_codes(form: str, symmetric: bool, tmp_path: Path) -> None:
    from llmpq import LLM, SamplingParams

    path = tmp_path / "model.gguf"
    model = wide_llama()
    words = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", *(f"w{i}" for i in range(196))],
        "tokenizer.ggml.merges": ["a b"],
    }
    described = {**common(model.config, "llama"), **words}
    write(path, "llama", described, converted(model, "llama"), form)
    want = ReferencePipeline.from_directory(path, dtype=torch.float32).generate([TOKENS], max_new=6)
    with LLM(path, dtype="float32") as llm:
        grid = llm.plan.quantization
        assert (grid.group_size, grid.symmetric) == (32, symmetric)
        assert set(llm.plan.precisions) == {Precision.W4A16}
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": TOKENS}], params)
    assert list(answer.outputs[0].token_ids) == want[0]


def split(path: Path, into: Path, count: int = 2) -> list[Path]:
    """Write a file's tensors into parts, as llama.cpp's gguf-split does."""
    whole = gguf.GGUFReader(path)
    parts = []
    for part in range(count):
        parts.append(into / f"m-{part + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(parts[-1], "llama")
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for name, field in whole.fields.items() if part == 0 else ():
            if name.startswith("llama."):
                kind = field.types[0]
                writer.add_key_value(name, field.contents(), kind)
        for tensor in whole.tensors[part::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_a_model_in_parts_is_read_from_any_of_them(tmp_path: Path) -> None:
    """From a part, a folder, links to one part and a folder of links, as Hugging Face's cache."""
    whole, real = tmp_path / "model.gguf", tmp_path / "real"
    write_model("llama", whole)
    real.mkdir()
    parts = split(whole, real, 3)
    (tmp_path / "links").mkdir()
    (tmp_path / "link.gguf").symlink_to(parts[1])
    (tmp_path / parts[1].name).symlink_to(parts[1])
    for index, part in enumerate(parts):
        (tmp_path / f"blob{index}").write_bytes(part.read_bytes())
        (tmp_path / "links" / part.name).symlink_to(tmp_path / f"blob{index}")
    want = logits(whole)
    for given in (*(parts[0], parts[2], real), tmp_path / "links", tmp_path / "link.gguf"):
        assert torch.equal(logits(given), want), given
    for given in (tmp_path / parts[1].name, tmp_path / "links" / parts[2].name):
        assert len(open_gguf(given).parts) == 3


def test_a_part_that_is_missing_or_another_is_named(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "model.gguf")
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = split(tmp_path / "model.gguf", folder, 3)
    second = parts[1].read_bytes()
    parts[1].unlink()
    for given in (parts[0], folder):
        with pytest.raises(ValueError, match="of 3 parts and 'm-00002-of-00003.gguf' is not"):
            ModelSpec.from_directory(given)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match="m-00002-of-00003.gguf' says it is part 2 .from 0. of 3"):
        ModelSpec.from_directory(folder)
    key = b"split.count" + (2).to_bytes(4, "little")
    assert second.count(key + (3).to_bytes(2, "little")) == 1
    four = second.replace(key + (3).to_bytes(2, "little"), key + (4).to_bytes(2, "little"))
    parts[1].write_bytes(four)
    with pytest.raises(ValueError, match="m-00002-of-00003.gguf' says it is part 1 .from 0. of 4"):
        ModelSpec.from_directory(folder)


def rewritten(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> Path:
    path.write_bytes(change(bytearray(path.read_bytes())))
    return path


def replaced(old: bytes, new: bytes) -> Callable[[bytearray], bytearray]:
    def change(content: bytearray) -> bytearray:
        assert content.count(old) == 1
        return content.replace(old, new)

    return change


NAME = b"blk.0.attn_q.weight"


def described(**changes: int) -> Callable[[bytearray], bytearray]:
    """Overwrite a number of the first tensor's description, `NAME`'s."""
    place = {"dimensions": (0, 4), "columns": (4, 8), "type": (20, 4), "offset": (24, 8)}

    def change(content: bytearray) -> bytearray:
        for what, value in changes.items():
            at, size = place[what]
            start = content.index(NAME) + len(NAME) + at
            content[start : start + size] = value.to_bytes(size, "little")
        return content

    return change


BROKEN: dict[str, tuple[Callable[[bytearray], bytes | bytearray], str]] = {
    "cut in its blocks": (lambda c: c[:-200], "ends at byte .*, the file has"),
    "cut in its header": (lambda c: c[:300], "truncated or damaged"),
    "cut after its magic": (lambda c: c[:4], "is not a GGUF file"),
    "no GGUF": (lambda c: b"\x80\x02}" + c, "is not a GGUF file"),
    "another version": (lambda c: c[:4] + (9).to_bytes(4, "little") + c[8:], "version 9"),
    "billions of keys": (lambda c: c[:16] + b"\xff" * 8 + c[24:], "truncated or damaged"),
    "billions of tensors": (lambda c: c[:8] + b"\xff" * 7 + b"\x0f" + c[16:], "truncated or"),
    "too many dimensions": (described(dimensions=9), "has 9 dimensions"),
    "absurd shape": (described(columns=1 << 50), "has shape"),
    "larger than the file": (described(columns=1 << 30), "ends at byte"),
    "unknown type": (described(type=77), "has type 77, which llmpq does not read"),
    "rows that are no blocks": (described(type=12), "has rows of 64, Q4_K has blocks of 256"),
    "offset inside another": (described(offset=32), "begins at byte .*, inside"),
    "offset behind the end": (described(offset=1 << 40), "the file has"),
    "a tensor twice": (
        lambda c: c.replace(b"blk.1.attn_q.weight", NAME),
        "'blk.0.attn_q.weight' is there twice",
    ),
    "offset between": (described(offset=(1 << 20) + 1), "unaligned"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_damaged_files_are_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    change, message = BROKEN[kind]
    path = tmp_path / "model.gguf"
    write_model("llama", path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=message) as error:
        ModelSpec.from_directory(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.head_count_kv": 3}, "do not share 3 key/value heads evenly"),
        ({"llama.block_count": 1}, "model.gguf': tensor 'blk.1.attn_k.weight' is not part of"),
        ({"llama.block_count": 3}, "'block_count' is 3, its tensors are of 2 layers"),
        ({"llama.block_count": 1 << 31}, "'block_count' is 2147483648, its tensors are of 2"),
        (
            {"llama.embedding_length": 1 << 31},
            "'embedding_length' is 2147483648, the tensor 'token_embd.weight' has rows of 64",
        ),
        ({"llama.feed_forward_length": (1 << 32) - 1}, "ffn=4,294,967,295, expected 16,777,216"),
        ({"llama.attention.head_count": None}, "'llama.attention.head_count', which .* missing"),
        ({"llama.attention.causal": False}, "tokens see those behind them"),
        ({"general.type": "adapter"}, "is a LoRA adapter, not a model"),
        ({"llama.feed_forward_length": 80}, "must have shape .* as its metadata says"),
        ({"llama.attention.value_length": 32}, "keys and values of different sizes"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "expected a positive number"),
        ({"llama.rope.scaling.type": "klingon"}, "rope scaling 'klingon' is not supported"),
        ({"llama.attention.temperature_scale": 0.5}, "temperature_scale'=0.5 is not known"),
        ({"llama.feed_forward_length": [96, 80]}, "the same for every layer"),
    ],
)
def test_lying_metadata_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model("llama")
    described = {f"llama.{k}": v for k, v in common(model.config, "llama").items()} | metadata
    plain = {k.removeprefix("llama."): v for k, v in described.items() if v is not None}
    write(path, "llama", plain, converted(model, "llama"))
    with pytest.raises(ValueError, match=message):
        spec = ModelSpec.from_directory(path)
        open_checkpoint(path, spec).layer(spec.num_layers - 1, torch.float32)


def test_other_architectures_and_tensors_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model("llama")
    described, tensors = common(model.config, "llama"), converted(model, "llama")
    write(path, "mamba", described, tensors)
    with pytest.raises(ValueError, match="architecture 'mamba' is not read from GGUF.*qwen3moe"):
        ModelSpec.from_directory(path)
    write(path, "llama", described, tensors | {"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(ValueError, match="'blk.0.attn_sinks.weight' is not part of a llama model"):
        open_checkpoint(path, ModelSpec.from_directory(path))
    write(path, "llama", described, {k: v for k, v in tensors.items() if k != "token_embd.weight"})
    with pytest.raises(ValueError, match="no tensor 'token_embd.weight'"):
        ModelSpec.from_directory(path)


EVEN = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"]


def held(form: str, bits: int, symmetric: bool, dtype: torch.dtype, path: Path) -> Any:
    """A matrix in a form, as the weight that keeps its codes; and its numbers."""
    number = gguf.GGMLQuantizationType[form]
    array = np.random.default_rng(7).normal(size=(48, 512)).astype(np.float32) * 0.05
    array[3, 64:96] = 0.25  # a flat group
    stored = stored_as(array, number)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    piece = codes_of(open_gguf(path).tensors["w"], None)
    assert piece is not None
    scheme = WeightScheme(bits=bits, group_size=32, symmetric=symmetric)
    kept = kept_weight([piece], [form], scheme, dtype, lambda rows: rows)
    return kept, torch.from_numpy(gguf.quants.dequantize(stored, number))


@pytest.mark.parametrize("form", EVEN)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_kept_without_a_second_rounding(
    form: str, bits: int, symmetric: bool, tmp_path: Path
) -> None:
    few, centred = int(form[1]) <= bits, form.endswith("_0")
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 1e-3)):
        kept, want = held(form, bits, symmetric, dtype, tmp_path / "t.gguf")
        if not few or (symmetric and not centred):
            assert kept is None  # the scheme has fewer bits, or no zeros
            continue
        scheme = WeightScheme(bits=bits, group_size=32, symmetric=symmetric)
        assert kept.nbytes == scheme.nbytes(48, 512, dtype.itemsize)
        got = kept.dequantize(torch.float32)
        assert float((got - want).abs().max() / want.abs().max()) < (0 if centred else most) + 1e-12


def test_scales_too_small_for_float16_are_read_as_numbers(tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType.Q8_0
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    stored = gguf.quants.quantize(np.full((4, 64), 1e-4, np.float32), number)
    writer.add_tensor("w", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    piece = codes_of(open_gguf(path).tensors["w"], None)
    assert piece is not None
    scheme = WeightScheme(bits=8, group_size=32, symmetric=True)
    same: Any = lambda rows: rows  # noqa: E731
    assert kept_weight([piece], ["Q8_0"], scheme, torch.bfloat16, same) is None
    assert kept_weight([piece], ["Q8_0"], scheme, torch.float32, same) is not None


KEPT = [(kind, form) for kind in ("llama", "glm4") for form in ("Q8_0", "Q4_0", "Q4_K", "Q5_K")]
KEPT += [("qwen35", "Q4_0"), ("qwen35", "IQ4_NL")]  # columns are put in another order, too
BY_32 = (
    *("falcon-h1", "kimi-linear", "gemma4, its mixture, keys for values", SHARED_CACHES),
    "granitehybrid with positions, a mixture",
)
KEPT += [(kind, form) for kind in BY_32 for form in ("Q4_0", "Q8_0")]
"""Kinds whose rows are whole blocks as they are."""


@pytest.mark.parametrize(("kind", "form"), KEPT)
def test_runs_of_kept_codes_give_the_logits_of_their_numbers(
    kind: str, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = random_model(kind, {} if kind in BY_32 else {**WIDE, "head_dim": 64}, noise=0.0)
    write_model(kind, path, form, model)
    precision = Precision.W4A16 if "Q4" in form else Precision.W8A16
    options: dict[str, Any] = {"dtype": torch.float32}
    layers = model.config.num_hidden_layers
    packed = logits(
        path,
        precisions=[precision] * layers,
        scheme=Quantization(group_size=32, symmetric=form.endswith("_0")).scheme,
        **options,
    )
    rounded = logits(path, precisions=[precision] * layers, **options)
    want = logits(path, **options)
    assert relative(packed, want) < 5e-6 < relative(rounded, want)


def test_experts_keep_their_codes(tmp_path: Path) -> None:
    import transformers

    path = tmp_path / "model.gguf"
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        **{**BASE, **WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    write_model("mixtral", path, "Q4_0", transformers.MixtralForCausalLM(config).float().eval())
    packed = logits(
        path,
        precisions=[Precision.W4A16] * 2,
        scheme=Quantization(group_size=32, symmetric=True).scheme,
        dtype=torch.float32,
    )
    assert relative(packed, logits(path, dtype=torch.float32)) < 5e-6


def demo_tokenizer() -> dict[str, Any]:
    stored = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(stored["vocab"], key=stored["vocab"].__getitem__),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


def test_a_file_is_quantised_to_a_directory_that_others_read(tmp_path: Path) -> None:
    import transformers

    demo = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    path, into = tmp_path / "demo.gguf", tmp_path / "w8"
    metadata = common(demo.config, "llama") | demo_tokenizer()
    write(path, "llama", metadata, converted(demo, "llama"), "Q8_0")
    words = ["--scheme", "w8a16", "--method", "rtn", "--text", str(DEMO.parent / "heldout.txt")]
    words += ["--windows", "4", "--window", "256"]
    assert quantize_main([str(path), str(into), *words]) == 0
    config = transformers.AutoConfig.from_pretrained(into)
    assert config.architectures == ["LlamaForCausalLM"]
    theirs = transformers.AutoTokenizer.from_pretrained(into)
    assert theirs("def f(x):\n")["input_ids"] == Tokenizer(DEMO).encode("def f(x):\n")
    assert relative(logits(into, dtype=torch.float32), logits(path, dtype=torch.float32)) < 0.02


@pytest.mark.parametrize("form", ["MXFP4", "Q8_0"])
@pytest.mark.parametrize("kind", [*BY_32, "qwen35", "lfm2", "nemotron_h", "granitehybrid"])
def test_plans_count_what_codes_of_hybrids_take(
    kind: str, form: str, tmp_path: Path, planned_and_loaded: Any
) -> None:
    path = tmp_path / "model.gguf"
    write_model(kind, path, form)
    planned, loaded = planned_and_loaded(path, "--dtype", "float32")
    assert loaded == planned

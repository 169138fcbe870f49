"""Configs as they are published: read or refused, and shrunk the same tokens as Transformers.

`benchmarks/configs.py published` runs hundreds; here are the keys that some of them have.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.families import BY_MODEL_TYPE, llama
from llmpq.models.model_spec import ModelSpec
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
ALL = "LLMPQ_ALL_TESTS" in os.environ
FOLDER = Path(__file__).parents[3] / "benchmarks"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
}
MIXTURE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
MROPE = {"mrope_section": [24, 20, 20], "rope_type": "default", "mrope_interleaved": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Gemma 2 has hidden_act beside hidden_activation": {
        **SIZES,
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "cache_implementation": "hybrid",
    },
    "Gemma 3 4B leaves heads, vocabulary and positions to the class": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    },
    "Qwen3-Coder has use_qk_norm": {
        **SIZES,
        "model_type": "qwen3_moe",
        "use_qk_norm": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "rope_theta": 10000000,
    },
    "Mixtral without eps and theta": {**SIZES, "model_type": "mixtral", "unsloth_fixed": True},
    "OLMo 3 without theta and layer_types": {**SIZES, "model_type": "olmo3"},
    "gpt-oss without rope": {**SIZES, "model_type": "gpt_oss", "head_dim": 32},
    "DeepSeek-V3 without a scale": {
        **SIZES,
        **MIXTURE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
    },
    "Kimi K2 has equal betas": {
        **SIZES,
        **MIXTURE,
        "model_type": "kimi_k2",
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "fewer layers than the class has dense ones": {
        **SIZES,
        **{k: v for k, v in MIXTURE.items() if k != "first_k_dense_replace"},
        "model_type": "kimi_k2",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "GLM-4.5 without first dense layers": {
        **SIZES,
        **{k: v for k, v in MIXTURE.items() if k != "first_k_dense_replace"},
        "model_type": "glm4_moe",
        "head_dim": 128,
        "use_qk_norm": True,
    },
    "Granite 4.0 micro is attention alone": {
        **SIZES,
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 10,
        "tie_word_embeddings": True,
        "mamba_n_heads": 2,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
    },
    "Granite 4.0 H says that there are no positions": {
        **SIZES,
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "nope",
        "rope_theta": 10000,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.246,
        "attention_multiplier": 0.015625,
        "logits_scaling": 3,
        "tie_word_embeddings": True,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_expand": 2,
    },
    "Qwen3-VL's text": {
        "model_type": "qwen3_vl",
        "text_config": {
            **SIZES,
            "model_type": "qwen3_vl_text",
            "head_dim": 128,
            "rope_scaling": MROPE,
            "rope_theta": 5000000,
        },
        "vision_config": {"depth": 27},
        "tie_word_embeddings": True,
    },
    "Devstral 2 says mscale_all_dim: 0": {
        **SIZES,
        "model_type": "ministral3",
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 64.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "original_max_position_embeddings": 4096,
            "llama_4_scaling_beta": 0.0,
        },
        "max_position_embeddings": 262144,
    },
    "LFM2-VL's text": {
        "model_type": "lfm2_vl",
        "text_config": {
            **SIZES,
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 3,
            "block_ff_dim": 96,
        },
        "vision_config": {"model_type": "siglip2_vision_model"},
    },
    "SmolVLM's text, beside a connector": {
        "model_type": "smolvlm",
        "text_config": {**SIZES, "model_type": "llama", "rope_theta": 273768.0},
        "vision_config": {"hidden_size": 768},
        "tie_word_embeddings": False,
    },
    "InternVL 3's text, tied by its wrapper's default": {
        "model_type": "internvl",
        "text_config": {**SIZES, "model_type": "qwen2", "rope_theta": 1000000.0},
        "vision_config": {"image_size": [28, 28], "patch_size": [14, 14]},
    },
    "Command A Vision's text": {
        "model_type": "cohere2_vision",
        "text_config": {**SIZES, "model_type": "cohere2", "sliding_window": 8},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "Aya Vision's text": {
        "model_type": "aya_vision",
        "text_config": {**SIZES, "model_type": "cohere2", "sliding_window": 8},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "GOT-OCR 2's text": {
        "model_type": "got_ocr2",
        "text_config": {**SIZES, "model_type": "qwen2", "use_sliding_window": False},
        "vision_config": {"hidden_size": 768},
    },
    "LightOnOCR's text": {
        "model_type": "lighton_ocr",
        "text_config": {**SIZES, "model_type": "qwen3", "head_dim": 32},
        "vision_config": {"model_type": "pixtral"},
    },
    "Qwen2.5-VL as it lies flat": {
        **SIZES,
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "image_token_id": 151655,
        "vision_config": {"depth": 32},
    },
    "Seed-OSS": {
        **SIZES,
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 128,
        "rope_theta": 10000000.0,
    },
    "MiMo 7B: Qwen2's layers, and one that predicts a further token": {
        **SIZES,
        "model_type": "mimo",
        "attention_bias": True,
        "head_dim": 16,
        "rope_theta": 640000,
        "sliding_window": 32768,
        "max_window_layers": 32,
        "use_sliding_window": False,
        "use_mrope": False,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    },
    "Gemma 1 says gelu": {**SIZES, "model_type": "gemma", "hidden_act": "gelu"},
    "StableLM 3B": {
        **SIZES,
        "model_type": "stablelm",
        "rope_pct": 0.25,
        "layer_norm_eps": 1e-05,
        "use_qkv_bias": True,
    },
    "rope_parameters beside a stale rope_theta": {
        **SIZES,
        "model_type": "llama",
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "a stale partial_rotary_factor": {
        **SIZES,
        "model_type": "glm4",
        "head_dim": 128,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "original positions beside and inside": {
        **SIZES,
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 8192,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    },
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(FOLDER))  # for its `lib`
    try:
        spec = util.spec_from_file_location("published", FOLDER / "lib" / "published_configs.py")
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        sys.modules["published"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


CHOSEN = (
    "Granite 4.0 H says that there are no positions",
    "MiMo 7B: Qwen2's layers, and one that predicts a further token",
    "Devstral 2 says mscale_all_dim: 0",
    "LFM2-VL's text",
    "SmolVLM's text, beside a connector",
)
SAMPLE = [name for i, name in enumerate(PUBLISHED) if ALL or i % 3 == 0 or name in CHOSEN]
"""Every third one in `make test`, and what no other test has."""


@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_config_runs_as_in_transformers(script: ModuleType, name: str) -> None:
    config = PUBLISHED[name]
    assert ModelSpec.from_config(config, name=name).num_layers
    assert script.runs_equal(script.shrunk(config))


def test_the_text_of_kimi_k2_5_is_run(script: ModuleType, tmp_path: Path) -> None:
    """As published: `language_model.` in front of Kimi K2's names, beside a vision tower."""
    text = {
        **SIZES,
        **MIXTURE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    bare, wrapped = tmp_path / "bare", tmp_path / "wrapped"
    script.random_model(text).save_pretrained(bare)
    tensors = load_file(bare / "model.safetensors")
    wrapped.mkdir()
    tower = {"vision_tower.patch_embed.proj.bias": torch.zeros(4)}
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()} | tower
    save_file(renamed, wrapped / "model.safetensors")
    config = {
        "model_type": "kimi_k25",
        "text_config": {**text, "model_type": "kimi_k2"},
        "vision_config": {"patch_size": 14, "vt_num_hidden_layers": 27},
        "tie_word_embeddings": False,
    }
    (wrapped / "config.json").write_text(json.dumps(config))
    outputs = []
    for directory in (bare, wrapped):
        pipeline = ReferencePipeline.from_directory(directory, max_len=10)
        outputs.append(pipeline.generate([[5, 17, 120, 3]], max_new=6))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("whole", [None, True])
@pytest.mark.parametrize("inside", [None, False])
@pytest.mark.parametrize("stored", [False, True])
def test_an_output_matrix_that_is_stored_is_no_embedding(
    script: ModuleType, tmp_path: Path, whole: bool | None, inside: bool | None, stored: bool
) -> None:
    """Wrappers whose default is a tied matrix around models whose default is an own one."""
    said = {"model_type": "internvl", "tie_word_embeddings": not stored}
    text = {**SIZES, "model_type": "qwen2"}
    vision = {**script.VISION, "image_size": [28, 28], "patch_size": [14, 14]}
    torch.manual_seed(1)
    model = script.random_model({**said, "text_config": text, "vision_config": vision})
    model.save_pretrained(tmp_path)
    config = {"model_type": "internvl", "text_config": dict(text), "vision_config": vision}
    for words, word in ((config, whole), (config["text_config"], inside)):
        words |= {} if word is None else {"tie_word_embeddings": word}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    spec = ModelSpec.from_directory(tmp_path)
    assert spec.tied_embeddings is not stored
    (got,) = ReferencePipeline.from_directory(tmp_path, max_len=12).generate([[5, 17]], max_new=6)
    theirs = model.generate(
        torch.tensor([[5, 17]]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert got == theirs[0, 2:].tolist()


def test_a_wrong_theta_would_be_seen(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the comparison above can fail."""
    wrong = {"rope_theta": 123.0}
    record = replace(llama.FAMILY, fields=lambda config: {**llama.fields(config), **wrong})
    monkeypatch.setitem(BY_MODEL_TYPE, "seed_oss", record)
    assert not script.runs_equal(script.shrunk(PUBLISHED["Seed-OSS"]))


def test_all_are_planned_or_refused_as_the_table_says(script: ModuleType) -> None:
    row = json.loads((FOLDER / "results" / "configs.jsonl").read_text().splitlines()[-1])
    planned: Counter[str] = Counter()
    refused: dict[str, Counter[str]] = {}
    for entry in script.published():
        kind = entry["config"]["model_type"]
        try:
            ModelSpec.from_config(script.unquantised(entry["config"]), name="published")
            planned[kind] += 1
        except ValueError as error:
            refused.setdefault(kind, Counter())[script.text_of(error)] += 1
    table = row["case"]["families"]
    assert refused == row["case"]["refused"]
    assert planned == Counter({kind: counts["planned"] for kind, counts in table.items()})
    assert sum(counts["configs"] for counts in table.values()) >= 300

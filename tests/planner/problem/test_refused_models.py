"""What is not run is refused by the feature that lacks, or named: nothing is passed over."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.families import BY_MODEL_TYPE, FAMILIES
from llmpq.families.not_run import FEATURE_OF
from llmpq.models.model_spec import ModelSpec, builtin_configs
from llmpq.planner.__main__ import main as planner
from llmpq.planner.cli.report import mtp_notes
from llmpq.planner.make import make_plan
from llmpq.plans.capabilities import (
    EXECUTION_MODES,
    FEATURES,
    execution_modes,
    lacking_sentence,
    lacks,
    require,
)
from llmpq.plans.plan import Speculation
from llmpq.precision import KVPrecision, Precision

pytestmark = pytest.mark.pure


def spec_of(model: str, **change: Any) -> ModelSpec:
    return ModelSpec.from_config({**builtin_configs()[model], **change}, name="changed")


@pytest.mark.parametrize(
    ("model_type", "feature"),
    [
        ("falcon_mamba", "lacks Mamba-1 layers"),
        ("mamba2", "models of Mamba-2 layers alone"),
        ("rwkv", "RWKV's layers"),
        ("t5", "decoder-only"),
        ("laguna", "gates of softplus, and a number of heads for each layer"),
        ("kolibri1", "a router whose corrections are added to logits"),
        ("axk1", "a norm behind mixtures alone"),
        ("longcat_flash", "two attentions a layer"),
        ("nanochat", "norms without weights"),
        ("step3p5", "a number of heads for each layer, and clamps behind activations"),
        ("bailing_hybrid", "decays of KDA from one matrix"),
        ("qwen4", "a record of this family"),
    ],
)
def test_a_family_is_refused_by_what_llmpq_lacks(model_type: str, feature: str) -> None:
    with pytest.raises(ValueError, match=f"model_type '{model_type}' .*{feature}") as refused:
        spec_of("llama-3-8b", model_type=model_type)
    assert "did you mean" not in str(refused.value) and "qwen3_moe" in str(refused.value)


def test_a_listed_recurrence_is_named_once() -> None:
    with pytest.raises(ValueError, match="lacks Mamba-1 layers; it runs"):
        spec_of("llama-3-8b", model_type="jamba", mamba_d_state=16, layers_block_type=["mamba"])
    with pytest.raises(ValueError, match="lacks this family's form of recurrent layers"):
        spec_of("llama-3-8b", model_type="brand_new", layer_types=["mamba", "full_attention"])


@pytest.mark.parametrize(
    ("keys", "feature"),
    [
        ({"mamba_d_state": 16}, "this family's form of recurrent layers"),
        ({"n_routed_experts": 64}, "lacks a record of this family .*; it runs"),
        ({"n_routed_experts": 4, "use_moe": False}, "lacks a record of this family .*; it runs"),
        ({"kv_lora_rank": 512}, "lacks a record of this family .*; it runs"),
        ({"attn_type_list": [0, 1]}, "form of recurrent layers"),
        ({"attn_type_list": [1, 1]}, "lacks a record of this family"),
        (
            {"sparse_attention_config": {"use_sparse_attention": True, "sparse_topk_blocks": 16}},
            "lacks sparse attention over chosen tokens; it runs",
        ),
        ({"sparse_attention_config": {"use_sparse_attention": False}}, "lacks a record"),
        ({"vision_config": {"depth": 2}}, "a record of this family .*leave out its vision tower"),
        ({"num_kv_shared_layers": 10}, "layers that share a KV cache"),
        ({"layer_types": ["conv", "full_attention"]}, "form of recurrent layers"),
        ({"text_config": {"model_type": "llama"}}, "'llama' inside is run if saved"),
        ({"text_config": {"linear_num_key_heads": 16}}, "form of recurrent layers"),
        ({"text_config": {"model_type": "qwen3_5_moe_text"}}, "'qwen3_5_moe_text' inside is run"),
    ],
)
def test_a_family_nobody_has_listed_is_judged_by_its_keys(keys: dict, feature: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=feature):
        spec_of("llama-3-8b", model_type="brand_new", **keys)


@pytest.mark.parametrize(
    ("model", "key"), [("llama-3-8b", "num_hidden_layers"), ("gemma-3-12b", "num_hidden_layers")]
)
@pytest.mark.parametrize("count", [2**31, 10**30, 10_001])
def test_layers_without_end_are_refused_at_once(model: str, key: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"{key}=.*10,000 layers at most"):
        spec_of(model, **{key: count})


QWEN35 = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "num_experts": 256,
}
GEMMA4 = {"global_head_dim": 512, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("kind", "text", "has", "has_not"),
    [
        (
            "qwen4_exp",
            QWEN35,
            "form of recurrent layers .*, and would leave out its vision tower",
            "mixture",
        ),
        ("gemma9", {**GEMMA4, "attention_k_eq_v": True}, "values that are .* keys", "share"),
        ("gemma9", {**GEMMA4, "enable_moe_block": True}, "a mixture of experts beside", "share"),
        ("gemma9", {**GEMMA4, "num_kv_shared_layers": 20}, "share a KV cache", "per-layer emb"),
        ("mistral3", {"model_type": "recurrent_gemma"}, "RG-LRU", "share"),
        ("kimi_k9", {"model_type": "kimi_k2", "kv_lora_rank": 512}, "'kimi_k2' inside is", "form"),
    ],
)
def test_a_refusal_is_true_of_the_config(kind: str, text: dict, has: str, has_not: str) -> None:  # type: ignore[type-arg]
    """Of the language model inside, and of this size of the family."""
    config = {"model_type": kind, "text_config": text, "vision_config": {"depth": 27}}
    with pytest.raises(ValueError, match=has) as refused:
        ModelSpec.from_config(config, name="m")
    assert has_not not in str(refused.value).partition("; it runs")[0]


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("granite", {"layer_types": ["mamba", "sliding"] * 16}, "layers of type 'sliding'"),
        ("falcon", {"alibi": True}, "alibi=True"),
        ("hunyuan_v1_moe", {"num_experts": [4, 8]}, "'num_experts' differs from layer to layer"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min=0.5 would change"),
        ("gpt_neox", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_sizes_of_a_family_that_are_not_run_are_refused(
    model: str, change: dict[str, Any], message: str
) -> None:
    whole = {
        "granite": {
            "model_type": "granitemoehybrid",
            "layer_types": ["attention"] * 32,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
    }.get(model, {"model_type": model})
    assert ModelSpec.from_config(whole, name="m").num_layers
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config({**whole, **change}, name="m")


@pytest.mark.parametrize(
    ("change", "positions"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "dynamic", "factor": 2.0}, 65536),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "yarn", "factor": 2.0}, 65536),
        ({"rope_type": "linear", "factor": 4.0}, 32768),
    ],
)
def test_a_card_that_stretches_positions_gets_them(change: dict, positions: int) -> None:  # type: ignore[type-arg]
    spec = spec_of("qwen2.5-7b", max_position_embeddings=32768, rope_scaling=change)
    assert spec.max_positions == positions


def test_linear_scaling_reaches_what_the_config_says_beside_it() -> None:
    """As in vicuna-7b-v1.5-16k; Llama 1's `max_sequence_length` without scaling changes nothing."""
    said = {"max_position_embeddings": 4096, "max_sequence_length": 16384}
    linear = {"type": "linear", "factor": 4.0}
    assert spec_of("llama-3.1-8b", **said, rope_scaling=linear).max_positions == 16384
    assert spec_of("llama-3.1-8b", **said, rope_scaling=None).max_positions == 4096


def test_a_key_and_its_alias_agree_or_are_refused() -> None:
    with pytest.raises(ValueError, match="'num_experts'=9 and 'num_local_experts'=8 are two names"):
        spec_of("mixtral-8x7b", num_experts=9)
    assert spec_of("mixtral-8x7b", num_experts=8) == spec_of("mixtral-8x7b")


def test_no_family_is_both_run_and_refused() -> None:
    assert not set(FEATURE_OF) & set(BY_MODEL_TYPE)


@pytest.mark.parametrize("model", ["llama-3-8b", "opt-125m", "gpt-oss-20b", "deepseek-v3"])
def test_a_key_that_changes_the_arithmetic_is_refused_unless_it_is_off(model: str) -> None:
    with pytest.raises(ValueError, match="'clip_qkv'=8.0 changes what a model computes"):
        spec_of(model, clip_qkv=8.0)
    with pytest.raises(ValueError, match="'is_causal'=False changes what a model computes"):
        spec_of(model, is_causal=False)
    for off in (None, False, 0, "", [], {}):
        assert spec_of(model, clip_qkv=off) == spec_of(model)
    assert spec_of(model, initializer_range=0.5, is_causal=True) == spec_of(model)


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("llama-3-8b", {"unsloth_fixed": True, "_flash_attn_2_enabled": True}),
        ("llama-3-8b", {"is_llama_config": True, "rope_interleaved": False}),
        ("llama-3-8b", {"sliding_window": 8192, "layer_types": ["full_attention"] * 32}),
        ("llama-3-8b", {"_attn_implementation_autoset": True, "neftune_noise_alpha": 5}),
        ("qwen3-30b-a3b", {"use_qk_norm": True, "shared_expert_intermediate_size": 5632}),
        ("mistral-7b", {"max_sequence_length": 9, "unsloth_version": "2026.1"}),
        ("deepseek-v3", {"moe_layer_freq": 1, "ep_size": 8, "num_nextn_predict_layers": 1}),
        ("phi-4", {"embd_layer": {"a": 1}, "transformers.js_config": {"dtype": "q4"}}),
        ("gemma-2-9b", {"hidden_act": "gelu_pytorch_tanh", "mystery": 7}),
        ("gpt-oss-20b", {"experts_per_token": 4, "initial_context_length": 4096}),
        ("opt-125m", {"_remove_final_layer_norm": False, "prefix": "</s>"}),
    ],
)
def test_a_key_that_the_config_class_does_not_read_changes_nothing(model: str, keys: dict) -> None:  # type: ignore[type-arg]
    assert spec_of(model, **keys).fingerprint() == spec_of(model).fingerprint()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "mixtral"}, {"norm_eps": 1e-5, "rope_theta": 1e6, "windows": ()}),
        ({"model_type": "olmo3"}, {"rope_theta": 5e5, "windows": (4096, 4096, 4096, 0) * 8}),
        ({"model_type": "mistral"}, {"windows": (4096,) * 32, "kv_heads": 8}),
        ({"model_type": "mistral", "sliding_window": None}, {"windows": ()}),
        ({"model_type": "gemma3_text"}, {"heads": 8, "vocab": 262208, "window_rope_theta": 1e4}),
        ({"model_type": "gemma2"}, {"score_cap": 50.0, "logit_cap": 30.0, "tied_embeddings": True}),
        ({"model_type": "glm4"}, {"qkv_bias": True, "rotary_dim": 64, "norm_eps": 1.5625e-7}),
        ({"model_type": "qwen3"}, {"head_dim": 128, "kv_heads": 32}),
        ({"model_type": "gpt_oss"}, {"windows": (128, 0) * 18, "max_positions": 131072}),
        ({"model_type": "deepseek_v3"}, {"dense_layers": (0, 1, 2), "shared_ffn": 2048}),
        ({"model_type": "glm4_moe", "head_dim": 128}, {"dense_layers": (0,), "rotary_dim": 64}),
    ],
)
def test_an_absent_key_has_the_default_of_the_config_class(config: dict, found: dict) -> None:  # type: ignore[type-arg]
    spec = ModelSpec.from_config(config, name="silent")
    assert {key: getattr(spec, key) for key in found} == found


@pytest.mark.parametrize(
    "change", [{"sliding_window": 512}, {"layer_types": ["sliding_attention"] * 32}]
)
def test_a_window_that_every_cache_of_transformers_reads_is_refused(change: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match="changes what a model computes"):
        spec_of("llama-3-8b", **change)


def test_gpt_oss_and_deepseek_have_their_classes_scalings() -> None:
    oss = ModelSpec.from_config({"model_type": "gpt_oss"}, name="silent")
    assert oss.rope_scaling is not None and oss.rope_scaling.factor == 32.0
    assert not oss.rope_scaling.truncate and oss.rope_theta == 150000.0
    assert ModelSpec.from_config({"model_type": "deepseek_v3"}, name="m").router.scale == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 3.0}, "'rope_theta'=3 is absurd, expected 100 to 1e[+]11"),
        ({"rope_theta": 1e30}, "'rope_theta'=1e[+]30 is absurd"),
        ({"rms_norm_eps": 0.5}, "'rms_norm_eps'=0.5 is absurd, expected 1e-12 to 0.01"),
        ({"rms_norm_eps": 1e-30}, "is absurd"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "'factor'=0.5 is absurd"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "attn_factor": 2}},
            "'attn_factor'=2 changes how positions rotate",
        ),
        ({"partial_rotary_factor": 1.5}, "must be at most 1"),
        ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ({"partial_rotary_factor": 0.01}, "rotates 1 channels of a head of 128"),
        (
            {"rope_scaling": {"rope_type": "yarn", "beta_fast": 1, "beta_slow": 2}},
            "beta_fast=1.0 is below beta_slow=2.0",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
            "'short_factor' must be 64 positive numbers",
        ),
    ],
)
def test_absurd_constants_are_refused(change: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        spec_of("llama-3-8b", **change)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("gemma-3-12b", {"layer_types": ["full_attention"]}, "kind of each of 48 layers"),
        ("gemma-3-12b", {"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
        ("gemma-2-9b", {"use_bidirectional_attention": True}, "is not supported"),
        ("deepseek-v3", {"topk_method": "random"}, "topk_method='random' is not supported"),
        ("deepseek-v3", {"n_group": 7}, "256 experts in n_group=7 groups"),
        ("deepseek-v3", {"topk_group": 9}, "of which topk_group=9 are kept"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "'first_k_dense_replace' must be"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias=True is not supported"),
        (
            "gemma-3-12b",
            {"attn_logit_softcapping": 5.0},
            "softcapping=5 is not supported in Gemma 3",
        ),
        (
            "qwen3-30b-a3b",
            {"num_experts_per_tok": 999},
            "num_experts_per_tok=999 of num_experts=128",
        ),
        ("qwen3-30b-a3b", {"mlp_only_layers": [99]}, "numbers of layers below 48"),
        ("phi-4", {"lm_head_bias": True}, "lm_head_bias=True is not supported"),
    ],
)
def test_what_a_family_does_not_run_with_is_refused(model: str, change: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        spec_of(model, **change)


def test_what_is_left_out_is_named() -> None:
    air = ModelSpec.by_name("glm-4.5-air")
    assert not air.left_out and air.further_layers == air.mtp_layers == 1
    text = dict(builtin_configs()["gemma-3-12b"])
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"depth": 2}}
    spec = ModelSpec.from_config(whole, name="gemma")
    assert spec.left_out == ("the vision tower: text only",)
    assert spec.fingerprint() == ModelSpec.by_name("gemma-3-12b").fingerprint()


def test_the_planner_says_what_is_left_out_and_what_no_gpu_runs(capsys: Any) -> None:
    words = "--batch 2 --prompt-len 64 --gen-len 8 --method uniform"
    mtp = (
        (
            "glm-4.5-air",
            "4090:8,H100:2",
            "1 layer for further tokens (MTP): --speculate mtp drafts",
        ),
        ("qwen3.5-27b", "cpu=99GB+60GB/s+8threads", "(MTP): --speculate mtp drafts with the first"),
    )
    for model, devices, note in mtp:
        assert planner([*f"--model {model} --devices {devices} {words}".split()]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert note in said and "does not run" not in said and "left out" not in said
    words = "--model gemma-2-9b --devices 4090 --kv 4 --batch 2 --prompt-len 64 --gen-len 8"
    assert planner([*words.split(), "--method", "uniform"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "does not run" not in said


def test_layers_that_draft_are_not_said_to_be_left_out() -> None:
    spec = ModelSpec.by_name("glm-4.5-air")
    devices = "cpu=200GB+60GB/s+8threads"
    plan = make_plan("glm-4.5-air", devices=devices, batch=1, prompt_len=64, bits="4")
    drafts = Speculation(mode="mtp", gamma=1, acceptance=0.8, extra_bytes=1)
    assert mtp_notes(plan.model_copy(update={"speculation": drafts}), spec) == []
    assert "--speculate mtp" in mtp_notes(plan, spec)[0]
    other = dataclasses.replace(ModelSpec.by_name("qwen3-8b"), mtp_layers=2)
    assert mtp_notes(plan, other)[0].startswith("left out: 2 layers for further tokens")


def test_what_a_config_leaves_to_its_class_is_said(tmp_path: Path, capsys: Any) -> None:
    """Only what decides something: a value that another key gives is none of the class's."""

    def left(config: dict[str, Any]) -> list[str]:
        return [one.partition("=")[0] for one in ModelSpec.from_config(config, name="m").from_class]

    llama = dict(builtin_configs()["llama-3-8b"])
    assert left(llama) == []
    for key in ("num_key_value_heads", "rms_norm_eps", "vocab_size", "intermediate_size"):
        without = {k: v for k, v in llama.items() if k != key}
        # Without it the class takes as many as there are query heads.
        assert left(without) == ([] if key == "num_key_value_heads" else [key])
    theta = {k: v for k, v in llama.items() if k != "rope_theta"}
    assert left(theta) == ["rope_theta"]
    assert left({**theta, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}) == []
    bare = {"model_type": "gemma3_text", "head_dim": 128}
    assert {"hidden_size", "num_attention_heads", "vocab_size"} < {*left(bare)}
    assert "head_dim" not in left(bare)
    (tmp_path / "config.json").write_text(json.dumps(bare))
    assert planner(["--model", str(tmp_path), "--devices", "4090", "--method", "uniform"]) == 0
    (line,) = [
        row for row in capsys.readouterr().out.splitlines() if "to Transformers' class" in row
    ]
    assert "vocab_size=262208" in line
    assert planner(["--model", "llama-2-7b", "--devices", "4090", "--method", "uniform"]) == 0
    assert "Transformers' class" not in capsys.readouterr().out


def test_bloom_by_its_first_configs_name() -> None:
    """BLOOM's own files say n_embed, and its class takes it for hidden_size."""
    config = {"model_type": "bloom", "n_embed": 1024, "n_layer": 2, "num_attention_heads": 16}
    spec = ModelSpec.from_config({**config, "vocab_size": 512}, name="bloom")
    assert (spec.hidden, spec.head_dim) == (1024, 64)


def test_a_feature_beyond_every_request_changes_nothing() -> None:
    dynamic = spec_of("llama-2-7b", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    gpu = execution_modes(gpu=True, kv=KVPrecision.KV4, drafts=True)
    assert lacking_sentence(dynamic, gpu, max_len=4096) is None
    with pytest.raises(ValueError, match="rope frequencies that change .*without speculation"):
        require(dynamic, gpu, max_len=4097)
    require(dynamic, execution_modes(gpu=True, kv=KVPrecision.KV4, drafts=False), max_len=4097)
    cpu = execution_modes(
        gpu=False, kv=KVPrecision.KV16, drafts=False, precisions=[Precision.W4A16]
    )
    require(dynamic, cpu, max_len=8192)


@pytest.mark.parametrize("model", ["gemma-2-9b", "gpt-oss-20b", "mistral-7b", "deepseek-v3"])
def test_packed_caches_and_drafts_on_gpus_know_every_rule(model: str) -> None:
    apart = execution_modes(gpu=True, kv=KVPrecision.KV8V4, drafts=True)
    if model == "deepseek-v3":
        with pytest.raises(ValueError, match="latents that are key .* for both, such as --kv 8"):
            require(ModelSpec.by_name(model), apart, max_len=32768)
    else:
        require(ModelSpec.by_name(model), apart, max_len=32768)
    ways = execution_modes(gpu=True, kv=KVPrecision.KV2, drafts=True, precisions=[Precision.W4A16])
    require(ModelSpec.by_name(model), ways, max_len=32768)


@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("deepseek-v3", "gpu_rounded"),
        ("gpt-oss-20b", "gpu_rounded"),
        ("deepseek-v2-lite", "apart_kv"),
    ],
)
def test_every_way_is_refused_by_feature(model: str, way: Any) -> None:
    spec = ModelSpec.by_name(model)
    missing = lacks(spec, way)
    assert missing and set(missing) <= {feature.name for feature in FEATURES}
    with pytest.raises(ValueError, match=missing[0].replace("(", r"\(").replace(")", r"\)")):
        require(spec, [way], max_len=spec.max_positions)


def test_the_families_of_before_run_every_way() -> None:
    """Packed blocks on a GPU hang on the size of heads and on the dtype."""
    for name in builtin_configs():
        spec = ModelSpec.by_name(name)
        if spec.family in ("opt", "bloom", "llama", "qwen2", "qwen3", "mixtral"):
            ways = [way for way in EXECUTION_MODES if not way.startswith("gpu_packed")]
            assert not any(lacks(spec, way) for way in ways), name


def test_the_table_is_printed(capsys: Any) -> None:
    assert planner(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for family in FAMILIES.values():
        (row,) = [line for line in lines if line.startswith(f"{family.name} ")]
        assert family.model_types[0] in row
    assert any(line.startswith("gpt_oss: rounded") and "clamped" in line for line in lines)
    assert planner(["models", "--json"]) == 0
    assert '"gpt-oss-20b"' in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(builtin_configs()))
def test_a_spec_survives_a_round_trip(name: str) -> None:
    import json

    spec = ModelSpec.by_name(name)
    data = json.loads(json.dumps(dataclasses.asdict(spec)))
    assert ModelSpec.from_fields(data) == spec


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v3", 671.0),
        ("glm-4.5-air", 106.9),
        ("phi-4", 14.7),
        ("gemma-3-27b", 27.0),
        ("deepseek-v3.2", 671.9),
        ("glm-5", 743.9),
        ("gemma-3n-e2b", 4.4),
        ("gemma-3n-e4b", 6.8),
        ("gemma-4-e2b", 4.6),
        ("gemma-4-e4b", 7.5),
        ("gemma-4-12b", 11.9),
        ("gemma-4-26b-a4b", 25.2),
        ("gemma-4-31b", 30.7),
        ("llama-4-scout-17b-16e", 107.8),
        ("llama-4-maverick-17b-128e", 400.7),
        ("mistral-small-4-119b", 119.0),
        ("ministral-3-3b", 3.4),
        ("ministral-3-8b", 8.5),
        ("ministral-3-14b", 13.5),
    ],
)
def test_built_in_models_have_the_parameters_their_cards_state(name: str, billions: float) -> None:
    """GLM-4.5-Air's card says 106B; Gemma's and Llama 4's count towers besides."""
    assert ModelSpec.by_name(name).num_params / 1e9 == pytest.approx(billions, abs=0.06)

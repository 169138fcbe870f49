"""Exports are read by the libraries they are for: compressed-tensors, Transformers, accelerate."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.export import WRITERS
from llmpq.plans.plan import Plan
from tests.runtime.conftest import BASE, KINDS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.cpu

SIZES = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
GATED = {**SIZES, "intermediate_size": 384, "num_key_value_heads": 2, "head_dim": 64}
PADDED = {**{k: v for k, v in GATED.items() if k != "head_dim"}, "pad_token_id": 0}
EXPERTS = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 128, "first_k_dense_replace": 1,
}  # fmt: skip
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
GATED_MIXTURE = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 64, "mamba_chunk_size": 16}
CONFIGS: dict[str, Callable[[], Any]] = {
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=512, word_embed_proj_dim=256),
    "bloom": lambda: transformers.BloomConfig(
        hidden_size=256, n_layer=2, n_head=4, vocab_size=64, tie_word_embeddings=True
    ),
    "llama": lambda: transformers.LlamaConfig(**GATED),
    "qwen2": lambda: transformers.Qwen2Config(
        **{k: v for k, v in GATED.items() if k != "head_dim"}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GATED),
    "mixtral": lambda: transformers.MixtralConfig(**GATED, num_local_experts=2),
    "arcee": lambda: transformers.ArceeConfig(**PADDED),
    "gemma": lambda: transformers.Gemma2Config(**GATED, pad_token_id=0),
    "gemma1": lambda: transformers.GemmaConfig(**GATED, pad_token_id=0),
    "stablelm": lambda: transformers.StableLmConfig(**PADDED),
    "granite4": lambda: transformers.GraniteMoeHybridConfig(
        **PADDED,
        layer_types=["attention"] * 2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=384,
        position_embedding_type="rope",
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**GATED, **DELTA_RULE, **GATED_MIXTURE),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**GATED, **DELTA_RULE),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **{k: v for k, v in GATED.items() if k != "intermediate_size"},
        **DELTA_RULE,
        **GATED_MIXTURE,
    ),
    "lfm2": lambda: transformers.Lfm2Config(**PADDED, layer_types=["conv", "full_attention"]),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **PADDED,
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=128,
    ),
    "bamba": lambda: transformers.BambaConfig(**PADDED, **MAMBA2, attn_layer_indices=[1]),
    "falcon_h1": lambda: transformers.FalconH1Config(**PADDED, **MAMBA2, mamba_d_ssm=512),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{k: v for k, v in GATED.items() if k != "num_hidden_layers"},
        layers_block_type=["linear_attention", "full_attention"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=16,
    ),
    "dots1": lambda: transformers.Dots1Config(**GATED, **EXPERTS, n_shared_experts=1),
    "phi3": lambda: transformers.Phi3Config(**PADDED),
    "glm4": lambda: transformers.Glm4Config(**PADDED),
    "granite": lambda: transformers.GraniteConfig(**PADDED),
    "olmo2": lambda: transformers.Olmo2Config(**PADDED),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **GATED, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=128
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **GATED, num_local_experts=2, num_experts_per_tok=1
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**GATED, **EXPERTS),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **SIZES, **EXPERTS, kv_lora_rank=32, q_lora_rank=32, num_key_value_heads=4
    ),
}


SAME_NAME = (
    *("apertus", "codegen", "cohere", "deepseek_v32", "ernie4_5_moe", "exaone4", "falcon"),
    *("gemma3n", "gemma4", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox"),
    *(
        "flint",
        "hy_v3",
        "minicpm3",
        "gptj",
        "hunyuan",
        "hunyuan_moe",
        "llama4",
        "minimax_m2",
        "ministral3",
        "olmoe",
        "phi",
    ),
    *("smollm3", "solar_open", "starcoder2", "afmoe", "ernie4_5", "exaone_moe", "flex_olmo"),
    *("granite_swa", "granitemoe", "granitemoe_swa", "helium", "hyperclovax", "jais2"),
    *(
        "kimi_linear",
        "lfm3",
        "mellum",
        "minimax",
        "nemotron",
        "olmo_hybrid",
        "qwen2_moe",
        "vaultgemma",
    ),
    "youtu",
)
"""Families whose configs here are those of the engine's tests."""


def _kind_of(family: str) -> str:
    return next(kind for kind in KINDS if kind == family or kind.startswith(f"{family} "))


def _of_kind(kind: str) -> Any:
    name, options = KINDS[kind]
    return getattr(transformers, f"{name}Config")(**{**BASE, **options})


CONFIGS["gemma4 shared"] = lambda: _of_kind("gemma4 with shared caches")
CONFIGS |= {family: partial(_of_kind, _kind_of(family)) for family in SAME_NAME}
EVERY_THIRD = [
    pytest.param(family, marks=[pytest.mark.seldom] * (number % 3 > 0))
    for number, family in enumerate(CONFIGS)
]
"""In `make test`, where Accelerate dispatches a model of every family by its map."""


def _model(family: str) -> tuple[Any, ModelSpec]:
    """Return a model of few layers and random weights, and what the planner knows of it."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    data = {**config.to_dict(), "torch_dtype": "float32"}
    return model, ModelSpec.from_config(data, name=f"tiny-{family}")


def _plan(spec: ModelSpec, precisions: tuple[str, str], *, cpu: bool = True) -> Plan:
    """Return a plan of two stages of half the layers each."""
    half = spec.num_layers // 2
    stages = [
        {"device": f"d{j}", "node": "box", "device_index": j, "kind": "CPU" if cpu else "T4",
         "profile_kind": "d", "layers": [j * half, (j + 1) * half],
         "precisions": [precisions[j]] * half}
        for j in range(2)
    ]  # fmt: skip
    data = {
        "model": {"name": spec.name, "num_layers": 2 * half, "fingerprint": spec.fingerprint()},
        "cluster": {"name": "box", "fingerprint": "0"},
        "workload": {"batch": 1, "prompt_len": 16, "gen_len": 8, "kv": "kv8"},
        "quantization": {"group_size": 128},
        "prefill_microbatch": 1,
        "decode_microbatch": 1,
        "stages": stages,
    }
    return Plan.parse_data(data, where="test")


TOKENS_BT = torch.arange(32).reshape(2, 16)


def _logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS_BT).logits


def _round(x: Any, scale: Any, bits: int) -> Any:
    """Round to the symmetric grid of a scale and back."""
    most = 2 ** (bits - 1)
    return torch.clamp(torch.round(x / scale), -most, most - 1) * scale


def _round_inputs(bits: int) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    """Return a hook that rounds a linear's input, each token on a grid of its own."""

    def hook(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        scale = inputs[0].abs().amax(-1, keepdim=True) / ((2**bits - 1) / 2)
        return (_round(inputs[0], scale.clamp(min=1e-12), bits),)

    return hook


def _compress(model: Any, config: dict[str, Any]) -> None:
    """Put a model into compressed-tensors' form; the scales are those of the largest weights."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    read = quantization.QuantizationConfig.model_validate(config)
    quantization.apply_quantization_config(model, read)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            bits, size = scheme.weights.num_bits, scheme.weights.group_size
            groups = module.weight.detach().unflatten(-1, (-1, size or module.in_features))
            module.weight_scale.data = groups.abs().amax(-1) / 2 ** (bits - 1)
    compressors.ModelCompressor(quantization_config=read).compress_model(model)


def _dequantised(model: Any, spec: ModelSpec, plan: Plan) -> int:
    """Round a plain model's weights and inputs as the plan says; return the linears touched."""
    touched = 0
    for name, module in model.named_modules():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if not isinstance(module, torch.nn.Linear) or layer is None:
            continue
        scheme = plan.settings().scheme(plan.precisions[layer])
        if scheme is None:
            continue
        groups = module.weight.data.unflatten(-1, (-1, scheme.group_size or module.in_features))
        scale = groups.abs().amax(-1, keepdim=True) / 2 ** (scheme.bits - 1)
        module.weight.data = _round(groups, scale, scheme.bits).flatten(-2)
        if scheme.activation_bits < 16:
            module.register_forward_pre_hook(_round_inputs(scheme.activation_bits))
        touched += 1
    return touched


def test_every_family_is_tried() -> None:
    """But for those whose text no auto class of Transformers makes."""
    left_out = {"mistral4", "qwen3_vl_moe"}
    assert {name.split()[0] for name in CONFIGS} == set(FAMILIES) - left_out


@pytest.mark.parametrize(
    ("family", "precisions"),
    [
        ("llama", ("w16a16", "w3a16")),
        ("llama", ("w8a16", "w4a16")),
        ("llama", ("w8a8", "w4a16")),
        ("llama", ("w4a4", "w4a4")),
        ("qwen3", ("w4a16", "w16a16")),
        ("qwen2", ("w16a16", "w4a16")),
        ("opt", ("w8a16", "w3a16")),
        ("bloom", ("w4a16", "w8a8")),
    ],
)
def test_transformers_reloads_what_the_config_describes(
    tmp_path: Path, family: str, precisions: tuple[str, str]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, spec = _model(family)
    plan = _plan(spec, precisions)
    text = WRITERS["compressed-tensors"](plan, spec).text
    plain = _logits(model)

    compressed, _ = _model(family)
    _compress(compressed, json.loads(text)["quantization_config"])
    tied = {"lm_head.weight"} if spec.tied_embeddings else set()
    tensors = {k: v.contiguous() for k, v in compressed.state_dict().items() if k not in tied}
    safetensors.save_file(tensors, str(tmp_path / "model.safetensors"), {"format": "pt"})
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **json.loads(text)}))

    assert _dequantised(model, spec, plan) > 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted, logits = _logits(model), _logits(found)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - plain).abs().max() > 20 * 1e-4  # rounding is seen, so a wrong grid would be


def test_compressed_tensors_reads_every_precision_at_once() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    spec = ModelSpec.by_name("opt-125m")
    bits = ["w16a16"] * 2 + ["w8a16"] * 4 + ["w4a16"] * 2 + ["w3a16"] * 2 + ["w8a8", "w4a4"]
    data = {
        "model": {"name": "opt-125m", "num_layers": 12, "fingerprint": spec.fingerprint()},
        "cluster": {"name": "box", "fingerprint": "0"},
        "workload": {"batch": 8, "prompt_len": 64, "gen_len": 8, "kv": "kv8"},
        "prefill_microbatch": 2,
        "decode_microbatch": 4,
        "stages": [
            {"device": "T4-0", "node": "box", "kind": "T4", "profile_kind": "T4",
             "layers": [0, 12], "precisions": bits}
        ],
    }  # fmt: skip
    plan = Plan.parse_data(data, where="test")
    config = json.loads(WRITERS["compressed-tensors"](plan, spec).text)["quantization_config"]
    read = quantization.QuantizationConfig.model_validate(config)
    assert sorted(g.weights.num_bits for g in read.config_groups.values()) == [3, 4, 4, 8, 8]
    assert all(g.weights.symmetric for g in read.config_groups.values())
    assert read.kv_cache_scheme is None


@pytest.mark.parametrize("family", CONFIGS)
def test_accelerate_dispatches_a_model_by_the_map(tmp_path: Path, family: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is in the dev extra")
    utils = pytest.importorskip("accelerate.utils")
    model, spec = _model(family)
    wanted = _logits(model)

    on_gpus = json.loads(WRITERS["accelerate"](_plan(spec, ("w16a16",) * 2, cpu=False), spec).text)
    utils.check_device_map(model, on_gpus)
    assert set(on_gpus.values()) == {0, 1}
    last = spec.num_layers - 1
    with pytest.raises(ValueError, match="does not give any device"):
        less = {k: v for k, v in on_gpus.items() if not k.endswith(f".{last}")}
        utils.check_device_map(model, less)

    # Two devices that every machine has: stage 0 in memory, stage 1 brought from disk as it runs.
    apart = {name: ("cpu", "disk")[device] for name, device in on_gpus.items()}
    found = accelerate.dispatch_model(
        model, apart, main_device="cpu", offload_dir=str(tmp_path / "offloaded")
    )
    torch.testing.assert_close(_logits(found), wanted)
    devices = {name: parameter.device.type for name, parameter in found.named_parameters()}
    layers = FAMILIES[spec.family].layers_at
    assert {d for name, d in devices.items() if name.startswith(f"{layers}.0.")} == {"cpu"}
    assert {d for name, d in devices.items() if name.startswith(f"{layers}.{last}.")} == {"meta"}


@pytest.mark.parametrize("family", EVERY_THIRD)
def test_transformers_loads_a_checkpoint_by_the_map(tmp_path: Path, family: str) -> None:
    pytest.importorskip("accelerate", reason="accelerate is in the dev extra")
    model, spec = _model(family)
    model.save_pretrained(tmp_path)
    device_map = json.loads(WRITERS["accelerate"](_plan(spec, ("w16a16",) * 2), spec).text)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    torch.testing.assert_close(_logits(loaded.eval()), _logits(model))

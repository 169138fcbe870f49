"""GGUF files of gpt-oss, GLM-4.5, DeepSeek and Ministral 3, laid out as llama.cpp's converter does.

The references are Transformers' logits, and for blocks those of the same blocks' numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llmpq.checkpoints.gguf_file import open_gguf
from llmpq.kernels.weights.codebook_weight import CodebookWeight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.gguf_checkpoint import GgufCheckpoint, values_of
from llmpq.sizes.memory import Quantization
from reference.pipeline import ReferencePipeline, pad

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.cpu
TOKENS = [5, 30, 77, 120, 9, 61, 62, 63, 64, 11, 12, 13]
BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
TOLD_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
MIXTURE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
TOLD_MIXTURE = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
TOLD_LATENT = {
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 12,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
}
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # What it is: Transformers' class, the file's architecture, config, metadata beside the common.
    "gpt-oss": (
        "GptOss",
        "gpt-oss",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "truncate": False},
        },
        {
            **TOLD_YARN,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 6,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 32,
        },
    ),
    "glm-4.5": (
        "Glm4Moe",
        "glm4moe",
        {
            **MIXTURE,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_shared_experts": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
        {
            **TOLD_MIXTURE,
            "block_count": 4,
            "nextn_predict_layers": 1,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 16,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        "deepseek2",
        {
            **MIXTURE,
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            **TOLD_YARN,
            **TOLD_MIXTURE,
            **TOLD_LATENT,
            "expert_shared_count": 2,
            "expert_gating_func": 1,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        "deepseek2",
        {
            **MIXTURE,
            **LATENT,
            "n_shared_experts": 1,
            "q_lora_rank": 32,
            "norm_topk_prob": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            **TOLD_YARN,
            **TOLD_MIXTURE,
            **TOLD_LATENT,
            "attention.q_lora_rank": 32,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "mistral 3": (
        "Mistral",
        "mistral3",
        {
            "head_dim": 32,
            "sliding_window": None,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            **TOLD_YARN,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 32,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """Return a kind and a random model of it."""
    return request.param, random_model(request.param)


def random_model(kind: str) -> Any:
    import transformers

    name, _, options, _ = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**BASE, **options})
    with torch.inference_mode(False), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).float()
        model.eval()
        for tensor in [*model.parameters(), *(b for n, b in buffers(model))]:
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


def buffers(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in model.named_buffers() if "correction" in name]


def converted(model: Any, arch: str, *, whole_kv_b: bool = False) -> dict[str, Tensor]:
    """Return the tensors as llama.cpp's converter names and turns them."""
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name, tensor in {**dict(model.named_parameters()), **dict(buffers(model))}.items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if ".experts.gate_up_proj" in name:
            parts = in_turn(tensor) if arch == "gpt-oss" else tensor.chunk(2, dim=1)
            kind = "bias" if name.endswith("bias") else "weight"
            if arch == "gpt-oss" and kind == "weight":
                parts = [part.transpose(1, 2) for part in parts]
            for part, side in zip(parts, ("gate", "up"), strict=True):
                found[f"blk.{layer}.ffn_{side}_exps.{kind}"] = part
        elif ".experts.down_proj" in name:
            kind = "bias" if name.endswith("bias") else "weight"
            transposed = arch == "gpt-oss" and kind == "weight"
            found[f"blk.{layer}.ffn_down_exps.{kind}"] = (
                tensor.transpose(1, 2) if transposed else tensor
            )
        elif "kv_b_proj" in name and not whole_kv_b:
            by_head = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            found[f"blk.{layer}.attn_k_b.weight"] = keys.transpose(1, 2)
            found[f"blk.{layer}.attn_v_b.weight"] = values
        elif name.endswith("sinks"):
            found[f"blk.{layer}.attn_sinks.weight"] = tensor
        else:
            if arch == "mistral3" and (turned_part := re.search(r"\.([qk])_proj\.", name)):
                heads = 4 if turned_part[1] == "q" else 2
                halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            called = name.replace("e_score_correction_bias", "e_score_correction.bias")
            stored = table.get_name(called, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            found[stored] = tensor
    return found


def in_turn(tensor: Tensor) -> list[Tensor]:
    """Return the gates and the ups of gpt-oss's experts."""
    return [tensor[..., ::2], tensor[..., 1::2]]


def write(path: Path, kind: str, model: Any, tensors: dict[str, Tensor], form: str = "") -> None:
    """Write a file; `form` is of the matrices whose rows have whole blocks, F32 for the others."""
    config, (_, arch, _, more) = model.config, KINDS[kind]
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 1e4,
        "vocab_size": config.vocab_size,
        **more,
    }
    writer = gguf.GGUFWriter(path, arch)
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata.items():
        adds.get(type(value), writer.add_string)(f"{arch}.{key}", value)
    for name, tensor in tensors.items():
        array = tensor.detach().float().contiguous().numpy()
        number = gguf.GGMLQuantizationType[form or "F32"]
        is_small = "norm" in name or "_inp" in name or array.ndim < 2 or name.endswith("bias")
        if form and not is_small and array.shape[-1] % 32 == 0:
            writer.add_tensor(name, blocks_of(array, number), raw_dtype=number)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks_of(array: Any, number: Any) -> Any:
    """Quantise an array; MXFP4, which the package cannot, as random codes of small exponents."""
    try:
        return gguf.quants.quantize(array, number)
    except NotImplementedError:
        rng = np.random.default_rng(array.size)
        blocks = rng.integers(0, 256, (*array.shape[:-1], array.shape[-1] // 32, 17), np.uint8)
        blocks[..., 0] = rng.integers(120, 124, blocks.shape[:-1])
        return blocks.reshape(*array.shape[:-1], -1)


def logits(path: Path, **options: Any) -> Tensor:
    pipeline = ReferencePipeline.from_directory(path, **options)
    step = Step.of([0], [0], [len(TOKENS)])
    caches = pipeline.caches(1, len(TOKENS))
    return pipeline.logits(pad([TOKENS]), step, caches, all_positions=True)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_files_give_transformers_logits_and_tokens(made: Any, tmp_path: Path) -> None:
    kind, model = made
    path = tmp_path / "model.gguf"
    tensors = converted(model, KINDS[kind][1])
    if kind == "glm-4.5":  # a layer that nobody runs
        tensors["blk.3.nextn.enorm.weight"] = torch.ones(64)
        tensors["blk.3.attn_norm.weight"] = torch.ones(64)
    write(path, kind, model, tensors)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(path)[0], want) < 2e-5
    pipeline = ReferencePipeline.from_directory(path, splits=(1,))
    (got,) = pipeline.generate([TOKENS], max_new=8)
    tokens = model.generate(
        torch.tensor([TOKENS]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert got == tokens[0, len(TOKENS) :].tolist()


@pytest.mark.parametrize("form", ["Q8_0", "MXFP4"])
def test_blocks_give_the_logits_of_their_numbers(made: Any, form: str, tmp_path: Path) -> None:
    """Transformers' model with the blocks' numbers as its weights is the reference."""
    kind, model = made
    path, plain = tmp_path / "model.gguf", tmp_path / "plain.gguf"
    write(path, kind, model, converted(model, KINDS[kind][1]), form)
    stored = open_gguf(path).tensors
    assert form in {tensor.kind for tensor in stored.values()}
    numbers = {name: values_of(tensor).float() for name, tensor in stored.items()}
    write(plain, kind, model, numbers)
    got, want = logits(path, dtype=torch.float32), logits(plain)
    assert torch.equal(got, want)


def test_the_latents_matrix_may_be_whole(tmp_path: Path) -> None:
    """Files written before attn_k_b and attn_v_b have attn_kv_b."""
    model = random_model("deepseek-v3")
    parts, whole = tmp_path / "parts.gguf", tmp_path / "whole.gguf"
    write(parts, "deepseek-v3", model, converted(model, "deepseek2"))
    write(whole, "deepseek-v3", model, converted(model, "deepseek2", whole_kv_b=True))
    assert torch.equal(logits(parts), logits(whole))


def test_what_a_file_lacks_or_has_too_much_is_named(tmp_path: Path) -> None:
    model, path = random_model("gpt-oss"), tmp_path / "model.gguf"
    tensors = converted(model, "gpt-oss")
    write(path, "gpt-oss", model, {n: t for n, t in tensors.items() if "blk.1.attn_sinks" not in n})
    spec = ModelSpec.from_directory(path)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.sinks' is missing"):
        GgufCheckpoint(path, spec).layer(1, torch.float32)
    write(path, "gpt-oss", model, {**tensors, "blk.1.attn_q_norm.weight": torch.ones(32)})
    with pytest.raises(ValueError, match=r"'blk.1.attn_q_norm.weight' is not part of a gpt_oss"):
        GgufCheckpoint(path, ModelSpec.from_directory(path))
    glm = random_model("glm-4.5")
    beyond = {**converted(glm, "glm4moe"), "blk.4.attn_norm.weight": torch.ones(64)}
    write(path, "glm-4.5", glm, beyond)
    with pytest.raises(ValueError, match=r"'blk.4.attn_norm.weight' is not part of"):
        GgufCheckpoint(path, ModelSpec.from_directory(path))


@pytest.mark.parametrize(
    ("kind", "key", "value", "says"),
    [
        ("mistral 3", "attention.temperature_scale", 0.1, "temperature_scale'=0.1.* is not known"),
        ("glm-4.5", "expert_gating_func", 1, "expert_gating_func=1, expected 2"),
        ("deepseek-v2", "expert_gating_func", 3, "expert_gating_func=3, expected 1"),
        ("deepseek-v2", "expert_weights_norm", True, "norm_topk_prob"),
        (
            "deepseek-v3",
            "attention.key_length_mla",
            8,
            "heads of 8 channels of which 8 are rotated",
        ),
        ("deepseek-v3", "expert_group_count", 3, "8 experts in n_group=3"),
    ],
)
def test_metadata_that_changes_the_arithmetic_is_refused(
    kind: str, key: str, value: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "model.gguf", random_model(kind)
    name, arch, options, more = KINDS[kind]
    monkeypatch.setitem(KINDS, kind, (name, arch, options, {**more, key: value}))
    write(path, kind, model, converted(model, arch))
    with pytest.raises(ValueError, match=says):
        ModelSpec.from_directory(path)


@pytest.mark.parametrize("form", ["Q8_0", "MXFP4"])
def test_a_second_rounding_is_said_with_its_error(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each type, and only where codes are not kept."""
    path, model = tmp_path / "model.gguf", random_model("mistral 3")
    write(path, "mistral 3", model, converted(model, "mistral3"), form)
    source = GgufCheckpoint(path, ModelSpec.from_directory(path))
    bits = Precision.W8A16 if form == "Q8_0" else Precision.W4A16
    kept = Quantization(group_size=32, symmetric=True).scheme(bits)
    source.keep_codes(dict.fromkeys(range(3), kept))
    for index in range(3):
        source.layer(index, torch.float32)
    said = [record.getMessage() for record in caplog.records]
    assert not said
    again = Precision.W4A16 if form == "Q8_0" else Precision.W3A16
    source.keep_codes({0: Quantization(group_size=64).scheme(again)})
    source.layer(0, torch.float32)
    (sentence,) = (record.getMessage() for record in caplog.records)
    found = re.search(
        rf"{form} blocks are .* to {again.weight_bits} bits in groups of 64: ([0-9.e-]+) of",
        sentence,
    )
    assert found is not None and 0.01 < float(found[1]) < 0.3


def test_experts_of_gpt_oss_keep_their_codes(tmp_path: Path) -> None:
    """MXFP4 as llama.cpp's converter lays it: gates and ups apart, ours one below the other."""
    path, model = tmp_path / "model.gguf", random_model("gpt-oss")
    write(path, "gpt-oss", model, converted(model, "gpt-oss"), "MXFP4")
    source = GgufCheckpoint(path, ModelSpec.from_directory(path))
    numbers = source.layer(1, torch.float32)
    for bits in (Precision.W4A16, Precision.W8A16):
        source.keep_codes({1: Quantization().scheme(bits)})
        kept = source.layer(1, torch.float32)
        for part in ("experts.2.gate_up.weight", "experts.0.down.weight"):
            assert isinstance(kept[part], CodebookWeight)
            assert torch.equal(kept[part].dequantize(torch.float32), numbers[part])
    assert not isinstance(numbers["experts.0.down.weight"], CodebookWeight)

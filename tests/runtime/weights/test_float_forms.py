"""Checkpoints whose codes become numbers: written by their own library, equal logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmpq.kernels.weights.interchange import pack_stream
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.stored_precisions import stored_layers
from llmpq.precision import Precision
from llmpq.runtime.steps.step import Step
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
TOKENS = [5, 30, 77, 120, 9, 61, 62, 63, 64]
Tensors = dict[str, Tensor]
Form = Callable[[Tensor], tuple[Tensors, Tensor]]
"""A weight to its stored tensors, by the last part of their names, and the numbers they are."""


def logits(directory: Path) -> Tensor:
    pipeline = ReferencePipeline.from_directory(directory)
    step = Step.of([0], [0], [len(TOKENS)])
    caches = pipeline.caches(1, len(TOKENS))
    return pipeline.logits(pad([TOKENS]), step, caches, all_positions=True)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def compressed(name: str, tensors: Tensors, **arguments: Any) -> tuple[Tensors, Tensor]:
    """Compress a weight with its scales by compressed-tensors; return it and what it stands for."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**arguments)
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(dict(tensors), scheme)
    stored = {k: v.contiguous() for k, v in stored.items() if v is not None}
    return stored, compressor.decompress(dict(stored), scheme)["weight"].float()


def fp8(shape: str) -> Form:
    def form(weight: Tensor) -> tuple[Tensors, Tensor]:
        peak = weight.abs().amax(1, keepdim=True) if shape == "channel" else weight.abs().amax()
        scale = (peak / 448).reshape(-1, 1) if shape == "channel" else (peak / 448).reshape(1)
        return compressed(
            "float-quantized",
            {"weight": weight, "weight_scale": scale},
            num_bits=8,
            type="float",
            strategy=shape,
        )

    return form


def fp8_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    """As DeepSeek-V3 and Qwen3-FP8 are published; the oracle is the definition, block by block."""
    n, k = weight.shape
    scale, numbers = torch.empty(-(-n // 128), -(-k // 128)), torch.empty(n, k)
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            scale[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            numbers[block] = codes[block].float() * scale[i, j]
    return {"weight": codes, "weight_scale_inv": scale}, numbers


def nvfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    whole = 448 * 6 / weight.abs().max()
    peak = weight.view(weight.shape[0], -1, 16).abs().amax(2)
    scale = (peak / 6 * whole).to(torch.float8_e4m3fn).float()
    stored, _ = compressed(  # whose own numbers are rounded to bfloat16
        "nvfp4-pack-quantized",
        {"weight": weight, "weight_scale": scale, "weight_global_scale": whole.reshape(1)},
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )
    wide = (stored["weight_scale"].float() / whole).repeat_interleave(16, 1)
    # The nearest of the numbers that four bits stand for, of what the scale leaves.
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    packed = stored["weight_packed"]
    nibbles = torch.stack((packed & 15, packed >> 4), 2).flatten(1).long()
    numbers = table[nibbles % 8] * torch.where(nibbles < 8, 1.0, -1.0) * wide
    assert float((numbers - weight).norm() / weight.norm()) < 0.15
    return stored, numbers


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    peak = weight.view(weight.shape[0], -1, 32).abs().amax(2)
    scale = torch.exp2(torch.floor(torch.log2(peak)) - 2)
    return compressed(
        "mxfp4-pack-quantized",
        {"weight": weight, "weight_scale": scale},
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
    )


def groups_of(size: int) -> Form:
    def form(weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        scale = weight.view(n, -1, size).abs().amax(2) / 7
        tensors = {"weight": weight, "weight_scale": scale}
        stored, numbers = compressed(
            "pack-quantized",
            tensors,
            num_bits=4,
            type="int",
            strategy="group",
            group_size=size,
        )
        return stored, numbers

    return form


def by_activation(weight: Tensor) -> tuple[Tensors, Tensor]:
    """As compressed-tensors wrote actorder=group until 0.12: channel k is of group g_idx[k]."""
    n, k = weight.shape
    g_idx, codes = torch.randperm(k) // 32, torch.randint(16, (n, k))
    scale = torch.rand(n, k // 32) * 0.05 + 0.01
    tensors = {
        "weight_packed": pack_stream(codes.to(torch.uint8), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
        "weight_g_idx": g_idx.int(),
    }
    return tensors, scale[:, g_idx] * (codes - 8)


def gptq_by_activation(weight: Tensor) -> tuple[Tensors, Tensor]:
    """As AutoGPTQ writes desc_act: channel k belongs to group g_idx[k]; zeros stored minus one."""
    n, k = weight.shape
    g_idx = torch.randperm(k) // 64
    codes, zero = torch.randint(16, (n, k)), torch.randint(1, 16, (n, k // 64))
    scale = torch.rand(n, k // 64) * 0.05 + 0.01
    tensors = {
        "qweight": pack_stream(codes.to(torch.uint8), 4).t().contiguous(),
        "qzeros": pack_stream((zero - 1).t().contiguous().to(torch.uint8), 4),
        "scales": scale.t().contiguous(),
        "g_idx": g_idx.int(),
    }
    return tensors, scale[:, g_idx] * (codes - zero[:, g_idx])


CT = {"quant_method": "compressed-tensors"}
FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "fp8 per tensor": (fp8("tensor"), CT),
    "fp8 per channel": (fp8("channel"), CT),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4": (nvfp4, CT),
    "mxfp4": (mxfp4, CT),
    "groups of 32": (groups_of(32), CT),
    "groups of 64": (groups_of(64), CT),
    "groups of 32 by activation": (by_activation, CT),
    "gptq by activation": (
        gptq_by_activation,
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
    ),
}


def write(dense: Path, folder: Path, form: Form, described: dict[str, Any]) -> tuple[Path, Path]:
    """Return the directory in a form, and the one of the numbers that it stands for."""
    torch.manual_seed(11)
    stored, numbers = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = numbers[name] = tensor
            continue
        tensors, numbers[name] = form(tensor)
        stored |= {name.removesuffix("weight") + last: t for last, t in tensors.items()}
    config = json.loads((dense / "config.json").read_text())
    for path, content, extra in (
        (folder / "form", stored, {"quantization_config": described}),
        (folder / "numbers", numbers, {}),
    ):
        path.mkdir()
        save_file(
            {k: v.contiguous().clone() for k, v in content.items()}, path / "model.safetensors"
        )
        (path / "config.json").write_text(json.dumps({**config, **extra}))
    return folder / "form", folder / "numbers"


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_the_numbers(dense: Path, tmp_path: Path, name: str) -> None:
    form, numbers = write(dense, tmp_path, *FORMS[name])
    found = logits(form)
    assert relative(found, logits(numbers)) < 1e-5
    assert relative(found, logits(dense)) > 1e-3, "the form must be seen in the logits"
    spec = ModelSpec.from_directory(form)
    layers = stored_layers(form, spec)
    assert layers is not None and all(layer.served == tuple(Precision) for layer in layers)
    eight = ReferencePipeline.from_directory(form, precisions=[Precision.W8A16] * 2)
    assert eight.generate([TOKENS], max_new=3)


def test_stages_of_a_mixed_directory_read_their_own_layers(dense: Path, tmp_path: Path) -> None:
    """One layer in blocks of FP8, the other dense, in two files."""
    form, numbers = write(dense, tmp_path, *FORMS["fp8 blocks"])
    coded, plain = (load_file(path / "model.safetensors") for path in (form, numbers))
    first = {k: v for k, v in coded.items() if "layers.1" not in k}
    second = {k: v for k, v in plain.items() if "layers.1" in k}
    for name, part in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(part, form / name)
    (form / "model.safetensors").unlink()
    held = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (form / "model.safetensors.index.json").write_text(json.dumps({"weight_map": held}))
    assert relative(logits(form), logits(numbers)) < 1e-5
    halves = ReferencePipeline.from_directory(form, splits=(1,)).generate([TOKENS], max_new=6)
    assert halves == ReferencePipeline.from_directory(numbers).generate([TOKENS], max_new=6)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8 blocks", {"weight_block_size": None}, "weight block size is None; expected two"),
        ("fp8 blocks", {"weight_block_size": [64, 64]}, "block scales have shape"),
        ("gptq by activation", {"quant_method": "exl2"}, "quantization method 'exl2' is not"),
        (
            "gptq by activation",
            {"checkpoint_format": "marlin"},
            "checkpoint_format='marlin' is not",
        ),
        ("gptq by activation", {"rotation": "hadamard"}, "'rotation' asks for rotations of act"),
        (
            "fp8 per channel",
            {"transform_config": {"config_groups": {"R4": {}}}},
            "rotations of act",
        ),
        ("fp8 per channel", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    ],
)
def test_lying_configs_are_refused(
    dense: Path, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    form, described = FORMS[name]
    directory, _ = write(dense, tmp_path, form, {**described, **change})
    with pytest.raises(ValueError, match=message):
        logits(directory)


@pytest.mark.parametrize(
    ("name", "last", "change", "message"),
    [
        ("fp8 per channel", "weight_scale", lambda t: t[:-1], "FP8 weight .* with scales"),
        ("nvfp4", "weight_scale", lambda t: t[:, :-1], "scales of groups of 16 have shape"),
        ("mxfp4", "weight_scale", lambda t: t[:-1], "scales of groups of 32 have shape"),
        ("groups of 32 by activation", "weight_g_idx", lambda t: t + 99, "the order of channels"),
        ("fp8 per tensor", "weight_scale", None, "is FP8 without a scale"),
    ],
)
def test_lying_tensors_are_refused(
    dense: Path, tmp_path: Path, name: str, last: str, change: Any, message: str
) -> None:
    directory, _ = write(dense, tmp_path, *FORMS[name])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    victim = f"model.layers.1.mlp.down_proj.{last}"
    if change is None:
        del tensors[victim]
    else:
        tensors[victim] = change(tensors[victim]).contiguous()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        logits(directory)


def test_experts_in_mxfp4_are_those_that_transformers_unpacks(tmp_path: Path) -> None:
    """gpt-oss as it is published: blocks and scales of all experts of a layer."""
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(5)
    config = transformers.GptOssConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "numbers")
    numbers = load_file(tmp_path / "numbers" / "model.safetensors")
    stored = dict(numbers)
    for name in [n for n in numbers if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inside, outside = numbers[name].shape
        blocks = torch.randint(256, (experts, outside, inside // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 123, (experts, outside, inside // 32), dtype=torch.uint8)
        unpacked = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert unpacked.shape == numbers[name].shape
        numbers[name] = unpacked.contiguous()
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(numbers, tmp_path / "numbers" / "model.safetensors")
    (tmp_path / "form").mkdir()
    save_file(stored, tmp_path / "form" / "model.safetensors")
    stored_config = json.loads((tmp_path / "numbers" / "config.json").read_text())
    stored_config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "form" / "config.json").write_text(json.dumps(stored_config))
    found, want = logits(tmp_path / "form"), logits(tmp_path / "numbers")
    assert torch.equal(found, want)

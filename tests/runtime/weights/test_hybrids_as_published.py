"""Recurrent models quantised as their publishers do it: the numbers of the codes, or the codes.

What is quantised of each and how follows checkpoints that are published:

    Nemotron 3 Nano, Super   ModelOpt: routed experts NVFP4, shared ones and Mamba-2's matrices FP8,
                             some with the output matrix in NVFP4; scales of an FP8 KV cache beside
    Nemotron Nano 2          ModelOpt: everything NVFP4 but convolutions and the ends
    Qwen3-Next, Qwen3.5      FP8 in blocks of 128 x 128 but for what decays and gates are made of;
                             llm-compressor: FP8 a row, or NVFP4, recurrent layers left whole;
                             ModelOpt: recurrent layers FP8, experts NVFP4
    Granite 4, LFM2, Kimi    llm-compressor: FP8 a row, experts one by one
    AWQ, GPTQ                4 bits in groups of 128; experts alone, or what has a shape for it
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.checkpoint_codes import (
    checkpoint_codes,
    rounded_shares,
    with_checkpoint_codes,
)
from llmpq.planner.problem.stored_precisions import stored_layers
from llmpq.plans.plan import QuantizationForm, StoredForm
from llmpq.plans.speculation import draft_bytes
from llmpq.precision import Precision, WeightScheme
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.quantized_checkpoint import QuantizedCheckpoint, open_checkpoint
from llmpq.sizes.memory import Quantization
from llmpq.sizes.pool_size import planned_pool
from llmpq.workload import Workload
from reference.interchange import to_awq, to_compressed_tensors, to_gptq
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
FILE = "model.safetensors"
TOKENS = [5, 30, 77, 120, 9, 61, 62, 63, 64, 11, 12]
BASE: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": None,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3_next": ("Qwen3Next", {**DELTA, **MIXTURE}),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**DELTA, **MIXTURE}),
    "qwen3_5": ("Qwen3_5Text", DELTA),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "bos_token_id": 0,
            "pad_token_id": 0,
        },
    ),
}
KV_SCALES = {"kv_cache_quant_algo": "FP8"}
NANO = {"NVFP4": r"experts\.\d+\.", "FP8": r"shared_experts|mixer\.(in|out)_proj"}
PUBLISHED: dict[str, tuple[str, str, dict[str, str]]] = {
    # Model, who writes it, and what is stored as what.
    "Nemotron 3 Nano": ("nemotron_h", "modelopt", NANO),
    "Nemotron 3 Nano, all 4 bits": (
        "nemotron_h",
        "modelopt",
        {"NVFP4": r"mixer\.(?!conv1d|gate|D|norm).*|lm_head"},
    ),
    "Nemotron 3 Nano FP8": (
        "nemotron_h",
        "modelopt",
        {"FP8": r"experts|mixer\.(in|out|up|down|o)_proj"},
    ),
    "Nemotron 3 Nano, the ends, too": (
        "nemotron_h",
        "modelopt",
        {"NVFP4": rf"{NANO['NVFP4']}|embeddings", "FP8": rf"{NANO['FP8']}|lm_head"},
    ),
    "Qwen3-Next FP8": (
        "qwen3_next",
        "fp8",
        {"FP8": r"experts?\.|self_attn\.\w_proj|in_proj_qkvz|linear_attn\.out_proj"},
    ),
    "Qwen3-Next FP8 a row": (
        "qwen3_next",
        "compressed-tensors",
        {"FP8": r"experts?\.|self_attn\.\w_proj"},
    ),
    "Qwen3-Next NVFP4": (
        "qwen3_next",
        "compressed-tensors",
        {"NVFP4": r"experts?\.|self_attn\.\w_proj"},
    ),
    "Qwen3.5 FP8": (
        "qwen3_5",
        "fp8",
        {"FP8": r"mlp\.|self_attn\.\w_proj|in_proj_(qkv|z)|linear_attn\.out_proj"},
    ),
    "Qwen3.6 NVFP4": (
        "qwen3_5",
        "modelopt",
        {
            "NVFP4": r"mlp\.",
            "FP8": r"self_attn\.\w_proj|in_proj_(qkv|z)|linear_attn\.out_proj",
        },
    ),
    "Qwen3.5 mixture, NVFP4": (
        "qwen3_5_moe",
        "modelopt",
        {"NVFP4": r"experts\.\d", "FP8": r"self_attn\.\w_proj|shared_expert\."},
    ),
    "Qwen3.5 mixture by RedHat": (
        "qwen3_5_moe",
        "compressed-tensors",
        {"NVFP4": r"experts\.\d|shared_expert\.|self_attn\.\w_proj"},
    ),
    "Granite 4 FP8 a row": (
        "granitemoehybrid",
        "compressed-tensors",
        {"FP8": r"mamba\.(in|out)_proj|self_attn|shared_mlp|experts\.\d"},
    ),
    "LFM2 NVFP4": (
        "lfm2_moe",
        "compressed-tensors",
        {"NVFP4": r"conv\.(in|out)_proj|self_attn\.\w+_proj|feed_forward\.(w|experts)"},
    ),
    "Kimi Linear FP8 a row": (
        "kimi_linear",
        "compressed-tensors",
        {"FP8": r"experts|self_attn\.(q|k|v|o|kv_b|kv_a)_proj"},
    ),
    "Granite 4 AWQ, what Mamba-2 reads left": (
        "granitemoehybrid",
        "awq",
        {"INT4": r"mamba\.out_proj|self_attn|shared_mlp|experts\.\d"},
    ),
    "Nemotron 3 Nano GPTQ, what Mamba-2 reads left": (
        "nemotron_h",
        "gptq",
        {"INT4": r"experts|mixer\.(out|up|down|o)_proj"},
    ),
    "Qwen3-Next AWQ, experts alone": ("qwen3_next", "awq", {"INT4": r"experts\.\d"}),
    "Kimi Linear GPTQ, attention left": ("kimi_linear", "gptq", {"INT4": r"experts|mlp"}),
    "Kimi Linear, FP8 beside 4 bits": (
        "kimi_linear",
        "compressed-tensors",
        {"INT4": r"experts\.\d|mlp", "FP8": r"shared_experts|self_attn\.(q|k|v|o|kv_a)_proj"},
    ),
}
STACKED: dict[str, tuple[str, ...]] = {
    "experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.down_proj": ("down_proj",),
    "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
    "block_sparse_moe.output_linear.weight": ("down_proj",),
}
"""Experts of a layer in one tensor, which quantised checkpoints have one by one."""


@pytest.fixture(scope="module")
def dense_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a directory of each model, made once."""
    import transformers

    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(3)
            name, options = MODELS[kind]
            config = getattr(transformers, f"{name}Config")(**{**BASE, **options})
            model = transformers.AutoModelForCausalLM.from_config(config).float()
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn_like(parameter) * 0.1
                    parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return of


def unstacked(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in stored.items():
        end = next((end for end in STACKED if name.endswith(end)), None)
        if end is None or tensor.ndim < 3:
            found[name] = tensor
            continue
        before = name.removesuffix(end) + end.partition(".")[0].replace("experts", "experts.")
        before = before if "experts" in before else f"{before}.experts."
        for expert, own in enumerate(tensor):
            parts = own.chunk(len(STACKED[end]))
            for part, piece in zip(STACKED[end], parts, strict=True):
                found[f"{before}{expert}.{part}.weight"] = piece
    return found


def nvfp4(weight: Tensor, style: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the fields of a linear, and the numbers that they are."""
    table, whole = torch.tensor(Codebook.E2M1.values), weight.abs().max() / (448 * 6)
    groups = weight.view(weight.shape[0], -1, 16)
    scales = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    wide = (scales.float() * whole)[:, :, None]
    codes = (groups / wide)[..., None].sub(table).abs().argmin(-1).flatten(1).to(torch.uint8)
    numbers = (table[codes.long()].view_as(groups) * wide).flatten(1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    if style == "modelopt":
        fields = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
        return {**fields, "input_scale": torch.tensor(0.5)}, numbers
    inverse = (1 / whole).reshape(1)
    fields = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": inverse}
    return {**fields, "input_global_scale": torch.tensor([2.0])}, numbers


def fp8(weight: Tensor, style: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the fields of a linear, and the numbers that they are."""
    if style == "fp8":
        tall, wide = (-(-size // 128) for size in weight.shape)
        padded = torch.zeros(tall * 128, wide * 128)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scale = padded.view(tall, 128, wide, 128).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread
    if style == "modelopt":
        scale = weight.abs().max() / 448
        fields = {"weight_scale": scale, "input_scale": torch.tensor(0.5)}
    else:
        scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16().float()
        fields = {"weight_scale": scale}
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, **fields}, codes.float() * scale


def int4(weight: Tensor, style: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the fields of a linear, and the numbers that they are."""
    scheme = WeightScheme(bits=4, group_size=128, clip_search=False)
    made = quantize_weight(weight, scheme, dtype=torch.float32, layout=Layout.ROWS)
    fields = {"awq": to_awq, "gptq": to_gptq}.get(style, to_compressed_tensors)(made)
    return fields, made.dequantize(torch.float32)


MAKERS = {"NVFP4": nvfp4, "FP8": fp8, "INT4": int4}


def described(style: str, of: dict[str, str]) -> dict[str, Any]:
    """Return config.json's words."""
    if style in ("awq", "gptq"):
        return {"quant_method": style, "bits": 4, "group_size": 128}
    if style == "fp8":
        return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    if style == "modelopt":
        algorithms = set(of.values())
        said = {"quant_method": "modelopt", **KV_SCALES, "exclude_modules": ["lm_head", "mtp*"]}
        if len(algorithms) == 1:
            return {**said, "quant_algo": algorithms.pop()}
        layers = {stem: {"quant_algo": own} for stem, own in of.items()}
        return {**said, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    is_fp8 = "FP8" in of.values()
    weights = {"type": "float", "num_bits": 8 if is_fp8 else 4, "symmetric": True}
    weights |= {"strategy": "channel"} if is_fp8 else {"strategy": "tensor_group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    form = "float-quantized" if is_fp8 else "nvfp4-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def written(dense: Path, folder: Path, style: str, stored_as: dict[str, str]) -> tuple[Path, Path]:
    """Write a directory as published, and one of the numbers that its codes are."""
    numbers = load_file(dense / "model.safetensors")
    codes, of = {}, {}
    whole = unstacked(numbers)
    for name, tensor in whole.items():
        stem = name.removesuffix(".weight")
        form = next((form for form, pattern in stored_as.items() if re.search(pattern, stem)), None)
        if form is None or tensor.ndim != 2:
            codes[name] = tensor
            continue
        fields, whole[name] = MAKERS[form](tensor.float(), style)
        codes |= {f"{stem}.{field}": value for field, value in fields.items()}
        of[stem] = form
    for name in [name for name in numbers if name.endswith("k_proj.weight")]:
        codes[name.replace("weight", "k_scale")] = torch.ones(1)
    config = json.loads((dense / "config.json").read_text())
    of_codes = {**config, "quantization_config": described(style, of)}
    for path, tensors, words in (("f", codes, of_codes), ("n", restacked(numbers, whole), config)):
        (folder / path).mkdir()
        save_file(
            {k: v.contiguous().clone() for k, v in tensors.items()},
            folder / path / "model.safetensors",
        )
        (folder / path / "config.json").write_text(json.dumps(words))
    assert set(of.values()) == set(stored_as), "every form is there"
    return folder / "f", folder / "n"


def restacked(stored: dict[str, Tensor], whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return numbers by the names of an unquantised checkpoint."""
    found = {}
    for name, tensor in stored.items():
        if name in whole:
            found[name] = whole[name]
            continue
        parts = [whole[own] for own in unstacked({name: tensor})]
        found[name] = torch.cat([part for part in parts]).view_as(tensor)
    return found


def logits(directory: Path, **options: Any) -> Tensor:
    pipeline = ReferencePipeline.from_directory(directory, **options)
    step = Step.of([0], [0], [len(TOKENS)])
    return pipeline.logits(pad([TOKENS]), step, pipeline.caches(1, len(TOKENS)), all_positions=True)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", PUBLISHED)
def test_hybrids_as_published_are_their_numbers(
    dense_of: Any, tmp_path: Path, planned_and_loaded: Any, name: str
) -> None:
    kind, style, stored_as = PUBLISHED[name]
    form, numbers = written(dense_of(kind), tmp_path, style, stored_as)
    want = logits(numbers)
    assert relative(want, logits(dense_of(kind))) > 1e-3
    assert relative(logits(form), want) < 1e-5
    spec = ModelSpec.from_directory(form)
    layers = stored_layers(form, spec)
    assert layers is not None
    best = [max(layer.as_stored, key=lambda p: p.weight_bits) for layer in layers]
    assert {layer.stored for layer in layers} <= {
        Precision.W16A16,
        *({Precision.W4A16} if stored_as.keys() & {"NVFP4", "INT4"} else ()),
        *({Precision.W8A16} if "FP8" in stored_as else ()),
    }
    held = open_checkpoint(form, spec)
    assert isinstance(held, QuantizedCheckpoint)
    held.keep_codes({i: Quantization().scheme(p) for i, p in enumerate(best)})
    plain, num_kept = open_checkpoint(numbers, spec), 0
    for index in range(spec.num_layers):
        values = plain.layer(index, torch.float32)
        for part, found in held.layer(index, torch.float32).items():
            own = found.dequantize(torch.float32) if isinstance(found, Weight) else found
            apart = (own.view_as(values[part]) - values[part]).norm()
            assert float(apart) <= 1e-5 * float(values[part].norm()), part
            num_kept += isinstance(found, Weight)
    assert num_kept >= 3, "codes stay codes"
    if "NVFP4" not in stored_as:  # nothing is rounded: floats beside codes stay floats
        assert relative(logits(form, precisions=best), want) < 1e-5
        rounded = _shares(form, spec, best)
        assert rounded == [0.0] * spec.num_layers
    planned, loaded = planned_and_loaded(form)
    assert planned == loaded


@pytest.mark.parametrize("name", ["Granite 4 AWQ, what Mamba-2 reads left", "Qwen3-Next FP8 a row"])
def test_drafts_copy_what_stays_whole_as_plans_count(
    dense_of: Any, tmp_path: Path, name: str
) -> None:
    kind, style, stored_as = PUBLISHED[name]
    form, _ = written(dense_of(kind), tmp_path, style, stored_as)
    spec = ModelSpec.from_directory(form)
    precision = Precision.W4A16 if "INT4" in stored_as else Precision.W8A16
    codes = checkpoint_codes(form, spec)
    grid = with_checkpoint_codes(Quantization(), codes, spec, (precision,), 4)
    plan = manual_plan(
        spec,
        Workload(batch=2, prompt_len=32, gen_len=16, dtype="float32"),
        precision=precision,
        quantization=QuantizationForm(stored=tuple(StoredForm.of(one) for one in grid.stored)),
    )
    pool = planned_pool(spec, plan.workload, plan.prefill_chunk, prefill_microbatch=1)
    source, layers = open_checkpoint(form, spec), range(spec.num_layers)
    compute, _ = build_stage(plan, 0, spec, source, torch.device("cpu"), pool)
    taken = compute.enable_speculation("w4kv4", pool, layers=layers, head=None)
    assert taken == draft_bytes(plan, spec, 0, "w4kv4")


def _shares(form: Path, spec: ModelSpec, precisions: list[Precision]) -> list[float]:
    """Return of each layer the share of weights that it rounds, as plans count it."""
    codes, found = checkpoint_codes(form, spec), []
    for index, precision in enumerate(precisions):
        scheme = Quantization().scheme(precision)
        found.append(0.0 if scheme is None else rounded_shares(codes, spec, scheme)[index])
    return found


def test_experts_in_one_tensor_of_codes_are_their_numbers(dense_of: Any, tmp_path: Path) -> None:
    """Granite 4 as llm-compressor writes it: FP8 [E, N, K], a scale for each row [E, N, 1]."""
    dense = dense_of("granitemoehybrid")
    stored = load_file(dense / "model.safetensors")
    codes, numbers = dict(stored), dict(stored)
    for name in [name for name in stored if name.endswith("put_linear.weight")]:
        if stored[name].ndim < 3:
            continue
        scale = stored[name].abs().amax(-1, keepdim=True) / 448
        codes[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
        numbers[name], codes[f"{name}_scale"] = codes[name].float() * scale, scale
    assert len(codes) == len(stored) + 4
    config = json.loads((dense / "config.json").read_text())
    said = {**config, "quantization_config": described("compressed-tensors", {"experts": "FP8"})}
    for path, tensors, words in (("f", codes, said), ("n", numbers, config)):
        (tmp_path / path).mkdir()
        save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / path / FILE)
        (tmp_path / path / "config.json").write_text(json.dumps(words))
    want = logits(tmp_path / "n")
    assert relative(logits(tmp_path / "f"), want) < 1e-5 < relative(want, logits(dense))
    layers = stored_layers(tmp_path / "f", ModelSpec.from_directory(tmp_path / "f"))
    assert layers is not None and {layer.stored for layer in layers} == {Precision.W8A16}

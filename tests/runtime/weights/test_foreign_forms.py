"""Forms of GPTQ, AWQ, AutoRound and ModelOpt that config.json tells apart: right, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.checkpoints.stored_codes import stored_codes
from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.stored_precisions import stored_layers
from llmpq.precision import Precision, WeightScheme
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from reference.interchange import to_awq, to_gptq
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
TOKENS = [5, 30, 77, 120, 9, 61, 62, 63, 64]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False}


def logits(directory: Path, **options: Any) -> torch.Tensor:
    pipeline = ReferencePipeline.from_directory(directory, **options)
    step = Step.of([0], [0], [len(TOKENS)])
    return pipeline.logits(pad([TOKENS]), step, pipeline.caches(1, len(TOKENS)), all_positions=True)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def directory_of(dense: Path, folder: Path, form: str, described: dict[str, Any]) -> Path:
    """Write the linears of a model in a form; `numbers` as what the codes stand for."""
    folder.mkdir()
    scheme = WeightScheme(bits=4, group_size=64, clip_search=False)
    tensors = load_file(dense / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight, stem = tensors.pop(name).float(), name.removesuffix(".weight")
        made = quantize_weight(weight, scheme, dtype=torch.float32, layout=Layout.ROWS)
        fields = {
            "numbers": lambda made=made: {"weight": made.dequantize(torch.float32)},
            "v1": lambda made=made: to_gptq(made),
            "v2": lambda made=made: to_gptq(made, v2=True),
            "awq": lambda made=made: to_awq(made),
        }[form]()
        tensors |= {f"{stem}.{field}": tensor.contiguous() for field, tensor in fields.items()}
    save_file({k: v.clone() for k, v in tensors.items()}, folder / "model.safetensors")
    config = json.loads((dense / "config.json").read_text())
    if described:
        config["quantization_config"] = described
    (folder / "config.json").write_text(json.dumps(config))
    return folder


READ = {
    "gptq, nothing said": ("v1", GPTQ),
    "gptq, checkpoint_format": ("v2", {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq, format": ("v2", {**GPTQ, "format": "gptq_v2"}),
    "gptq, capitals": ("v2", {**GPTQ, "format": "GPTQ_V2"}),
    "gptq, both": ("v2", {**GPTQ, "format": "gptq_v2", "checkpoint_format": "gptq_v2"}),
    "gptq, some left as they are": ("v1", {**GPTQ, "dynamic": {"-:lm_head": {}}}),
    "gptq, the first": ("v1", {**GPTQ, "format": "gptq"}),
    "awq": ("awq", {**AWQ, "format": "gemm"}),
    "awq, version": ("awq", {**AWQ, "version": "GEMM"}),
    "AutoRound": ("v2", {**ROUND, "packing_format": "auto_round"}),
    "AutoRound, gptqmodel": ("v2", {**ROUND, "packing_format": "auto_round:gptqmodel"}),
    "AutoRound, auto_gptq": ("v1", {**ROUND, "packing_format": "auto_round:auto_gptq"}),
    "AutoRound, awq": ("awq", {**ROUND, "packing_format": "auto_round:auto_awq"}),
}


@pytest.mark.parametrize("name", READ)
def test_zero_points_are_those_of_the_form(dense: Path, tmp_path: Path, name: str) -> None:
    form, described = READ[name]
    path = directory_of(dense, tmp_path / "form", form, described)
    want = logits(directory_of(dense, tmp_path / "numbers", "numbers", {}))
    assert relative(logits(path), want) < 1e-5
    if form in ("v1", "v2"):
        wrong = directory_of(dense, tmp_path / "wrong", {"v1": "v2", "v2": "v1"}[form], described)
        assert relative(logits(wrong), want) > 0.05, "the other zero points must be seen"


@pytest.mark.parametrize(
    ("name", "form", "described"),
    [
        ("quantize_config.json", "v1", {"bits": 4, "group_size": 64, "desc_act": False}),
        ("quantize_config.json", "awq", {"w_bit": 4, "q_group_size": 64, "zero_point": True}),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
        (
            "quantization_config.json",
            "v1",
            {**ROUND, "packing_format": "auto_round:auto_gptq"},
        ),
    ],
)
def test_older_tools_say_it_in_a_file_of_their_own(
    dense: Path, tmp_path: Path, name: str, form: str, described: dict[str, Any]
) -> None:
    """AutoGPTQ's and AutoAWQ's first models: their config.json says nothing of it."""
    path = directory_of(dense, tmp_path / "form", form, {})
    (path / name).write_text(json.dumps(described))
    want = logits(directory_of(dense, tmp_path / "numbers", "numbers", {}))
    assert relative(logits(path), want) < 1e-5
    assert stored_layers(path, ModelSpec.from_directory(path)) is not None
    (path / name).write_text("[]")
    with pytest.raises(ValueError, match="is no object"):
        open_checkpoint(path, ModelSpec.from_directory(path))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({**GPTQ, "format": "marlin"}, "GPTQ's format='marlin' is not supported"),
        ({**GPTQ, "format": "gptq", "checkpoint_format": "gptq_v2"}, "is not supported"),
        (
            {**GPTQ, "dynamic": {"-:.*down_proj": {}, r"+:.*\.1\.mlp.*": {"bits": 8}}},
            r"'dynamic' gives '.*mlp.*' bits=8, others have 4",
        ),
        ({**GPTQ, "dynamic": {".*o_proj": {"group_size": 32}}}, "group_size=32, others have 64"),
        ({**AWQ, "format": "gemv"}, "AWQ's format='gemv' is not supported; expected gemm"),
        ({**AWQ, "version": "gemv_fast"}, "AWQ's version='gemv_fast'"),
        ({**AWQ, "version": "gemm", "format": "gemv"}, "AWQ's version='gemm', format='gemv'"),
        ({**AWQ, "backend": "llm-awq"}, "AWQ's llm-awq is not supported"),
        (ROUND, "AutoRound with packing_format=None"),
        ({**ROUND, "packing_format": "auto_round", "data_type": "mx_fp"}, "data_type='mx_fp'"),
        ({**ROUND, "packing_format": "auto_round", "act_bits": 8}, "act_bits=8"),
        (
            {**ROUND, "packing_format": "auto_round", "extra_config": {"lm_head": {"bits": 8}}},
            "AutoRound gives 'lm_head' 8 bits, others 4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "no 'quantized_layers'"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
                    "model.layers.1.mlp.up_proj": {"quant_algo": "W4A16_AWQ", "group_size": 128},
                },
            },
            "quant_algo='W4A16_AWQ' of 'model.layers.1.mlp.up_proj' is not supported",
        ),
        ({"bits": 4, "group_size": 64}, "in MLX's form"),
    ],
)
def test_other_forms_are_refused_by_name(
    dense: Path, tmp_path: Path, described: dict[str, Any], message: str
) -> None:
    form = "awq" if described.get("quant_method") == "awq" else "v1"
    path = directory_of(dense, tmp_path / "form", form, described)
    spec = ModelSpec.from_directory(path)
    for ask in (lambda: stored_layers(path, spec), lambda: open_checkpoint(path, spec)):
        with pytest.raises(ValueError, match=message) as error:
            ask()
        assert str(path) in str(error.value)


def modelopt(dense: Path, folder: Path, algorithm: str, *, beside: bool) -> tuple[Path, Path]:
    """Write a directory as ModelOpt does, and one of the numbers that its codes are."""
    stored, of = load_file(dense / "model.safetensors"), {}
    numbers = dict(stored)
    for name in [name for name in stored if "_proj.weight" in name]:
        weight, stem = stored.pop(name).float(), name.removesuffix(".weight")
        own = of[stem] = algorithm
        if algorithm == "MIXED_PRECISION":
            own = of[stem] = "FP8_PB_WO" if ".layers.0." in name else "W4A16_NVFP4"
        if own == "FP8_PB_WO":
            tall, wide = (size // 128 for size in weight.shape)
            blocks = weight.view(tall, 128, wide, 128)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            spread = scale.expand_as(blocks).reshape(weight.shape)
            codes = (weight / spread).to(torch.float8_e4m3fn)
            numbers[name] = codes.float() * spread
            stored |= {f"{stem}.weight": codes, f"{stem}.weight_scale": scale}
            continue  # of weights alone: inputs have no scale
        if own == "FP8":
            scale = weight.abs().max() / 448
            codes = (weight / scale).to(torch.float8_e4m3fn)
            numbers[name] = codes.float() * scale
            stored |= {f"{stem}.weight": codes, f"{stem}.weight_scale": scale}
        else:
            table, whole = torch.tensor(Codebook.E2M1.values), weight.abs().max() / (448 * 6)
            groups = weight.view(weight.shape[0], -1, 16)
            scales = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
            wide = (scales.float() * whole)[:, :, None]
            codes = (groups / wide)[..., None].sub(table).abs().argmin(-1).flatten(1)
            numbers[name] = (table[codes].view_as(groups) * wide).flatten(1)
            codes = codes.to(torch.uint8)
            stored |= {
                f"{stem}.weight": codes[:, ::2] | codes[:, 1::2] << 4,
                f"{stem}.weight_scale": scales,
                f"{stem}.weight_scale_2": whole,
            }
        stored[f"{stem}.input_scale"] = torch.tensor(0.5)
    stated = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if algorithm == "MIXED_PRECISION":
        stated["quantized_layers"] = {stem: {"quant_algo": own} for stem, own in of.items()}
    config = json.loads((dense / "config.json").read_text())
    own = (
        config
        if beside
        else {**config, "quantization_config": {"quant_method": "modelopt", **stated}}
    )
    for path, tensors, words in ((folder / "f", stored, own), (folder / "n", numbers, config)):
        path.mkdir(parents=True)
        save_file({k: v.clone() for k, v in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(words))
    if beside:
        content = {"producer": {"name": "modelopt"}, "quantization": stated}
        (folder / "f" / "hf_quant_config.json").write_text(json.dumps(content))
    return folder / "f", folder / "n"


@pytest.fixture(scope="module")
def whole_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose matrices are whole blocks of 128 x 128, stacked ones, too."""
    import transformers

    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=199,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("whole")
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    "algorithm", ["NVFP4", "W4A16_NVFP4", "FP8", "FP8_PB_WO", "MIXED_PRECISION"]
)
def test_modelopts_codes_are_kept(
    whole_blocks: Path, tmp_path: Path, planned_and_loaded: Any, algorithm: str, beside: bool
) -> None:
    form, numbers = modelopt(whole_blocks, tmp_path, algorithm, beside=beside)
    first, second = {
        **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), (Precision.W4A16, Precision.W4A16)),
        "MIXED_PRECISION": (Precision.W8A16, Precision.W4A16),
    }.get(algorithm, (Precision.W8A16, Precision.W8A16))
    layers = stored_layers(form, ModelSpec.from_directory(form))
    assert layers is not None and [layer.stored for layer in layers] == [first, second]
    assert stored_codes(form) == {first, second}
    want = logits(numbers)
    assert relative(logits(form, precisions=[first, second]), want) < 1e-5
    assert relative(logits(numbers, precisions=[first, second]), want) > 1e-3
    planned, loaded = planned_and_loaded(form)
    assert planned == loaded


@pytest.mark.parametrize("kind", ["gpt2", "codegen", "falcon of one norm for each"])
@pytest.mark.parametrize("form", ["v1", "awq"])
def test_codes_of_fused_and_transposed_matrices_are_read(
    models: Any, tmp_path: Path, kind: str, form: str
) -> None:
    """GPTQ and AWQ store codes of [out, in], also where a family's numbers lie transposed."""
    dense = models.directory(kind)
    scheme = WeightScheme(bits=4, group_size=64, clip_search=False)
    stored = load_file(dense / "model.safetensors")
    read = ("attn", "attention", "mlp")
    names = [n for n in stored if n.endswith(".weight") and any(f".{p}" in n for p in read)]
    numbers, codes = dict(stored), dict(stored)
    for name in (n for n in names if stored[n].ndim > 1 and "norm" not in n):
        turned = kind == "gpt2"
        weight = stored[name].t() if turned else stored[name]
        made = quantize_weight(
            weight.float().contiguous(), scheme, dtype=torch.float32, layout=Layout.ROWS
        )
        value = made.dequantize(torch.float32)
        numbers[name] = value.t() if turned else value
        fields = to_gptq(made) if form == "v1" else to_awq(made)
        stem = name.removesuffix(".weight")
        del codes[name]
        codes |= {f"{stem}.{field}": tensor for field, tensor in fields.items()}
    config = json.loads((dense / "config.json").read_text())
    described = GPTQ if form == "v1" else {**AWQ, "format": "gemm"}
    found = []
    for folder, tensors, said in (("a", numbers, {}), ("b", codes, described)):
        path = tmp_path / folder
        path.mkdir()
        save_file(
            {k: v.contiguous().clone() for k, v in tensors.items()}, path / "model.safetensors"
        )
        whole = {**config, "quantization_config": said} if said else config
        (path / "config.json").write_text(json.dumps(whole))
        found.append(logits(path))
    assert len(codes) > len(stored) and relative(found[1], found[0]) < 1e-5

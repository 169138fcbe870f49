"""Integer checkpoints in groups of 32 and 64: codes are kept where the plan has such groups."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights.quantized_weight import QuantizedWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.planner.__main__ import main as planner
from llmpq.planner.problem.stored_precisions import small_groups, stored_layers
from llmpq.precision import Precision, WeightScheme
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.cut_parts import cut_tensor
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.sizes.memory import Quantization
from llmpq.sizes.pool_size import PoolSize
from reference.interchange import to_awq, to_compressed_tensors, to_gptq
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
FORMS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False},
    "awq": {"quant_method": "awq", "version": "gemm", "bits": 4},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}
TO = {
    "gptq": to_gptq,
    "awq": to_awq,
    "compressed-tensors": to_compressed_tensors,
}
CENTRED = {"gptq": "sym", "awq": "zero_point"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have more than one group of 64."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=199, hidden_size=128, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write(source: Path, target: Path, form: str, group: int | None, *, symmetric: bool) -> Path:
    """Write a model's linears in a form; zeros are whole numbers in all of them."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    scheme = WeightScheme(bits=4, group_size=group, symmetric=symmetric, clip_search=False)
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors.pop(name).float()
        made = quantize_weight(weight, scheme, dtype=torch.float32, layout=Layout.ROWS)
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{field}": t.contiguous() for field, t in TO[form](made).items()}
    save_file(tensors, target / "model.safetensors")
    described = {**FORMS[form], "group_size": group}
    if form in CENTRED:
        described[CENTRED[form]] = symmetric == (form == "gptq")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = described
    (target / "config.json").write_text(json.dumps(config))
    return target


def logits(directory: Path, **options: Any) -> torch.Tensor:
    pipeline = ReferencePipeline.from_directory(directory, **options)
    tokens = list(range(5, 25))
    step = Step.of([0], [0], [len(tokens)])
    return pipeline.logits(pad([tokens]), step, pipeline.caches(1, 20), all_positions=True)


@pytest.mark.thin(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_kept(
    llama: Path, tmp_path: Path, make_plan: Any, form: str, group: int, symmetric: bool
) -> None:
    target = write(llama, tmp_path / "q", form, group, symmetric=symmetric)
    spec = ModelSpec.from_directory(target)
    numbers = logits(target)
    grid = small_groups(target, spec)
    assert grid == Quantization(group_size=group, symmetric=symmetric)
    layers = stored_layers(target, spec, kept=grid)
    assert layers is not None and {one.stored for one in layers} == {Precision.W4A16}
    plain = stored_layers(target, spec)
    assert plain is not None and {one.stored for one in plain} == {Precision.W16A16}
    precisions = [Precision.W4A16] * spec.num_layers
    for symmetric_plan in {symmetric, False}:
        kept = Quantization(group_size=group, symmetric=symmetric_plan)
        source = open_checkpoint(target, spec)
        source.keep_codes({0: kept.scheme(Precision.W4A16)})  # type: ignore[attr-defined]
        part = source.layer(0, torch.float32)["qkv.weight"]
        assert isinstance(part, QuantizedWeight) and part.symmetric == symmetric_plan
        got = logits(target, precisions=precisions, scheme=kept.scheme)
        assert float((got - numbers).norm() / numbers.norm()) < 2e-6
    rounded = logits(target, precisions=precisions)
    assert float((rounded - numbers).norm() / numbers.norm()) > 1e-2, "rounded a second time"


@pytest.mark.thin(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_devices_that_share_a_stage_read_their_codes(
    llama: Path, tmp_path: Path, form: str, group: int
) -> None:
    """Values are those of the whole's codes, also where a share begins inside a group."""
    target = write(llama, tmp_path / "q", form, group, symmetric=True)
    spec = ModelSpec.from_directory(target)
    scheme = WeightScheme(bits=4, group_size=group, symmetric=True)

    def layer(member: Member | None) -> dict[str, Any]:
        source = open_checkpoint(target, spec)
        source.keep_codes({0: scheme})
        if member is not None:
            source.take_member(member)
        return source.layer(0, torch.float32)

    def values(part: Any) -> torch.Tensor:
        return part if isinstance(part, torch.Tensor) else part.dequantize(torch.float32)

    whole = layer(None)
    for index in range(2):
        member = Member(spec=spec, shares=(2, 1), index=index)
        cuts = member.cuts(0)
        assert {"qkv.weight", "o.weight", "down.weight"} <= cuts.keys()
        for name, part in layer(member).items():
            assert isinstance(part, QuantizedWeight) == isinstance(whole[name], QuantizedWeight)
            expected = values(whole[name])
            expected = cut_tensor(expected, cuts[name]) if name in cuts else expected
            assert torch.equal(values(part), expected), name


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_for_a_cpu_has_the_groups_and_its_bytes(
    llama: Path, tmp_path: Path, form: str, capsys: Any
) -> None:
    from llmpq.plans.plan import Plan

    target = write(llama, tmp_path / "q", form, 32, symmetric=False)
    words = f"--model {target} --devices cpu --batch 2 --prompt-len 16 --gen-len 8 --dtype float32"
    path = tmp_path / "plan.json"
    assert planner([*words.split(), "-o", str(path)]) == 0, capsys.readouterr().err
    plan = Plan.load(path)
    assert plan.quantization.group_size == 32
    assert set(plan.stages[0].precisions) == {Precision.W4A16}
    spec = ModelSpec.from_directory(target)
    size = PoolSize(num_blocks=2, slots=2, max_len=24)
    build_stage(plan, 0, spec, open_checkpoint(target, spec), torch.device("cpu"), size)


@pytest.mark.thin
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_plans_count_what_codes_take(
    llama: Path, tmp_path: Path, planned_and_loaded: Any, form: str, symmetric: bool
) -> None:
    """Groups of 128 and of whole rows, with zero points and without."""
    for group in (128, None, 64):
        target = write(llama, tmp_path / f"q{group}", form, group, symmetric=symmetric)
        for dtype in ("bfloat16", "float32"):
            planned, loaded = planned_and_loaded(target, "--dtype", dtype)
            assert loaded == planned, (group, dtype)


def test_zeros_that_config_denies_are_refused(llama: Path, tmp_path: Path) -> None:
    target = write(llama, tmp_path / "q", "gptq", 32, symmetric=False)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["sym"] = True
    (target / "config.json").write_text(json.dumps(config))
    scheme = Quantization(group_size=32, symmetric=True).scheme
    with pytest.raises(ValueError, match="have zero points, which config.json says"):
        logits(target, precisions=[Precision.W4A16] * 4, scheme=scheme)

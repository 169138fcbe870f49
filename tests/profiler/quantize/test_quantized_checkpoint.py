"""`llmpq-quantize` and the directories it writes: read back, in Transformers, resumed, refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmpq.kernels.atom.reference import atom_linear_reference
from llmpq.kernels.weights.atom_weight import AtomWeight
from llmpq.kernels.weights.quantized_weight import QuantizedWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision, WeightScheme
from llmpq.profiler.cli.quantize import main as quantize_main
from llmpq.profiler.quantize.layer_walk import random_windows
from llmpq.profiler.quantize.recipes import Settings
from llmpq.profiler.quantize.whole_model import QuantizeJob, quantize_model, spread
from llmpq.runtime.steps.step import Step
from llmpq.runtime.tools.evaluate import MeasuredJob, measured_plan, open_model, scores_of
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint, stored_kv
from llmpq.runtime.weights.quantized_writer import layer_file
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.memory import Quantization
from reference.interchange import to_awq, to_gptq
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
FAMILIES = ("opt", "bloom", "llama", "qwen2", "qwen3", "mixtral")
TOKENS = list(range(5, 45))


def write(
    directory: Path,
    target: Path,
    schemes: str,
    *,
    method: str = "rtn",
    kv: KVPrecision = KVPrecision.KV16,
    **settings: Any,
) -> ModelSpec:
    """Quantise a directory with two short windows of calibration."""
    spec = ModelSpec.from_directory(directory)
    job = QuantizeJob(
        spec=spec,
        precisions=spread([Precision.parse(s) for s in schemes.split(",")], spec.num_layers),
        settings=Settings(method=method, **settings),  # type: ignore[arg-type]
        windows_WT=random_windows([t % spec.vocab for t in range(7, 3000, 7)], count=2, length=48),
        kv=kv,
    )
    with torch.inference_mode():
        quantize_model(job, CheckpointSource(directory, spec), target)
    return spec


@pytest.fixture(scope="module")
def written(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a maker of the demo model in a scheme, each quantised once: for copies."""

    @cache
    def made(scheme: str) -> Path:
        target = tmp_path_factory.mktemp("written") / "q"
        write(demo_model, target, scheme)
        return target

    return made


def logits(pipeline: ReferencePipeline, tokens: list[int] = TOKENS) -> torch.Tensor:
    step = Step.of([0], [0], [len(tokens)])
    caches = pipeline.caches(1, len(tokens))
    return pipeline.logits(torch.tensor([tokens]), step, caches, all_positions=True)


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


@pytest.mark.thin
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_every_family_reads_back_what_was_written(
    kind: str, scheme: str, tiny_models: Any, tmp_path: Path
) -> None:
    source = tiny_models.directory(kind)
    write(source, tmp_path / "q", scheme, group_size=None)
    exact = logits(ReferencePipeline.from_directory(source))
    assert relative(logits(ReferencePipeline.from_directory(tmp_path / "q")), exact) < 0.06


@pytest.mark.parametrize("kind", FAMILIES)
def test_atom_layers_of_every_family_read_back_exactly(
    kind: str, tiny_models: Any, tmp_path: Path
) -> None:
    spec = write(tiny_models.directory(kind), tmp_path / "q", "w4a4", method="gptq", outliers=4)
    first = logits(ReferencePipeline.from_directory(tmp_path / "q"))
    source = open_checkpoint(tmp_path / "q", spec)
    weight = source.layer(0, torch.float32)["qkv.weight"]
    assert isinstance(weight, AtomWeight) and weight.index_K is not None
    assert weight.scheme.outliers == 4 and weight.scheme.signed_scale
    down = source.layer(0, torch.float32)[f"{spec.mlps()[-1]}down.weight"]
    assert down.index_K is None and down.scheme.rotation
    # The same tensors at 16-bit activations are the target of a draft: another result.
    precisions = [Precision.W4A16] * spec.num_layers
    target = ReferencePipeline.from_directory(tmp_path / "q", precisions=precisions)
    assert relative(first, logits(target)) > 0.01


MIXED = "w8a16,w4a16,w4a16,w3a16,w4a16,w4a16,w16a16,w4a16"


@pytest.mark.parametrize("schemes", ["w4a16", MIXED])
def test_transformers_loads_it_and_gives_the_same_logits(
    schemes: str, demo_model: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    write(demo_model, tmp_path / "q", schemes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([TOKENS])).logits
    ours = logits(ReferencePipeline.from_directory(tmp_path / "q"))
    dense = logits(ReferencePipeline.from_directory(demo_model))
    # Transformers keeps layers that nobody quantised in bfloat16's values, as we do.
    assert relative(ours, theirs) < 2e-5 < 1e-2 < relative(dense, theirs)


def test_transformers_loads_quantised_experts(tiny_models: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    source = tiny_models.directory("mixtral")
    write(source, tmp_path / "q", "w8a16", group_size=None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([TOKENS])).logits
    ours, dense = (
        logits(ReferencePipeline.from_directory(path)) for path in (tmp_path / "q", source)
    )
    assert relative(ours, theirs) < 2e-5 < 1e-3 < relative(dense, theirs)


@pytest.mark.parametrize(
    "kv", [KVPrecision.KV4, pytest.param(KVPrecision.KV8, marks=pytest.mark.seldom)]
)
def test_a_low_bit_cache_is_named_in_the_configuration(
    kv: KVPrecision, demo_model: Path, tmp_path: Path
) -> None:
    """Transformers rounds keys and values per token and head; ours keeps the newest exact."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    write(demo_model, tmp_path / "q", "w8a16", kv=kv)
    tokens = [token % 4096 for token in range(5, 3000, 7)]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    with torch.no_grad():
        logits_QV = model.eval()(torch.tensor([tokens])).logits[0, :-1]
    targets = torch.tensor(tokens[1:])
    theirs = logits_QV.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def ours(bits: str | None) -> tuple[torch.Tensor, str]:
        directory, job = str(tmp_path / "q"), MeasuredJob(max_len=len(tokens))
        spec = ModelSpec.from_directory(directory)
        plan, described = measured_plan(directory, spec, job, kv=bits)
        with open_model(directory, plan) as llm:
            return torch.tensor(scores_of(llm)(tokens)[0]), described

    as_stored, described = ours(None)
    assert described == f"quantised as stored, {kv.value}"
    exact, _ = ours("16")
    rounded = relative(theirs, exact)
    assert 0.1 * rounded < relative(as_stored, exact) < 1.5 * rounded


@pytest.mark.parametrize("zero", [0, 3])
def test_8_bit_codes_around_zero_points_are_refused(
    zero: int, demo_model: Path, tmp_path: Path
) -> None:
    write(demo_model, tmp_path / "q", "w8a8")
    path = tmp_path / "q" / layer_file(1)
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("o_proj.weight_scale"))
    points = torch.full_like(tensors[name], zero, dtype=torch.int8)
    stem = name.removesuffix(".weight_scale")
    save_file(tensors | {f"{stem}.weight_zero_point": points}, path)
    index = tmp_path / "q" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"][f"{stem}.weight_zero_point"] = layer_file(1)
    index.write_text(json.dumps(data))
    spec = ModelSpec.from_directory(tmp_path / "q")
    source = open_checkpoint(tmp_path / "q", spec)
    if zero == 0:
        source.layer(1, torch.float32)
        return
    with pytest.raises(ValueError, match=f"{stem} has zero points, which llmpq does not run"):
        source.layer(1, torch.float32)


def test_w8a8_rounds_inputs_as_transformers_does(demo_model: Path, tmp_path: Path) -> None:
    """Every linear of its forward pass, on the inputs that it has there."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    spec = write(demo_model, tmp_path / "q", "w8a8")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            keep = partial(lambda n, _m, given, y: seen.update({n: (given[0][0], y[0])}), name)
            module.register_forward_hook(keep)
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([TOKENS])).logits
    source = open_checkpoint(tmp_path / "q", spec)
    for index in range(spec.num_layers):
        parts = source.layer(index, torch.float32)
        for linear, names in {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }.items():
            pairs = [seen[f"model.layers.{index}.{name}"] for name in names]
            y = atom_linear_reference(pairs[0][0], parts[f"{linear}.weight"])
            assert relative(y, torch.cat([pair[1] for pair in pairs], dim=-1)) < 1e-6
    dense = logits(ReferencePipeline.from_directory(demo_model))
    ours = logits(ReferencePipeline.from_directory(tmp_path / "q"))
    # Sums of another order move some value over an edge; from there on the two drift apart.
    assert relative(ours, theirs) < 0.6 * relative(theirs, dense)


def test_zero_points_are_read_back(demo_model: Path, tmp_path: Path) -> None:
    spec = write(demo_model, tmp_path / "q", "w3a16", symmetric=False)
    weight = open_checkpoint(tmp_path / "q", spec).layer(2, torch.float32)["gate_up.weight"]
    assert isinstance(weight, QuantizedWeight) and weight.bits == 3 and not weight.symmetric
    dense = CheckpointSource(demo_model, spec).layer(2, torch.float32)["gate_up.weight"]
    best = quantize_weight(dense, WeightScheme(bits=3), dtype=torch.bfloat16)
    assert torch.equal(weight.codes(), best.codes())
    assert torch.equal(weight.scale_NG(), best.scale_NG().float())


def test_a_stopped_run_continues_to_the_same_tensors(tiny_models: Any, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for target in (whole, stopped):
        write(tiny_models.directory("llama"), target, "w4a4", method="gptq", outliers=4)
    for name in (layer_file(1), layer_file(2), "config.json"):
        (stopped / name).unlink()
    write(tiny_models.directory("llama"), stopped, "w4a4", method="gptq", outliers=4)
    for index in range(3):
        expected, found = (load_file(path / layer_file(index)) for path in (whole, stopped))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    for name in ("config.json", "model.safetensors.index.json"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes(), name


def test_other_settings_are_refused(demo_model: Path, tmp_path: Path) -> None:
    write(demo_model, tmp_path / "q", "w8a16")
    with pytest.raises(ValueError, match="differs in precisions; give a new directory"):
        write(demo_model, tmp_path / "q", "w4a16")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty and has no quantize.json"):
        write(demo_model, tmp_path / "full", "w4a16")


def gptq_directory(method: str, demo_model: Path, folder: Path) -> None:
    """Write the demo model as GPTQ or AWQ do."""
    tensors = load_file(demo_model / "model.safetensors")
    scheme = WeightScheme(bits=4)
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        weight = quantize_weight(tensors.pop(name).float(), scheme, dtype=torch.float32)
        packed = to_gptq(weight) if method == "gptq" else to_awq(weight)
        tensors |= {f"{name.removesuffix('weight')}{key}": t for key, t in packed.items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((demo_model / "config.json").read_bytes())
    change_config(folder, quant_method=method, bits=4, group_size=128)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptq_and_awq_directories_are_read(method: str, demo_model: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_directory(demo_model)
    gptq_directory(method, demo_model, tmp_path)
    ours = ReferencePipeline.from_directory(
        demo_model, precisions=[Precision.W4A16] * spec.num_layers, scheme=Quantization().scheme
    )
    assert relative(logits(ReferencePipeline.from_directory(tmp_path)), logits(ours)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "hqq"}, "quantization method 'hqq' is not supported"),
        ({"quant_method": "gptq", "bits": 4}, None),
    ],
)
def test_unknown_methods_are_named(
    change: dict[str, Any], message: str | None, demo_model: Path, tmp_path: Path
) -> None:
    spec = ModelSpec.from_directory(demo_model)
    (tmp_path / "model.safetensors").write_bytes((demo_model / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": change}))
    if message is None:
        assert "qkv.weight" in open_checkpoint(tmp_path, spec).layer(0, torch.float32)
        return
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path, spec)


def change_config(directory: Path, **quantization: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization}))


def change_tensors(path: Path, change: Any, metadata: dict[str, str] | None = None) -> None:
    save_file(change(load_file(path)), path, metadata=metadata)


@pytest.mark.parametrize("value", [5, "gptq", [1], True])
def test_a_quantization_config_is_an_object(value: Any, demo_model: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_directory(demo_model)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": value}))
    for read in (lambda: open_checkpoint(tmp_path, spec), lambda: stored_kv(tmp_path)):
        with pytest.raises(ValueError, match="'quantization_config' must be an object, got"):
            read()


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (5, "'kv_cache_scheme' must be an object, got 5"),
        ({"num_bits": "8", "type": "int"}, None),
        ({"num_bits": [8], "type": []}, None),
    ],
)
def test_a_kv_scheme_is_an_object(scheme: Any, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    change_config(tmp_path, kv_cache_scheme=scheme)
    if message is None:
        assert stored_kv(tmp_path) is KVPrecision.KV16
        return
    with pytest.raises(ValueError, match=message):
        stored_kv(tmp_path)


@pytest.mark.parametrize("bits", [None, "4", 0, 4.0])
def test_gptq_says_its_bits(bits: Any, demo_model: Path, tmp_path: Path) -> None:
    gptq_directory("gptq", demo_model, tmp_path)
    change_config(tmp_path, quant_method="gptq", bits=bits)
    with pytest.raises(ValueError, match="quantization_config: 'bits' (is missing|must be a posi)"):
        ReferencePipeline.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "field", "dtype"),
    [
        ("w4a16", "q_proj.weight_packed", torch.float32),
        ("w4a16", "q_proj.weight_packed", torch.int8),
        ("w4a16", "q_proj.weight_scale", torch.int32),
        ("w8a8", "q_proj.weight", torch.uint8),
        ("w8a8", "q_proj.weight_scale", torch.int32),
        ("w4a4", "qkv.codes", torch.float32),
        ("w4a4", "qkv.scale", torch.int32),
        ("w4a4", "attn_norm.weight", torch.int32),
    ],
)
def test_tensors_of_another_dtype_are_refused(
    scheme: str, field: str, dtype: torch.dtype, demo_model: Path, written: Any, tmp_path: Path
) -> None:
    spec = ModelSpec.from_directory(demo_model)
    shutil.copytree(written(scheme), tmp_path / "q")
    path = tmp_path / "q" / layer_file(2)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    (name,) = (n for n in load_file(path) if n.endswith(field))
    change_tensors(path, lambda ts: {**ts, name: ts[name].to(dtype)}, metadata)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"{path.name}': tensor '{name}' is {kind}, expected"):
        open_checkpoint(tmp_path / "q", spec).layer(2, torch.float32)


def test_int8_linears_beside_one_in_fp8_are_refused(demo_model: Path, tmp_path: Path) -> None:
    """q, k and v are one product: FP8 is a form of its own, so the int8 one beside it is named."""
    write(demo_model, tmp_path / "q", "w8a8")
    path = tmp_path / "q" / layer_file(2)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    (name,) = (n for n in load_file(path) if n.endswith("q_proj.weight"))
    change_tensors(path, lambda ts: {**ts, name: ts[name].to(torch.float8_e4m3fn)}, metadata)
    with pytest.raises(ValueError, match=r"k_proj.weight' is int8, expected"):
        ReferencePipeline.from_directory(tmp_path / "q")


def test_a_packed_weight_without_its_scales(demo_model: Path, tmp_path: Path) -> None:
    gptq_directory("gptq", demo_model, tmp_path)
    name = "model.layers.2.self_attn.q_proj.scales"
    change_tensors(tmp_path / "model.safetensors", lambda ts: {n: ts[n] for n in ts if n != name})
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        ReferencePipeline.from_directory(tmp_path)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
def test_a_quantised_directory_with_more_layers_than_its_config(
    scheme: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written(scheme), tmp_path / "q")
    path = tmp_path / "q" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 6}))
    with pytest.raises(ValueError, match=r"has layers up to 7 .*config\.json says 6 layers"):
        ReferencePipeline.from_directory(tmp_path / "q")


def test_quantised_weights_are_not_quantised_again(
    demo_model: Path, written: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(written("w8a8"), tmp_path / "q")
    (tmp_path / "q" / "tokenizer.json").write_bytes((demo_model / "tokenizer.json").read_bytes())
    text = tmp_path / "calibration.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 200)
    words = [str(tmp_path / "q"), str(tmp_path / "again"), "--text", str(text), "--method", "rtn"]
    assert quantize_main([*words, "--scheme", "w4a16", "--windows", "1", "--window", "32"]) == 2
    assert "is quantised already (compressed-tensors)" in capsys.readouterr().err


def test_a_plan_with_other_bits_is_refused(demo_model: Path, written: Any) -> None:
    spec = ModelSpec.from_directory(demo_model)
    for precision in (Precision.W8A16, Precision.W4A4):
        with pytest.raises(
            ValueError, match="stores 4-bit weights for 16-bit activations, the plan"
        ):
            ReferencePipeline.from_directory(
                written("w4a16"), precisions=[precision] * spec.num_layers
            )


def test_the_command_quantises_and_explains(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "calibration.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 200)
    command = [str(demo_model), str(tmp_path / "q"), "--text", str(text), "--method", "rtn"]
    short = ["--windows", "1", "--window", "32"]
    assert quantize_main([*command, *short, "--scheme", "w4a16"]) == 0
    assert (tmp_path / "q" / "tokenizer.json").exists()
    assert ReferencePipeline.from_directory(tmp_path / "q").spec.num_layers == 8
    assert quantize_main([*command, *short]) == 2
    assert "give either --scheme" in capsys.readouterr().err
    assert quantize_main([*command, *short, "--scheme", "w5a5"]) == 2
    assert "unknown precision 'w5a5'" in capsys.readouterr().err
    assert quantize_main([*command, "--scheme", "w4a16,w8a16"]) == 2
    assert "--scheme names 2 layers, the model has 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"hidden_size": 192}, ["w4a16"], "qkv of layer 0 has 192 inputs, which do not divide"),
        ({"intermediate_size": 320}, ["w8a16"], "down of layer 0 has 320 inputs"),
        ({"intermediate_size": 320}, [",".join(["w8a8"] * 7 + ["w3a16"])], "down of layer 7"),
        ({"intermediate_size": 320}, [",".join(["w4a4"] * 7 + ["w4a16"])], "down of layer 7"),
    ],
)
def test_rows_that_are_no_whole_groups_are_refused_before_anything_is_read(
    demo_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: dict[str, int],
    options: list[str],
    message: str,
) -> None:
    model, output = tmp_path / "model", tmp_path / "q"
    shutil.copytree(demo_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"head_dim": 64} | sizes))
    words = [str(model), str(output), "--text", "nowhere.txt", "--method", "rtn", "--scheme"]
    assert quantize_main([*words, *options]) == 2
    assert message in capsys.readouterr().err and not output.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--windows", "0"], "got 0 calibration windows of 1024 tokens"),
        (["--window", "0"], "windows of 0 tokens, expected 1 to"),
        (["--variant", "paper"], "--variant is for w4a4 layers, there are none here"),
        (["--in-turn"], "--in-turn is for w4a4 layers"),
        (["--outliers", "8"], "--outliers is for w4a4 layers"),
        (["--scheme", "w8a8", "--group-size", "64"], "--group-size is for w4a4 and weight-only"),
        (["--scheme", "w4a4", "--asymmetric"], "--asymmetric is for w3a16, w4a16 and w8a16"),
        (["--scheme", "w4a4", "--outliers", "256", "--window", "32"], "no channel would be left"),
    ],
)
def test_options_that_nothing_heeds_are_refused(
    options: list[str],
    message: str,
    demo_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "calibration.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 200)
    command = [str(demo_model), str(tmp_path / "q"), "--text", str(text), "--scheme", "w4a16"]
    assert quantize_main([*command, *options]) == 2
    assert message in capsys.readouterr().err
    if options[0] != "--windows" and not (tmp_path / "q").exists():
        return
    # Nothing of it stands in the way of the right command.
    right = [*command, "--windows", "1", "--window", "32", "--method", "rtn"]
    assert quantize_main(right) == 0

"""Calibration, GPTQ and the folds: what quantising a layer keeps and what it gains."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.kernels.atom.reference import atom_linear_reference
from llmpq.kernels.formats.atom_rounding import (
    Codes,
    integer_scales,
    restore,
    round_activations,
    round_weight,
    stored_integers,
)
from llmpq.kernels.formats.atom_scheme import MANY, AtomScheme
from llmpq.kernels.weights.atom_weight import AtomWeight, quantize_atom
from llmpq.kernels.weights.quantized_weight import from_codes
from llmpq.kernels.weights.round_to_nearest import quantize_codes
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision, WeightScheme
from llmpq.profiler.cli.quantize import main as quantize_main
from llmpq.profiler.quantize.gptq import gptq_atom, gptq_codes, inverse_factor
from llmpq.profiler.quantize.layer_walk import CalibrationRun, random_windows
from llmpq.profiler.quantize.linears_in_turn import compensated, quantize
from llmpq.profiler.quantize.one_layer import Recipe, channel_order, folded
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.memory import Quantization
from reference.atom_twins import integer_product
from reference.inject_outliers import InjectedSource
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
FAMILIES = ("opt", "bloom", "llama", "qwen3", "mixtral")


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def correlated(k: int = 200, tokens: int = 600) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(k)
    mix = torch.randn(k, k, generator=seeded) / k**0.5
    return torch.randn(tokens, k, generator=seeded) @ mix


def output_error(x: torch.Tensor, got: torch.Tensor, w: torch.Tensor) -> float:
    return float((x @ (got - w).t()).norm() / (x @ w.t()).norm())


@pytest.mark.parametrize("group", [128, 64, None])
@pytest.mark.parametrize("rotation", [False, True])
def test_gptq_beats_rounding_and_keeps_codes_in_range(group: int | None, rotation: bool) -> None:
    x = correlated()
    w = torch.randn(32, 200, generator=torch.Generator().manual_seed(1))
    scheme = AtomScheme(outliers=8, group_size=group, rotation=rotation)
    nearest = restore(round_weight(w, scheme, scale_dtype=torch.float32))
    found = gptq_atom(w, x.t() @ x, scheme, scale_dtype=torch.float32, damping=0.01)
    assert int(found.codes.min()) >= -8 and int(found.codes.max()) <= 7
    assert output_error(x, restore(found), w) < 0.85 * output_error(x, nearest, w)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_scales_are_whole_units_of_a_row(method: str, dtype: torch.dtype) -> None:
    x = correlated(1100)
    seeded = torch.Generator().manual_seed(5)
    w = torch.randn(32, 1100, generator=seeded) * (1 + 3 * torch.rand(1, 1100, generator=seeded))
    free = AtomScheme(outliers=8, signed_scale=True, weight_clip=None, group_size=64)
    scheme = replace(free, integer_scales=True)

    def made(of: AtomScheme) -> Codes:
        if method == "rtn":
            return round_weight(w, of, scale_dtype=dtype)
        return gptq_atom(w, x.t() @ x, of, scale_dtype=dtype, damping=0.01)

    found = made(scheme)
    steps, unit = stored_integers(found.scale)
    # 16 bits keep a scale to a 256th, which is less than half a unit.
    places = {"rtol": 1e-6 if dtype == torch.float32 else 8e-3}
    assert torch.allclose(steps * unit, found.scale.float(), **places)
    assert int(steps.abs().min()) >= 1 and int(steps.abs().max()) == 15
    loose = made(free).scale
    steps, unit = stored_integers(loose)
    assert not torch.allclose(steps * unit, loose.float(), **places)
    ideal, error = output_error(x, restore(made(free)), w), output_error(x, restore(found), w)
    assert error < 1.1 * ideal


def test_the_twin_takes_integer_scales_of_many_tokens_only() -> None:
    seeded = torch.Generator().manual_seed(6)
    scheme = AtomScheme(outliers=8, signed_scale=True, group_size=64, integer_scales=True)
    w, x = torch.randn(16, 520, generator=seeded), torch.randn(MANY + 1, 520, generator=seeded)
    free = round_activations(x, replace(scheme, integer_scales=False))
    many, few = round_activations(x, scheme), round_activations(x[:-1], scheme)
    assert torch.equal(many.codes, free.codes) and torch.equal(few.scale, free.scale[:-1])
    steps, unit = integer_scales(free.scale)
    assert torch.equal(many.scale, steps * unit) and not torch.equal(many.scale, free.scale)
    assert float((many.scale - free.scale).abs().max() / unit.max()) <= 0.5 + 1e-3
    weight = quantize_atom(w, scheme, dtype=torch.float16)
    y = atom_linear_reference(x, weight).double()
    exact = integer_product(x, weight)
    assert float((y - exact).norm() / exact.norm()) < 1e-5
    apart = atom_linear_reference(x, weight.with_activations(16)).double()
    assert float((y - apart).norm() / exact.norm()) > 0.05
    assert atom_linear_reference(x[:0], weight).shape == (0, 16)
    for wrong in ({"group_size": None}, {"weight_bits": 8}, {"number": "e2m1"}):
        with pytest.raises(ValueError, match="integer_scales: code"):
            replace(scheme, signed_scale=False, **wrong)


def test_integer_scales_beside_a_huge_channel_and_of_nothing() -> None:
    """Groups below half a unit are left out, not inflated; rows of zeros stay zeros."""
    x = torch.randn(MANY + 1, 1024, generator=torch.Generator().manual_seed(7))
    x[:, 5] *= 1000
    x[0] = 0
    scheme = AtomScheme(outliers=0, signed_scale=True, integer_scales=True)
    restored = restore(round_activations(x, scheme))
    assert torch.isfinite(restored).all() and not restored[0].any()
    assert float(restored[:, 128:].norm()) <= float(x[:, 128:].norm())
    steps, unit = stored_integers(torch.zeros(2, 8))
    assert torch.isfinite(steps).all() and not (steps * unit).double().abs().gt(1e-36).any()


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_of_weight_only_schemes_beats_rounding(bits: int, symmetric: bool) -> None:
    x = correlated()
    w = torch.randn(32, 200, generator=torch.Generator().manual_seed(2))
    scheme = WeightScheme(bits=bits, symmetric=symmetric)

    def dense(found: tuple) -> torch.Tensor:  # type: ignore[type-arg]
        weight = from_codes(*found, bits=bits, group_size=128, in_features=200)
        return weight.dequantize(torch.float32)

    nearest = dense(quantize_codes(w, scheme, scale_dtype=torch.float32))
    found = dense(gptq_codes(w, x.t() @ x, scheme, scale_dtype=torch.float32, damping=0.01))
    assert output_error(x, found, w) < 0.85 * output_error(x, nearest, w)


def test_gptq_with_an_identity_hessian_is_rounding_to_nearest() -> None:
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(3))
    scheme = AtomScheme(outliers=0)
    found = gptq_atom(w, torch.eye(256), scheme, scale_dtype=torch.float32, damping=0.01)
    nearest = round_weight(w, scheme, scale_dtype=torch.float32)
    assert torch.equal(found.codes, nearest.codes)
    assert torch.allclose(found.scale, nearest.scale)


def test_factor_is_that_of_the_damped_inverse_and_survives_dead_channels() -> None:
    x = correlated(40, 100)
    x[:, 3] = 0
    h = x.t() @ x
    u = inverse_factor(h, 0.01)
    damped = h + torch.eye(40) * 0.01 * h.diagonal().mean()
    damped[3, 3] += 1
    assert torch.allclose(u.t() @ u @ damped, torch.eye(40), atol=2e-3)
    with pytest.raises(ValueError, match="all zero"):
        inverse_factor(torch.zeros(4, 4), 0.01)


def test_compensation_reduces_the_error_of_noisy_inputs() -> None:
    x = correlated(64, 2000)
    z = x + 0.3 * x.std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    best = compensated(w, z.t() @ z, x.t() @ z, 0.001)
    plain_error, error = (float((x @ w.t() - z @ m.t()).norm()) for m in (w, best))
    assert error < 0.9 * plain_error
    unchanged = compensated(w, x.t() @ x, x.t() @ x, 0.01)
    assert torch.allclose(unchanged, w, atol=1e-3)


def logits(spec: ModelSpec, source: object, tokens: list[int]) -> torch.Tensor:
    pipeline = ReferencePipeline.build(spec, source)  # type: ignore[arg-type]
    step = Step.of([0], [0], [len(tokens)])
    caches = pipeline.caches(1, 64)
    return pipeline.logits(torch.tensor([tokens]), step, caches, all_positions=True)


class Changed:
    """A source with one layer replaced."""

    def __init__(self, source: CheckpointSource, index: int, parts: dict) -> None:  # type: ignore[type-arg]
        self._source, self._index, self._parts = source, index, parts
        self.embedding, self.head = source.embedding, source.head
        self.keep_codes = source.keep_codes

    def layer(self, index: int, dtype: torch.dtype) -> object:
        return self._parts if index == self._index else self._source.layer(index, dtype)


@pytest.mark.parametrize("kind", FAMILIES)
def test_folds_leave_every_family_as_it_was(kind: str, tiny_models, random_prompts) -> None:  # type: ignore[no-untyped-def]
    directory = tiny_models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    source = CheckpointSource(directory, spec)
    (prompt,) = random_prompts(20)
    run = CalibrationRun(spec, source, torch.tensor([prompt]))
    view = run.view(0)
    parts, orders = folded(view, Recipe(scheme=AtomScheme(outliers=4)))
    assert set(orders) == {name for name in view.hessians if not name.endswith("down")}
    ups = [order.tolist() for name, order in orders.items() if name.endswith("up")]
    assert all(order == ups[0] for order in ups), "experts share the order of their input"
    exact = logits(spec, source, prompt)
    assert torch.allclose(logits(spec, Changed(source, 0, parts), prompt), exact, atol=1e-4)
    for name in parts:
        if name.endswith("down.weight"):
            parts[name] = parts[name].roll(1, dims=1)
    assert not torch.allclose(logits(spec, Changed(source, 0, parts), prompt), exact, atol=1e-2)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("improved", [False, True])
def test_eight_bit_atom_layers_are_nearly_exact(  # type: ignore[no-untyped-def]
    kind: str, improved: bool, tiny_models, random_prompts
) -> None:
    """Orders, folds, rotation and turns are right: at 8 bits nothing but rounding is left."""
    directory = tiny_models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    source = CheckpointSource(directory, spec)
    prompts = random_prompts(24, 24)
    run = CalibrationRun(spec, source, torch.tensor(prompts))
    scheme = AtomScheme(
        weight_bits=8, activation_bits=8, outliers=4, weight_clip=1.0, activation_clip=1.0
    )
    recipe = Recipe(
        scheme=scheme,
        rotated=("down",) if improved else (),
        compensated=improved and not spec.experts,
    )
    parts = quantize(run, run.view(0), recipe, dtype=torch.float32)
    exact, got = (layer_output(run, layer) for layer in (source.layer(0, torch.float32), parts))
    errors_T = (got - exact).norm(dim=1) / exact.norm(dim=1)
    # A router may send a token to another expert after rounding: not all tokens, but most.
    assert float(errors_T.quantile(0.9 if spec.experts else 1.0)) < 0.04
    down = f"{spec.mlps()[-1]}down.weight"
    swapped = parts | {down: replace(parts[down], scale=parts[down].scale.roll(1, dims=0))}
    errors_T = (layer_output(run, swapped) - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(errors_T.quantile(0.9)) > 0.04, "a neighbour's scales must not pass"


def layer_output(run: CalibrationRun, parts: dict) -> torch.Tensor:  # type: ignore[type-arg]
    """Return what a layer of these tensors makes of the run's hidden states, [T, h]."""
    moved = copy(run)
    moved._hidden = list(run._hidden)
    moved.advance(parts)
    return torch.cat([x.flatten(0, 1) for x in moved._hidden])


def test_the_order_puts_the_largest_channels_last() -> None:
    x = torch.tensor([[1.0, 9.0, 3.0], [1.0, -9.0, 2.0]])
    assert channel_order(x.t() @ x).tolist() == [0, 2, 1]


@pytest.mark.parametrize("kind", FAMILIES)
def test_injected_outliers_change_nothing_but_the_channels(  # type: ignore[no-untyped-def]
    kind: str, tiny_models, random_prompts
) -> None:
    directory = tiny_models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    source = CheckpointSource(directory, spec)
    (prompt,) = random_prompts(20)
    exact = logits(spec, source, prompt)
    for everywhere in (False, True):
        injected = InjectedSource(source, spec, 4, 30.0, everywhere=everywhere)
        assert torch.allclose(logits(spec, injected, prompt), exact, atol=2e-3)
        before, after = (s.layer(0, torch.float32)["qkv.weight"] for s in (source, injected))
        assert not torch.equal(before, after)


def test_outliers_save_an_injected_model(demo_model: Path, tmp_path: Path) -> None:
    spec = replace(ModelSpec.from_directory(demo_model), num_layers=2)
    tensors = load_file(demo_model / "model.safetensors")
    short = {name: t for name, t in tensors.items() if not re.search(r"layers\.[2-7]\.", name)}
    save_file(short, tmp_path / "model.safetensors")
    source = InjectedSource(CheckpointSource(tmp_path, spec), spec, 4, 50.0)
    windows = random_windows(list(range(4, 600)), count=2, length=64)
    exact = logits(spec, source, windows[0].tolist()[:60])

    def error(scheme: AtomScheme, method: str) -> float:
        run = CalibrationRun(spec, source, windows)
        chosen = Recipe(scheme=scheme, method=method)  # type: ignore[arg-type]
        parts = quantize(run, run.view(0), chosen, dtype=torch.float32)
        got = logits(spec, Changed(source, 0, parts), windows[0].tolist()[:60])  # type: ignore[arg-type]
        return float((got - exact).norm() / exact.norm())

    assert error(AtomScheme(outliers=8), "gptq") < 0.3 * error(AtomScheme(), "rtn")


def test_w4a4_and_w8a8_run_without_calibration(demo_model: Path) -> None:
    spec = ModelSpec.from_directory(demo_model)
    source = CheckpointSource(demo_model, spec)
    tokens = list(range(5, 45))
    exact = logits(spec, source, tokens)

    def error(precision: Precision) -> float:
        pipeline = ReferencePipeline.build(
            spec, source, precisions=[precision] * spec.num_layers, scheme=Quantization().scheme
        )
        assert isinstance(pipeline.stages[0].layers[0].attention.qkv.weight, AtomWeight)
        step = Step.of([0], [0], [len(tokens)])
        caches = pipeline.caches(1, 64)
        got = pipeline.logits(torch.tensor([tokens]), step, caches, all_positions=True)
        return float((got - exact).norm() / exact.norm())

    assert error(Precision.W8A8) < 0.08 < error(Precision.W4A4) < 0.6


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_groups_that_weight_only_layers_cannot_have_are_refused(
    method: str, demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 200)
    command = [str(demo_model), str(tmp_path / "q"), "--text", str(text), "--method", method]
    schemes = ",".join(["w4a4"] * 7 + ["w4a16"])
    assert quantize_main([*command, "--scheme", schemes, "--group-size", "64"]) == 2
    assert "got 64, w4a16 layers have 128 or channel" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def test_a_directory_with_integer_scales_says_so_and_transformers_refuses_it(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 200)
    command = [str(demo_model), str(tmp_path / "q"), "--text", str(text), "--integer-scales"]
    command += ["--windows", "1", "--window", "64", "--method", "rtn"]
    assert quantize_main([*command, "--scheme", "w4a16"]) == 2
    assert "--integer-scales is for w4a4 layers" in capsys.readouterr().err
    assert quantize_main([*command, "--scheme", "w4a4", "--group-size", "64"]) == 2
    assert "got groups of 64, expected 128" in capsys.readouterr().err
    assert quantize_main([*command, "--scheme", "w4a4"]) == 0
    source = open_checkpoint(tmp_path / "q", ModelSpec.from_directory(tmp_path / "q"))
    parts = source.layer(0, torch.bfloat16).values()
    weights = [part for part in parts if isinstance(part, AtomWeight)]
    assert len(weights) == 4 and all(weight.scheme.integer_scales for weight in weights)
    for weight in weights:
        steps, unit = stored_integers(weight.scale)
        assert torch.allclose(steps * unit, weight.scale.float(), rtol=8e-3)
    import transformers

    with pytest.raises(ValueError, match="no `quant_method`"):  # else: random weights
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q")

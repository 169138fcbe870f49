"""Balanced channels: the layer computes what it did, and 8 bits are enough for outlier channels."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.profiler.quantize.layer_walk import CalibrationRun, Hessian, random_windows
from llmpq.profiler.quantize.linears_in_turn import quantize
from llmpq.profiler.quantize.one_layer import Recipe
from llmpq.profiler.quantize.recipes import Settings, recipe
from llmpq.profiler.quantize.smooth_channels import factors, smoothed
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.weights.sources import CheckpointSource
from reference.inject_outliers import InjectedSource

pytestmark = pytest.mark.cpu
TEXT = Path(__file__).parents[3] / "examples" / "heldout.txt"


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def output(run: CalibrationRun, parts: Any) -> torch.Tensor:
    """Return what a layer of these tensors makes of the calibration text, [T, h]."""
    moved = copy(run)
    moved._hidden = list(run._hidden)
    moved.advance(parts)
    return torch.cat([x.flatten(0, 1) for x in moved._hidden])


@pytest.mark.parametrize("kind", ["opt", "bloom", "llama", "qwen3", "mixtral"])
def test_balancing_changes_no_output(kind: str, tiny_models: Any) -> None:
    directory = tiny_models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    source = InjectedSource(CheckpointSource(directory, spec), spec, 4, 30.0)
    run = CalibrationRun(spec, source, random_windows(list(range(150)), count=2, length=40))
    view = run.view(0)
    found = smoothed(view)
    exact = output(run, view.tensors)
    torch.testing.assert_close(output(run, found.tensors), exact, rtol=1e-4, atol=1e-4)
    changed = found.tensors["attn_norm.weight"] / view.tensors["attn_norm.weight"]
    assert changed.unique().numel() > 1
    assert torch.equal(changed.log2(), changed.log2().round()), "a power of two"
    one_sided = {**found.tensors, "qkv.weight": view.tensors["qkv.weight"]}
    assert not torch.allclose(output(run, one_sided), exact, rtol=1e-2, atol=1e-2)
    # The sums are those of the inputs that the balanced layer has.
    x_TK = torch.cat(list(run.inputs(found.tensors, "qkv")))
    torch.testing.assert_close(x_TK.t() @ x_TK, found.hessians["qkv"].sum_KK, rtol=1e-3, atol=1e-2)


def test_silent_channels_are_left_alone() -> None:
    hessian = Hessian(4, torch.device("cpu"))
    hessian.add(torch.tensor([[100.0, 1.0, 0.0, 1.0]]))
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    found = factors([hessian], [weight], 0.5)
    assert found[2] == found[3] == 1.0 and found[0] > found[1]


@pytest.mark.parametrize(("precision", "gain"), [(Precision.W8A8, 0.3), (Precision.W4A4, 1.0)])
def test_outlier_channels_cost_less(demo_model: Path, precision: Precision, gain: float) -> None:
    spec = ModelSpec.from_directory(demo_model)
    source = InjectedSource(CheckpointSource(demo_model, spec), spec, 8, 50.0)
    tokens = Tokenizer(demo_model).encode(TEXT.read_text()[:20000], special=False)
    run = CalibrationRun(spec, source, random_windows(tokens, count=4, length=256))
    view = run.view(0)
    exact = output(run, view.tensors)

    def error(chosen: Recipe | None) -> float:
        assert chosen is not None
        got = output(run, quantize(run, view, chosen, dtype=torch.float32))
        return float((got - exact).norm() / exact.norm())

    default = recipe(precision, spec, Settings(group_size=64))
    assert default is not None and default.smoothing == 0.5
    assert error(default) < gain * error(replace(default, smoothing=None))

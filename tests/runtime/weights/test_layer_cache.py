"""Layers kept on disk: read instead of quantised, and made again when they do not fit."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.weights.layer_cache import KeptLayers
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.memory import Quantization

pytestmark = pytest.mark.cpu
BITS = [Precision.W4A16, Precision.W8A16, Precision.W16A16, Precision.W3A16]


class CountingSource(CheckpointSource):
    """Counts the layers read from the checkpoint."""

    num_layers_read = 0

    def layer(self, index, dtype):
        self.num_layers_read += 1
        return super().layer(index, dtype)


def build(directory: Path, folder: Path | None, *, symmetric: bool = False):
    """Build the first layers of a model; return logits, and how many layers were read where."""
    spec = ModelSpec.from_directory(directory)
    source = CountingSource(directory, spec)
    scheme = Quantization(symmetric=symmetric).scheme
    precisions = BITS[: spec.num_layers]
    schemes = {i: scheme(p) for i, p in enumerate(precisions)}
    cpu = torch.device("cpu")
    kept = source if folder is None else KeptLayers(source, folder, schemes, cpu)
    model = StageModel.build(
        spec,
        range(len(precisions)),
        precisions,
        first=True,
        last=True,
        dtype=torch.float32,
        device=cpu,
        scheme=scheme,
        source=kept,
    )
    weights = [
        layer.attention.qkv.weight.codes().sum().item()
        for layer, p in zip(model.layers, precisions, strict=True)
        if p is not Precision.W16A16
    ]
    return weights, model.weight_nbytes, source.num_layers_read


@pytest.fixture
def model(tiny_models, tmp_path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_models.directory("llama"), copy)
    return copy


def test_a_second_start_reads_what_the_first_one_quantised(model, tmp_path):
    plain = build(model, None)
    first, second = build(model, tmp_path / "kept"), build(model, tmp_path / "kept")
    assert first[:2] == second[:2] == plain[:2]
    dense = BITS[: plain[2]].count(Precision.W16A16)
    assert first[2] == plain[2] and second[2] == dense, "only dense layers are read again"


def test_each_layout_is_kept_by_itself(model, tmp_path, monkeypatch):
    folder, where = tmp_path / "kept", "llmpq.runtime.weights.layer_cache.best_layout"
    first = build(model, folder)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(where, lambda *_: Layout.ROWS)
        assert build(model, folder)[2] == first[2], "made anew as another CPU has it"
    assert build(model, folder)[2] < first[2], "what this CPU has stays"


@pytest.mark.parametrize("change", ["truncated", "checkpoint", "scheme"])
def test_what_does_not_fit_is_made_again(model, tmp_path, change):
    folder = tmp_path / "kept"
    first = build(model, folder)
    if change == "truncated":
        for path in folder.rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:100])
    elif change == "checkpoint":
        (model / "model.safetensors").touch()
    again = build(model, folder, symmetric=change == "scheme")
    assert again[2] == first[2], "every layer is read from the checkpoint"
    assert (again[:2] == first[:2]) == (change != "scheme")


def test_a_disk_without_room_for_a_layer_is_named(model, tmp_path, monkeypatch):
    def full(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("llmpq.runtime.weights.layer_cache.save_file", full)
    with pytest.raises(ValueError, match=r"cannot write '.*/0\.safetensors' of --layer"):
        build(model, tmp_path / "kept")
    assert not list((tmp_path / "kept").rglob("*.*")), "no half of a file"

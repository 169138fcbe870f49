"""llmpq-quantize continues what the same weights and settings began, and ends with a sentence."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.profiler.cli import quantize as quantize_command
from llmpq.profiler.quantize.layer_walk import random_windows
from llmpq.profiler.quantize.recipes import Settings
from llmpq.profiler.quantize.whole_model import QuantizeJob, quantize_model
from llmpq.runtime.weights import atomic_write as whole_files
from llmpq.runtime.weights.quantized_checkpoint import open_dequantized
from llmpq.runtime.weights.quantized_writer import ENDS_FILE, layer_file
from llmpq.runtime.weights.sources import CheckpointSource

pytestmark = pytest.mark.cpu


@pytest.fixture
def model(tiny_models: Any, tmp_path: Path) -> Path:
    """Return a copy of a model, to change."""
    return shutil.copytree(tiny_models.directory("llama"), tmp_path / "model")


def quantise(
    model: Path,
    target: Path,
    dtype: torch.dtype = torch.float32,
    sizes: list[int] | None = None,
) -> list[bool]:
    """Return which layers were there already; their bytes as shown go into `sizes`."""
    spec = ModelSpec.from_directory(model)
    job = QuantizeJob(
        spec=spec,
        precisions=(Precision.W8A16,) * spec.num_layers,
        settings=Settings(method="rtn", group_size=None),
        windows_WT=random_windows([t % spec.vocab for t in range(400)], count=2, length=16),
    )
    there: list[bool] = []

    def on_layer(index: int, size: int, resumed: bool) -> None:
        there.append(resumed)
        if sizes is not None:
            sizes.append(size)

    with torch.inference_mode():
        quantize_model(
            job,
            CheckpointSource(model, spec),
            target,
            dtype=dtype,
            on_layer=on_layer,
        )
    return there


def test_the_same_command_continues(model: Path, tmp_path: Path) -> None:
    written: list[int] = []
    shown: list[int] = []
    quantise(model, tmp_path / "q", sizes=written)
    (tmp_path / "q" / layer_file(1)).unlink()
    assert quantise(model, tmp_path / "q", sizes=shown) == [True, False, True]
    files = [(tmp_path / "q" / layer_file(index)).stat().st_size for index in range(3)]
    assert written == shown == files


def test_what_is_quantised_already_is_not_quantised_again(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q")
    with pytest.raises(
        ValueError, match=r"q' is quantised already \(compressed-tensors\).*16 bits"
    ):
        open_dequantized(tmp_path / "q", ModelSpec.from_directory(tmp_path / "q"))


def test_layers_of_other_weights_are_not_taken(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 2
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="a quantisation that differs in weights; give a new"):
        quantise(model, tmp_path / "q")


def test_layers_computed_in_another_dtype_are_not_taken(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q")
    with pytest.raises(ValueError, match="a quantisation that differs in dtype; give a new"):
        quantise(model, tmp_path / "q", torch.bfloat16)


def test_embedding_of_another_model_is_not_taken(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "q"
    quantise(model, target)
    for path in target.glob("model-layer-*"):  # as a run that stopped in its first layer
        path.unlink()
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 2
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    quantise(model, target)
    found = load_file(target / ENDS_FILE)["model.embed_tokens.weight"]
    assert found.equal(tensors["model.embed_tokens.weight"])


def test_layers_behind_a_missing_first_one_are_not_taken(model: Path, tmp_path: Path) -> None:
    quantise(model, tmp_path / "q")
    (tmp_path / "q" / layer_file(0)).unlink()
    with pytest.raises(ValueError, match="a quantisation that differs in dtype; give a new"):
        quantise(model, tmp_path / "q", torch.bfloat16)


@pytest.mark.parametrize("content, words", [("[]", "holds a list"), ("{", "is not JSON")])
def test_a_state_that_is_none(model: Path, tmp_path: Path, content: str, words: str) -> None:
    quantise(model, tmp_path / "q")
    (tmp_path / "q" / "quantize.json").write_text(content)
    with pytest.raises(ValueError, match=f"quantize.json' {words}"):
        quantise(model, tmp_path / "q")


def test_files_are_as_readable_as_the_umask_says(model: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        quantise(model, tmp_path / "q")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "q").iterdir()} == {0o640}


@pytest.mark.parametrize("file", [layer_file(1), ENDS_FILE])
def test_a_full_disk_is_named_and_the_run_continues(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    target, write = tmp_path / "q", whole_files.save_file

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if path.name.startswith(file):
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        write(tensors, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(whole_files, "save_file", full)
        with pytest.raises(
            ValueError, match=f"cannot write '{target / file}': no space left.*free"
        ):
            quantise(model, target)
    assert not list(target.glob("*.unfinished")) and not (target / file).exists()
    with pytest.raises(ValueError, match="config.json"):
        ModelSpec.from_directory(target)
    first = file == layer_file(1)
    assert quantise(model, target) == [first, False, False]
    assert ModelSpec.from_directory(target).num_layers == 3


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors.index.json"])
def test_a_full_disk_while_small_files_are_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target, write = tmp_path / "q", Path.write_bytes
    (model / "tokenizer.json").write_text("{}")

    def full(path: Path, content: bytes) -> int:
        if path.parent == target and path.name.startswith(name):
            write(path, content[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(ValueError, match=f"cannot write '{target / name}': no space left"):
            quantise(model, target)
    assert not (target / "config.json").exists() and not (target / name).exists()
    quantise(model, target)
    assert (target / "config.json").exists() and (target / name).exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate"),
    ],
)
def test_no_memory_left_is_a_sentence(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(quantize_command, "quantize", fail)
    assert quantize_command.main(f"m {tmp_path} --text t --device cuda:1".split()) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("llmpq-quantize: out of memory") and "fewer --windows" in line


def test_another_error_of_torch_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(quantize_command, "quantize", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        quantize_command.main(f"m {tmp_path} --text t".split())

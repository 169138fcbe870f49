"""A stage's slice copied from another host: the same tensors, no others, checked by hash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from llmpq.checkpoints.tensor_names import INDEX, SINGLE
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.runtime.weights.remote_slice import SliceReader, remote_slice

pytestmark = pytest.mark.cpu


class CountingReader(SliceReader):
    """Counts the bytes that it gives; spoils the first pieces."""

    def __init__(self, directory: Path, *, spoiled: int = 0) -> None:
        super().__init__(str(directory))
        self.bytes_given, self.spoiled = 0, spoiled

    def piece(self, file: str, start: int, end: int) -> tuple[bytes, str]:
        data, total = super().piece(file, start, end)
        self.bytes_given += len(data)
        if self.spoiled:
            self.spoiled -= 1
            return bytes(len(data)), total
        return data, total


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("kind", ["opt", "bloom", "llama", "qwen3", "mixtral"])
def test_a_slice_has_its_layers_and_ends_and_nothing_else(tiny_models, tmp_path, kind):
    whole_dir = tiny_models.directory(kind)
    spec = ModelSpec.from_directory(whole_dir)
    whole = open_checkpoint(whole_dir, spec)
    reader = CountingReader(whole_dir)
    parts = ((0, 1), (1, 2), (2, 3))
    for start, end in parts:
        folder = remote_slice(reader, tmp_path, (start, end))
        assert ModelSpec.from_directory(folder).fingerprint() == spec.fingerprint()
        part = open_checkpoint(folder, spec)
        for index in range(spec.num_layers):
            if start <= index < end:
                assert same(part.layer(index, torch.float32), whole.layer(index, torch.float32))
            else:
                with pytest.raises(ValueError, match=r"does not give tensor"):
                    part.layer(index, torch.float32)
        if start == 0:
            assert same(part.embedding(torch.float32), whole.embedding(torch.float32))
        if end == spec.num_layers:
            assert same(part.head(torch.float32), whole.head(torch.float32))
    ends = 2 if spec.tied_embeddings else 1  # a tied embedding is needed at both
    table = sum(t.numel() * 4 for t in whole.embedding(torch.float32).values())
    assert reader.bytes_given <= (whole_dir / SINGLE).stat().st_size + (ends - 1) * table


def test_a_copy_is_used_again_unless_it_or_the_checkpoint_has_changed(demo_model, tmp_path):
    original = tmp_path / "model"
    shutil.copytree(demo_model, original)
    reader = CountingReader(original)
    folder = remote_slice(reader, tmp_path / "cache", (0, 4))
    given, reader.bytes_given = reader.bytes_given, 0
    assert remote_slice(reader, tmp_path / "cache", (0, 4)) == folder and reader.bytes_given == 0
    kept = folder / SINGLE
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    remote_slice(reader, tmp_path / "cache", (0, 4))
    assert reader.bytes_given == given
    assert json.loads((folder / "copied.json").read_text()).keys() == {SINGLE}
    weights = original / SINGLE
    weights.write_bytes(weights.read_bytes()[:-2] + b"xy")
    assert remote_slice(reader, tmp_path / "cache", (0, 4)) != folder


def test_a_checkpoint_of_several_files_is_copied_by_file(demo_model, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(demo_model / SINGLE)
    names = sorted(tensors)
    shutil.copytree(demo_model, tmp_path / "model")
    (tmp_path / "model" / SINGLE).unlink()
    file_of = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(names)}
    for file in set(file_of.values()):
        held = {name: tensors[name] for name in names if file_of[name] == file}
        save_file(held, tmp_path / "model" / file, metadata={"format": "pt"})
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": file_of}))
    spec = ModelSpec.from_directory(demo_model)
    folder = remote_slice(SliceReader(str(tmp_path / "model")), tmp_path / "cache", (4, 8))
    found = open_checkpoint(folder, spec).layer(5, torch.float32)
    assert same(found, open_checkpoint(demo_model, spec).layer(5, torch.float32))


def test_what_arrives_broken_is_asked_for_once_more_then_refused(demo_model, tmp_path):
    folder = remote_slice(CountingReader(demo_model, spoiled=1), tmp_path / "a", (0, 4))
    spec = ModelSpec.from_directory(demo_model)
    found = open_checkpoint(folder, spec).layer(0, torch.float32)
    assert same(found, open_checkpoint(demo_model, spec).layer(0, torch.float32))
    with pytest.raises(ValueError, match=r"arrived broken twice \(SHA-256 differs\)"):
        remote_slice(CountingReader(demo_model, spoiled=10**6), tmp_path / "b", (0, 4))
    assert not list((tmp_path / "b").rglob("*.safetensors"))


def test_files_outside_the_model_directory_are_not_given(demo_model):
    with pytest.raises(ValueError, match=r"file name inside"):
        SliceReader(str(demo_model)).piece("../../etc/passwd", 0, 1)

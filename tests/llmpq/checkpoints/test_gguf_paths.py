"""Paths that look like a GGUF file's: one sentence says what is there instead."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main

pytestmark = pytest.mark.pure


def test_missing_files_and_folders_of_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file: .*nothing.gguf"):
        ModelSpec.from_directory(tmp_path / "nothing.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ValueError, match="model.gguf' is not a GGUF file"):
            ModelSpec.from_directory(path)
    (tmp_path / "model.gguf").write_text("version https://git-lfs.github.com/spec/v1\nsize 12\n")
    with pytest.raises(ValueError, match="model.gguf' is a pointer of Git LFS, .*git lfs pull"):
        ModelSpec.from_directory(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="no config.json .* give one itself, .*model.gguf"):
        ModelSpec.from_directory(tmp_path)


def file_of(**said: str) -> bytes:
    """A GGUF file of keys alone."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(said))
    for key, value in said.items():
        name = f"general.{key}".encode()
        content += struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value))
        content += value.encode()
    return content


@pytest.mark.parametrize(
    "beside",
    [
        {"architecture": "clip"},
        {"architecture": "clip", "type": "mmproj"},
        {"type": "imatrix"},
        {"architecture": "llama", "type": "adapter"},
    ],
)
def test_what_lies_beside_a_model_is_no_other_model(tmp_path: Path, beside: dict[str, str]) -> None:
    """As LM Studio's folders have it: a projector beside the model."""
    (tmp_path / "model-Q4_0.gguf").write_bytes(file_of(architecture="llama", type="model"))
    (tmp_path / "a.gguf").write_bytes(file_of(**beside))
    with pytest.raises(ValueError, match="model-Q4_0.gguf' has no tensor"):
        ModelSpec.from_directory(tmp_path)
    (tmp_path / "model-Q8_0.gguf").write_bytes(file_of(architecture="llama"))
    with pytest.raises(ValueError, match="give one itself, '.*model-Q4_0.gguf'"):
        ModelSpec.from_directory(tmp_path)


def test_the_planner_refuses_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--device-names", "V100", "--device-numbers", "1", "--s", "64", "--n", "8"]
    assert main(["--model", "there/is/none.gguf", *job]) == 2
    said = "llmpq-algo: no such file: 'there/is/none.gguf'; expected a GGUF file\n"
    assert capsys.readouterr().err == said

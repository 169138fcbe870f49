"""Paths that look like a GGUF file's: one sentence says what is there instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.model_spec import ModelSpec
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


def test_the_planner_refuses_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--device-names", "V100", "--device-numbers", "1", "--s", "64", "--n", "8"]
    assert main(["--model", "there/is/none.gguf", *job]) == 2
    said = "llmpq-algo: no such file: 'there/is/none.gguf'; expected a GGUF file\n"
    assert capsys.readouterr().err == said

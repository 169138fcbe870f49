"""llmpq-dist convert: old pickled checkpoints become safetensors, or are refused."""

from __future__ import annotations

import errno
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from llmpq.runtime.cli.main import main as dist
from llmpq.runtime.weights import atomic_write as whole_files
from llmpq.runtime.weights.convert import convert
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu


@pytest.fixture
def pickled(tiny_models, tmp_path):
    """Return a maker of a directory as OPT ships: config.json and pytorch_model.bin (shards)."""

    def make(shards: int = 1, **options) -> Path:
        directory = tmp_path / "pickled"
        directory.mkdir()
        shutil.copy(tiny_models.directory("opt") / "config.json", directory)
        state = tiny_models.reference("opt").state_dict()
        names = list(state)
        if shards == 1:
            torch.save(state, directory / "pytorch_model.bin", **options)
            return directory
        weight_map = {}
        for number in range(shards):
            file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
            part = {name: state[name] for name in names[number::shards]}
            torch.save(part, directory / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return directory

    return make


@pytest.mark.parametrize(
    "shards, options", [(1, {}), (3, {}), (1, {"_use_new_zipfile_serialization": False})]
)
def test_a_converted_model_generates_the_same(
    tiny_models, random_prompts, pickled, tmp_path, shards, options
):
    directory = pickled(shards, **options)
    done = convert(directory, tmp_path / "out")
    assert len(done.files) == shards
    assert not list((tmp_path / "out").glob("*.bin*"))
    prompts = random_prompts(5, 8)
    expected = tiny_models.greedy("opt", prompts, 6)
    assert (
        ReferencePipeline.from_directory(tmp_path / "out").generate(prompts, max_new=6) == expected
    )


def test_the_command_says_what_it_wrote(pickled, tmp_path, capsys):
    assert dist(["convert", str(pickled()), str(tmp_path / "out")]) == 0
    assert "tensors" in capsys.readouterr().out


class Payload:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_code_in_a_checkpoint_is_refused_and_not_run(pickled, tmp_path):
    directory, trace = pickled(), tmp_path / "ran"
    torch.save({"w": torch.ones(2), "x": Payload(trace)}, directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="more than tensors.*could run code"):
        convert(directory, tmp_path / "out")
    assert not trace.exists()


def test_a_truncated_checkpoint(pickled, tmp_path):
    path = pickled() / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert not zipfile.is_zipfile(path)
    with pytest.raises(ValueError, match="truncated perhaps.*Download it again"):
        convert(path.parent, tmp_path / "out")


def test_something_else_than_named_tensors(pickled, tmp_path):
    directory = pickled()
    torch.save({"step": 3}, directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="'step' is a int, expected a tensor"):
        convert(directory, tmp_path / "out")
    torch.save([torch.ones(1)], directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds a list"):
        convert(directory, tmp_path / "out2")


def test_directories_that_cannot_be_converted(pickled, tmp_path):
    with pytest.raises(ValueError, match=r"no pytorch_model\.bin"):
        convert(tmp_path, tmp_path / "out")
    directory = pickled(2)
    (directory / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ValueError, match="00002-of-00002.bin' is missing"):
        convert(directory, tmp_path / "out")


def test_a_full_target_is_left_alone(pickled):
    directory = pickled()
    with pytest.raises(ValueError, match="not empty"):
        convert(directory, directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "'weight_map' must be an object, got None"),
        ({"weight_map": ["a"]}, "'weight_map' must be an object"),
        ({"weight_map": {"a": 5}}, "'a' is said to be in 5, expected a"),
        ({"weight_map": {"a": "../../secret.bin"}}, "'a' is said to be in '../../secret.bin'"),
    ],
)
def test_an_index_that_names_no_files(pickled, tmp_path, content, message):
    directory = pickled(2)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        convert(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def full_after(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full once so many safetensors files are there; half of the next one is."""
    save_file, done = whole_files.save_file, []

    def save(tensors, path, metadata):
        done.append(path)
        if len(done) > number:
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(whole_files, "save_file", save)


def test_a_full_disk_is_named_and_leaves_nothing(pickled, tmp_path, capsys, monkeypatch):
    directory, target = pickled(3), tmp_path / "out"
    with monkeypatch.context() as patch:
        full_after(1, patch)
        assert dist(["convert", str(directory), str(target)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    file = target / "model-00002-of-00003.safetensors"
    assert f"cannot write '{file}': no space left on device (" in line
    assert "to write" in line and "free some space" in line
    assert not target.exists()
    assert dist(["convert", str(directory), str(target)]) == 0  # the same command again


def test_a_full_disk_while_config_is_copied(pickled, tmp_path, monkeypatch):
    directory, target = pickled(), tmp_path / "out"
    (directory / "tokenizer.json").write_text("{}")
    target.mkdir()
    write_bytes, kept = Path.write_bytes, []

    def write(path, content):
        if path.name.startswith("config.json"):
            kept.extend(sorted(found.name for found in target.iterdir()))
            write_bytes(path, content[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(ValueError, match="cannot write '.*config.json': no space left"):
        convert(directory, target)
    assert kept == ["model.safetensors", "tokenizer.json"]  # config.json is the last
    assert target.is_dir() and not list(target.iterdir())


def test_standard_output_that_is_closed(pickled, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert dist(["convert", str(pickled()), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").exists()

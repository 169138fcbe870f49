"""Nodes with other versions, or another model, are named before a stage loads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmpq.errors import PlanMismatchError
from llmpq.runtime.launch.nodes.node_report import SAME, report, require_alike

VERSIONS = [name for name in SAME if name != "NCCL"]
"""What a node reports before a GPU is looked at."""

pytestmark = pytest.mark.pure

CONFIG = {"hidden_size": 64, "vocab_size": 128, "rope_theta": 10000.0}


def answer(
    versions: dict[str, str] | None = None,
    config: dict[str, Any] | None = CONFIG,
    problem: str | None = None,
) -> dict[str, Any]:
    usual = {"Python": "3.11", "llmpq": "0.1.0", "torch": "2.13.0", "ray": "2.50.0"}
    return {
        "host": "x", "versions": usual | (versions or {}), "config": config, "problem": problem,
    }  # fmt: skip


def test_a_report_holds_the_versions_and_the_model_of_its_node(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    found = report(str(tmp_path))
    assert found["config"] == CONFIG and found["problem"] is None
    assert set(found["versions"]) == set(VERSIONS)
    require_alike(report(str(tmp_path)), [("hostb", found)])


@pytest.mark.parametrize("text", [None, "{", b"\xff\xfe"])
def test_a_directory_without_a_readable_config_is_a_problem(tmp_path, text):
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "config.json").write_bytes(data)
    found = report(str(tmp_path))
    assert found["config"] is None and str(tmp_path) in found["problem"]
    with pytest.raises(ValueError, match=r"hostb.*--copy-weights"):
        require_alike(report(None), [("hosta", report(None)), ("hostb", found)])


@pytest.mark.parametrize("package", VERSIONS)
def test_another_version_is_named_with_its_node(package):
    with pytest.raises(PlanMismatchError, match=rf"node hostb has {package} 9\.9, this host has"):
        require_alike(answer(), [("hosta", answer()), ("hostb", answer({package: "9.9"}))])


def test_a_build_of_another_kind_is_the_same_version(monkeypatch):
    built = {"torch": "2.13.0+cu130", "ray": "2.50.0", "llmpq": "0.1.0"}
    monkeypatch.setattr("importlib.metadata.version", built.__getitem__)
    assert report(None)["versions"]["torch"] == "2.13.0"


@pytest.mark.parametrize("change", [{"hidden_size": 65}, {"new": 1}, {"rope_theta": None}])
def test_another_model_is_named_with_the_key_that_differs(change):
    (key,) = change
    with pytest.raises(PlanMismatchError, match=rf"node hostb has another model: '{key}'"):
        require_alike(answer(), [("hostb", answer(config=CONFIG | change))])


def test_what_says_nothing_of_the_model_may_differ():
    require_alike(answer(), [("hostb", answer(config=CONFIG | {"transformers_version": "5"}))])
    require_alike(answer(), [("hostb", answer(config=None))])


def test_a_gguf_file_is_compared_by_its_size_and_head(tmp_path):
    here, there = tmp_path / "here.gguf", tmp_path / "there.gguf"
    here.write_bytes(b"GGUF" + bytes(64))
    there.write_bytes(b"GGUF" + bytes(64))
    require_alike(report(str(here)), [("hostb", report(str(there)))])
    there.write_bytes(b"GGUF" + bytes(63) + b"1")
    with pytest.raises(PlanMismatchError, match="node hostb has another model: 'sha256"):
        require_alike(report(str(here)), [("hostb", report(str(there)))])
    there.write_bytes(b"GGUF")
    with pytest.raises(PlanMismatchError, match="node hostb has another model: 'bytes'"):
        require_alike(report(str(here)), [("hostb", report(str(there)))])
    there.unlink()
    with pytest.raises(ValueError, match="hostb has no readable"):
        require_alike(report(str(here)), [("hostb", report(str(there)))])


@pytest.mark.parametrize(
    ("index", "there", "missing"),
    [
        (None, [], "model.safetensors"),
        (["a", "b"], ["a"], "b.safetensors"),
        (["a", "b"], [], "a.safetensors"),
        (["a", "b"], ["a", "b"], None),
        (None, ["any"], None),
    ],
)
def test_a_directory_without_all_its_weights_is_a_problem(tmp_path, index, there, missing):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in there:
        (tmp_path / f"{name}.safetensors").touch()
    if index is not None:
        names = {f"layer {at}": f"{name}.safetensors" for at, name in enumerate(index)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = report(str(tmp_path))
    if missing is None:
        require_alike(found, [("hostb", found)])
        return
    with pytest.raises(ValueError, match=f"node hostb has no {missing} in .*--copy-weights"):
        require_alike(found, [("hostb", found)])

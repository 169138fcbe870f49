"""Files are written whole or not at all, and what cannot be read is a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmpq import file_form
from llmpq.costs.cost_model import CostModel
from llmpq.devices.cluster import Cluster
from llmpq.file_form import FileForm, read_json, replace_text
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import ClusterRef, Plan
from llmpq.sensitivity import Sensitivity

pytestmark = pytest.mark.pure


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.json"
    path.write_text("good")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_form.os, "replace", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        replace_text(path, "better")
    message = f"cannot write '{path}': no space left on device; what it held is kept; free some"
    with pytest.raises(ValueError, match=message):
        ClusterRef(name="c", fingerprint="f").save_json(path)
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"] and path.read_text() == "good"


def test_a_full_device_is_named() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        replace_text(Path("/dev/full"), "text")


def test_a_link_is_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    replace_text(link, "text")
    assert link.is_symlink() and target.read_text() == "text"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    replace_text(pipe, "text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)


def test_nesting_without_end_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not JSON"):
        read_json(path)
    with pytest.raises(ValueError, match="is not valid YAML"):
        Cluster.load(path)
    with pytest.raises(ValueError, match="is not valid JSON"):
        ModelSpec.from_directory(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="got list, expected an object"):
        ModelSpec.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (
            "devices: [[T4]]",
            r"'nodes.0.devices.0': expected a table with keys of .*kind.*'T4'",
        ),
        ("devices: [T44]", r"'nodes.0.devices': device T44: unknown device 'T44': nearest: T4"),
        ("devices: {kind: T4}", r"'nodes.0.devices': expected a list, got .*T4"),
        ("labels: [rack]", r"'nodes.0.labels': expected a table, got \['rack'\]"),
    ],
)
def test_an_entry_of_another_form_is_said_in_the_words_of_files(
    entry: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"name: lab\nnodes:\n  - name: a\n    {entry}\n")
    with pytest.raises(ValueError, match=sentence):
        Cluster.load(path)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("count", "yes", "'nodes.0.devices.0.count': expected a number, got True"),
        ("count", "two", "'nodes.0.devices.0.count': expected a whole number, got 'two'"),
        ("count", "1.5", "'nodes.0.devices.0.count': expected a whole number, got 1.5"),
        ("count", "-1", "'nodes.0.devices.0.count': expected more than 0, got -1"),
        ("count", "[1]", r"'nodes.0.devices.0.count': expected a whole number, got \[1\]"),
        ("threads", "no", "'nodes.0.devices.0.threads': expected a number, got False"),
        ("kind", "on", "'nodes.0.devices.0.kind': expected a text in quotes, got True"),
        ("kind", "2026-01-01", "'nodes.0.devices.0.kind': expected a text in quotes, got "),
        ("memory", "lots", "'nodes.0.devices.0.memory': expected a size such as .*, got 'lots'$"),
    ],
)
def test_scalars_of_yaml_are_refused_in_words_of_a_file(
    tmp_path: Path, key: str, text: str, said: str
) -> None:
    path = tmp_path / "cluster.yaml"
    device = {"kind": "RTX-4090", key: text}
    lines = "\n".join(f"          {name}: {value}" for name, value in device.items())
    path.write_text(
        f"schema: 1\nname: home\nnodes:\n  - name: pc\n    devices:\n      -\n{lines}\n"
    )
    with pytest.raises(ValueError, match=said):
        Cluster.load(path)


def test_an_unknown_key_is_named_before_what_is_missing_without_it() -> None:
    with pytest.raises(ValueError, match="unknown key 'devices'"):
        Cluster.parse_data({"devices": [{"kind": "T4"}]}, where="my.yaml")
    with pytest.raises(ValueError, match="unknown key 'nodes.0.nmae': did you mean 'name'"):
        Cluster.parse_data({"name": "lab", "nodes": [{"nmae": "a"}]}, where="my.yaml")


def test_a_key_that_begins_with_one_that_is_known_is_taken_for_it() -> None:
    for key, said in (("hostname", "host"), ("host_name", "host"), ("labels_", "labels")):
        with pytest.raises(ValueError, match=f"unknown key 'nodes.0.{key}': did you mean '{said}'"):
            Cluster.parse_data({"name": "lab", "nodes": [{"name": "a", key: "x"}]}, where="x")


@pytest.mark.parametrize(
    ("node", "key", "meant"),
    [
        ({"devices": [{"type": "RTX-4090"}]}, "devices.0.type", "kind"),
        ({"devices": [{"name": "RTX-4090", "num": 2}]}, "devices.0.name", "kind"),
        ({"devices": [{"kind": "T4", "num": 2}]}, "devices.0.num", "count"),
        ({"devices": [{"kind": "T4", "VRAM": "16GB"}]}, "devices.0.VRAM", "memory"),
        ({"gpus": ["T4"]}, "gpus", "devices"),
        ({"devices": ["T4"], "ip": "10.0.0.1"}, "ip", "host"),
    ],
)
def test_a_key_of_other_tools_is_answered_by_what_it_means(
    node: dict[str, object], key: str, meant: str
) -> None:
    with pytest.raises(ValueError, match=f"unknown key 'nodes.0.{key}': did you mean '{meant}'"):
        Cluster.parse_data({"name": "lab", "nodes": [{"name": "a", **node}]}, where="x")


@pytest.mark.parametrize(
    ("key", "meant"),
    [("gpus", "nodes"), ("machines", "nodes"), ("network", "links"), ("links.nvlink", "within")],
)
def test_a_key_at_the_top_is_answered_by_what_it_means(key: str, meant: str) -> None:
    outer, _, inner = key.partition(".")
    data = {"name": "lab", "nodes": [{"name": "a", "devices": ["T4"]}]}
    with pytest.raises(ValueError, match=f"unknown key '{key}': did you mean '{meant}"):
        Cluster.parse_data({**data, outer: {inner: 10}}, where="x")


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        (CostModel, {"model": {}, "workload": {}, "stages": []}, "a plan .*, expected costs"),
        (CostModel, {"schema": 1, "name": "lab", "nodes": []}, "a cluster file .*, expected costs"),
        (Plan, {"model": "m", "model_fingerprint": "f", "entries": []}, "costs .*expected a plan"),
        (Plan, {"plan_sha256": "0", "proofs": []}, "a plan's certificate, expected a plan"),
        (Plan, {"model_type": "llama"}, "a model's config.json, expected a plan"),
        (Cluster, {"workload": {}, "engines": []}, "a plan of several .*expected a cluster file"),
        (Sensitivity, {"model": "m", "model_fingerprint": "f", "entries": 0}, "expected quality"),
    ],
)
def test_another_kind_of_file_is_called_what_it_is(
    kind: type[FileForm], data: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=f"x.json: it is {said}|x.json: it is costs .*{said}"):
        kind.parse_data(data, where="x.json")


def test_only_binary_files_are_called_pickles(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(ValueError, match="binary; llmpq reads no pickle files"):
        read_json(path)
    path.write_text("schema: 1\n")
    with pytest.raises(ValueError, match=r"is not JSON \([^;]*\)$"):
        read_json(path)


def test_a_link_said_in_part_has_the_rest_of_its_default() -> None:
    nodes = [{"name": name, "accelerators": "T4:1"} for name in "ab"]
    links = {"between_nodes": {"gbps": 25}, "within_node": {"latency_us": 5}}
    made = Cluster.parse_data({"name": "lab", "nodes": nodes, "links": links}, where="x").links
    assert (made.between_nodes.gbps, made.between_nodes.latency_us) == (25, 50)
    assert (made.within_node.gbps, made.within_node.latency_us) == (64, 5)

"""Every shipped cluster, card and omega file parses and says where its numbers come from."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.devices.device_spec import canonical_kind, device_specs
from llmpq.models.model_spec import ModelSpec
from llmpq.sensitivity import Sensitivity

pytestmark = pytest.mark.pure

CLUSTERS = Path(str(resources.files("llmpq.clusters")))
FILES = sorted(p for p in CLUSTERS.rglob("*.yaml") if p.name != "gpus.yaml")
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_the_paper_has_eleven_clusters_and_there_are_four_examples() -> None:
    names = [p.name for p in FILES if p.parent.name == "paper"]
    assert names == [f"{i:02d}.yaml" for i in range(1, 12)]
    assert len(FILES) - len(names) >= 4


@pytest.mark.parametrize("path", FILES + EXAMPLES, ids=lambda p: p.name)
def test_cluster_parses_and_its_hints_exist(path: Path) -> None:
    cluster = Cluster.load(path)
    assert cluster.devices
    if cluster.planning.omega_file:
        assert cluster.planning.model is not None
        spec = ModelSpec.by_name(cluster.planning.model)
        omega = Sensitivity.load(
            path.parent / cluster.planning.omega_file, num_layers=spec.num_layers
        )
        assert omega.indicator == "synthetic"
        assert "synthetic" in cluster.planning.note


@pytest.mark.parametrize("number, devices", [(3, 4), (5, 6), (7, 8), (8, 6), (11, 4)])
def test_paper_cluster_has_the_papers_devices(number: int, devices: int) -> None:
    assert len(Cluster.load(CLUSTERS / "paper" / f"{number:02d}.yaml").devices) == devices


def test_every_card_names_its_source_and_has_one_owner_per_alias() -> None:
    specs = device_specs()
    assert len(specs) >= 30
    for kind, spec in specs.items():
        assert spec.source, f"{kind} has no source"
        for alias in spec.aliases:
            assert canonical_kind(alias) == kind, f"{alias} belongs to two cards"


@pytest.mark.parametrize(
    "spelling, kind",
    [
        ("Tesla_V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA_A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H200", "H200"),
        ("Tesla_T4", "T4"),
    ],
)
def test_the_papers_and_drivers_spellings_are_known(spelling: str, kind: str) -> None:
    assert canonical_kind(spelling) == kind


def test_synthetic_omega_is_what_its_script_makes() -> None:
    import importlib.util

    script = Path(__file__).parents[2] / "benchmarks" / "lib" / "synthetic_omega.py"
    spec = importlib.util.spec_from_file_location("synthetic_omega", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for model, total in module.TOTAL_3BIT.items():
        shipped = (CLUSTERS / "paper" / f"omega-{model}.json").read_text()
        assert module.synthetic_omega(model, total).dump_json() == shipped


@pytest.mark.parametrize("stated", ["4090,3090:2", "4090:1,3090:2", "3090:two"])
def test_accelerators_are_of_one_kind(stated: str) -> None:
    data = {"name": "home", "nodes": [{"name": "box", "accelerators": stated}]}
    with pytest.raises(ValueError, match="several kinds are a list under 'devices'"):
        Cluster.parse_data(data, where="home.yaml").devices  # noqa: B018


@pytest.mark.parametrize(
    ("stated", "names"),
    [
        ("devices: [T4:2, 3060]", ["T4-0", "T4-1", "RTX-3060-0"]),
        ("devices: [3090:2, {kind: 4090}]", ["RTX-3090-0", "RTX-3090-1", "RTX-4090-0"]),
        ("devices: 2x 3090", ["RTX-3090-0", "RTX-3090-1"]),
        ("devices: {4090: 1, L4: 2}", ["RTX-4090-0", "L4-0", "L4-1"]),
        ("devices: [cpu=64GB+16threads]", ["CPU-0"]),
        ("accelerators: 4060:2", ["RTX-4060-0", "RTX-4060-1"]),
    ],
)
def test_devices_of_a_file_are_said_as_on_the_command_line(
    tmp_path: Path, stated: str, names: list[str]
) -> None:
    """YAML reads `3090:2` as a number to the base of 60, 185,402, unless it is quoted."""
    path = tmp_path / "c.yaml"
    path.write_text(f"name: x\nnodes:\n- name: a\n  {stated}\n")
    devices = Cluster.load(path).devices
    assert [device.name for device in devices] == names
    if "cpu" in stated:
        assert (devices[0].threads, devices[0].memory_bytes) == (16, 64 * 10**9)


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ("[T5:2]", "'nodes.0.devices': device T5:2: unknown device 'T5': nearest: T4 "),
        ("[4090:0]", "device 4090:0: expected 1 to 1,000 devices, got 0"),
        ("{T4: 2, count: 2}", "'nodes.0.devices': expected a list, got "),
        ("[true]", "'nodes.0.devices.0': expected a table with keys of count, "),
    ],
)
def test_devices_of_a_file_that_are_none(tmp_path: Path, stated: str, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{{name: x, nodes: [{{name: a, devices: {stated}}}]}}")
    with pytest.raises(ValueError, match="c.yaml: ") as error:
        Cluster.load(path)
    assert text in str(error.value)

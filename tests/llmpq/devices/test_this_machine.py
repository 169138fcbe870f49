"""What a driver and a system report becomes a cluster; costs are kept by kind of device."""

from __future__ import annotations

import pytest

from llmpq.costs import costs_cache
from llmpq.costs.cost_model import CostModel, LatencyEntry, LinkCost, Phase, Regime
from llmpq.devices import this_machine
from llmpq.devices.device_spec import device_specs
from llmpq.devices.joined_devices import one_group
from llmpq.devices.this_machine import (
    GIB,
    Host,
    assumed,
    free_cores,
    parse_gpus,
    useful_threads,
    visible,
)
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision

pytestmark = pytest.mark.pure

SMI = """\
0, GPU-aa11, NVIDIA H200, 143771, 143000, 570.1, 9.0
1, GPU-aa22, Tesla T4, 15360, 9000, 570.1, 7.5
2, GPU-bb33, NVIDIA GB99, [N/A], [N/A], 580.2, 12.1
"""
HOST = Host(reported="a CPU", cores=8, threads=6, total_bytes=64 * GIB, free_bytes=40 * GIB)


def machine(monkeypatch: pytest.MonkeyPatch, smi: str = "", wanted: str | None = None):
    """Return the cluster of a machine whose driver says this."""
    monkeypatch.setattr(this_machine, "read_host", lambda: HOST)
    monkeypatch.setattr(this_machine, "read_gpus", lambda: parse_gpus(smi))
    if wanted is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    return this_machine.this_machine()


def test_gpus_are_taken_with_the_memory_that_nobody_uses(monkeypatch):
    h200, t4, gb10 = machine(monkeypatch, SMI).devices
    assert (h200.kind, t4.kind, gb10.kind) == ("H200", "T4", "NVIDIA GB99")
    assert t4.memory_bytes == 15360 * 2**20
    assert t4.reserve_bytes == 6400 * 2**20, "6360 MiB in use, in steps of 256"
    assert gb10.memory_bytes == HOST.total_bytes, "it shares the host's"
    assert gb10.limit_bytes == HOST.free_bytes
    assert gb10.kind not in device_specs()


def test_what_is_guessed_is_said(monkeypatch):
    (said,) = assumed(machine(monkeypatch, SMI))
    assert "NVIDIA GB99" in said and "assumed" in said
    assert assumed(machine(monkeypatch, SMI, "0,1")) == []
    assert assumed(one_group(machine(monkeypatch), 2, ModelSpec.by_name("opt-13b"))) == []


def test_without_gpus_the_cores_are_taken(monkeypatch):
    (cpu,) = machine(monkeypatch).devices
    assert (cpu.kind, cpu.threads, cpu.profile_kind) == ("CPU", 6, "CPU@6t")
    assert cpu.limit_bytes == HOST.free_bytes
    assert machine(monkeypatch, SMI, "").devices[0].kind == "CPU", "no GPU may be seen"


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ("2,0", [2, 0]),
        ("GPU-aa22", [1]),
        ("GPU-aa", []),  # of two
        ("1,9,0", [1]),
        ("-1", []),
    ],
)
def test_gpus_are_seen_as_cuda_sees_them(wanted, indices):
    assert [gpu.index for gpu in visible(parse_gpus(SMI), wanted)] == indices


@pytest.mark.parametrize(("load", "threads"), [(0.2, 8), (3.4, 5), (8.0, 1), (40.0, 1)])
def test_busy_cores_are_left_to_others(load, threads):
    assert free_cores(8, load) == threads


@pytest.mark.parametrize(("mib", "threads"), [(28, 1), (64, 2), (200, 4), (100_000, 16)])
def test_small_models_get_few_threads(mib, threads):
    assert useful_threads(16, mib * 2**20) == threads


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (7, 1), (16, 2), (32, 4), (10_000, 16)])
def test_many_rows_keep_more_threads_busy(rows, threads):
    assert useful_threads(16, 28 * 2**20, rows) == threads


def test_this_machine_is_found_as_it_is():
    cluster = this_machine.this_machine()
    assert cluster.devices and all(d.limit_bytes > 0 for d in cluster.devices)


def costs(*kinds: str, seconds: float = 1e-3) -> CostModel:
    """Return a cost model of one entry a kind, and a link from the first to the last."""
    entries = [
        LatencyEntry(
            device_kind=kind, part="layer", phase=Phase.DECODE, precision=Precision.W16A16,
            dtype="float32", regimes=(Regime(terms={"1": seconds}),), source="profile",
        )
        for kind in kinds
    ]  # fmt: skip
    link = LinkCost(source_kind=kinds[0], target_kind=kinds[-1], alpha_s=1e-5, beta_s_per_byte=0)
    return CostModel(model="m", model_fingerprint="f1", entries=tuple(entries), links=(link,))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "llmpq" / "costs"


def test_costs_are_found_again_by_model_and_device(cache):
    assert costs_cache.cached_costs("f1", ["T4"]) == (None, [])
    costs_cache.store_costs(costs("T4", "CPU@2t"))
    found, notes = costs_cache.cached_costs("f1", ["CPU@2t", "T4", "H200"])
    assert found is not None and found.device_kinds == ("CPU@2t", "T4") and notes == []
    assert found.link("T4", "CPU@2t", same_node=True) is not None
    assert costs_cache.cached_costs("f2", ["T4"]) == (None, []), "of another model"
    (other, _) = costs_cache.cached_costs("f1", ["T4"])
    assert other is not None and other.device_kinds == ("T4",)


def test_a_newer_measurement_replaces_an_older_one(cache):
    costs_cache.store_costs(costs("T4"))
    costs_cache.store_costs(costs("T4", seconds=2e-3))
    found, _ = costs_cache.cached_costs("f1", ["T4"])
    assert found is not None and [e.seconds(v=1, length=1) for e in found.entries] == [2e-3]


def test_costs_of_other_kernels_are_named_until_all_are_measured_anew(cache, monkeypatch):
    first, second = costs("T4"), costs("T4", seconds=2e-3)
    (entry,) = first.entries
    both = CostModel(
        model="m",
        model_fingerprint="f1",
        entries=(entry, entry.model_copy(update={"dtype": "float16"})),
    )
    with monkeypatch.context() as older:
        older.setattr(costs_cache, "stage_mark", lambda on_cpu: "older")
        costs_cache.store_costs(both)
        assert costs_cache.cached_costs("f1", ["T4"])[1] == []
    found, (note,) = costs_cache.cached_costs("f1", ["T4"])
    assert found is not None and "T4" in note and "--profile" in note
    costs_cache.store_costs(second)
    found, notes = costs_cache.cached_costs("f1", ["T4"])
    assert found is not None and len(found.entries) == 2 and len(notes) == 1, "one is old still"
    costs_cache.store_costs(both)
    assert costs_cache.cached_costs("f1", ["T4"])[1] == []


def test_a_file_that_cannot_be_read_is_named_and_passed_over(cache):
    (path,) = costs_cache.store_costs(costs("T4"))
    path.write_text("{")
    found, (note,) = costs_cache.cached_costs("f1", ["T4"])
    assert found is None and str(path) in note and "--profile" in note
    costs_cache.store_costs(costs("T4"))
    assert costs_cache.cached_costs("f1", ["T4"])[1] == []

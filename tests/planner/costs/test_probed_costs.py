"""Plans for a CPU that was probed are by its rates, each precision and each rounding by its own."""

from __future__ import annotations

import pytest

from llmpq.costs.cost_model import Phase
from llmpq.costs.cpu_rates import CpuRates, ProductRate
from llmpq.devices.cluster import Cluster
from llmpq.devices.device_list import read_devices
from llmpq.devices.this_machine import NAME
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.costs import probed
from llmpq.planner.costs.probed import outdated_rates, probed_costs, rates_for
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.memory import Quantization

pytestmark = pytest.mark.pure
ONE_S = {16: 4e-10, 8: 2e-10, 4: 1e-10, 3: 0.9e-10}
"""Seconds a weight takes with one row, at 16, 8, 4 and 3 bits."""


def made_rates(threads: int = 4) -> CpuRates:
    products = [
        ProductRate(bits=bits, activations=a, per_weight=((1, s * f), (8, s * f), (64, 8 * s * f)))
        for bits, s in ONE_S.items()
        for a, f in (("exact", 1.0), ("int8", 0.5))
    ]
    return CpuRates(
        processor="X", threads=threads, dtype="float32", day="2026-01-01", busy=False,
        mem_gbps=10.0, products=tuple(products),
    )  # fmt: skip


def costs_of(name: str, *, activations: str = "exact", precision=Precision.W4A16):
    cluster = read_devices("cpu=64GB+4threads").cluster
    costs = probed_costs(
        ModelSpec.by_name(name),
        cluster.devices,
        [made_rates()],
        dtype="float32",
        precisions=[precision],
        kvs=[KVPrecision.KV16],
        quantization=Quantization(cpu_activations=activations),
    )
    kind = cluster.devices[0].profile_kind
    return {
        phase: costs.find(kind, phase=phase, precision=precision, dtype="float32")
        for phase in (Phase.PREFILL, Phase.DECODE)
    }, costs


@pytest.mark.parametrize("precision", [p for p in Precision if p.value.endswith("a16")])
def test_a_step_takes_its_weights_at_the_rate_of_their_bits(precision):
    found, _ = costs_of("llama-3.2-1b", precision=precision)
    weights = sum(shape.num_weights for shape in ModelSpec.by_name("llama-3.2-1b").linears())
    one = found[Phase.DECODE].seconds(v=1, length=1)
    assert one == pytest.approx(weights * ONE_S[precision.weight_bits] + 1e-4, rel=1e-3)
    assert found[Phase.DECODE].seconds(v=8, length=1) == pytest.approx(one, rel=1e-2)
    many = found[Phase.PREFILL].seconds(v=4, length=64)
    assert many == pytest.approx(32 * weights * ONE_S[precision.weight_bits], rel=0.1)


def test_rounded_activations_cost_what_they_take():
    exact, _ = costs_of("llama-3.2-1b")
    rounded, _ = costs_of("llama-3.2-1b", activations="int8")
    for phase in exact:
        ratio = rounded[phase].seconds(v=1, length=64) / exact[phase].seconds(v=1, length=64)
        assert 0.5 <= ratio < 0.6
    dense, _ = costs_of("llama-3.2-1b", activations="int8", precision=Precision.W16A16)
    assert dense == costs_of("llama-3.2-1b", precision=Precision.W16A16)[0]


def test_a_mixture_reads_the_experts_that_are_hit():
    spec = ModelSpec.by_name("mixtral-8x7b")
    found, _ = costs_of("mixtral-8x7b")
    whole = sum(shape.num_weights for shape in spec.linears())
    one, eight = (found[Phase.DECODE].seconds(v=v, length=1) for v in (1, 8))
    assert one == pytest.approx(spec.weights_per_token * ONE_S[4] + 1e-4, rel=0.01)
    assert 2 * one < eight < whole * ONE_S[4] + 1e-3


def test_other_devices_and_other_threads_keep_their_estimates():
    _, costs = costs_of("llama-3.2-1b")
    assert {entry.part for entry in costs.entries} == {"layer", "head"}
    cluster = read_devices("4090,cpu=64GB+2threads").cluster
    none = probed_costs(
        ModelSpec.by_name("llama-3.2-1b"), cluster.devices, [made_rates()], dtype="float32",
        precisions=[Precision.W4A16], kvs=[KVPrecision.KV16], quantization=Quantization(),
    )  # fmt: skip
    assert none.entries == ()


def test_kept_rates_are_taken_for_this_machine_alone(monkeypatch):
    monkeypatch.setattr(probed, "kept_rates", lambda threads, dtype: made_rates(threads))
    elsewhere = read_devices("cpu=64GB+4threads").cluster
    here = Cluster(name=NAME, nodes=elsewhere.nodes)
    assert rates_for(elsewhere, "float32") == []
    assert rates_for(here, "float32") == [made_rates()]
    assert rates_for(here, "float32", profiled=[here.devices[0].profile_kind]) == []


def test_rates_of_other_kernels_have_a_note_for_this_machine(monkeypatch):
    monkeypatch.setattr(probed, "outdated", lambda threads, dtype: f"{threads} {dtype} are old")
    elsewhere = read_devices("cpu=64GB+4threads,cpu=64GB+4threads").cluster
    here = Cluster(name=NAME, nodes=elsewhere.nodes)
    assert outdated_rates(elsewhere, "float32") == []
    assert outdated_rates(here, "float32") == ["4 float32 are old"]
    assert outdated_rates(here, "float32", profiled=[here.devices[0].profile_kind]) == []


def test_a_probe_needs_a_cpu_that_is_not_measured():
    with pytest.raises(ValueError, match="there is no CPU among the devices"):
        rates_for(read_devices("4090").cluster, "float32", probing=True)
    cluster = read_devices("cpu=64GB+4threads").cluster
    with pytest.raises(ValueError, match="measured already"):
        rates_for(cluster, "float32", profiled=[cluster.devices[0].profile_kind], probing=True)


def planned(tmp_path, *flags: str) -> Plan:
    path = tmp_path / "plan.json"
    job = ["--batch", "4", "--prompt-len", "128", "--gen-len", "64", "--engines", "1"]
    devices = ["--devices", "cpu=64GB+4threads,cpu=64GB+4threads"]
    given = ["--model", "llama-3.2-1b", *devices, *job, "--probe-cpu", "-o", str(path), *flags]
    assert main(given) == 0
    return Plan.load(path)


def test_the_command_plans_by_what_it_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(probed, "probe", lambda threads, dtype: made_rates(threads))
    times = {bits: planned(tmp_path, "--bits", bits).predicted.total_s for bits in ("16", "8", "4")}
    said = " ".join(capsys.readouterr().out.split())
    assert "this CPU's (X, 4 threads, float32) as measured on 2026-01-01: 10 GB/s" in said
    assert times["16"] > times["8"] > times["4"]
    free = planned(tmp_path, "--bits", "16,8,4", "--theta", "0")
    assert {p for stage in free.stages for p in stage.precisions} == {Precision.W4A16}
    rounded = planned(tmp_path, "--bits", "4", "--cpu-activations", "int8")
    assert rounded.predicted.total_s < times["4"]


def test_a_cluster_file_may_ask_for_the_probe(monkeypatch):
    described = read_devices("cpu=64GB+4threads").cluster
    asking = Cluster.parse_data(
        {**described.model_dump(mode="json", by_alias=True), "planning": {"probe_cpu": True}},
        where="test",
    )
    assert asking.fingerprint() == described.fingerprint()
    kept = dict.fromkeys([4])
    monkeypatch.setattr(probed, "kept_rates", lambda threads, dtype: kept[threads])
    monkeypatch.setattr(probed, "probe", lambda threads, dtype: made_rates(threads))
    assert rates_for(described, "float32") == []
    assert rates_for(asking, "float32") == [made_rates()]
    assert rates_for(asking, "float32", profiled=[asking.devices[0].profile_kind]) == []
    kept[4] = made_rates()
    monkeypatch.delattr(probed, "probe")
    assert rates_for(asking, "float32") == [made_rates()]

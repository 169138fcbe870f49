"""Numbers that no float holds, not-a-number and slips of the pen end in one short sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from llmpq.costs.cost_model import CostModel, LatencyEntry, LinkCost, Phase, Regime
from llmpq.devices.cluster import Cluster
from llmpq.errors import LlmpqError
from llmpq.file_form import FileForm
from llmpq.plans.plan import ClusterRef, ModelRef, Plan, Predicted, StagePlan
from llmpq.precision import Precision
from llmpq.sensitivity import Sensitivity
from llmpq.units import parse_size
from llmpq.workload import Workload

pytestmark = pytest.mark.pure

ABSURD = (10**400, -(10**400), 10**5000, 2**70, float("inf"), float("-inf"), float("nan"), 1e300)

CLUSTER = {
    "name": "x",
    "nodes": [
        {
            "name": "a",
            "devices": [
                {
                    "kind": "own",
                    "memory": "8 GB",
                    "reserve": "1 GB",
                    "count": 1,
                    "spec": {
                        "memory": "8 GB",
                        "mem_gbps": 100,
                        "fp16_tflops": 10,
                        "fp32_tflops": 5,
                        "context": "1 GB",
                        "sms": 10,
                        "matmul_efficiency": 0.5,
                    },
                },
                {"kind": "CPU", "threads": 2},
                {"kind": "T4", "emulate": {"sms": 4, "memory": "4 GB"}},
            ],
        }
    ],
    "links": {"within_node": {"gbps": 1, "latency_us": 1}},
}


def _plan() -> dict[str, Any]:
    stage = StagePlan(
        device="a", node="n", kind="T4", profile_kind="T4", layers=(0, 1), sms=3, threads=None,
        precisions=(Precision.W16A16,), prefill_s=1.0,
    )  # fmt: skip
    plan = Plan(
        model=ModelRef(name="m", num_layers=1, fingerprint="f"),
        cluster=ClusterRef(name="c", fingerprint="f"),
        workload=Workload(batch=1, prompt_len=1, gen_len=1),
        prefill_microbatch=1,
        decode_microbatch=1,
        stages=(stage,),
        predicted=Predicted(
            prefill_s=1, decode_s=1, total_s=2, output_tokens_per_s=1, sum_omega=0, bottleneck="a"
        ),
    )
    data: dict[str, Any] = json.loads(plan.dump_json())
    del data["predicted"]["sum_omega"]  # signed, and nothing is computed with it
    return data


def _costs() -> dict[str, Any]:
    entry = LatencyEntry(
        device_kind="T4", part="layer", phase=Phase.PREFILL, precision=Precision.W16A16,
        dtype="float16", regimes=(Regime(terms={"v*s": 1.0}, curve=((1, 1), (2, 2))),),
        source="profile",
    )  # fmt: skip
    link = LinkCost(source_kind="a", target_kind="b", alpha_s=1, beta_s_per_byte=1)
    costs = CostModel(model="m", model_fingerprint="f", entries=(entry,), links=(link,))
    data: dict[str, Any] = json.loads(costs.dump_json())
    return data


def _omega() -> dict[str, Any]:
    table = Sensitivity(
        indicator="none", model="m", num_layers=1, weights={Precision.W4A16: (0.5,)}
    )
    data: dict[str, Any] = json.loads(table.dump_json())
    return data


def _numbers(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, (dict, list)):
        for key, inner in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _numbers(inner, (*place, key))
    elif isinstance(data, str):
        yield from [place] * data.endswith(" GB")
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield place


FORMS: list[tuple[type[FileForm], dict[str, Any]]] = [
    (Cluster, CLUSTER),
    (Plan, _plan()),
    (CostModel, _costs()),
    (Sensitivity, _omega()),
]


@pytest.mark.parametrize(("form", "data"), FORMS, ids=lambda value: getattr(value, "__name__", ""))
def test_no_number_of_a_file_may_be_absurd(form: type[FileForm], data: dict[str, Any]) -> None:
    form.parse_data(copy.deepcopy(data) | _missing(form, data), where="file")
    places = [p for p in _numbers(data) if p[:1] != ("solver",)]
    assert len(places) >= 3
    for place in places:
        for absurd in ABSURD:
            changed = copy.deepcopy(data)
            inner: Any = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = absurd
            with pytest.raises((ValueError, LlmpqError)) as caught:
                form.parse_data(changed, where="file")
            text = str(caught.value)
            assert "\n" not in text and len(text) < 300, (place, text)


def _missing(form: type[FileForm], data: dict[str, Any]) -> dict[str, Any]:
    if form is not Plan:
        return {}
    return {"predicted": {**data["predicted"], "sum_omega": 0.0}}


@pytest.mark.parametrize(
    ("value", "meant"),
    [(24, "24 GB"), ("24", "24 GB"), (24.5, "24.5 GB"), (24564, "24564 MiB"), (1, "1 GB")],
)
def test_a_bare_number_of_gigabytes_is_asked_back(value: object, meant: str) -> None:
    number = meant.split()[0]
    byte = "byte" if number == "1" else "bytes"
    with pytest.raises(ValueError) as caught:
        parse_size(value)
    assert str(caught.value) == f"{number} {byte}? write {meant}, or {number} B if so"


def test_bytes_that_are_meant_are_taken() -> None:
    assert parse_size(0) == 0 and parse_size("24 B") == 24
    assert parse_size(2**34) == parse_size("16 GiB") == parse_size(float(2**34))


def test_a_clusters_bare_memory_is_asked_back_by_its_place() -> None:
    data = copy.deepcopy(CLUSTER)
    data["nodes"][0]["devices"][0]["memory"] = 24  # type: ignore[index]
    with pytest.raises(ValueError) as caught:
        Cluster.parse_data(data, where="my.yaml")
    assert str(caught.value) == (
        "my.yaml: 'nodes.0.devices.0.memory': 24 bytes? write 24 GB, or 24 B if so (got 24)"
    )

"""A device kind means one thing in a whole cluster file: costs are looked up by its name."""

from typing import Any

import pytest

from llmpq.devices.cluster import Cluster

pytestmark = pytest.mark.pure


def cluster(first: dict[str, Any], second: dict[str, Any]) -> Cluster:
    nodes = [{"name": "a", "devices": [first]}, {"name": "b", "devices": [second]}]
    return Cluster.parse_data({"name": "lab", "nodes": nodes}, where="lab.yaml")


def inline(mem_gbps: float, **more: Any) -> dict[str, Any]:
    spec = {"memory": "8 GiB", "mem_gbps": mem_gbps, "fp16_tflops": 10}
    return {"kind": "X", "spec": spec} | more


def test_a_kind_with_two_specs_is_refused() -> None:
    message = (
        "node 'b': kind 'X' has mem_gbps 300.0, expected 200.0 as where the kind comes first; "
    )
    with pytest.raises(ValueError, match=message + "give other devices a kind of their own"):
        cluster(inline(200), inline(300))


def test_a_spec_does_not_replace_that_of_the_table() -> None:
    with pytest.raises(ValueError, match="kind 'T4' has memory"):
        cluster({"kind": "T4"}, inline(200, kind="T4"))


def test_devices_of_a_kind_may_differ_in_what_is_given_to_stages() -> None:
    made = cluster(inline(200), inline(200, memory="4 GiB", emulate={"sms": 4}))
    assert [device.profile_kind for device in made.devices] == ["X", "X@4sm"]

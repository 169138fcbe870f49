"""A problem as plain JSON and back: how it reaches a solver in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from llmpq.costs.cost_model import CostModel
from llmpq.devices.cluster import Cluster
from llmpq.devices.joined_devices import group_of
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.cost_book import CostBook
from llmpq.planner.problem.problem import Problem
from llmpq.plans.plan import StoredForm
from llmpq.precision import Precision
from llmpq.sensitivity import Sensitivity
from llmpq.sizes.memory import Quantization
from llmpq.workload import Workload

PLAIN = (
    "theta",
    "objective",
    "group",
    "max_devices",
    "prefill_microbatch",
    "decode_microbatch",
    "chunk",
)
"""Fields that JSON holds as they are."""


def problem_data(p: Problem) -> dict[str, Any]:
    """Return everything a problem holds as JSON types."""
    profile = p.costs.profile
    return {
        **{name: getattr(p, name) for name in PLAIN},
        "spec": asdict(p.spec),
        "cluster": p.cluster.model_dump(mode="json", by_alias=True),
        "devices": [
            [[one.name for one in d.joined], d.shares] if d.joined else d.name
            for d in p.cluster.devices
        ],
        "workload": p.workload.model_dump(mode="json", by_alias=True),
        "choices": [choice.value for choice in p.choices],
        "sensitivity": p.sensitivity.model_dump(mode="json", by_alias=True),
        "estimate": p.costs.estimate.model_dump(mode="json", by_alias=True),
        "profile": None if profile is None else profile.model_dump(mode="json", by_alias=True),
        "scale": p.costs.scale,
        "quantization": asdict(replace(p.quantization, stored=())),
        "stored": [StoredForm.of(one).model_dump(mode="json") for one in p.quantization.stored],
        "pins": {name: list(layers) for name, layers in p.pins.items()},
        "offered": [[choice.value for choice in layer] for layer in p.offered],
    }


def parse_problem(data: dict[str, Any]) -> Problem:
    """Return the problem that `problem_data` wrote."""
    where = "problem"
    profile = data["profile"]
    stored = (StoredForm.parse_data(one, where=where).value() for one in data["stored"])
    quantization = replace(Quantization(**data["quantization"]), stored=tuple(stored))
    costs = CostBook(
        estimate=CostModel.parse_data(data["estimate"], where=where),
        profile=None if profile is None else CostModel.parse_data(profile, where=where),
        scale=data["scale"],
        quantization=quantization,
    )
    spec = ModelSpec.from_fields(data["spec"])
    return Problem(
        **{name: data[name] for name in PLAIN},
        spec=spec,
        cluster=_cluster(data, spec),
        workload=Workload.parse_data(data["workload"], where=where),
        choices=tuple(Precision(value) for value in data["choices"]),
        sensitivity=Sensitivity.parse_data(data["sensitivity"], where=where),
        costs=costs,
        quantization=quantization,
        pins={name: (layers[0], layers[1]) for name, layers in data["pins"].items()},
        offered=tuple(tuple(Precision(value) for value in layer) for layer in data["offered"]),
    )


def _cluster(data: dict[str, Any], spec: ModelSpec) -> Cluster:
    """Return the cluster with the devices that the problem has, groups among them."""
    cluster = Cluster.parse_data(data["cluster"], where="problem")
    if data["devices"] == [device.name for device in cluster.devices]:
        return cluster
    if all(isinstance(one, str) for one in data["devices"]):
        return cluster.part(data["devices"])
    return cluster.grouped(
        [
            cluster.device(one) if isinstance(one, str) else group_of(cluster, one[0], one[1], spec)
            for one in data["devices"]
        ]
    )

"""Which device, link and cost entries a plan uses: it carries them, and can be checked by itself.

Knows nothing of how the plan was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from llmpq.cluster import Cluster, Device
from llmpq.cost_model import LatencyEntry, Phase
from llmpq.model_spec import ModelSpec
from llmpq.plan_inputs import DeviceInput, LinkInput, PlanInputs
from llmpq.planner.costs.cost_book import CostBook
from llmpq.precision import Precision
from llmpq.workload import Workload


def used_inputs(
    spec: ModelSpec,
    cluster: Cluster,
    costs: CostBook,
    work: Workload,
    stages: Sequence[tuple[Device, Sequence[Precision]]],
) -> PlanInputs:
    """Return the entries of stages, given as their devices and the precisions of their layers."""
    devices = [device for device, _ in stages]
    ways = [*pairwise(devices), (devices[-1], devices[0])] if len(devices) > 1 else []
    entries: dict[tuple[object, ...], LatencyEntry] = {}
    for position, (device, precisions) in enumerate(stages):
        ends = ("embedding",) * (position == 0) + ("head",) * (position == len(stages) - 1)
        for phase in (Phase.PREFILL, Phase.DECODE):
            for precision in sorted(set(precisions), key=lambda p: p.value):
                entry = costs.entry(device, "layer", phase, work, precision)
                entries[device.profile_kind, "layer", phase, precision] = entry
            for part in ends:
                entry = costs.entry(device, part, phase, work)  # type: ignore[arg-type]
                entries[device.profile_kind, part, phase, None] = entry
    return PlanInputs(
        model=spec,
        devices=tuple(DeviceInput.of(d, time_factor=costs.factor(d)) for d in devices),
        links=tuple(_link(cluster, costs, source, target) for source, target in ways),
        costs=tuple(entries.values()),
    )


def _link(cluster: Cluster, costs: CostBook, source: Device, target: Device) -> LinkInput:
    terms = costs.link(cluster, source, target)
    return LinkInput(
        source=source.name,
        target=target.name,
        delay_s=terms.delay_s,
        handshake_s=terms.handshake_s,
        per_byte_s=terms.per_byte_s,
    )

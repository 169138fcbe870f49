"""How long the parts of a start took, and from that how long the next one will take.

A process that is fresh has to be there; every stage loads the layers that it does not hold, and is
connected to the others. Stages do so side by side. The first start warms them up, too. Until a
start has been timed, what it is expected to take stands for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from llmpq.plans.plan import Plan, Worker
from llmpq.precision import Precision
from llmpq.runtime.launch.stages.stage_place import DeviceOf, device_of
from llmpq.runtime.steps.trace import LoadReport

PROCESS_S, CONNECT_S = 1.5, 0.1
"""What a process that imports torch takes to answer, and stages to be connected, on a host of two
cores (2026-11)."""
LOAD_BYTES_PER_S = 1e9
"""How fast weights are read from the page cache and made what a stage computes with."""


@dataclass
class StartTimes:
    """Of one start."""

    started_s: float = 0.0
    """Until every process answered."""
    connected_s: float = 0.0
    load_s: dict[int, float] = field(default_factory=dict)
    """By stage: until it was loaded and warm."""

    def note_load(self, index: int, began_s: float, call: Future[Any]) -> None:
        """Note that a stage's load has ended."""
        self.load_s[index] = time.perf_counter() - began_s


class StartModel:
    """What is known of starts so far."""

    def __init__(self, *, layer_bytes: float = 0.0) -> None:
        """`layer_bytes`: of a layer's weights, which the first start is predicted by."""
        self._expected_layer_s = layer_bytes / LOAD_BYTES_PER_S
        self._fresh_s, self._moved_s, self._connect_s = PROCESS_S, 0.0, CONNECT_S
        self.leave_s = 0.0
        """How long the stages took to leave the plan before, the last time."""
        self._layer_s: dict[DeviceOf, float] = {}
        """Seconds that a layer took on a device, its share of embedding and head included."""
        self._compile_s = 0.0
        """The most that compiling a stage's kernels took: where some were not there, those of
        other precisions are not either."""
        self._precisions: set[Precision] = set()
        """Of layers that were loaded so far."""
        self._rest_s: dict[DeviceOf, float] = {}
        """Seconds of a load beside layers and warming up, which no start in place of another
        does: the KV cache."""

    def learn(
        self,
        plan: Plan,
        took: StartTimes,
        loads: Sequence[LoadReport],
        moved: Collection[int],
    ) -> None:
        """Note how long a start took; `moved`: stages whose processes were there."""
        if len(moved) < len(plan.places):
            self._fresh_s = took.started_s
        else:
            self._moved_s = took.started_s
        self._connect_s = took.connected_s
        for index, (place, load) in enumerate(zip(plan.places, loads, strict=True)):
            own, num_new = device_of(place), place.num_layers - load.num_held
            if num_new > 0:
                self._layer_s[own] = load.layers_s / num_new
            if place.threads is None:  # a CPU's kernels are of all precisions, compiled once
                self._compile_s = max(self._compile_s, load.compiled_s)
            self._precisions.update(place.precisions)
            known_s = load.layers_s + load.compiled_s + load.warm_s
            self._rest_s[own] = max(0.0, took.load_s.get(index, load.seconds) - known_s)

    def begun(self, took: StartTimes) -> None:
        """Note what is known of a start that was lost before it ended."""
        if not self._layer_s and took.started_s > 0:
            self._fresh_s = took.started_s

    def predicted_s(self, plan: Plan, before: Plan, left: Collection[DeviceOf]) -> float:
        """Return how long a start of a plan will take.

        `left`: devices on which processes go on with the layers of the plan before.
        """
        fresh = any(device_of(place) not in left for place in plan.places)
        loads_s = [self._load_s(own, before, device_of(own.place) in left) for own in plan.workers]
        start_s = self._fresh_s if fresh else self._moved_s
        return self.leave_s + start_s + max(loads_s) + self._connect_s

    def _load_s(self, worker: Worker, before: Plan, is_left: bool) -> float:
        place = worker.place
        num_new = place.num_layers - (num_held(worker, before) if is_left else 0)
        own = device_of(place)
        known_s = self._layer_s.values()
        usual_s = statistics.median(known_s) if known_s else self._expected_layer_s
        rest_s = statistics.median(self._rest_s.values()) if self._rest_s else 0.0
        compile_s = 0.0 if self._precisions.issuperset(place.precisions) else self._compile_s
        return self._rest_s.get(own, rest_s) + compile_s + num_new * self._layer_s.get(own, usual_s)


def num_held(worker: Worker, before: Plan) -> int:
    """Return how many of a device's layers, or parts of them, it has alike by another plan."""
    found, place = 0, worker.place
    for own in before.workers:
        other = own.place
        alike = (own.shares, own.member) == (worker.shares, worker.member)
        if alike and device_of(other) == device_of(place):
            had = dict(zip(range(*other.layers), other.precisions, strict=True))
            new = zip(range(*place.layers), place.precisions, strict=True)
            found += sum(had.get(index) == precision for index, precision in new)
    return found

"""Moves a running engine to other devices: more, fewer, or the same at the times that they show.

A move pays where the job comes further in the time that it goes on (the horizon) although it pauses
for the move. Devices that are to be free are left in any case, if the job fits on the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llmpq.devices.cluster import Cluster
from llmpq.plans.plan import Plan
from llmpq.runtime.elastic.replan import Change, Replanner
from llmpq.runtime.launch.engine_starter import EngineStarter, Replanned
from llmpq.runtime.launch.engine_thread import EngineThread
from llmpq.runtime.launch.start_times import num_held
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.simulate.simulation import EngineModel, simulate
from llmpq.traffic import Arrival

SIMULATION_S = 0.5
"""How long both plans may be simulated, beside the engine that serves."""
HORIZON_S = 3600.0
"""How long a job is expected to go on where nothing is said."""
Action = Literal["add", "drain", "slow"]


@dataclass(frozen=True, kw_only=True)
class DeviceChange:
    """What became of a wish for other devices."""

    done: bool
    """Whether the engine runs on them."""
    text: str
    """What was done, or why not: a sentence or two."""
    tokens_per_s: tuple[float, float] | None = None
    """Predicted of the planned job: by the plan before, and by the new one."""
    pause_s: tuple[float, float | None] | None = None
    """How long requests wait: predicted, and measured where it was done."""
    layers: tuple[int, int] | None = None
    """Layers of the new plan that devices hold already, and those that are loaded."""

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)


class Elastic:
    """The devices of one engine."""

    def __init__(
        self,
        replanner: Replanner,
        starter: EngineStarter,
        engine: Callable[[], EngineThread],
    ) -> None:
        """`engine`: what serves; asked for when a change is to be carried out."""
        self._replanner, self._starter, self._engine = replanner, starter, engine
        self._lock = threading.Lock()
        """One change at a time."""

    def add(
        self, name: str, *, cluster: Cluster | None = None, horizon_s: float = HORIZON_S
    ) -> DeviceChange:
        """Use more devices, if that pays."""
        if not horizon_s > 0:
            raise ValueError(f"the horizon must be seconds above 0, got {horizon_s}")
        with self._lock:
            plan = self._plan
            change = self._replanner.with_devices(plan, name, cluster)
            return self._if_it_pays(plan, change, f"{name} was added", "add", horizon_s)

    def drain(self, name: str) -> DeviceChange:
        """Leave devices free; `DoesNotFitError` says what is short on the others."""
        with self._lock:
            plan = self._plan
            change = self._replanner.without(plan, name)
            if _same(plan, change.made.plan):
                self._replanner.accept(change)
                text = f"{name} was not in use, and will not be"
                return DeviceChange(done=True, text=text)
            found = rates(plan, change.made)
            return self._carried_out(change, f"{name} is drained", "drain", found)

    def move_from_slow(self, slowdowns: Mapping[int, float], reason: str) -> DeviceChange:
        """Plan by measured times, `slowdowns` by stage, and move if that pays."""
        with self._lock:
            plan = self._plan
            change = self._replanner.at_measured_times(plan, slowdowns)
            return self._if_it_pays(plan, change, reason, "slow", HORIZON_S)

    @property
    def _plan(self) -> Plan:
        return self._engine().client.plan

    def _if_it_pays(
        self, plan: Plan, change: Change, reason: str, action: Action, horizon_s: float
    ) -> DeviceChange:
        made = change.made
        if _same(plan, made.plan):
            return DeviceChange(done=False, text=f"{reason}: the plan that runs is the best one")
        before, now = rates(plan, made)
        pause_s = self._starter.predicted_s(made.plan)
        finer = _bits(made.plan) - _bits(plan)
        if finer < 0 or (finer == 0 and now * max(0.0, horizon_s - pause_s) <= before * horizon_s):
            less = ", and layers would have fewer bits" if finer < 0 else ""
            text = (
                f"{reason}: nothing is moved, as it does not pay: {now:.4g} tokens/s are predicted "
                f"instead of {before:.4g}, for a pause of {pause_s:.1f} s in the next "
                f"{horizon_s:.0f} s{less}"
            )
            return DeviceChange(
                done=False, text=text, tokens_per_s=(before, now), pause_s=(pause_s, None)
            )
        return self._carried_out(change, reason, action, (before, now))

    def _carried_out(
        self, change: Change, reason: str, action: Action, tokens_per_s: tuple[float, float]
    ) -> DeviceChange:
        made = change.made
        recovery = self._engine().move_to(made, reason=reason, action=action)
        layers = recovery.num_held, recovery.num_loaded
        pause_s = recovery.predicted_s or 0.0, recovery.measured_s
        before, now = tokens_per_s
        if recovery.undone is not None:
            text = f"{reason}: the plan before goes on, as the new one failed: {recovery.undone}"
            return DeviceChange(
                done=False, text=text, tokens_per_s=tokens_per_s, pause_s=pause_s, layers=layers
            )
        self._replanner.accept(change)
        text = (
            f"{reason}: {described(made)}; {now:.4g} tokens/s are predicted instead of "
            f"{before:.4g}, requests waited {recovery.measured_s or 0.0:.2f} s "
            f"({pause_s[0]:.2f} predicted), {layers[1]} layers were loaded and {layers[0]} were "
            "there"
        )
        return DeviceChange(
            done=True, text=text, tokens_per_s=tokens_per_s, pause_s=pause_s, layers=layers
        )


def rates(plan: Plan, made: Replanned) -> tuple[float, float]:
    """Return the predicted tokens/s of the planned job: by the plan before, and by the new one.

    Both at the costs of the new one, where the plan before can be counted at them, and step by
    step as the engine's own scheduler runs them: a live one computes prompts in shorter steps than
    an offline job. As the plans predict themselves where one of them cannot be simulated.
    """
    both = made.before or plan, made.plan
    until_s = time.perf_counter() + SIMULATION_S
    try:
        before, now = (_simulated_tokens_per_s(one, made.options, until_s) for one in both)
    except (ValueError, TimeoutError):
        assert made.plan.predicted is not None, "the planner always predicts"
        now = made.plan.predicted.output_tokens_per_s
        known = both[0].predicted
        before = now if known is None else known.output_tokens_per_s
    return before, now


def _simulated_tokens_per_s(plan: Plan, options: EngineOptions, until_s: float) -> float:
    """Return the tokens/s of a plan's job, all of it there at once; `TimeoutError` after `until_s`.

    `ValueError` where it drafts or carries no cost entries.
    """
    if options.speculate not in (None, "off"):
        raise ValueError("steps with drafts are not simulated")
    work = plan.workload
    budget = options.max_num_batched_tokens
    model = EngineModel.of_plan(plan, max_num_batched_tokens=budget, offline=options.offline)
    row = Arrival(at_s=0.0, prompt_tokens=work.prompt_len, output_tokens=work.gen_len)
    served = simulate([model], [row] * work.batch, late=lambda: time.perf_counter() > until_s)
    return work.batch * work.gen_len / max(one.end_s for one in served)


def described(made: Replanned) -> str:
    """Return which devices have how many layers at which precisions."""
    parts = [f"{s.device} has {s.num_layers}" for s in made.plan.places]
    now = made.change["now"]
    was = made.change["before"]
    bits = f"weights {now['weights']}"
    if now["weights"] != was["weights"]:
        bits += f" (before: {was['weights']})"
    if now["kv"] != was["kv"]:
        bits += f", KV {now['kv']} (before: {was['kv']})"
    return f"of the layers {', '.join(parts)}; {bits}"


def _same(plan: Plan, other: Plan) -> bool:
    """Whether two plans have the same layers in the same places, run alike."""
    held = sum(num_held(worker, plan) for worker in other.workers)
    alike = len(plan.places) == len(other.places) and held == other.model.num_layers
    return alike and _room(plan) == _room(other)


def _room(plan: Plan) -> tuple[object, ...]:
    """Return what requests a plan has room for, whatever of them is prompt."""
    work = plan.workload
    return work.batch, work.max_len, work.kv, work.dtype


def _bits(plan: Plan) -> int:
    return sum(precision.weight_bits for precision in plan.precisions)

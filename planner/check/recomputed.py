"""Recomputes a plan's times from the cost entries that it carries, for the check of the plan.

Shares no code with the search, its closed form or the simulator. The times are those of the closed
form, with the last micro-batch counted as it is; where they are over 0.5 % from what the job takes
token by token, they are that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import LatencyEntry, Part, Phase
from llmpq.plans.plan import Plan
from llmpq.plans.plan_inputs import PlanInputs
from llmpq.precision import Precision

FAR = 0.005
"""Relative distance from which on the closed form is not what a plan predicts."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """A plan's times, written out a second time."""

    prefill_s: float
    decode_s: float
    stage_prefill_s: tuple[float, ...]
    stage_decode_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Time of the whole job."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, kw_only=True)
class _Ring:
    """Stages, the messages behind them and the way back, for micro-batches of one size.

    Columns are stages and messages in turn, the way back last, if there is more than one stage.
    """

    held_s: Floats
    """[T, R] seconds that each keeps the next one waiting, at every chunk or token."""
    total_s: Floats
    """[T, R] seconds until the micro-batch has passed it."""

    def mean(self) -> _Ring:
        """Return the ring of the mean chunk or token."""
        held, total = (table.mean(axis=0, keepdims=True) for table in (self.held_s, self.total_s))
        return _Ring(held_s=held, total_s=total)


class _Times:
    """Rings of one plan, and what its job takes of them."""

    def __init__(self, plan: Plan, inputs: PlanInputs) -> None:
        self.plan, self.inputs = plan, inputs
        work = plan.workload
        self.n = work.gen_len
        self.sizes = {Phase.PREFILL: plan.prefill_microbatch, Phase.DECODE: plan.decode_microbatch}
        self.counts = {phase: -(-work.batch // size) for phase, size in self.sizes.items()}

    @cached_property
    def rings(self) -> dict[Phase, tuple[_Ring, _Ring]]:
        """A whole micro-batch's, and the last one's, of either phase."""
        found = {}
        for phase, size in self.sizes.items():
            count = self.counts[phase]
            last = self.plan.workload.batch - (count - 1) * size if count > 1 else size
            whole = self._ring(phase, size)
            found[phase] = whole, whole if last == size else self._ring(phase, last)
        return found

    def _ring(self, phase: Phase, size: int) -> _Ring:
        """Every stage's time at every chunk or length of the cache, and the messages'."""
        plan, inputs = self.plan, self.inputs
        # (Tokens in the cache, new tokens) of each step of a request.
        start = plan.workload.prompt_len + 1
        steps = (
            plan.chunks
            if phase is Phase.PREFILL
            else tuple((length, 1) for length in range(start, start + max(self.n - 1, 1)))
        )
        names = [stage.device for stage in plan.stages]
        known: dict[tuple[object, ...], Floats] = {}

        def seconds(kind: str, part: Part, precision: Precision) -> Floats:
            key = (kind, part, precision)
            if key not in known:
                entry = inputs.cost(kind, part, phase, precision, plan.workload.kv)
                known[key] = np.array([_seconds(entry, size, *step) for step in steps])
            return known[key]

        held: list[Floats] = []
        total: list[Floats] = []
        for j, (stage, device) in enumerate(zip(plan.stages, inputs.devices, strict=True)):
            kind, last = device.profile_kind, j == len(names) - 1
            time = np.sum([seconds(kind, "layer", b) for b in stage.precisions], axis=0)
            if j == 0:
                time = time + seconds(kind, "embedding", Precision.W16A16)
            if last:
                time = time + seconds(kind, "head", plan.settings().head(on_cpu=stage.is_cpu))
            held.append(time * device.time_factor)
            total.append(time * device.time_factor)
            if len(names) > 1:
                row = inputs.model.hop_features * plan.workload.dtype_bytes
                link = inputs.link(names[j], names[0 if last else j + 1])
                sent = [size * (8 if last else count * row) for _, count in steps]
                held.append(np.array([link.busy_s(num_bytes) for num_bytes in sent]))
                total.append(np.array([link.seconds(num_bytes) for num_bytes in sent]))
        return _Ring(held_s=np.stack(held, axis=1), total_s=np.stack(total, axis=1))

    def closed_form(self) -> tuple[float, float]:
        """Seconds of prefill and of decode by the closed form."""
        several = len(self.plan.stages) > 1
        slow, way, back = {}, {}, {}
        chunks = len(self.plan.chunks)
        for phase, passes in ((Phase.PREFILL, chunks), (Phase.DECODE, self.n - 1)):
            whole, last = (ring.mean() for ring in self.rings[phase])
            count, held = self.counts[phase], whole.held_s[0]
            if count > 1 and passes > 0:
                # All passes over all micro-batches, less a whole micro-batch's way.
                spent = passes * ((count - 1) * held + last.held_s[0]) - held
                held = spent / (passes * count - 1)
            returns = self.n > (1 if phase is Phase.PREFILL else 2)
            slow[phase] = float(held[: len(held) - (several and not returns)].max())
            back[phase] = float(whole.total_s[0, -1]) if several else 0.0
            way[phase] = float(whole.total_s[0].sum()) - back[phase]
        mp, md = self.counts[Phase.PREFILL] * chunks, self.counts[Phase.DECODE]
        prefill = (mp - 1) * slow[Phase.PREFILL] + way[Phase.PREFILL]
        if self.n < 2:
            return prefill, 0.0
        once, slowest = way[Phase.DECODE], slow[Phase.DECODE]
        period = max(md * slowest, once + back[Phase.DECODE])
        decode = once + (md - 1) * slowest + (self.n - 2) * period
        return prefill + back[Phase.PREFILL], decode

    def by_token(self) -> tuple[float, float]:
        """Seconds of prefill and of decode with every token's own cache length."""
        several = len(self.plan.stages) > 1
        whole, last = self.rings[Phase.PREFILL]
        ways = whole.held_s.shape[1]
        used = ways - (several and self.n < 2)
        prefill = self._through(Phase.PREFILL, range(len(self.plan.chunks)), used)
        if self.n < 2:
            return prefill, 0.0
        whole, last = self.rings[Phase.DECODE]
        held = (self.counts[Phase.DECODE] - 1) * whole.held_s + last.held_s
        periods = np.maximum(held.max(axis=1), whole.total_s.sum(axis=1))
        end = self._through(Phase.DECODE, [len(periods) - 1], ways - several)
        return prefill, float(periods[:-1].sum()) + end

    def _through(self, phase: Phase, steps: Sequence[int], used: int) -> float:
        """When the last of all micro-batches has passed the first `used` columns of its ring.

        Each takes the `steps`, one behind the other.
        """
        whole, last = self.rings[phase]
        free, done = [0.0] * used, 0.0
        for i in range(self.counts[phase]):
            ring = last if i == self.counts[phase] - 1 else whole
            for step in steps:
                now = 0.0
                for k in range(used):
                    begin = max(now, free[k])
                    free[k] = begin + float(ring.held_s[step, k])
                    now = begin + float(ring.total_s[step, k])
                done = max(done, now)
        return done


def recomputed(plan: Plan, inputs: PlanInputs) -> Recomputed:
    """Return the plan's times from its stages and entries; `ValueError` if an entry is missing."""
    times = _Times(plan, inputs)
    prefill, decode = times.closed_form()
    by_token = times.by_token()
    if abs(sum(by_token) - prefill - decode) > FAR * (prefill + decode):
        prefill, decode = by_token
    step = 2 if len(plan.stages) > 1 else 1
    tp, td = (times.rings[phase][0].mean().total_s[0, ::step].tolist() for phase in times.sizes)
    return Recomputed(
        prefill_s=prefill,
        decode_s=decode,
        stage_prefill_s=tuple(tp),
        stage_decode_s=tuple(td if plan.workload.gen_len > 1 else [0.0] * len(td)),
    )


def _seconds(entry: LatencyEntry, size: int, cached: int, new: int) -> float:
    """Return an entry's time for a chunk of prompts, or for a token."""
    if entry.phase is Phase.PREFILL:
        return entry.chunk_s(v=size, start=cached, length=new)
    return entry.seconds(v=size, length=cached)

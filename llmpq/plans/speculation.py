"""Costs and gains of speculation: formulas that the planner predicts with and the runtime obeys.

With acceptance a per token, a round of gamma drafts yields E = (1 - a^(gamma+1)) / (1 - a) tokens
and takes gamma drafts and one verify of gamma + 1 positions. The speed-up over plain decoding is

    S(gamma) = E * decode / (gamma * draft + verify(gamma + 1))

Times come from a cost model, summed over the stages of a plan. Standard library and nouns only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, get_args

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase
from llmpq.devices.device_spec import device_specs
from llmpq.models.model_spec import LinearShape, ModelSpec
from llmpq.plans.capabilities import execution_modes, lacking_sentence, packed_kv_sentence
from llmpq.plans.plan import MAX_GAMMA, Plan, StagePlan
from llmpq.precision import KVPrecision, Precision, WeightScheme
from llmpq.sizes.memory import mtp_weight_bytes
from llmpq.sizes.pool_size import READS_KV4, drafted_bytes, planned_pool

SpeculationMode = Literal["qspec", "w4kv4", "kv4", "ngram", "mtp"]
MODES: tuple[SpeculationMode, ...] = get_args(SpeculationMode)
PRIOR_ACCEPTANCE: Mapping[SpeculationMode, float] = {
    "qspec": 0.8,
    "w4kv4": 0.9,
    "kv4": 0.97,
    "ngram": 0.3,
    "mtp": 0.8,
}
"""Per token, until it is observed: trained models at 4 bits, round to nearest; mtp: DeepSeek-V3's
report has 0.85 to 0.9 for one further token, drafts behind it are worse."""
WORTHWHILE = 1.02
"""Least predicted speed-up worth drafting for: cost models err by a few percent."""

DRAFT_PRECISION: Mapping[SpeculationMode, Mapping[Precision, Precision]] = {
    "qspec": {Precision.W4A16: Precision.W4A4},
    "w4kv4": {Precision.W16A16: Precision.W4A16, Precision.W8A16: Precision.W4A16},
    "kv4": {},
    "ngram": {},
    "mtp": {},
}
"""Mode -> what a layer of a precision is drafted as; others run as they are."""
FOUR_BIT_COPY = WeightScheme(bits=4, group_size=128, symmetric=True)
"""How drafts copy what they cannot read from the stage itself."""


class StepTimes(Protocol):
    """Seconds of a micro-batch of `rows` requests with `context` tokens in the cache."""

    def decode_s(self, rows: int, context: float) -> float:
        """One plain decode step."""
        ...

    def draft_s(self, rows: int, context: float) -> float:
        """One draft step; 0 where drafts need no model."""
        ...

    def verify_s(self, rows: int, context: float, q_len: int) -> float:
        """One verify of `q_len` positions a request."""
        ...


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the mean number of tokens one round yields."""
    if acceptance >= 1:
        return gamma + 1.0
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def predicted_speedup(
    times: StepTimes, acceptance: float, gamma: int, *, rows: int, context: float
) -> float:
    """Return S(gamma) over plain decoding; 1 for gamma 0."""
    if gamma == 0:
        return 1.0
    spent_s = gamma * times.draft_s(rows, context) + times.verify_s(rows, context, gamma + 1)
    return expected_tokens(acceptance, gamma) * times.decode_s(rows, context) / spent_s


def best_gamma(
    times: StepTimes,
    acceptance: float,
    *,
    rows: int,
    context: float,
    lengths: Sequence[int] = range(1, MAX_GAMMA + 1),
) -> tuple[int, float]:
    """Return the draft length of the highest predicted speed-up, and that; (0, 1) if none."""
    best = (0, 1.0)
    for gamma in lengths:
        speedup = predicted_speedup(times, acceptance, gamma, rows=rows, context=context)
        if speedup > max(best[1], WORTHWHILE):
            best = (gamma, speedup)
    return best


def choose_mode(
    times: Mapping[SpeculationMode, StepTimes], *, rows: int, context: float
) -> tuple[SpeculationMode, int, float] | None:
    """Return the mode of the highest predicted speed-up, its gamma and speed-up; None if none."""
    best: tuple[SpeculationMode, int, float] | None = None
    for mode, mode_times in times.items():
        acceptance = PRIOR_ACCEPTANCE[mode]
        gamma, speedup = best_gamma(mode_times, acceptance, rows=rows, context=context)
        if gamma > 0 and (best is None or speedup > best[2]):
            best = (mode, gamma, speedup)
    return best


def kv_refusal(plan: Plan, spec: ModelSpec, kv: KVPrecision) -> str | None:
    """Return why a plan's devices do not run a cache, or a copy of one, of so many bits, if so."""
    gpu = not all(stage.is_cpu for stage in plan.stages)
    ways = execution_modes(gpu=gpu, kv=kv, drafts=False, dtype=plan.workload.dtype)
    longest = min(plan.workload.max_len, spec.max_positions)
    lacking = lacking_sentence(spec, ways, max_len=longest)
    if lacking is not None or kv is KVPrecision.KV16:
        return lacking
    known = device_specs()
    kinds = {place.kind for place in plan.places} & known.keys()
    return packed_kv_sentence((kind, known[kind]) for kind in sorted(kinds))


def usable_modes(
    plan: Plan,
    kept: Collection[Precision] = frozenset(),
    *,
    mtp: bool = False,
    packed_copies: bool = True,
) -> tuple[SpeculationMode, ...]:
    """Return the modes that make something of this plan cheaper.

    `mtp`: whether the model has a head of its own that predicts a further token. `packed_copies`:
    whether the devices read a cache's copy of 4 bits.
    `kept`: precisions whose layers keep a checkpoint's own codes (checkpoints/stored_codes.py),
    which qspec would draft with at the target's cost.
    """
    plain_cache = plan.workload.kv is KVPrecision.KV16

    def usable(mode: SpeculationMode) -> bool:
        if mode == "ngram":
            return True
        if mode == "mtp":
            return mtp
        if mode in READS_KV4 and not (plain_cache and packed_copies):
            return False
        linear = plan.precisions if mode != "qspec" else set(plan.precisions) - set(kept)
        return mode == "kv4" or any(p in DRAFT_PRECISION[mode] for p in linear)

    return tuple(mode for mode in MODES if usable(mode))


@dataclass(frozen=True)
class PlanTimes:
    """The step times of a plan under a cost model.

    What was not profiled is taken at its target's cost, which never flatters speculation: a draft
    as the layer it drafts for, a verify of q positions as a decode of q times as many requests.
    """

    plan: Plan
    costs: CostModel
    mode: SpeculationMode

    def decode_s(self, rows: int, context: float) -> float:
        """One plain decode step."""
        return sum(
            count * entry.seconds(v=rows, length=context)
            for entry, count in self._entries["decode"]
        )

    def draft_s(self, rows: int, context: float) -> float:
        """One draft step; 0 where drafts need no model."""
        if self.mode == "ngram":
            return 0.0
        entries = self._entries["draft"]
        return sum(count * entry.seconds(v=rows, length=context) for entry, count in entries)

    def verify_s(self, rows: int, context: float, q_len: int) -> float:
        """One verify of `q_len` positions a request."""
        total_s = 0.0
        for entry, count in self._entries["verify"]:
            many = rows if entry.phase is Phase.VERIFY else rows * q_len
            total_s += count * entry.seconds(v=many, length=context, q_len=q_len)
        return total_s

    @cached_property
    def _entries(self) -> dict[str, list[tuple[LatencyEntry, int]]]:
        """Return the cost entries of a decode, a draft and a verify, and how often each counts."""
        found: dict[str, list[tuple[LatencyEntry, int]]] = {"decode": [], "draft": [], "verify": []}
        last = len(self.plan.stages) - 1
        for index, stage in enumerate(self.plan.stages):
            drafting = self.mode != "mtp" or index == last
            parts: list[Literal["embedding", "head"]] = []
            parts += ["embedding"] if index == 0 else []
            parts += ["head"] if index == last else []
            for part in parts:
                entry = self.costs.find(
                    stage.profile_kind,
                    part=part,
                    phase=Phase.DECODE,
                    precision=self.plan.settings().head(on_cpu=stage.is_cpu),
                    dtype=self.plan.workload.dtype,
                )
                if entry is not None:
                    for kind, entries in found.items():
                        if kind != "draft" or drafting:
                            entries.append((entry, 1))
            for precision, count in Counter(stage.precisions).items():
                for kind, entry in self._layer(stage, precision).items():
                    if kind != "draft" or self.mode != "mtp":
                        found[kind].append((entry, count))
            if self.mode == "mtp" and index == last:
                # The model's own head is a layer as the last one, and the output matrix.
                found["draft"].append((self._layer(stage, stage.precisions[-1])["draft"], 1))
        return found

    def _layer(self, stage: StagePlan, precision: Precision) -> dict[str, LatencyEntry]:
        workload = self.plan.workload

        def find(phase: Phase, as_precision: Precision, kv: KVPrecision) -> LatencyEntry | None:
            return self.costs.find(
                stage.profile_kind,
                phase=phase,
                precision=as_precision,
                kv=kv,
                dtype=workload.dtype,
            )

        decode = find(Phase.DECODE, precision, workload.kv)
        if decode is None:
            raise ValueError(
                f"the cost model has no decode time of {precision.value} layers with "
                f"{workload.kv.value} in {workload.dtype} on {stage.profile_kind}; profile it with "
                "llmpq-profile"
            )
        drafted = DRAFT_PRECISION[self.mode].get(precision, precision)
        kv = KVPrecision.KV4 if self.mode in READS_KV4 else workload.kv
        draft = find(Phase.DECODE, drafted, kv) or find(Phase.DECODE, drafted, workload.kv)
        verify = find(Phase.VERIFY, precision, workload.kv)
        return {"decode": decode, "draft": draft or decode, "verify": verify or decode}


Line = tuple[tuple[float, float], ...]
"""Points (x, seconds), x ascending."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """`StepTimes` of a device: a line over the context for each number of rows (and positions)."""

    draft: Mapping[int, Line] = field(default_factory=dict)
    verify: Mapping[tuple[int, int], Line]
    """(rows, positions) -> line."""
    plain: Mapping[int, Line] = field(default_factory=dict)
    """Rows -> line, of steps without drafts and what is kept for them."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Draft lengths whose verify was timed."""
        return tuple(sorted({positions - 1 for _, positions in self.verify} - {0}))

    @property
    def corners(self) -> tuple[tuple[int, float], ...]:
        """(rows, context) that were timed."""
        return tuple((r, at) for (r, q), line in self.verify.items() if q == 1 for at, _ in line)

    def decode_s(self, rows: int, context: float) -> float:
        """One plain decode step; where none was timed, a verify of one position."""
        if not self.plain:
            return self.verify_s(rows, context, 1)
        return on_line(self.plain[_next_above(rows, self.plain)], context)

    def draft_s(self, rows: int, context: float) -> float:
        """One draft step; 0 where drafts need no model."""
        if not self.draft:
            return 0.0
        return on_line(self.draft[_next_above(rows, self.draft)], context)

    def verify_s(self, rows: int, context: float, q_len: int) -> float:
        """One verify of `q_len` positions a request."""
        known = _next_above(rows, [r for r, _ in self.verify])
        points = sorted(
            (q, on_line(line, context)) for (r, q), line in self.verify.items() if r == known
        )
        return on_line(tuple(points), q_len)


def on_line(points: Line, x: float) -> float:
    """Return the value at x: straight between points, along the outer pieces beyond them."""
    if len(points) == 1:
        return points[0][1]
    upper = next((i for i, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(upper, 1) - 1 : max(upper, 1) + 1]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _next_above(rows: int, known: Sequence[int] | Mapping[int, Line]) -> int:
    """Return the least known number of rows that holds `rows`, or the largest."""
    return min((r for r in known if r >= rows), default=max(known))


def draft_bytes(plan: Plan, spec: ModelSpec, index: int, mode: SpeculationMode) -> int:
    """Return what a device's drafts hold beyond its part itself: weights, and of requests.

    `index`: of `plan.workers`.
    """
    workload = plan.workload
    own = _held(plan, spec, index)
    pool = planned_pool(
        spec, workload, plan.prefill_chunk, prefill_microbatch=plan.prefill_microbatch
    )
    return draft_weight_bytes(plan, spec, index, mode) + drafted_bytes(
        pool,
        mode,
        own,
        layers=range(*plan.places[index].layers),
        kv=workload.kv,
        dtype_bytes=workload.dtype_bytes,
    )


def draft_weight_bytes(plan: Plan, spec: ModelSpec, index: int, mode: SpeculationMode) -> int:
    """Return the weights that a device's drafts hold beside its own; `index`: of `plan.workers`.

    A 4-bit copy of its 16- and 8-bit layers, of such linears in others, and of its output matrix
    (w4kv4); on the last stage the model's own head (mtp).
    """
    stage, workload = plan.places[index], plan.workload
    own, weights = _held(plan, spec, index), 0
    worker = plan.workers[index]
    last = worker.leads and worker.stage == len(plan.stages) - 1
    if mode == "w4kv4":
        weights = sum(
            FOUR_BIT_COPY.nbytes(s.out_features, s.in_features, workload.dtype_bytes)
            for layer, precision in zip(range(*stage.layers), stage.precisions, strict=True)
            for s in _copied(plan, spec, layer, precision, own.of_layer(layer).linears())
        )
        if last:
            weights += FOUR_BIT_COPY.nbytes(spec.vocab, spec.hidden, workload.dtype_bytes)
    if mode == "mtp" and last:
        weights = mtp_weight_bytes(
            spec,
            stage.precisions[-1],
            plan.settings(),
            dtype_bytes=workload.dtype_bytes,
            has_embedding=worker.stage == 0,
        )
    return weights


def _copied(
    plan: Plan,
    spec: ModelSpec,
    layer: int,
    precision: Precision,
    linears: Sequence[LinearShape],
) -> Sequence[LinearShape]:
    """Return those linears of a layer that w4kv4 copies: all at its bits, or those of 8 and 16."""
    if precision in DRAFT_PRECISION["w4kv4"]:
        return linears
    stored = [one for one in plan.settings().of_layer(layer).stored if one.precision is precision]
    weights = {s.kind: s.num_weights for s in (spec.of_layer(layer).linears() if stored else ())}
    whole = {kind for one in stored for kind, size in one.linears if size >= weights[kind]}
    return [s for s in linears if s.kind in whole]


def _held(plan: Plan, spec: ModelSpec, index: int) -> ModelSpec:
    """Return what a device of a plan has of the model."""
    member = plan.workers[index].member_of(spec)
    return spec if member is None else member.own

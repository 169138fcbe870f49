"""Writes the certificate of a plan: tables of costs, and multipliers from which a bound follows.

`planner/check/verify.py` checks it, and says what the multipliers mean. The proof is made here anew
after the search, from its relaxation, as far as a small program can check it: a pair of micro-batch
sizes is bounded by one set of prices, of those that bound least by a shortest path with these. So
its bound is below that of the search.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from llmpq.costs.cost_model import Phase
from llmpq.planner.check import verify
from llmpq.planner.check.verify import PRICE, UNIT
from llmpq.planner.costs.links import Floats, Hops
from llmpq.planner.evaluate.objective import Coefficients, job_time, make_form, value
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation, Prices
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.problem.numbers import SizeNumbers
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import weights_of_groups
from llmpq.planner.solving.count_vectors import Vector
from llmpq.planner.solving.engine_floors import engine_variants, least_row_s
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import variants_with_room
from llmpq.planner.solving.topology_search import KnownPipeline, TopologySearch
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology

SHRUNK = 1 - 1e-12
"""Shares are a little smaller, so that their sum is not above 1 for rounding."""
MOST_WORK = 2_000_000
"""Steps of shortest paths that a proof may take."""
MOST_PARTS = 120
"""Multipliers and paths of single pairs of sizes that a proof may have."""
MOST_ENGINES = 64
"""Engines that devices can make, up to which a certificate has proofs of them."""
MOST_PAIRS = 200
"""Pairs up to which the memory of all is looked at; of more, that of the extreme ones."""
NEAR = 1e-6
"""Relative gap at which a proof is complete."""


class NoCertificate(ValueError):
    """Why a plan can have none."""


def certificate(
    plan: Plan, p: Problem, a: Assignment, variants: Sequence[Problem], budget: float | None
) -> dict[str, Any]:
    """Return the certificate of a plan; `NoCertificate` says why there is none.

    `p`: the problem whose assignment the plan is; `variants`: it at every KV precision and prefill
    chunk that the plan was chosen from.
    """
    theta = 0.0 if budget is not None else p.theta
    own = p.with_changes(theta=theta)
    value_s, jobs = value(own, a), [one.with_changes(theta=theta) for one in variants]
    at = [(one.kv, one.chunk) for one in variants].index((p.kv, p.chunk))
    data = _job(plan, own, budget, value_s) | {
        "exactly": 1,
        "most_waves": 1,
        "engines": [_engine(plan, own, a, at)],
        "tables": [_table(one) for one in jobs],
    }
    data["proofs"] = _Proof(data, jobs, data["tables"], rows=p.workload.batch).made(value_s)
    return _signed(_proven(data), data, value_s)


def topology_certificate(
    topology: Topology,
    p: Problem,
    engines: Sequence[tuple[Problem, Assignment]],
    variants: Sequence[Problem],
    budget: float | None,
    proofs: Sequence[dict[str, Any]] = (),
    exactly: int | None = None,
) -> dict[str, Any]:
    """Return the certificate of engines that share a job: of the problem of all its devices.

    `proofs`: what engines take for their rows at least (`engine_proofs`), of a search for
    `exactly` so many engines, or any number. Without any it has what a row takes at least.
    """
    theta, value_s = 0.0 if budget is not None else topology.solver.theta, topology.solver.value
    assert value_s is not None, "a topology that was searched has a value"
    rows = least_row_s(variants, p.workload.batch) * SHRUNK
    pairs = list(zip(topology.engines, engines, strict=True))
    data = _job(topology, p.with_changes(theta=theta), budget, value_s) | {
        "exactly": exactly,
        "most_waves": MOST_WAVES,
        "engines": [_engine(share.plan, own, a, at) for at, (share, (own, a)) in enumerate(pairs)],
        "tables": [_of_its_sizes(_table(own), a) for _, (own, a) in pairs],
        "proofs": [],
        "row": [_units(float(seconds)) for seconds in rows],
    }
    both = [(_proven(one), one) for one in (data, with_tables(data, proofs))]
    return _signed(*max(both, key=lambda one: one[0]), value_s)


def with_tables(data: dict[str, Any], proofs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a certificate with proofs that `engine_proofs` made, which have their own tables."""
    first = len(data["tables"])
    return data | {
        "tables": [*data["tables"], *(proof["table"] for proof in proofs)],
        "proofs": [proof | {"table": first + at} for at, proof in enumerate(proofs)],
    }


def _proven(data: dict[str, Any]) -> Fraction:
    """Return the bound of a certificate, 0 where its proofs do not bound all engines.

    Bounds are checked as they are computed: there is one program for both.
    """
    try:
        return min(verify.bounds(data))
    except verify.Refused:
        return Fraction(0)


def _signed(proven: Fraction, data: dict[str, Any], value_s: float) -> dict[str, Any]:
    """Return a certificate with its bound and digest."""
    data = data | {"bound": max(0.0, min(float(proven) * SHRUNK, value_s))}
    return data | {"sha256": verify.digest(data)}


def engine_proofs(
    p: Problem, options: SolveOptions, aim: float, most: Sequence[tuple[Vector, int]]
) -> list[dict[str, Any]]:
    """Return proofs that engines take `aim` seconds or more for a row more than they may do below.

    `most`: those rows, of engines given as counts of devices of each class; where there are none,
    the largest value and rows that bounds of engines show. No proofs where engines are too many, or
    where layers differ.
    """
    rows = p.workload.batch
    if not most:
        search = TopologySearch(p, options, known=KnownPipeline(value=aim))
        aim = search.bound(search.vectors.vectors)
        most = search.most_of_each(aim)
    bounding = [
        (v, n)
        for v, n in most
        if n < rows and all(n < m for w, m in most if v != w and _has_all(w, v))
    ]
    if math.prod(cls.count + 1 for cls in p.classes) > MOST_ENGINES or not _is_alike(p):
        return []
    priced = p if options.budget is None else p.with_changes(theta=0.0)
    share = 1 / max(1, len(bounding) * MOST_WAVES)
    return [
        proof
        for v, n in bounding
        for waves in range(1, min(MOST_WAVES, n + 1) + 1)
        for proof in _engine_proofs(priced, options, aim, v, n + 1, waves, share)
    ]


def _is_alike(p: Problem) -> bool:
    """Whether all layers take as long."""
    return p.numbers(*p.pairs[0]).uniform


def _has_all(v: Vector, other: Vector) -> bool:
    return all(a >= b for a, b in zip(v, other, strict=True))


def _engine_proofs(
    p: Problem,
    options: SolveOptions,
    aim: float,
    v: Vector,
    rows: int,
    waves: int,
    share: float,
) -> list[dict[str, Any]]:
    """Return the proofs of an engine in so many waves: one for every variant, with its table."""
    names = [d.name for cls, n in zip(p.classes, v, strict=True) for d in cls.devices[:n]]
    job = p.part(names).prepared().with_job(batch=-(-rows // waves))
    variants = variants_with_room(job, options) or engine_variants(job, options.kvs)
    tables = [_table(one) for one in variants]
    data = {"gen_len": job.workload.gen_len, "theta": p.theta, "budget": options.budget}
    jobs = [one.with_changes(theta=p.theta / waves) for one in variants]
    proofs = _Proof(data, jobs, tables, rows=rows, waves=waves, share=share).made(aim / waves)
    return [proof | {"table": table} for proof, table in zip(proofs, tables, strict=True)]


def _of_its_sizes(table: dict[str, Any], a: Assignment) -> dict[str, Any]:
    """Return an engine's table without sizes that are not its plan's: no proof needs them."""
    chosen = {"prefill": a.prefill_microbatch, "decode": a.decode_microbatch}
    sizes = {
        phase: [one for one in table[phase] if one["size"] == size]
        for phase, size in chosen.items()
    }
    return {**table, **sizes, "room": []}


def digest_of(plan: Plan | Topology) -> str:
    """Return what a certificate knows a plan file by."""
    return verify.digest(json.loads(plan.dump_json()))


def _classes(p: Problem) -> list[list[str]]:
    return [[device.name for device in cls.devices] for cls in p.classes]


def _job(plan: Plan | Topology, p: Problem, budget: float | None, value_s: float) -> dict[str, Any]:
    """Return what a certificate says of the job and of the plan as a whole."""
    return {
        "schema": verify.SCHEMA,
        "plan_sha256": digest_of(plan),
        "rows": p.workload.batch,
        "gen_len": p.workload.gen_len,
        "theta": p.theta,
        "budget": budget,
        "classes": _classes(p),
        "choices": [choice.value for choice in p.choices],
        "value": value_s,
    }


def _engine(plan: Plan, p: Problem, a: Assignment, table: int) -> dict[str, Any]:
    """Return what the plan of an engine is checked by, beside its table."""
    if p.objective != "makespan" or p.group != 1 or not _is_alike(p):
        raise NoCertificate("only plans of --objective makespan of single equal layers have one")
    if plan.speculation is not None:
        raise NoCertificate("the times of drafts have none; plan without --speculate")
    assert plan.predicted is not None, "the planner always predicts"
    x = p.numbers(a.prefill_microbatch, a.decode_microbatch)
    closed = job_time(p, a).total_s
    return {
        "table": table,
        "weights": weights_of_groups(p).tolist(),
        "room": [_room_of(p, x.capacity, stage) for stage in a.stages],
        "step_by_step": not math.isclose(plan.predicted.total_s, closed, rel_tol=1e-9),
        "prefill": _messages(a, x.hop_prefill, x.back_prefill, back=p.workload.gen_len > 1),
        "decode": _messages(a, x.hop_decode, x.back_decode, back=p.workload.gen_len > 2),
    }


def _room_of(p: Problem, capacity: Any, stage: Stage) -> int:
    """Return the bytes that a stage has for its layers: by its end layers, and kinds of bits."""
    dense = {p.choices[b].value.startswith("w16") for b in stage.choices}
    mixed = 2 if len(dense) == 2 else int(False in dense)
    first, last = int(stage.start == 0), int(stage.end == p.num_layers)
    return int(capacity[stage.cls][first][last][mixed])


def _messages(a: Assignment, hop: Hops, way_back: Hops, *, back: bool) -> dict[str, Any]:
    """Return how long messages of a phase hold their links, and what the way back takes.

    `back`: whether anything is sent back.
    """
    order = [stage.cls for stage in a.stages]
    held = [float(hop.held_s[pair]) for pair in itertools.pairwise(order)]
    ends, returns = (order[-1], order[0]), back and len(order) > 1
    held += [float(way_back.held_s[ends])] * returns
    return {
        "messages_held": _units(held),
        "way_back": _units(float(way_back.total_s[ends])) if returns else 0,
    }


def _units(data: Any) -> Any:
    """Return seconds, losses, or lists of them, as whole numbers of 1/UNIT, rounded down."""
    if isinstance(data, list):
        return [_units(one) for one in data]
    return math.floor(Fraction(data) * UNIT)


def _table(p: Problem) -> dict[str, Any]:
    """Return what layers, ends and messages of a job take at every size, and what they may be."""
    etas, xis = p.prefill_sizes, p.decode_sizes
    sizes, layers = np.unique(p.all_layer_bytes, axis=0, return_inverse=True)
    return {
        "classes": _classes(p),
        "batch": p.workload.batch,
        "kv": p.kv.value,
        "chunk": p.chunk,
        "omega": [
            [_units(float(x)) if allowed else None for x, allowed in zip(*row, strict=True)]
            for row in zip(p.omega, p.open, strict=True)
        ],
        "sizes": sizes.tolist(),
        "layers": layers.ravel().tolist(),
        "room": [_roomiest(p, eta).max(axis=3).tolist() for eta in etas],
        "prefill": [
            _size(eta, p.counts(eta, xis[0])[0], p.size_numbers(Phase.PREFILL, eta)) for eta in etas
        ],
        "decode": [
            _size(xi, p.counts(etas[0], xi)[1], p.size_numbers(Phase.DECODE, xi)) for xi in xis
        ],
    }


def _size(size: int, count: int, x: SizeNumbers) -> dict[str, Any]:
    return {
        "size": size,
        "count": count,
        "layer": _units(x.layer_s[0].tolist()),
        "held_layer": _units(x.held_layer_s[0].tolist()),
        "ends": _units(x.ends_s.tolist()),
        "held_ends": _units(x.held_ends_s.tolist()),
        "hop": _units(x.hop.total_s.tolist()),
    }


def _roomiest(p: Problem, eta: int) -> Any:
    """[C, 2, 2, 3] the most bytes left for layers at a prefill size, whatever the decode size."""
    xis = p.decode_sizes
    if len(xis) * len(p.prefill_sizes) > MOST_PAIRS:
        xis = (xis[0], xis[-1])
    return np.max([p.capacity(eta, xi) for xi in xis], axis=0)


PairAt = tuple[int, int, int]
"""A variant, and indices of a prefill and a decode size."""


class _Proof:
    """Makes multipliers for all pairs of sizes of an engine's job, the least bound first."""

    def __init__(
        self,
        data: dict[str, Any],
        variants: Sequence[Problem],
        tables: Sequence[dict[str, Any]],
        *,
        rows: int,
        waves: int = 1,
        share: float = 1.0,
    ) -> None:
        """`share`: of the work and the parts that a proof may have."""
        self._data, self._tables, self._share = data, tables, share
        self._rows, self._waves, budget = rows, waves, data["budget"]
        # Under a budget the price of omega is a multiplier: omega itself is what it prices.
        self._problems = [p if budget is None else p.with_changes(theta=1.0) for p in variants]
        self._relaxations = [ClassRelaxation(p, budget) for p in self._problems]
        self._pairs = [_PairBounds(p, budget) for p in self._problems]

    def made(self, value_s: float) -> list[dict[str, Any]]:
        """Return the proof of every variant; `value_s`: what bounds need not be above."""
        for k, p in enumerate(self._problems):
            rows, columns = len(p.prefill_sizes), len(p.decode_sizes)
            for row, column in {(0, 0), (rows // 2, columns // 2), (rows - 1, columns - 1)}:
                self._solve((k, row, column))
            if not self._pairs[k].made:  # no fractions of layers have room there
                self._pairs[k].add(_nothing(len(p.classes)))
        self._refine(value_s * (1 - NEAR))
        job, found = {"rows": self._rows, "waves": self._waves}, []
        for k, pairs in enumerate(self._pairs):
            used, which = np.unique(pairs.which, return_inverse=True)
            chosen = [_whole(pairs.made[int(number)]) for number in used]
            of_pairs = which.ravel().tolist()
            found.append({**job, "table": k, "multipliers": chosen, "of_pairs": of_pairs})
        return found

    def _solve(self, at: PairAt) -> None:
        """Add the multipliers of a pair's own relaxation."""
        p = self._problems[at[0]]
        form = make_form(p, p.prefill_sizes[at[1]], p.decode_sizes[at[2]])
        prices = self._relaxations[at[0]].solve(form)
        if math.isfinite(prices.value):
            self._pairs[at[0]].add(_multipliers(p, form, prices))

    def _refine(self, target_s: float) -> None:
        """Raise the least bounds: give the pair multipliers of its own, then a path with them."""
        heap = [
            (float(bound), (k, row, column), 0)
            for k, pairs in enumerate(self._pairs)
            for (row, column), bound in np.ndenumerate(pairs.best)
        ]
        heapq.heapify(heap)
        parts, work = max(2.0, MOST_PARTS * self._share), MOST_WORK * self._share
        while heap and parts > 0 and heap[0][0] < target_s:
            bound, at, done = heapq.heappop(heap)
            best, pair = self._pairs[at[0]].best, at[1:]
            if float(best[pair]) <= bound:  # else by multipliers of another pair
                steps = self._steps(at[0])
                if done == 0:
                    self._solve(at)
                elif done == 1 and steps <= work:
                    work -= steps
                    self._add_path(at)
                else:  # it cannot be raised, and is the least
                    return
                parts, done = parts - 1, done + 1
            heapq.heappush(heap, (float(best[pair]), at, done))

    def _steps(self, k: int) -> int:
        """Return the steps of a shortest path over stages."""
        p = self._problems[k]
        states = math.prod(cls.count + 1 for cls in p.classes)
        return p.num_layers**2 // 2 * len(p.classes) ** 2 * states

    def _add_path(self, at: PairAt) -> None:
        """Bound a pair by a shortest path with its best multipliers."""
        k, row, column = at
        pairs, table = self._pairs[k], self._tables[k]
        m = {**pairs.made[int(pairs.which[row, column])], "path": True}
        alone = {
            **table,
            "prefill": [table["prefill"][row]],
            "decode": [table["decode"][column]],
            "room": [table["room"][row]],
        }
        proof = {"waves": self._waves, "table": 0, "multipliers": [_whole(m)], "of_pairs": [0]}
        bound = float(verify.bounds_of({**self._data, "tables": [alone]}, proof)[0]) / self._waves
        if bound > pairs.best[row, column]:
            pairs.best[row, column], pairs.which[row, column] = bound, len(pairs.made)
            pairs.made.append(m)


def _whole(m: dict[str, Any]) -> dict[str, Any]:
    """Return multipliers as whole numbers of 1/PRICE; of seconds a byte of 1/(UNIT PRICE)."""

    def whole(x: float, unit: int = PRICE) -> int:
        return math.floor(Fraction(x) * unit)

    return {
        "path": m["path"],
        "kappa": whole(m["kappa"]),
        "prefill": [whole(x) for x in m["prefill"]],
        "decode": [whole(x) for x in m["decode"]],
        "memory": [whole(x, UNIT * PRICE) for x in m["memory"]],
        "loss": whole(m["loss"]),
    }


def _multipliers(p: Problem, form: Coefficients[float], prices: Prices) -> dict[str, Any]:
    """Return prices of a relaxation as shares of the weights of P and D."""
    counts = np.array([cls.count for cls in p.classes])

    def shares(own: Floats, weight: float) -> list[float]:
        share = np.clip(own, 0, None) / weight if weight > 0 else np.zeros(len(counts))
        return (share * (SHRUNK / max(1.0, float((share * counts).sum())))).tolist()

    return {
        "path": False,
        "kappa": float(np.clip(prices.kappa, 0, 1)),
        "prefill": shares(prices.prefill, form.a),
        "decode": shares(prices.decode, form.d_weight(prices.kappa)),
        "memory": np.clip(prices.memory, 0, None).tolist(),
        "loss": float(prices.omega),
    }


def _nothing(classes: int) -> dict[str, Any]:
    """Return multipliers of zero."""
    zero = [0.0] * classes
    shares = {"prefill": zero, "decode": zero, "memory": zero}
    return {"path": False, "kappa": 1.0, "loss": 0.0, **shares}


class _PairBounds:
    """What multipliers prove of all pairs at once, as `verify` computes it but for rounding."""

    def __init__(self, p: Problem, budget: float | None) -> None:
        self.p, self.budget = p, budget
        prefill = [p.size_numbers(Phase.PREFILL, eta) for eta in p.prefill_sizes]
        decode = [p.size_numbers(Phase.DECODE, xi) for xi in p.decode_sizes]
        self.pre, self.dec = (
            {
                "layer": np.array([x.layer_s[0] for x in own]),
                "held": np.array([x.held_layer_s[0] for x in own]),
                "ends": np.array([x.ends_s for x in own]),
                "held_ends": np.array([x.held_ends_s for x in own]),
            }
            for own in (prefill, decode)
        )
        etas, xis = p.prefill_sizes, p.decode_sizes
        self.a = np.array([make_form(p, eta, xis[0]).a for eta in etas])
        forms = [make_form(p, etas[0], xi) for xi in xis]
        self.bd, self.ws, self.z, self.md = (
            np.array([float(getattr(form, name)) for form in forms])
            for name in ("bd", "ws", "z", "md")
        )
        self.room = np.array(
            [_roomiest(p, eta).clip(0).max(axis=(1, 2, 3)) for eta in etas], dtype=float
        )
        self.counts = np.array([cls.count for cls in p.classes], dtype=float)
        self.omega, self.rows = p.priced_omega, p.all_layer_bytes
        self.best = np.full((len(etas), len(xis)), -np.inf)
        self.which = np.zeros(self.best.shape, dtype=int)
        self.made: list[dict[str, Any]] = []

    def add(self, m: dict[str, Any]) -> None:
        """Keep multipliers for the pairs of which they prove most."""
        kappa, share_p, share_d, memory = (
            m["kappa"],
            np.array(m["prefill"]),
            np.array(m["decode"]),
            np.array(m["memory"]),
        )
        d_weight, s_weight = self.bd + kappa * self.z * self.md, self.ws + (1 - kappa) * self.z
        loss = self.omega if self.budget is None else _lossy(self.omega, m["loss"])

        def times(part: str) -> tuple[Floats, Floats]:
            held = {"layer": "held", "ends": "held_ends"}[part]
            before = self.pre[part] + (self.a[:, None] * share_p)[:, :, None] * self.pre[held]
            after = (
                s_weight[:, None, None] * self.dec[part]
                + (d_weight[:, None] * share_d)[:, :, None] * self.dec[held]
            )
            return before, after

        before, after = times("layer")
        own = before[:, None] + after[None]  # [E, X, C, B]
        total = np.zeros(self.best.shape)
        alike = bool((self.rows == self.rows[:1]).all())
        if alike:
            cheapest = (own + memory[:, None] * self.rows[0][None, :]).min(axis=2)
            for row in loss:
                total += (cheapest + row).min(axis=2)
        else:
            for size, row in zip(self.rows, loss, strict=True):
                cheapest = (own + memory[:, None] * size[None, :]).min(axis=2)
                total += (cheapest + row).min(axis=2)
        before, after = times("ends")
        total += (before[:, None] + after[None]).min(axis=2).sum(axis=2)
        total -= (self.room * memory * self.counts).sum(axis=1)[:, None]
        if self.budget is not None:
            total -= m["loss"] * self.budget * (1 + 1e-9)
        better = total > self.best
        self.best = np.where(better, total, self.best)
        self.which = np.where(better, len(self.made), self.which)
        self.made.append(m)


def _lossy(omega: Floats, price: float) -> Floats:
    return np.where(np.isinf(omega), np.inf, price * np.where(np.isinf(omega), 0.0, omega))

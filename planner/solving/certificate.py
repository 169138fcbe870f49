"""Writes the certificate of a plan: tables of costs, and multipliers from which a bound follows.

`planner/check/verify.py` checks it, and says what the multipliers mean. The proof is made here anew
after the search, from the same relaxation, as far as a program can check it that knows no labels: a
part is bounded by one relaxation and a shortest path, or split by the range of the slowest stage's
time. Where the work allowed ends first the bound stays below that of the search.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmpq.cost_model import Phase
from llmpq.plan import Plan
from llmpq.planner.check import verify
from llmpq.planner.costs.links import Floats, Hops
from llmpq.planner.costs.stage_memory import weights_of_groups
from llmpq.planner.evaluate.objective import (
    Coefficients,
    job_time,
    make_form,
    value,
)
from llmpq.planner.exact.bounds.plan_cases import Box
from llmpq.planner.exact.bounds.relaxation import ClassRelaxation, Prices
from llmpq.planner.problem.numbers import SizeNumbers
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem
from llmpq.planner.solving.count_vectors import Vector
from llmpq.planner.solving.engine_floors import engine_variants
from llmpq.planner.solving.engine_prices import GRID, MOST_SIZES
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import variants_with_room
from llmpq.planner.solving.topology_search import KnownPipeline, TopologySearch
from llmpq.topology import Topology

SHRUNK = 1 - 1e-12
"""Shares are a little smaller, so that their sum is not above 1 for rounding."""
MOST_WORK = 1_000_000
"""Steps of shortest paths that a proof may take."""
MOST_PARTS = 120
"""Parts of single pairs that a proof may have."""
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
    data = _checked_plan(plan, own, a, budget, variants)
    data |= {"plan_sha256": digest_of(plan), "value": value(own, a)}
    proof = _Proof(data, [one.with_changes(theta=theta) for one in variants], data["value"])
    data["proof"], data["bound"] = proof.made()
    data["sha256"] = verify.digest(data)
    return data


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
    `exactly` so many engines, or any number.
    """
    theta, work, value_s = topology.solver.theta, topology.workload, topology.solver.value
    assert value_s is not None, "a topology that was searched has a value"
    sizes = _grid(work.batch)
    data = {
        "schema": 1,
        "plan_sha256": digest_of(topology),
        "rows": work.batch,
        "gen_len": work.gen_len,
        "theta": theta,
        "budget": budget,
        "classes": _classes(p),
        "choices": [choice.value for choice in p.choices],
        "value": value_s,
        "engines": [
            _of_its_sizes(
                _checked_plan(share.plan, own.with_changes(theta=theta), a, budget, [own]), a
            )
            for share, (own, a) in zip(topology.engines, engines, strict=True)
        ],
        "steps": [_steps(one, sizes) for one in variants],
        "exactly": exactly,
        "proofs": list(proofs),
    }
    # Bounds are checked as they are computed: there is one program for both.
    bound = verify.topology_bound(data)
    if proofs:
        try:
            bound = max(bound, verify.engine_bounds(data)[1])
        except verify.Refused:
            data["proofs"] = []
    data["bound"] = max(0.0, min(bound / verify.UNIT * SHRUNK, value_s))
    data["sha256"] = verify.digest(data)
    return data


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
    share = 1 / max(1, len(bounding) * verify.MOST_WAVES)
    return [_engine_proof(priced, options, aim, v, n + 1, share) for v, n in bounding]


def _is_alike(p: Problem) -> bool:
    """Whether all layers take as long."""
    return p.numbers(*p.pairs[0]).uniform


def _has_all(v: Vector, other: Vector) -> bool:
    return all(a >= b for a, b in zip(v, other, strict=True))


def _engine_proof(
    p: Problem, options: SolveOptions, aim: float, v: Vector, rows: int, share: float
) -> dict[str, Any]:
    """Return the proof of an engine: for every number of waves, tables and a tree of parts."""
    names = [d.name for cls, n in zip(p.classes, v, strict=True) for d in cls.devices[:n]]
    part = p.part(names).prepared()
    waves = []
    for number in range(1, min(verify.MOST_WAVES, rows) + 1):
        job = part.with_job(batch=-(-rows // number)).with_changes(theta=p.theta / number)
        variants = variants_with_room(job, options) or engine_variants(job, options.kvs)
        data = {
            "schema": 1,
            "gen_len": job.workload.gen_len,
            "theta": job.theta,
            "budget": options.budget,
            "classes": _classes(job),
            "choices": [choice.value for choice in job.choices],
            "variants": [_tables(one) for one in variants],
        }
        proof, _ = _Proof(data, variants, aim / number, share).made()
        waves.append({"variants": data["variants"], "proof": proof})
    return {"classes": _classes(part), "rows": rows, "waves": waves}


def _of_its_sizes(data: dict[str, Any], a: Assignment) -> dict[str, Any]:
    """Return an engine's tables without sizes that are not its plan's: no proof needs them."""
    (variant,) = data["variants"]
    chosen = {"prefill": a.prefill_microbatch, "decode": a.decode_microbatch}
    for phase, size in chosen.items():
        variant[phase] = [one for one in variant[phase] if one["size"] == size]
    variant["room"] = []
    return data


def digest_of(plan: Plan | Topology) -> str:
    """Return what a certificate knows a plan file by."""
    return verify.digest(json.loads(plan.dump_json()))


def _grid(rows: int) -> list[int]:
    """Return batches at which times are looked up, ascending from 1."""
    found, ratio = [1], max(GRID, rows ** (1 / MOST_SIZES))
    while found[-1] < rows:
        found.append(min(rows, max(found[-1] + 1, int(found[-1] * ratio))))
    return found


def _steps(p: Problem, sizes: Sequence[int]) -> dict[str, Any]:
    """Return what a layer takes in steps of so many rows, in either phase."""
    tables = {
        phase: [p.size_numbers(phase, size).layer_s[0].tolist() for size in sizes]
        for phase in (Phase.PREFILL, Phase.DECODE)
    }
    return {
        "sizes": list(sizes),
        "layers": p.num_layers,
        "passes": [p.chunks_of_prompt, p.workload.gen_len - 1],
        "seconds": list(tables.values()),
    }


def _classes(p: Problem) -> list[dict[str, Any]]:
    return [{"devices": [device.name for device in cls.devices]} for cls in p.classes]


def _checked_plan(
    plan: Plan, p: Problem, a: Assignment, budget: float | None, variants: Sequence[Problem]
) -> dict[str, Any]:
    """Return what the plan of one pipeline is checked by, with tables of its variants."""
    if p.objective != "makespan" or p.group != 1 or not _is_alike(p):
        raise NoCertificate("only plans of --objective makespan of single equal layers have one")
    if plan.speculation is not None:
        raise NoCertificate("the times of drafts have none; plan without --speculate")
    return {
        "schema": 1,
        "gen_len": p.workload.gen_len,
        "theta": p.theta,
        "budget": budget,
        "classes": _classes(p),
        "choices": [choice.value for choice in p.choices],
        "weights": weights_of_groups(p).tolist(),
        "plan": _plan_tables(plan, p, a),
        "variants": [_tables(one) for one in variants],
    }


def _plan_tables(plan: Plan, p: Problem, a: Assignment) -> dict[str, Any]:
    x = p.numbers(a.prefill_microbatch, a.decode_microbatch)
    assert plan.predicted is not None, "the planner always predicts"
    closed = job_time(p, a).total_s

    def hops(hop: Hops, back: Hops) -> dict[str, Any]:
        return {
            "held_s": hop.held_s.tolist(),
            "back_s": back.total_s.tolist(),
            "back_held_s": back.held_s.tolist(),
        }

    return {
        "room": x.capacity.tolist(),
        "total_s": plan.predicted.total_s,
        "step_by_step": not math.isclose(plan.predicted.total_s, closed, rel_tol=1e-9),
        "prefill": hops(x.hop_prefill, x.back_prefill),
        "decode": hops(x.hop_decode, x.back_decode),
    }


def _tables(p: Problem) -> dict[str, Any]:
    """Return what a variant's layers, ends and messages take at every size."""
    etas, xis = p.prefill_sizes, p.decode_sizes
    sizes = p.all_layer_bytes
    return {
        "kv": p.kv.value,
        "chunk": p.chunk,
        "omega": [
            [float(x) if allowed else None for x, allowed in zip(*row, strict=True)]
            for row in zip(p.omega, p.open, strict=True)
        ],
        "layer_bytes": (sizes[:1] if (sizes == sizes[:1]).all() else sizes).tolist(),
        "room": [_roomiest(p, eta).tolist() for eta in etas],
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
        "layer_s": x.layer_s[0].tolist(),
        "held_s": x.held_layer_s[0].tolist(),
        "layer_ends_s": x.ends_s.tolist(),
        "held_ends_s": x.held_ends_s.tolist(),
        "hop_s": x.hop.total_s.tolist(),
    }


def _roomiest(p: Problem, eta: int) -> Any:
    """[C, 2, 2, 3] the most bytes left for layers at a prefill size, whatever the decode size."""
    xis = p.decode_sizes
    if len(xis) * len(p.prefill_sizes) > MOST_PAIRS:
        xis = (xis[0], xis[-1])
    return np.max([p.capacity(eta, xi) for xi in xis], axis=0)


@dataclass
class _Node:
    """A part of the plans of a pair."""

    pair: tuple[int, int, int]
    """Variant, and indices of the sizes."""
    box: Box
    multipliers: dict[str, Any] | None = None
    split: tuple[str, float] | None = None
    children: list[_Node] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return the part as the certificate has it."""
        if self.split is None:
            assert self.multipliers is not None
            return {**self.multipliers, "path": True}
        low, high = (child.data() for child in self.children)
        return {"split": self.split[0], "at": self.split[1], "low": low, "high": high}


class _Proof:
    """Makes the tree of parts, the part of the smallest bound first."""

    def __init__(
        self,
        data: dict[str, Any],
        variants: Sequence[Problem],
        value_s: float,
        share: float = 1.0,
    ) -> None:
        """`share`: of the work and the parts that a proof may have."""
        self.data, self.value_s, self.share = data, value_s, share
        budget = data["budget"]
        # Under a budget the price of omega is a multiplier: omega itself is what it prices.
        self.problems = [p if budget is None else p.with_changes(theta=1.0) for p in variants]
        self.relaxations = [ClassRelaxation(p, budget) for p in self.problems]
        self.vectors = [_PairBounds(p, budget) for p in self.problems]
        self.tables = [verify.Tables(data, variant) for variant in data["variants"]]
        self.roots: dict[tuple[int, int, int], _Node] = {}
        self._ticket = itertools.count()

    def made(self) -> tuple[list[dict[str, Any]], float]:
        """Return the tree of every variant, and the bound that follows from all."""
        for k, p in enumerate(self.problems):
            middle = len(p.prefill_sizes) // 2, len(p.decode_sizes) // 2
            for row, column in {(0, 0), middle, (-1, -1)}:
                eta, xi = p.prefill_sizes[row], p.decode_sizes[column]
                self._add_multipliers(k, eta, xi)
            if not self.vectors[k].made:  # no fractions of layers have room there
                self.vectors[k].add(_nothing(len(p.classes)))
        heap = [
            (float(bound), next(self._ticket), (k, row, column), None)
            for k, vector in enumerate(self.vectors)
            for (row, column), bound in np.ndenumerate(vector.best)
        ]
        heapq.heapify(heap)
        self._refine(heap)
        trees = [self._tree(k) for k in range(len(self.problems))]
        bound = min(
            part
            for tables, tree in zip(self.tables, trees, strict=True)
            for part in verify.bounds_of(tables, tree)
        )
        exact = bound / verify.UNIT
        return trees, max(0.0, min(exact * (1 - 1e-15), self.value_s))

    def _refine(self, heap: list[Any]) -> None:
        work = parts = 0
        target = self.value_s * (1 - NEAR)
        most = max(2.0, MOST_PARTS * self.share)
        while heap and work < MOST_WORK * self.share and parts < most:
            bound, _, pair, node = heapq.heappop(heap)
            if bound >= target:
                return
            vector = self.vectors[pair[0]]
            if node is None:
                if float(vector.best[pair[1:]]) > bound:  # by multipliers of another pair
                    entry = float(vector.best[pair[1:]]), next(self._ticket), pair, None
                    heapq.heappush(heap, entry)
                    continue
                node = _Node(pair=pair, box=Box())
                self.roots[pair] = node
                fresh = [node]
                self._add_multipliers(*self._sizes(pair))
            else:
                fresh = self._split(node)
                if not fresh:
                    return
            for child in fresh:
                least = self._bound(child)
                work += self._work(pair[0])
                parts += 1
                if math.isfinite(least):
                    heapq.heappush(heap, (max(bound, least), next(self._ticket), pair, child))

    def _work(self, k: int) -> int:
        p = self.problems[k]
        states = self.tables[k].states
        states = states if states <= verify.MOST_STATES else 1
        return p.num_layers**2 // 2 * len(p.classes) * (states + 3)

    def _sizes(self, pair: tuple[int, int, int]) -> tuple[int, int, int]:
        p = self.problems[pair[0]]
        return pair[0], p.prefill_sizes[pair[1]], p.decode_sizes[pair[2]]

    def _add_multipliers(self, k: int, eta: int, xi: int) -> None:
        p = self.problems[k]
        form = make_form(p, eta, xi)
        prices = self.relaxations[k].solve(form)
        if math.isfinite(prices.value):
            self.vectors[k].add(_multipliers(p, form, prices, Box()))

    def _bound(self, node: _Node) -> float:
        """Give a part its multipliers; return its bound in seconds."""
        k, eta, xi = self._sizes(node.pair)
        p = self.problems[k]
        form = make_form(p, eta, xi)
        prices = self.relaxations[k].solve(form, box=node.box)
        offered = [] if node.multipliers is None else [node.multipliers]
        if math.isfinite(prices.value):
            offered.append(_multipliers(p, form, prices, node.box))
        offered = offered or [_nothing(len(p.classes))]
        p_range, d_range = (
            (verify.units(low), None if math.isinf(high) else verify.units(high))
            for low, high in (
                (node.box.p_low, node.box.p_high),
                (node.box.d_low, node.box.d_high),
            )
        )
        bounds = [
            verify.Part(self.tables[k], m, *node.pair[1:]).of_stages(p_range, d_range)
            for m in offered
        ]
        best = max(range(len(bounds)), key=bounds.__getitem__)
        node.multipliers = offered[best]
        return math.inf if bounds[best] >= verify.NEVER // 2 else bounds[best] / verify.UNIT

    def _split(self, node: _Node) -> list[_Node]:
        """Split a part in two by the range of the slowest stage's time, that which weighs more."""
        k, eta, xi = self._sizes(node.pair)
        p, box = self.problems[k], node.box
        form = make_form(p, eta, xi)
        x, found = form.numbers, list[tuple[float, str, float, float]]()
        for name, weight, low, high, times in (
            ("D", form.d_weight(1.0), box.d_low, box.d_high, x.held_decode_s[0]),
            ("P", form.a, box.p_low, box.p_high, x.held_prefill_s[0]),
        ):
            if weight <= 0:
                continue
            fewest = -(-p.num_layers // sum(cls.count for cls in p.classes))
            low = max(low, float(times.min()) * fewest)
            most = min(high, self.value_s / weight)
            if most <= low * (1 + 1e-9):
                continue
            found.append((weight * (most - low), name, low, most))
        if not found:
            return []
        _, name, low, most = max(found)
        at = (low + most) / 2
        node.split = name, at
        own = {"D": ("d_high", "d_low"), "P": ("p_high", "p_low")}[name]
        node.children = [
            _Node(pair=node.pair, box=box.with_limits({limit: at}), multipliers=node.multipliers)
            for limit in own
        ]
        return node.children

    def _tree(self, k: int) -> dict[str, Any]:
        vector = self.vectors[k]
        own = {pair[1:]: node for pair, node in self.roots.items() if pair[0] == k}
        rows, columns = vector.best.shape

        def of(r0: int, r1: int, c0: int, c1: int) -> dict[str, Any]:
            if (r1 - r0) * (c1 - c0) == 1 and (r0, c0) in own:
                return own[r0, c0].data()
            if not any(r0 <= r < r1 and c0 <= c < c1 for r, c in own):
                which = np.unique(vector.which[r0:r1, c0:c1])
                if len(which) == 1:
                    return vector.made[int(which[0])]
            if r1 - r0 >= c1 - c0:
                at = (r0 + r1) // 2
                low, high = of(r0, at, c0, c1), of(at, r1, c0, c1)
                return {"split": "prefill", "at": at, "low": low, "high": high}
            at = (c0 + c1) // 2
            low, high = of(r0, r1, c0, at), of(r0, r1, at, c1)
            return {"split": "decode", "at": at, "low": low, "high": high}

        return of(0, rows, 0, columns)


def _multipliers(p: Problem, form: Coefficients[float], prices: Prices, box: Box) -> dict[str, Any]:
    """Return prices of a relaxation as shares of the weights of P and D."""
    counts = np.array([cls.count for cls in p.classes])

    def shares(own: Floats, weight: float, high: float) -> list[float]:
        share = np.clip(own, 0, None) / weight if weight > 0 else np.zeros(len(counts))
        total = float((share * counts).sum())
        scale = 1.0 if math.isfinite(high) else SHRUNK / max(1.0, total)
        return [float(x) for x in share * scale]

    return {
        "kappa": float(np.clip(prices.kappa, 0, 1)),
        "prefill": shares(prices.prefill, form.a, box.p_high),
        "decode": shares(prices.decode, form.d_weight(prices.kappa), box.d_high),
        "memory": [float(x) for x in np.clip(prices.memory, 0, None)],
        "loss": float(prices.omega),
    }


def _nothing(classes: int) -> dict[str, Any]:
    """Return multipliers of zero."""
    zero = [0.0] * classes
    return {"kappa": 1.0, "prefill": zero, "decode": zero, "memory": zero, "loss": 0.0}


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
            [np.clip(_roomiest(p, eta), 0, None).max(axis=(1, 2, 3)) for eta in etas], dtype=float
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

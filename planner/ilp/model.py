"""The integer program of the paper for one device order and one pair of micro-batch sizes.

Variables: z[i,j,b] layer i runs on stage j at choice b; P, D the slowest stage in either phase;
period = max(md D, S + rd), where F has it (`Form.z`). Every stage of the order holds
at least one layer: devices are left out by leaving them out of the order.

Contiguity is the cumulative form, sum_{k<=j} x[i+1,k] <= sum_{k<=j} x[i,k], which is much tighter
than the paper's pairwise (16).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmpq.planner.evaluate.objective import Form, make_form
from llmpq.planner.ilp.milp import LinearModel
from llmpq.planner.problem.numbers import PairNumbers
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stage_memory import DENSE, MIXED, NEVER, PACKED

MIB = float(2**20)
"""Memory rows are in MiB: a solver's tolerance of 1e-6 is then one byte."""


@dataclass(frozen=True, kw_only=True)
class StageIlp:
    """The program of one (order, pair) and where its variables are."""

    problem: Problem
    form: Form
    order: tuple[int, ...]
    model: LinearModel
    z: np.ndarray
    """[L, J, B] variable indices."""
    slowest_prefill: int
    slowest_decode: int
    period: int | None

    @property
    def numbers(self) -> PairNumbers:
        """Times and bytes of the pair of micro-batch sizes."""
        return self.form.numbers

    def x(self, i: int, j: int) -> list[tuple[int, float]]:
        """x[i,j] = sum_b z[i,j,b]: layer i runs on stage j."""
        return [(int(v), 1.0) for v in self.z[i, j]]

    def stage_sum(self, j: int, table: np.ndarray) -> list[tuple[int, float]]:
        """sum_ib table[i,b] z[i,j,b]."""
        return [
            (int(self.z[i, j, b]), float(table[i, b]))
            for i in range(self.z.shape[0])
            for b in range(self.z.shape[2])
        ]

    def ends(self, j: int, table: np.ndarray) -> float:
        """Embedding time on the first stage, head time on the last."""
        cls, total = self.order[j], 0.0
        if j == 0:
            total += float(table[cls, 0])
        if j == len(self.order) - 1:
            total += float(table[cls, 1])
        return total

    def assignment(self, values: np.ndarray) -> Assignment:
        """Read the stages off a solution."""
        num_layers, num_stages, num_choices = self.z.shape
        chosen = values[self.z.reshape(num_layers, -1)].argmax(axis=1)
        stage_of, choice_of = chosen // num_choices, chosen % num_choices
        stages = []
        for j in range(num_stages):
            layers = np.flatnonzero(stage_of == j)
            stages.append(
                Stage(
                    cls=self.order[j],
                    start=int(layers[0]),
                    end=int(layers[-1]) + 1,
                    choices=tuple(int(b) for b in choice_of[layers]),
                )
            )
        return Assignment(
            prefill_microbatch=self.numbers.eta,
            decode_microbatch=self.numbers.xi,
            stages=tuple(stages),
        )


def build_ilp(
    p: Problem, order: tuple[int, ...], eta: int, xi: int, *, budget: float | None = None
) -> StageIlp:
    """Return the whole program; `budget` caps the sum of omega instead of pricing it."""
    model = LinearModel()
    form = make_form(p, eta, xi)
    z = np.zeros((p.num_layers, len(order), len(p.choices)), dtype=np.int64)
    for i, j, b in np.ndindex(*z.shape):
        z[i, j, b] = model.variable(f"z[{i},{j},{p.choices[b].value}]", binary=True)
    ilp = StageIlp(
        problem=p,
        form=form,
        order=order,
        model=model,
        z=z,
        slowest_prefill=model.variable("P"),
        slowest_decode=model.variable("D"),
        period=model.variable("period") if form.z else None,
    )
    each_layer_once(ilp)
    every_stage_used(ilp)
    contiguous(ilp)
    ends_in_place(ilp)
    pins_held(ilp)
    caches_reached(ilp)
    choices_offered(ilp)
    fit_in_memory(ilp)
    slowest_stage(ilp)
    minimise_time(ilp)
    if budget is None:
        price_quality(ilp)
    else:
        cap_quality(ilp, budget)
    return ilp


def each_layer_once(m: StageIlp) -> None:
    """sum_jb z[i,j,b] = 1 for each layer i.  (L constraints)"""
    for i in range(m.z.shape[0]):
        terms = [(int(v), 1.0) for v in m.z[i].ravel()]
        m.model.equal(f"once[{i}]", terms, 1.0)


def every_stage_used(m: StageIlp) -> None:
    """sum_i x[i,j] >= 1 for each stage j.  (J constraints)"""
    for j in range(m.z.shape[1]):
        terms = [(int(v), 1.0) for v in m.z[:, j].ravel()]
        m.model.at_least(f"used[{j}]", terms, 1.0)


def contiguous(m: StageIlp) -> None:
    """sum_{k<=j} x[i+1,k] <= sum_{k<=j} x[i,k] for i < L-1, j < J-1.  ((L-1)(J-1) constraints)"""
    for i in range(m.z.shape[0] - 1):
        for j in range(m.z.shape[1] - 1):
            after = [(int(v), 1.0) for v in m.z[i + 1, : j + 1].ravel()]
            before = [(int(v), -1.0) for v in m.z[i, : j + 1].ravel()]
            m.model.at_most(f"contiguous[{i},{j}]", after + before, 0.0)


def ends_in_place(m: StageIlp) -> None:
    """x[0,0] = 1 and x[L-1,J-1] = 1.  (2 constraints)"""
    m.model.equal("first", m.x(0, 0), 1.0)
    m.model.equal("last", m.x(m.z.shape[0] - 1, m.z.shape[1] - 1), 1.0)


def pins_held(m: StageIlp) -> None:
    """x[i,j] = 0 where a pin keeps layer i off stage j."""
    for i, j in np.ndindex(m.z.shape[0], m.z.shape[1]):
        for index, cls in enumerate(m.problem.classes):
            if cls.pinned and cls.pinned[0] <= i < cls.pinned[1] and index != m.order[j]:
                for v in m.z[i, j]:
                    m.model.fix(int(v), 0.0)


def caches_reached(m: StageIlp) -> None:
    """x[i-1,j] = x[i,j] where no stage may begin with layer i, which reads a cache before it."""
    for i in np.flatnonzero(~m.problem.cuts):
        for j in range(m.z.shape[1]):
            behind = [(v, -1.0) for v, _ in m.x(int(i), j)]
            m.model.equal(f"together[{i},{j}]", m.x(int(i) - 1, j) + behind, 0.0)


def choices_offered(m: StageIlp) -> None:
    """z[i,j,b] = 0 where layer i may not have choice b."""
    for i, b in zip(*np.nonzero(~m.problem.open), strict=True):
        for v in m.z[i, :, b]:
            m.model.fix(int(v), 0.0)


def fit_in_memory(m: StageIlp) -> None:
    """sum_ib bytes[i,b] z[i,j,b] <= capacity[j] for each stage j.  (J constraints, or 3 J)

    A stage with layers of 16 bits only, or of fewer bits only, has more room than one with both:
    where that is so, binaries u say which it is, u[j,dense] + u[j,packed] <= 1, and a layer of the
    other sort is forbidden, sum over it of z <= L (1 - u).
    """
    for j, cls in enumerate(m.order):
        room = m.numbers.capacity[cls, int(j == 0), int(j == len(m.order) - 1)]
        terms = m.stage_sum(j, m.numbers.layer_bytes / MIB)
        sorts = [s for s in (DENSE, PACKED) if room[s] > NEVER]
        if len(sorts) < 2:
            m.model.at_most(f"memory[{j}]", terms, float(room[sorts[0]]) / MIB)
            continue
        only = [m.model.variable(f"only[{j},{sort}]", binary=True) for sort in sorts]
        gains = [(v, -float(room[s] - room[MIXED]) / MIB) for v, s in zip(only, sorts, strict=True)]
        m.model.at_most(f"memory[{j}]", terms + gains, float(room[MIXED]) / MIB)
        m.model.at_most(f"sort[{j}]", [(v, 1.0) for v in only], 1.0)
        for v, other in zip(only, (True, False), strict=True):
            barred = [
                (int(z), 1.0)
                for b, choice in enumerate(m.problem.choices)
                if (choice.weight_bits < 16) is other
                for z in m.z[:, j, b]
            ]
            layers = float(m.z.shape[0])
            m.model.at_most(f"sort[{j},{v}]", [*barred, (v, layers)], layers)


def slowest_stage(m: StageIlp) -> None:
    """P >= tp[j], D >= td[j]; both at least what of a hop occupies its link.  (2J constraints)"""
    x = m.numbers
    floor_p, floor_d = m.form.hops.of(np.array(m.order))[1].tolist()
    m.model.at_least("hops_prefill", [(m.slowest_prefill, 1.0)], floor_p)
    m.model.at_least("hops_decode", [(m.slowest_decode, 1.0)], floor_d)
    for j, cls in enumerate(m.order):
        for name, top, table, ends in (
            ("prefill", m.slowest_prefill, x.held_prefill_s, x.held_ends_prefill_s),
            ("decode", m.slowest_decode, x.held_decode_s, x.held_ends_decode_s),
        ):
            terms = [(v, -t) for v, t in m.stage_sum(j, table[:, cls])]
            m.model.at_least(f"{name}[{j}]", [(top, 1.0), *terms], m.ends(j, ends))


def minimise_time(m: StageIlp) -> None:
    """F of evaluate/objective.py; period >= md D and period >= S + rd.  (2 constraints)"""
    x, form, model = m.numbers, m.form, m.model
    hops, _, back = (part.tolist() for part in form.hops.of(np.array(m.order)))
    (hops_p, hops_d), (back_p, back_d) = hops, back
    stages = range(len(m.order))
    decode_terms: list[tuple[int, float]] = []
    for j, cls in enumerate(m.order):
        for v, t in m.stage_sum(j, x.prefill_s[:, cls]):
            model.costs[v] += t
        decode_terms += m.stage_sum(j, x.decode_s[:, cls])
    fixed = sum(m.ends(j, x.ends_decode_s) for j in stages) + hops_d
    model.constant += sum(m.ends(j, x.ends_prefill_s) for j in stages) + hops_p + back_p
    model.constant += form.ws * fixed + form.back * back_d
    for v, t in decode_terms:
        model.costs[v] += form.ws * t
    model.costs[m.slowest_prefill] += form.a
    model.costs[m.slowest_decode] += form.bd
    if m.period is not None:
        model.costs[m.period] += form.z
        full = [(m.period, 1.0), (m.slowest_decode, -float(form.md))]
        model.at_least("period_full", full, 0.0)
        empty = [(m.period, 1.0), *((v, -t) for v, t in decode_terms)]
        model.at_least("period_empty", empty, fixed + back_d)


def price_quality(m: StageIlp) -> None:
    """Add theta * sum_ijb omega[i,b] z[i,j,b] to the objective."""
    for i, j, b in np.ndindex(*m.z.shape):
        m.model.costs[m.z[i, j, b]] += m.problem.theta * float(m.problem.omega[i, b])


def cap_quality(m: StageIlp, budget: float) -> None:
    """sum_ijb omega[i,b] z[i,j,b] <= budget.  (1 constraint)"""
    terms = [t for j in range(m.z.shape[1]) for t in m.stage_sum(j, m.problem.omega)]
    m.model.at_most("quality", terms, budget)

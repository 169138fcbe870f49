"""The objective F, written once for all solvers: how long a pipeline takes, and what loss costs.

tp, td   each stage's time per prefill step (a chunk of every prompt of a micro-batch, the mean over
         chunks) and per decode micro-batch
hp, hd   each hop's time to the next stage (sent while the next micro-batch computes)
rp, rd   the sampled tokens' way from the last stage back to the first
bhp ...  the part of each of these that occupies the link: the rest only delays the message
mp, md   numbers of prefill steps (micro-batches times the chunks of a prompt) and of decode
         micro-batches; n tokens a request
x'       the mean of x over micro-batches, of which the last may be smaller (numbers.py)

    P = max(tp', bhp', brp')   D = max(td', bhd', brd')   S = sum td + sum hd

    T = (mp-1) P + sum tp + sum hp + rp                   prefill, first token (rp only if n >= 2)
      + (n-2) max(md D, S + rd) + S + (md-1) D            the other n-1 tokens (n >= 2)

brp counts in P only if n >= 2, brd in D only if n > 2: nothing travels back after the last token.

Chunks fill the pipeline one behind the other as micro-batches do: with C chunks over D stages a
prompt's first token takes (C-1) P + sum tp, not C sum tp.

Exact for equal micro-batches (simulator.py agrees), but for a way back that is slower than every
stage. With a smaller last one, or chunks of which the later ones see more keys, it is exact where
the pipeline is full; it is off by less than what the last one takes of two stages more or less,
once a job. Where that is much, a plan predicts its time step by step (simulator.py).

As coefficients of what a plan decides, of one pair of micro-batch sizes (`Coefficients`):

    F = A P + Bd D + sum tp + wS S + Z max(md D, S + rd) + theta sum omega + constants

makespan: wS = 1, Z = n-2, hops inside the sums; with md = 1 the maximum is S + rd, so it moves into
wS. paper (eq. 4): wS = n-1, Z = 0, Bd = (n-1)(md-1), hops bound P and D only. For any kappa in
[0, 1], max(md D, S) >= kappa md D + (1-kappa) S: each kappa gives a linear lower bound of F, and F
is the larger of those of kappa = 0 and kappa = 1.

What checks a plan shares nothing with this file: simulator.py replays it, and
planner/check/recomputed.py adds its own entries up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import Phase
from llmpq.planner.costs.links import Floats, Hops
from llmpq.planner.problem.numbers import PairNumbers
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Assignment
from llmpq.planner.problem.problem import Objective, Problem
from llmpq.planner.problem.work_clock import spend

Ints = NDArray[np.int64]
Number = TypeVar("Number", float, Floats)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Times of a pipeline's stages and hops, in seconds."""

    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    hop_prefill_s: tuple[float, ...] = ()
    hop_decode_s: tuple[float, ...] = ()
    back_prefill_s: float = 0.0
    back_decode_s: float = 0.0
    busy_prefill_s: tuple[float, ...] = ()
    """For how long each message of prefill occupies its link, the way back last."""
    busy_decode_s: tuple[float, ...] = ()
    held_prefill_s: tuple[float, ...] = ()
    """What P is the largest of: stages, messages, the way back last. Empty: equal micro-batches."""
    held_decode_s: tuple[float, ...] = ()

    def paces(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return what P and D are the largest of, the way back last where there is one."""
        prefill = self.held_prefill_s or (*self.prefill_s, *self.busy_prefill_s)
        return prefill, self.held_decode_s or (*self.decode_s, *self.busy_decode_s)


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Prefill (with the first token) and decode (the other n-1 tokens), in seconds."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """End-to-end time."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, kw_only=True)
class Coefficients(Generic[Number]):
    """How often each time of a pipeline counts in F; arrays of them over micro-batch sizes."""

    a: Number
    """A, of the slowest prefill stage."""
    bd: Number
    """Bd, of the slowest decode stage outside the maximum."""
    ws: Number
    """wS, of the sum of decode times outside the maximum."""
    z: Number
    """Z, of max(md D, S + rd); zero when F is linear."""
    md: Number
    """Number of decode micro-batches."""
    back: Number
    """Of the decode hop back, where F is linear but tokens still travel back."""
    hops_in_sums: bool
    first_back: bool
    """Whether the first tokens travel back: their hop counts in prefill and bounds P."""
    back_bounds: bool
    """Whether the hop back bounds D."""

    def d_weight(self, kappa: float) -> Number:
        """Coefficient of D in the linear bound of kappa."""
        return self.bd + kappa * self.z * self.md

    def s_weight(self, kappa: float) -> Number:
        """Coefficient of S in the linear bound of kappa."""
        return self.ws + (1 - kappa) * self.z


@dataclass(frozen=True, kw_only=True)
class Form(Coefficients[float]):
    """F of one pair of micro-batch sizes: its coefficients, and the times they weigh."""

    numbers: PairNumbers

    @cached_property
    def hops(self) -> HopTables:
        """What messages take, [2, C, C] of prefill and decode."""
        x = self.numbers
        prefill = hop_tables(self, Phase.PREFILL, [(x.hop_prefill, x.back_prefill)])
        decode = hop_tables(self, Phase.DECODE, [(x.hop_decode, x.back_decode)])
        both = zip(vars(prefill).values(), vars(decode).values(), strict=True)
        return HopTables(*(np.concatenate(tables) for tables in both))

    def seconds(self, order: Ints, times: Floats) -> Floats:
        """[...] F without theta omega of whole plans.

        `order` [..., J]: classes of the stages. `times` [4, ..., J]: each stage's prefill and
        decode time, and both as P and D take them.
        """
        sums, held, back = self.hops.of(order)
        sums = sums + times[:2].sum(axis=-1)
        slow = np.maximum(times[2:].max(axis=-1), held)
        prefill, decode = weighed(
            self,
            slow_p=slow[0],
            slow_d=slow[1],
            tp=sums[0] + back[0],
            td=sums[1],
            back_d=back[1],
        )
        return np.asarray(prefill + decode)


@dataclass(frozen=True)
class HopTables:
    """Seconds of messages between classes, [..., C, C]: zero for what does not count in F."""

    total_s: Floats
    """In the sums over stages."""
    held_s: Floats
    """What P or D is at least."""
    back_s: Floats
    """Of the tokens' way from the last stage back to the first: rp or rd."""
    back_held_s: Floats

    def of(self, order: Ints) -> tuple[Floats, Floats, Floats]:
        """Return the sum of all hops, what P or D is at least, and the way back, of each ring."""
        if order.shape[-1] < 2:  # a single stage sends nothing
            nothing = np.zeros(self.total_s.shape[:-2] + order.shape[:-1])
            return nothing, nothing, nothing
        links, ring = (..., order[..., :-1], order[..., 1:]), (..., order[..., -1], order[..., 0])
        held = np.maximum(self.held_s[links].max(axis=-1), self.back_held_s[ring])
        return self.total_s[links].sum(axis=-1), held, self.back_s[ring]


def hop_tables(
    c: Coefficients[float], phase: Phase, sizes: Sequence[tuple[Hops, Hops]]
) -> HopTables:
    """Return the tables [n, C, C] of hops and ways back at n micro-batch sizes of a phase."""
    first = phase is Phase.PREFILL
    total = np.array([hop.total_s for hop, _ in sizes]) * float(c.hops_in_sums)
    back = np.array([back.total_s for _, back in sizes])
    back_held = np.array([back.held_s for _, back in sizes])
    counts_back = c.hops_in_sums and (c.first_back or not first)
    bounds = c.first_back if first else c.back_bounds
    return HopTables(
        total,
        np.array([hop.held_s for hop, _ in sizes]),
        back * float(counts_back),
        back_held * float(bounds),
    )


def weighed(
    c: Coefficients[float] | Coefficients[Floats],
    *,
    slow_p: Floats | float,
    slow_d: Floats | float,
    tp: Floats | float,
    td: Floats | float,
    back_d: Floats | float,
) -> tuple[Floats, Floats]:
    """Return F's prefill and decode part, of P, D, sum tp and S (messages in all) and rd."""
    period = np.maximum(c.md * slow_d, td + back_d)
    prefill = c.a * slow_p + tp
    decode = c.bd * slow_d + c.ws * td + c.back * back_d + c.z * period
    return np.asarray(prefill), np.asarray(decode)


def coefficients(objective: Objective, *, mp: int, md: int, n: int) -> Coefficients[float]:
    """Return the coefficients of a job of n tokens a request in so many micro-batches."""
    if objective == "paper":
        return Coefficients(
            a=mp - 1.0,
            bd=(n - 1.0) * (md - 1),
            ws=n - 1.0,
            z=0.0,
            md=md,
            back=0.0,
            hops_in_sums=False,
            first_back=False,
            back_bounds=False,
        )
    later = max(0.0, n - 2.0)
    linear = md == 1 or later == 0
    return Coefficients(
        a=mp - 1.0,
        bd=(md - 1.0) if n > 1 else 0.0,
        ws=(1.0 + (later if md == 1 else 0.0)) if n > 1 else 0.0,
        z=0.0 if linear else later,
        md=md,
        back=later if md == 1 else 0.0,
        hops_in_sums=True,
        first_back=n > 1,
        back_bounds=n > 2,
    )


def make_form(p: Problem, eta: int, xi: int) -> Form:
    """Return F of a pair of micro-batch sizes."""
    mp, md = p.counts(eta, xi)
    weights = coefficients(p.objective, mp=mp, md=md, n=p.workload.gen_len)
    return Form(numbers=p.numbers(eta, xi), **vars(weights))


def pipeline_time(objective: Objective, t: StageTimes, *, mp: int, md: int, n: int) -> PhaseTimes:
    """Return the time of a job by an objective's formula."""
    c = coefficients(objective, mp=mp, md=md, n=n)
    held_p, held_d = t.paces()
    returns = bool(t.busy_prefill_s)
    prefill, decode = weighed(
        c,
        slow_p=max(held_p if c.first_back or not returns else held_p[:-1]),
        slow_d=max(held_d if c.back_bounds or not returns else held_d[:-1]),
        tp=sum(t.prefill_s)
        + (sum(t.hop_prefill_s) if c.hops_in_sums else 0.0)
        + (t.back_prefill_s if c.first_back else 0.0),
        td=sum(t.decode_s) + (sum(t.hop_decode_s) if c.hops_in_sums else 0.0),
        back_d=t.back_decode_s if c.hops_in_sums else 0.0,
    )
    return PhaseTimes(prefill_s=float(prefill), decode_s=float(decode))


def makespan(t: StageTimes, *, mp: int, md: int, n: int) -> PhaseTimes:
    """Return the time of the job (formula in the module's docstring)."""
    return pipeline_time("makespan", t, mp=mp, md=md, n=n)


def stage_times(p: Problem, a: Assignment) -> StageTimes:
    """Return the times of an assignment's stages."""
    x = p.numbers(a.prefill_microbatch, a.decode_microbatch)
    prefill, decode = (
        _stages(a, x.prefill_s, x.ends_prefill_s),
        _stages(a, x.decode_s, x.ends_decode_s),
    )
    held_p = _stages(a, x.held_prefill_s, x.held_ends_prefill_s)
    held_d = _stages(a, x.held_decode_s, x.held_ends_decode_s)
    links = [(s.cls, t.cls) for s, t in zip(a.stages, a.stages[1:], strict=False)]
    ends = (a.stages[-1].cls, a.stages[0].cls)
    single = len(a.stages) == 1
    return StageTimes(
        prefill_s=prefill,
        decode_s=decode,
        hop_prefill_s=tuple(float(x.hop_prefill.total_s[link]) for link in links),
        hop_decode_s=tuple(float(x.hop_decode.total_s[link]) for link in links),
        back_prefill_s=0.0 if single else float(x.back_prefill.total_s[ends]),
        back_decode_s=0.0 if single else float(x.back_decode.total_s[ends]),
        busy_prefill_s=_ways(x.hop_prefill.busy_s, x.back_prefill.busy_s, links, ends),
        busy_decode_s=_ways(x.hop_decode.busy_s, x.back_decode.busy_s, links, ends),
        held_prefill_s=held_p + _ways(x.hop_prefill.held_s, x.back_prefill.held_s, links, ends),
        held_decode_s=held_d + _ways(x.hop_decode.held_s, x.back_decode.held_s, links, ends),
    )


def _stages(a: Assignment, layers: Floats, ends: Floats) -> tuple[float, ...]:
    """Return the time of every stage: `layers` [L, C, B], `ends` [C, 2]."""
    found = []
    for position, stage in enumerate(a.stages):
        held = zip(range(stage.start, stage.end), stage.choices, strict=True)
        total = sum(layers[i, stage.cls, b] for i, b in held)
        if position == 0:
            total += ends[stage.cls, 0]
        if position == len(a.stages) - 1:
            total += ends[stage.cls, 1]
        found.append(float(total))
    return tuple(found)


def _ways(
    hop: Floats, back: Floats, links: list[tuple[int, int]], ends: tuple[int, int]
) -> tuple[float, ...]:
    """Return the time of each message on a ring of stages, the way back last."""
    last = float(back[ends]) if links else 0.0
    return (*(float(hop[link]) for link in links), last)


def sum_omega(p: Problem, a: Assignment) -> float:
    """Return the quality loss of an assignment: the sum over layers of omega."""
    total = 0.0
    for stage in a.stages:
        for i, b in zip(range(stage.start, stage.end), stage.choices, strict=True):
            total += float(p.omega[i, b])
    return total


def keeps_budget(p: Problem, a: Assignment, budget: float | None) -> bool:
    """Whether the quality loss is within a budget, however its sum rounds; None: no budget."""
    return budget is None or sum_omega(p, a) <= budget * (1 + BUDGET_ROUNDING / 2)


def job_time(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the makespan of an assignment, whatever objective it was found for."""
    mp, md = p.counts(a.prefill_microbatch, a.decode_microbatch)
    if p.objective != "makespan":  # its numbers take every micro-batch as a whole one
        p = p.with_changes(objective="makespan")
    return makespan(stage_times(p, a), mp=mp, md=md, n=p.workload.gen_len)


def value(p: Problem, a: Assignment) -> float:
    """Return the problem's objective: time plus theta times sum of omega, in seconds."""
    mp, md = p.counts(a.prefill_microbatch, a.decode_microbatch)
    spend(30 + p.num_layers)
    time = pipeline_time(p.objective, stage_times(p, a), mp=mp, md=md, n=p.workload.gen_len)
    return time.total_s + p.theta * sum_omega(p, a)

"""Looks for the best plan of a job over KV precisions, prefill chunks and a preference's thetas.

It runs solvers in this process; planner/solving/worker.py runs it in one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from llmpq.errors import DoesNotFitError
from llmpq.planner.check.refusal import NothingFitsError, too_big
from llmpq.planner.evaluate.objective import sum_omega
from llmpq.planner.front.preference import WEIGHTS, Scored, look_around, preferred
from llmpq.planner.problem.numbers import chunk_sizes, small_chunks
from llmpq.planner.problem.outcome import (
    OPTIMAL_GAP,
    Assignment,
    Infeasible,
    Outcome,
    Unfinished,
    WarmStart,
)
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import Timer, counting, now_s
from llmpq.planner.solving.methods import SolveOptions, solve

FIRST_SHARE = 0.4
"""Share of the time that the problem with the smallest bound has at least."""
AGAIN_SHARE = 0.1
"""Share of the time that must be left for a problem to be searched once more."""


class KvPrecisionSweep:
    """The best plan of problems that differ by KV precision or prefill chunk, and their bounds.

    The time is shared out among them, the one with the smallest bound first. What some leave of
    their share goes to the one whose bound is then the smallest.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        options: SolveOptions,
        solve: Callable[[Problem, SolveOptions, WarmStart], Outcome] = solve,
        *,
        ceiling: float = math.inf,
        enough: float = -math.inf,
    ) -> None:
        """`ceiling`: plans that are not below it need not be found; `enough`: one below it is."""
        self.problems = problems
        self.options = options
        self.solve = solve
        self.ceiling, self.enough = ceiling, enough
        self.best: tuple[int, Outcome] | None = None
        """Index of a problem, and its outcome."""
        self.bounds: dict[int, float] = {}
        """Proven lower bound, by index of a problem that may have a plan."""
        self.unfinished: Unfinished | None = None
        self.refusal = Infeasible("")

    def solve_all(self) -> None:
        """Solve every problem; keep the best plan."""
        limit = self.options.time_limit_s
        deadline = now_s() + limit
        waiting = self._by_promise() if self.options.method == "exact" else self._as_given()
        for k, index in enumerate(waiting):
            if self._is_enough:
                return
            left = max(0.0, deadline - now_s())
            share = max(1 / (len(waiting) - k), FIRST_SHARE if k == 0 else 0.0)
            self._solve(index, limit if math.isinf(left) else left * share)
        if self._is_enough:
            return
        again = sorted(self.bounds, key=lambda index: self.bounds[index])
        for index in again if len(self.problems) > 1 and self.options.method == "exact" else ():
            left = deadline - now_s()
            if left > AGAIN_SHARE * limit and self._may_be_better(index):
                self._solve(index, left)
        self._move_to_another_kv()

    @property
    def _is_enough(self) -> bool:
        return self.best is not None and self.best[1].value < self.enough

    @property
    def proven(self) -> bool:
        """Whether no plan can be better, within the gap."""
        return not any(self._may_be_better(index) for index in self.bounds)

    def _move_to_another_kv(self) -> None:
        """Take the best plan as it is at the KV precision at which it is worth most."""
        if self.best is None or self.options.method != "exact" or self.proven:
            return
        outcome = self.best[1]
        for index in self.bounds:
            worth = _worth(self.problems[index], outcome.assignment, self.options.budget)
            if worth < self.best[1].value:
                bound = min(self.bounds[index], worth)
                self.best = index, replace(outcome, value=worth, bound=bound)

    def _as_given(self) -> list[int]:
        return list(range(len(self.problems)))

    def _by_promise(self) -> list[int]:
        """Return the problems, those first that are quickest if everything fits.

        What is found at one precision bounds the search at those that follow.
        """
        if len(self.problems) < 2:
            return self._as_given()
        from llmpq.planner.exact.bounds.pairs import quick_bound

        bounds = [quick_bound(priced) for priced in self.problems]
        return sorted(self._as_given(), key=lambda index: bounds[index])

    def _may_be_better(self, index: int) -> bool:
        if self.best is None:
            return True
        value = self.best[1].value
        return self.bounds[index] < value - self.options.gap * abs(value)

    def _solve(self, index: int, limit_s: float) -> None:
        """Solve one problem; keep the plan if it is the best, and what is proven."""
        known = self.bounds.get(index, -math.inf)
        warm = WarmStart(ceiling=self.ceiling, enough=self.enough, resumed=index in self.bounds)
        if self.best is not None:
            outcome = self.best[1]
            ceiling = min(outcome.value, self.ceiling)
            warm = replace(warm, ceiling=ceiling, known=outcome.assignment)
        elif self.options.known is not None:
            known_plan = self.options.known.in_numbers_of(self.problems[index])
            warm = replace(warm, known=known_plan)
        try:
            outcome = self.solve(
                self.problems[index], replace(self.options, time_limit_s=limit_s), warm
            )
        except Unfinished as error:
            self.unfinished = error
            self.bounds[index] = max(known, error.bound)
            return
        except Infeasible as error:
            # Of several precisions the one that allows most says what can be had.
            if not str(self.refusal) or error.least < self.refusal.least:
                self.refusal = error
            self.bounds.pop(index, None)
            return
        bound = -math.inf if outcome.bound is None else outcome.bound
        self.bounds[index] = max(known, bound)
        if self.best is None or outcome.value < self.best[1].value:
            self.best = index, outcome


def _worth(p: Problem, a: Assignment, budget: float | None) -> float:
    """Return what a plan is worth, under a budget its time; infinite where it does not fit."""
    from llmpq.planner.evaluate.fits import fits
    from llmpq.planner.evaluate.objective import keeps_budget, value

    if not fits(p, a):
        return math.inf
    if budget is None:
        return value(p, a)
    return value(p.with_changes(theta=0.0), a) if keeps_budget(p, a, budget) else math.inf


SOLVE_SHARE = 0.6
"""Share of the time left that one solve may take, where a preference takes several."""
CUT = "the time limit ended the search before its work was done: with less load it may find more"
HEAD_SHARE = 0.3
"""Share of the time that a search has, at least, if it has to go on with another output matrix."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A job as it is solved best (its KV precision, chunk and theta chosen), and the outcome."""

    problem: Problem
    outcome: Outcome


def search_plan(problem: Problem, options: SolveOptions, *, ceiling: float = math.inf) -> Solved:
    """Return the best plan as asked for; `NothingFitsError` where no plan has the memory.

    `Unfinished` where none is below `ceiling`, which is of one theta or a budget.
    """
    with counting(options.ends_at) as clock:
        if options.prefer:
            found = _preferred(problem, options)
        else:
            found = best_plan(problem, options, ceiling=ceiling)
    outcome = replace(found.outcome, work_s=clock.spent_s)
    if clock.cut and outcome.status == "feasible":
        outcome = replace(outcome, note="; ".join(filter(None, (outcome.note, CUT))))
    return replace(found, outcome=outcome)


def _preferred(problem: Problem, options: SolveOptions) -> Solved:
    """Return the plan of the front that a preference takes, and the problem with its theta."""
    assert options.prefer is not None, "there is a preference"
    timer, deadline_s = Timer(), now_s() + options.time_limit_s
    unit = problem.sensitivity.four_bit_omega()
    price = WEIGHTS[options.prefer] / unit if unit else 0.0

    def solve_at(theta: float) -> Scored[Solved]:
        share = SOLVE_SHARE * (deadline_s - now_s())
        limit = share if math.isfinite(share) else options.time_limit_s
        found = best_plan(
            problem.with_changes(theta=theta),
            replace(options, time_limit_s=max(0.0, limit)),
            variants=[one.with_changes(theta=theta) for one in variants],
        )
        omega = sum_omega(found.problem, found.outcome.assignment)
        return Scored(
            plan=found,
            theta=theta,
            time_s=found.outcome.value - theta * omega,
            omega=omega,
            bound=found.outcome.bound,
        )

    variants = [one.sharing_tables() for one in variants_with_room(problem, options)]
    if not variants:
        raise nothing_fits(problem, options)
    guess, corner = look_around(variants, price)
    best = preferred(
        solve_at,
        price=price,
        guess=guess,
        corner=corner if options.method == "exact" else None,
        late=lambda: now_s() > deadline_s,
    )
    return replace(best.plan, outcome=replace(best.plan.outcome, seconds=timer.seconds))


def best_plan(
    problem: Problem,
    options: SolveOptions,
    *,
    other_bound: float = math.inf,
    ceiling: float = math.inf,
    variants: Sequence[Problem] | None = None,
) -> Solved:
    """Return the best plan over the KV precisions allowed and over prefill chunk sizes.

    `variants`: the job at each of them, where the caller has made them. The bound is the smallest
    of all of them, and of `other_bound`: that of plans of the same job that this problem does not
    have. `Unfinished` with its bound where no plan is below `ceiling`.
    """
    timer, limit = Timer(), options.time_limit_s
    variants = variants_with_room(problem, options) if variants is None else variants
    sweep = KvPrecisionSweep(variants, options, ceiling=ceiling)
    sweep.solve_all()
    if sweep.best is None and sweep.unfinished is not None and sweep.bounds:
        raise Unfinished(str(sweep.unfinished), bound=min(*sweep.bounds.values(), other_bound))
    if sweep.best is None:
        its_own = options.method not in ("exact", "ilp") or options.budget is not None
        if its_own and not too_big(problem):  # the model as such would fit
            raise DoesNotFitError(str(sweep.refusal))
        raise nothing_fits(problem, options)
    priced, outcome = sweep.problems[sweep.best[0]], sweep.best[1]
    bound = min(*sweep.bounds.values(), other_bound)
    if _rounds_the_head_only(priced, outcome):
        left = max(limit - timer.work_s, HEAD_SHARE * limit)
        with suppress(DoesNotFitError, Unfinished):
            # Plans that mix precisions go on with a rounded output matrix: their bound stands.
            options = replace(options, time_limit_s=left)
            return best_plan(with_head_of_16_bits(problem), options, other_bound=bound)
    return Solved(problem=priced, outcome=_over_all(outcome, bound))


def nothing_fits(problem: Problem, options: SolveOptions) -> NothingFitsError:
    """Return the refusal of a job that no plan has the memory for."""
    return NothingFitsError(
        problem,
        options.kvs,
        budget=options.budget,
        names_flags=options.names_flags,
        names_context=options.names_context,
    )


def variants_with_room(problem: Problem, options: SolveOptions) -> list[Problem]:
    """Return the job at every KV precision and prefill chunk that is not too big for the devices.

    Smaller chunks than usual only where nothing else fits.
    """
    chunk = options.chunk
    if chunk is not None:
        kept = [p for p in _variants(problem, options, lambda p: (chunk,)) if not too_big(p)]
        if kept:
            return kept

    def usual_chunks(p: Problem) -> tuple[int, ...]:
        work = p.workload
        return chunk_sizes(work.batch, work.prompt_len, window=p.spec.widest_window)

    usual = [p for p in _variants(problem, options, usual_chunks) if not too_big(p)]
    if usual:
        return usual
    small = _variants(problem, options, lambda p: small_chunks(p.workload.prompt_len))
    return [p for p in small if not too_big(p)]


def _variants(
    problem: Problem, options: SolveOptions, chunks: Callable[[Problem], tuple[int, ...]]
) -> list[Problem]:
    if not options.kvs:  # as it is
        return [problem]
    found = []
    for kv in options.kvs:
        work = problem.workload.model_copy(update={"kv": kv})
        priced = problem.with_changes(workload=work)
        found += [priced.with_changes(chunk=size) for size in chunks(priced)]
    return found


def _rounds_the_head_only(p: Problem, outcome: Outcome) -> bool:
    """Whether all layers have 16 bits and yet the output matrix, on a CPU, would be rounded."""
    a = outcome.assignment
    last = p.classes[a.stages[-1].cls].first
    return (
        p.quantization.head_bits is None
        and last.spec.is_cpu
        and all(p.choices[choice].weight_bits == 16 for choice in a.choices)
    )


def with_head_of_16_bits(p: Problem) -> Problem:
    """Return the problem with an output matrix of 16 bits everywhere."""
    quantization = replace(p.quantization, head_bits=16)
    costs = replace(p.costs, quantization=quantization)
    return p.with_changes(quantization=quantization, costs=costs)


def _over_all(outcome: Outcome, bound: float) -> Outcome:
    """Return an outcome with the bound over every KV precision in place of its own."""
    if outcome.bound is None:
        return outcome
    if not math.isfinite(bound):
        return replace(outcome, bound=None, status="feasible")
    bound = min(bound, outcome.value)
    proven = outcome.value - bound <= OPTIMAL_GAP * abs(outcome.value)
    return replace(outcome, bound=bound, status="optimal" if proven else "feasible")

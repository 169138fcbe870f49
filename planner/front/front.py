"""The front of time against the sum of omega, with how much of it is proven to be listed.

A listed point has a proven bound of its time. Between two neighbours, left (faster) and right (more
precise), a plan that is not listed has at least left's bound of time and right's omega, and is
above every line time + theta omega = bound of a solved theta. What is left of that rectangle is the
pair's width: the factor by which a plan in it can be better than both neighbours.

The supported points (optimal for some theta) come first; then the widest rectangle is cut by the
fastest plan within a budget inside it, priced at the slope of the front there, until the number of
points is reached, or nothing wider than rounding is left and the front is complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from llmpq.planner.evaluate.objective import sum_omega, value
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.front.least_omega import least_omega
from llmpq.planner.front.quality import solve_budget
from llmpq.planner.problem.outcome import OPTIMAL_GAP, Assignment, Infeasible, Outcome, WarmStart
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.work_clock import counting, now_s

SAME = 1e-6
"""Relative difference below which two sums of omega, or widths, are taken as equal."""
GAP = 1e-6
"""Relative gap each point is proven to."""
END_SHARE, POINT_SHARE = 1 / 4, 1 / 3
"""Share of the time left that an end of the front, or another point, may take; a point that is not
proven by then keeps the bound it has."""
SHORTEST_S = 0.05


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A plan of the front; the outcome's value is its time, its bound that of plans as precise."""

    time_s: float
    omega: float
    theta: float
    """Seconds a unit of omega costs here: the slope of the front."""
    supported: bool
    """Whether the plan is the best one for its theta; a plan that is not is the best for none."""
    outcome: Outcome

    @property
    def bound_s(self) -> float:
        """No plan with at most this sum of omega is faster."""
        return 0.0 if self.outcome.bound is None else self.outcome.bound


@dataclass(frozen=True, kw_only=True)
class Front:
    """Points, fastest first, and what is known of the plans that are not listed."""

    points: tuple[FrontPoint, ...]
    width: float
    """Every plan is within this relative distance of a listed one, in time or in sum of omega."""
    complete: bool
    """Whether every point of the front is listed."""
    work_s: float = 0.0
    """Of the search, by the clock that counts it (planner/problem/work_clock.py)."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What may still lie between two neighbours."""

    left: FrontPoint
    right: FrontPoint
    omega_low: float
    """Plans of the opening have at least this sum of omega."""
    tried: bool = False
    """Whether a budget in the middle found nothing new."""


@dataclass(kw_only=True)
class FrontSearch:
    """State of the search for a front."""

    p: Problem
    most: int
    deadline: float
    points: list[FrontPoint] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    given_up: list[Opening] = field(default_factory=list)
    """Openings in which no plan was found in time."""
    lines: list[tuple[float, float]] = field(default_factory=list)
    """(theta, bound): every plan has time + theta omega >= bound."""
    slack: float = 0.0
    """Largest relative gap of a solve: what may be better than the plan it found."""

    def run(self) -> Front:
        """Find the ends, then supported points, then what lies between them."""
        finest = max(float(self.p.omega.max()), 1e-9)
        fast = self._supported(1e-9 / finest, END_SHARE)
        try:
            fine = self._most_precise(1e6 / finest)
        except Infeasible:  # out of time
            fine, self.slack = fast, math.inf
        self.points = [fast]
        if fast.omega > fine.omega * (1 + SAME) + SAME * finest:
            self.points.append(fine)
            self.openings = [Opening(left=fast, right=fine, omega_low=fine.omega)]
        self._add_supported(max(3, self.most // 2))
        while self._goes_on(self.most):
            self._cut(self._widest())
        left = [self.width(opening) for opening in (*self.openings, *self.given_up)]
        slack = max([self.slack, *(_open(point.outcome) for point in self.points)])
        width = max([0.0, *left])
        points = tuple(sorted(self.points, key=lambda point: point.time_s))
        complete = width <= 2 * SAME and slack <= 10 * GAP
        return Front(points=points, width=max(width, slack), complete=complete)

    def width(self, o: Opening) -> float:
        """Return how much better than both neighbours a plan in the opening can be, relatively.

        Such a plan is inside the box [0, s right.time] x [0, s left.omega] only if the box reaches
        the neighbours' bounds and every line.
        """
        high_t, high_w = o.right.time_s, o.left.omega
        least = max(o.left.bound_s / high_t, o.omega_low / high_w)
        for theta, bound in self.lines:
            least = max(least, bound / (high_t + theta * high_w))
        return max(0.0, 1 / least - 1) if least > 0 else math.inf

    def _goes_on(self, most: int) -> bool:
        late = now_s() >= self.deadline
        if late or not self.openings or len(self.points) >= most:
            return False
        return self.width(self._widest()) > 2 * SAME

    def _widest(self) -> Opening:
        return max(self.openings, key=self.width)

    def _add_supported(self, most: int) -> None:
        """Split openings at the theta that makes the neighbours equal, widest first."""
        edges: list[Opening] = []
        while self._goes_on(most):
            opening = self._widest()
            self.openings.remove(opening)
            left, right = opening.left, opening.right
            theta = (right.time_s - left.time_s) / (left.omega - right.omega)
            try:
                found = self._supported(theta)
            except Infeasible:  # out of time
                self.given_up.append(opening)
                continue
            line = left.time_s + theta * left.omega
            new = found.time_s + theta * found.omega < line * (1 - GAP)
            if new and left.time_s < found.time_s < right.time_s:
                self._split(opening, found, found.omega)
            else:
                edges.append(opening)
        self.openings += edges

    def _split(self, o: Opening, found: FrontPoint, budget: float) -> None:
        """Put a point between two neighbours; beyond `budget` it proves nothing."""
        self.points.append(found)
        self.openings.append(Opening(left=o.left, right=found, omega_low=budget))
        self.openings.append(Opening(left=found, right=o.right, omega_low=o.right.omega))

    def _cut(self, o: Opening) -> None:
        """Cut an opening by the fastest plan within a budget inside it."""
        self.openings.remove(o)
        middle = (o.omega_low + o.left.omega) / 2
        # Nothing below the middle: what is left is most often nothing at all, so ask for all of it.
        budget = o.left.omega * (1 - SAME) if o.tried else middle
        try:
            found = self._within(budget, o.right)
        except Infeasible:  # out of time
            self.given_up.append(o)
            return
        if found is None or found.omega <= o.right.omega * (1 + SAME):
            self.openings.append(replace(o, omega_low=budget, tried=True))
        elif found.time_s <= o.left.time_s * (1 + 1e-12):
            # As fast as left and more precise, within left's own gap: it takes left's place.
            self.points = [q for q in self.points if q is not o.left]
            others = [replace(q, right=found) for q in self.openings if q.right is o.left]
            self.openings = [q for q in self.openings if q.right is not o.left] + others
            self.points.append(found)
            self.openings.append(Opening(left=found, right=o.right, omega_low=o.right.omega))
        else:
            self._split(o, found, budget)

    def _within(self, budget: float, known: FrontPoint) -> FrontPoint | None:
        """Return the fastest plan within a budget that `known` keeps."""
        theta = self._slope(budget)
        outcome = solve_budget(
            self.p,
            budget,
            time_limit_s=self._seconds(),
            gap=GAP,
            theta=theta,
            warm=WarmStart(known=known.outcome.assignment),
        )
        self.slack = max(self.slack, _open(outcome))
        omega = sum_omega(self.p, outcome.assignment)
        if outcome.value >= known.time_s * (1 - SAME):
            return None
        outcome = replace(outcome, note=f"fastest with sum omega <= {omega:g}")
        return FrontPoint(
            time_s=outcome.value, omega=omega, theta=theta, supported=False, outcome=outcome
        )

    def _slope(self, budget: float) -> float:
        """Return the slope of the points' lower hull at a sum of omega."""
        best, slope = math.inf, 0.0
        for fine in (q for q in self.points if q.omega <= budget):
            for fast in (q for q in self.points if q.omega > budget):
                theta = (fine.time_s - fast.time_s) / (fast.omega - fine.omega)
                here = fine.time_s - theta * (budget - fine.omega)
                if here < best:
                    best, slope = here, theta
        return max(slope, 0.0)

    def _supported(self, theta: float, share: float = POINT_SHARE) -> FrontPoint:
        outcome = solve_exact(
            self.p.with_changes(theta=theta), time_limit_s=self._seconds(share), gap=GAP
        )
        omega = sum_omega(self.p, outcome.assignment)
        bound = None
        if outcome.bound is not None:
            self.lines.append((theta, outcome.bound))
            bound = outcome.bound - theta * omega
        timed = _timed(self.p, outcome, bound, f"best for theta {theta:.3g}")
        return FrontPoint(
            time_s=timed.value, omega=omega, theta=theta, supported=True, outcome=timed
        )

    def _most_precise(self, theta: float) -> FrontPoint:
        """Return the fastest of the most precise plans: no plan has a smaller sum of omega.

        Where the smallest sum is not known at once, it is that of the best plan at a theta so high
        that a share SAME of omega outweighs every plan's time: that plan's bound proves it.
        """
        known = least_omega(self.p).plan
        if known is None:
            known = self._priced_highest(self._supported(theta, END_SHARE))
        outcome = solve_budget(
            self.p,
            sum_omega(self.p, known) * (1 + SAME),
            time_limit_s=self._seconds(END_SHARE),
            gap=GAP,
            theta=theta,
            warm=WarmStart(known=known),
        )
        omega = sum_omega(self.p, outcome.assignment)
        outcome = replace(outcome, note="the smallest sum of omega there is")
        return FrontPoint(
            time_s=outcome.value, omega=omega, theta=theta, supported=True, outcome=outcome
        )

    def _priced_highest(self, fine: FrontPoint) -> Assignment:
        """Return the most precise plan that is found, beginning with one that nearly is."""
        least, longest = float(self.p.omega.min(axis=1).sum()), _longest_s(self.p)
        if fine.omega <= least * (1 + SAME):
            return fine.outcome.assignment
        theta = 4 * longest / (SAME * fine.omega)
        priced = self.p.with_changes(theta=theta)
        best = solve_exact(priced, time_limit_s=self._seconds(END_SHARE), gap=SAME / 4)
        omega = sum_omega(self.p, best.assignment)
        if best.bound is None or best.bound - theta * omega * (1 - SAME) < longest:
            self.slack = math.inf  # a more precise plan is neither known nor excluded
        return best.assignment

    def _seconds(self, share: float = POINT_SHARE) -> float:
        return max(SHORTEST_S, share * (self.deadline - now_s()))


def pareto_front(
    p: Problem, *, points: int = 25, time_limit_s: float = 60.0, ends_at: float = math.inf
) -> Front:
    """Return the front, at most `points` of it; limits as `SolveOptions` has them."""
    with counting(ends_at) as clock:
        search = FrontSearch(p=p.sharing_tables(), most=points, deadline=now_s() + time_limit_s)
        return replace(search.run(), work_s=clock.spent_s)


def _longest_s(p: Problem) -> float:
    """Return seconds that no plan exceeds: every micro-batch by itself, at the worst of all."""
    longest = 0.0
    for pair in p.pairs:
        x, (mp, md) = p.numbers(*pair), p.counts(*pair)
        prefill = x.prefill_s.max() + x.hop_prefill.total_s.max()
        decode = x.decode_s.max() + x.hop_decode.total_s.max()
        once = p.num_layers * prefill + 2 * x.ends_prefill_s.max() + x.back_prefill.total_s.max()
        token = p.num_layers * decode + 2 * x.ends_decode_s.max() + x.back_decode.total_s.max()
        longest = max(longest, float(mp * once + p.workload.gen_len * md * token))
    return longest


def _open(outcome: Outcome) -> float:
    """Return the relative gap of an outcome, infinite where it has no bound."""
    return math.inf if outcome.gap is None else outcome.gap


def _timed(p: Problem, outcome: Outcome, bound: float | None, note: str) -> Outcome:
    """Return an outcome valued in seconds only."""
    seconds = value(p.with_changes(theta=0.0), outcome.assignment)
    proven = bound is not None and seconds - bound <= OPTIMAL_GAP * seconds
    return replace(
        outcome,
        value=seconds,
        bound=bound,
        status="optimal" if proven else "feasible",
        note=note,
    )

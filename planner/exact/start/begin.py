"""Looks for good plans before a search that proves: simple ones, walks, other methods' plans."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from llmpq.planner.exact.start.improve import improved
from llmpq.planner.exact.start.starts import distinct_orders, first_plans, other_methods
from llmpq.planner.exact.start.walk import Walk
from llmpq.planner.problem.outcome import Assignment

IMPROVE_SHARE = 0.4
"""Share of what is left of the time for the improvement of each of a few plans."""
STARTS = 4
"""Plans of the simple methods that are improved, each of another order."""
WALK_SHARE = 0.6
"""Share of what is left of the time for a walk among plans of one precision a stage."""


def begin(walk: Walk, known: Assignment | None, limit: float) -> None:
    """Offer simple plans and a known one, improved, to the walk's incumbent.

    It takes until `limit`, a time of `time.perf_counter`.
    """
    incumbent, tables = walk.incumbent, walk.tables
    p, now = incumbent.p, time.perf_counter()
    found: list[tuple[float, Assignment]] = []

    def keep(plans: Iterator[Assignment], until: float) -> None:
        for plan in plans:
            incumbent.offer(plan)
            found.append((incumbent.worth(plan), plan))
            if time.perf_counter() > until and incumbent.best is not None:
                return

    if known is not None:  # it may not fit: it is of another precision of KV
        share = (limit - now) * IMPROVE_SHARE / 2
        improved(incumbent, tables, known, now + share)
        found.append((math.inf, known))
    keep(first_plans(p, tables), (now + limit) / 2)
    now = time.perf_counter()
    walk.from_each(distinct_orders(found, STARTS), now + (limit - now) * WALK_SHARE)
    now = time.perf_counter()
    keep(other_methods(p, now + (limit - now) / 4), limit)
    now = time.perf_counter()
    walk.from_each(distinct_orders(found, STARTS), now + (limit - now) * WALK_SHARE)
    for plan in (*filter(None, [incumbent.best]), *distinct_orders(found, STARTS)):
        now = time.perf_counter()
        improved(incumbent, tables, plan, now + (limit - now) * IMPROVE_SHARE)
    keep(other_methods(p, limit), limit)
    if incumbent.best is not None:
        improved(incumbent, tables, incumbent.best, limit)

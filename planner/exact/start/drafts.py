"""Drafts of plans, and what they are worth: what small changes are made to (improve.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmpq.planner.costs.stage_memory import sort_of
from llmpq.planner.exact.bounds.form import make_form
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Stage
from llmpq.planner.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A plan as lists: classes of the stages, their boundaries, a choice of every layer."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]
    choices: tuple[int, ...]

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages as solvers name them."""
        return tuple(
            Stage(cls=c, start=low, end=high, choices=self.choices[low:high])
            for c, low, high in zip(self.order, self.bounds, self.bounds[1:], strict=False)
        )


class Scales:
    """Weighs drafts at one pair of micro-batch sizes."""

    def __init__(self, p: Problem, eta: int, xi: int, budget: float | None) -> None:
        self.p, self.budget = p, budget
        self.form = make_form(p, eta, xi)
        x = self.form.numbers
        self.tp, self.td = x.prefill_s[0], x.decode_s[0]
        self.paces = x.held_prefill_s[0], x.held_decode_s[0]
        """[C, B] of prefill and decode, as the slowest stage goes by."""
        self.tables = np.stack([self.tp, self.td, *self.paces])
        self.ends = np.stack(
            [x.ends_prefill_s, x.ends_decode_s, x.held_ends_prefill_s, x.held_ends_decode_s]
        )
        self.room = x.capacity
        self.sizes = p.all_layer_bytes[0]
        self.unit = np.eye(len(p.choices), dtype=np.int64)
        self.omega = np.where(p.open, p.omega, np.inf)
        self.rows = np.arange(p.num_layers)

    def counts(self, draft: Draft) -> np.ndarray:
        """[J, B] layers of each stage at each choice."""
        chosen = self.unit[np.array(draft.choices)]
        return np.asarray(np.add.reduceat(chosen, np.array(draft.bounds[:-1]), axis=0))

    def spare(self, draft: Draft, counts: np.ndarray) -> np.ndarray:
        """[J] bytes that each stage leaves free."""
        count = len(draft.order)
        first, last = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
        first[0], last[-1] = 1, 1
        sorts = sort_of(self.p.packed, counts)
        room = self.room[np.array(draft.order), first, last, sorts]
        return np.asarray(room - counts @ self.sizes)

    def worth(self, draft: Draft) -> float:
        """Return the objective, infinite if a draft does not fit."""
        counts = self.counts(draft)
        if (self.spare(draft, counts) < 0).any():
            return math.inf
        if self.p.pins and not all(
            self.p.allowed(c, low, high)
            for c, low, high in zip(draft.order, draft.bounds, draft.bounds[1:], strict=False)
        ):
            return math.inf
        omega = float(self.omega[self.rows, list(draft.choices)].sum())
        if not math.isfinite(omega):
            return math.inf
        if self.budget is not None and omega > self.budget * (1 + BUDGET_ROUNDING / 4):
            return math.inf
        priced = omega if self.budget is None else self.budget
        return self._seconds(draft.order, counts) + self.p.theta * priced

    def _seconds(self, order: tuple[int, ...], counts: np.ndarray) -> float:
        x, form, stages = self.form.numbers, self.form, np.array(order)
        times = np.einsum("jb,xjb->xj", counts, self.tables[:, stages])
        times[:, 0] += self.ends[:, order[0], 0]
        times[:, -1] += self.ends[:, order[-1], 1]
        slow_p, slow_d = times[2:].max(axis=1).tolist()
        cost_p, once = times[:2].sum(axis=1).tolist()
        back = 0.0
        if len(stages) > 1:
            links, ring = (stages[:-1], stages[1:]), (stages[-1], stages[0])
            slow_p = max(slow_p, float(x.hop_prefill.held_s[links].max()))
            slow_d = max(slow_d, float(x.hop_decode.held_s[links].max()))
            if form.first_back:
                slow_p = max(slow_p, float(x.back_prefill.held_s[ring]))
            if form.back_bounds:
                slow_d = max(slow_d, float(x.back_decode.held_s[ring]))
            if form.hops_in_sums:
                cost_p += float(x.hop_prefill.total_s[links].sum())
                once += float(x.hop_decode.total_s[links].sum())
                back = float(x.back_decode.total_s[ring])
                if form.first_back:
                    cost_p += float(x.back_prefill.total_s[ring])
        total = form.a * slow_p + cost_p + form.bd * slow_d + form.ws * once + form.back * back
        return total + form.z * max(form.md * slow_d, once + back)

    def squeezed(self, draft: Draft) -> Draft | None:
        """Lower precisions on stages that are too full, least omega a byte first."""
        spare = self.spare(draft, self.counts(draft))
        if (spare >= 0).all():
            return draft
        choices, last = np.array(draft.choices), len(draft.order) - 1
        for j in np.flatnonzero(spare < 0).tolist():
            low, high = draft.bounds[j], draft.bounds[j + 1]
            held, room = choices[low:high], self.room[draft.order[j], int(j == 0), int(j == last)]
            while (short := -self._spare_of(held, room)) > 0:
                saved = self.sizes[held][:, None] - self.sizes[None]
                had = np.nan_to_num(self.omega[np.arange(low, high), held], posinf=1e300)
                lost = self.omega[low:high] - had[:, None]
                rate = np.where(saved > 0, lost / np.maximum(saved, 1), np.inf)
                layer, b = np.unravel_index(int(np.argmin(rate)), rate.shape)
                if not np.isfinite(rate[layer, b]):
                    return None
                # As many layers at once as are needed, cheapest first.
                same = np.flatnonzero((held == held[layer]) & np.isfinite(rate[:, b]))
                needed = -(-short // int(saved[layer, b]))
                held[same[np.argsort(rate[same, b], kind="stable")][:needed]] = b
        return Draft(order=draft.order, bounds=draft.bounds, choices=tuple(choices.tolist()))

    def _spare_of(self, held: np.ndarray, room: np.ndarray) -> int:
        """Return the bytes that a stage with a choice of every layer leaves of `room` by sort."""
        counts = np.bincount(held, minlength=len(self.sizes))
        return int(room[sort_of(self.p.packed, counts)] - counts @ self.sizes)

    def within_budget(self, draft: Draft) -> Draft:
        """Raise precisions until the budget is kept, most omega a second first, where it fits."""
        choices = np.array(draft.choices)
        layers = np.diff(draft.bounds)
        stage = np.repeat(np.arange(len(layers)), layers)
        spare = self.spare(draft, self.counts(draft))
        price = self.tp + (self.form.ws + self.form.z) * self.td
        price = price[np.array(draft.order)[stage]]
        left = math.inf if self.budget is None else self.budget
        while float(self.omega[self.rows, choices].sum()) > left:
            gain = self.omega[self.rows, choices][:, None] - self.omega
            slower = np.maximum(price - price[self.rows, choices][:, None], 1e-12)
            larger = self.sizes[None] - self.sizes[choices][:, None]
            rate = np.where((gain > 0) & (larger <= spare[stage][:, None]), gain / slower, -np.inf)
            layer, b = np.unravel_index(int(np.argmax(rate)), rate.shape)
            if rate[layer, b] == -np.inf:
                return draft
            spare[stage[layer]] -= larger[layer, b]
            choices[layer] = b
        return Draft(order=draft.order, bounds=draft.bounds, choices=tuple(choices.tolist()))

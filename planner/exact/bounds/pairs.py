"""Bounds and values of all pairs of micro-batch sizes at once.

A job of B requests has some 4 B pairs. Times go by one size of the two, so tables of all prefill
sizes [E] and all decode sizes [X] say everything; what a relaxation's multipliers prove of one
pair, they prove of every pair, once scaled to its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import Phase
from llmpq.planner.evaluate.objective import (
    Coefficients,
    Form,
    HopTables,
    hop_tables,
    make_form,
    weighed,
)
from llmpq.planner.exact.bounds.plan_cases import (
    Box,
    Case,
    Islands,
    by_stages,
    cases_of,
    find_islands,
    in_memory,
    least_hops,
    least_slowest,
    most_priced,
    quickest_hop,
)
from llmpq.planner.exact.bounds.relaxation import (
    ClassMemory,
    LayerGroups,
    Prices,
    class_memory,
    layer_groups,
    whole_layers,
)
from llmpq.planner.problem.outcome import Stage
from llmpq.planner.problem.problem import Floats, Problem
from llmpq.planner.problem.stage_memory import sort_of
from llmpq.planner.problem.work_clock import spend


@dataclass(frozen=True, kw_only=True)
class PairBound:
    """Lower bounds of what the plans of a case take, in seconds, at every size."""

    case: Case
    slow_p: Floats
    """[E] the slowest stage."""
    slow_d: Floats
    """[X]."""
    hops_p: Floats
    """[E] all hops of one micro-batch together."""
    hops_d: Floats
    """[X]."""


class PairTables:
    """Times and weights of every size: `p.prefill_sizes` [E] by `p.decode_sizes` [X]."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        etas, xis = p.prefill_sizes, p.decode_sizes
        prefill = [p.size_numbers(Phase.PREFILL, eta) for eta in etas]
        decode = [p.size_numbers(Phase.DECODE, xi) for xi in xis]
        self.prefill_s = np.array([x.layer_s[0] for x in prefill])
        """[E, C, B]."""
        self.decode_s = np.array([x.layer_s[0] for x in decode])
        """[X, C, B]."""
        self.ends_prefill_s = np.array([x.ends_s for x in prefill])
        """[E, C, 2]."""
        self.ends_decode_s = np.array([x.ends_s for x in decode])
        self.held_prefill_s = np.array([x.held_layer_s[0] for x in prefill])
        """[E, C, B] of the slowest stage."""
        self.held_decode_s = np.array([x.held_layer_s[0] for x in decode])
        self.held_ends_prefill_s = np.array([x.held_ends_s for x in prefill])
        self.held_ends_decode_s = np.array([x.held_ends_s for x in decode])
        self.hops = (prefill, decode)
        across = [make_form(p, etas[0], xi) for xi in xis]
        self.a = np.array([make_form(p, eta, xis[0]).a for eta in etas])
        """[E] weight of P."""
        self.bd, self.ws, self.z, self.md, self.back = (
            np.array([float(getattr(form, name)) for form in across])
            for name in ("bd", "ws", "z", "md", "back")
        )
        self.form = across[0]
        self.coefficients = Coefficients[Floats](
            a=self.a,
            bd=self.bd,
            ws=self.ws,
            z=self.z,
            md=self.md,
            back=self.back,
            hops_in_sums=self.form.hops_in_sums,
            first_back=self.form.first_back,
            back_bounds=self.form.back_bounds,
        )
        self.open = np.zeros((len(etas), len(xis)), dtype=bool)
        """[E, X] whether a pair may be chosen."""
        rows = {eta: k for k, eta in enumerate(etas)}
        columns = {xi: k for k, xi in enumerate(xis)}
        for eta, xi in p.pairs:
            self.open[rows[eta], columns[xi]] = True

    def first_bounds(self, groups: LayerGroups) -> Floats:
        """[I, E, X] lower bounds of F by case: every layer where it is cheapest, memory or not."""
        zero, one = np.zeros(len(self.p.classes)), np.ones(len(self.p.classes))
        found = []
        for floor in self.case_bounds:
            bounds = [
                self._of_case(groups, kappa, (share, share, zero), (1.0, 1.0), floor)
                for kappa in (0.0, 1.0)
                for share in (zero, one)
            ]
            found.append(np.max(bounds, axis=0))
        return np.array(found)

    def bounds(self, groups: LayerGroups, form: Form, prices: Prices) -> Floats:
        """[I, E, X] lower bounds of F from the multipliers of one pair, by case."""
        weights = (form.a, form.d_weight(prices.kappa))
        multipliers = (prices.prefill, prices.decode, prices.memory)
        return np.array(
            [
                self._of_case(groups, prices.kappa, multipliers, weights, floor)
                for floor in self.case_bounds
            ]
        )

    @cached_property
    def case_bounds(self) -> list[PairBound]:
        """What the plans of each case take at least, at every size."""
        cases = cases_of(self.p, self.islands)
        return [self._case_bound(case) for case in in_memory(cases, self._roomy, self.p.num_layers)]

    def cut_by_stages(self, pair: tuple[int, int], step_s: float) -> None:
        """Make cases of their own of numbers of stages whose hops differ by more than a step."""
        etas, xis = self.p.prefill_sizes, self.p.decode_sizes
        row, column = etas.index(pair[0]), xis.index(pair[1])
        weight = self.ws[column] + self.z[column]
        cases = [floor.case for floor in self.case_bounds]
        costs = []
        d_weight = self.bd[column] + self.z[column] * self.md[column]
        for case in cases:
            hops = [self._hops(case, k, (row, column)) for k in range(1, case.most + 1)]
            cost = np.array([float(p[0] + weight * d[0]) for p, d in hops])
            if case.most > 1:
                busy_p, busy_d = self._busy(case)
                cost[1:] += self.a[row] * busy_p[row] + d_weight * busy_d[column]
            costs.append(cost)
        self.case_bounds = [self._case_bound(case) for case in by_stages(cases, costs, step_s)]

    def box(self, case: int, form: Form) -> Box:
        """Return what is known of the plans of a case at a pair."""
        floor, x = self.case_bounds[case], form.numbers
        row = self.p.prefill_sizes.index(x.eta)
        column = self.p.decode_sizes.index(x.xi)
        return Box(
            p_low=float(floor.slow_p[row]),
            d_low=float(floor.slow_d[column]),
            island=floor.case.island,
            fewest=floor.case.fewest,
            most=floor.case.most,
            hops_prefill_s=float(floor.hops_p[row]),
            hops_decode_s=float(floor.hops_d[column]),
        )

    def _case_bound(self, case: Case) -> PairBound:
        slow = []
        for layer_s, ends_s in (
            (self.held_prefill_s, self.held_ends_prefill_s),
            (self.held_decode_s, self.held_ends_decode_s),
        ):
            quickest = layer_s.min(axis=2)
            slow.append(least_slowest(case, quickest, ends_s, self.p.num_layers, self._roomy))
        if case.fewest >= 2:
            slow = [np.maximum(*both) for both in zip(slow, self._busy(case), strict=True)]
        hops_p, hops_d = self._hops(case, case.fewest, None)
        return PairBound(case=case, slow_p=slow[0], slow_d=slow[1], hops_p=hops_p, hops_d=hops_d)

    def _busy(self, case: Case) -> list[Floats]:
        """Return for how long a message of several stages occupies its link, at every size."""
        found = []
        for sizes in self.hops:
            times = np.array([np.where(self._linked, x.hop.held_s, np.inf) for x in sizes])
            found.append(quickest_hop(case, self.islands, times))
        return found

    def _hops(self, case: Case, stages: int, at: tuple[int, int] | None) -> tuple[Floats, Floats]:
        """Return what the hops of so many stages take at least, at every size, or at one pair's."""
        found = []
        for k, sizes in enumerate(self.hops):
            chosen = sizes if at is None else [sizes[at[k]]]
            if not self.form.hops_in_sums:
                found.append(np.zeros(len(chosen)))
                continue
            times = np.array([np.where(self._linked, x.hop.total_s, np.inf) for x in chosen])
            found.append(least_hops(case, stages, self.islands, times))
        return found[0], found[1]

    @cached_property
    def _linked(self) -> NDArray[np.bool_]:
        """[C, C] whether there are two devices of these classes."""
        table = np.zeros((len(self.p.classes),) * 2, dtype=bool)
        for ends in self.p.class_links.terms:
            table[ends] = True
        return table

    def _of_case(
        self,
        groups: LayerGroups,
        kappa: float,
        multipliers: tuple[Floats, Floats, Floats],
        weights: tuple[float, float],
        floor: PairBound,
    ) -> Floats:
        """Bound every pair by multipliers of weights (A, D's), shared out among devices.

        Once with all of both weights on the devices, once with what the multipliers leave of them
        on the least that the slowest stage takes.
        """
        case = floor.case
        entries = self.open.size * len(case.counts) * len(self.p.choices)
        spend(100, (6 + 4 * len(groups.sizes) / len(case.counts)) * entries)
        d_weight = self.bd + kappa * self.z * self.md
        totals = [most_priced(prices, case.counts, case.most) for prices in multipliers[:2]]
        shares = [
            total / weight if weight > 0 else 0.0
            for total, weight in zip(totals, weights, strict=True)
        ]
        found = np.full(self.open.shape, -np.inf)
        for full in (True, False):
            scales = [
                1.0 / share if share > 0 and (full or share > 1) else float(share > 0)
                for share in shares
            ]
            left = [1.0 - share * scale for share, scale in zip(shares, scales, strict=True)]
            scaled = (multipliers[0] * scales[0], multipliers[1] * scales[1], multipliers[2])
            bound = self._on(groups, kappa, scaled, weights, case.counts)
            slowest = (left[0] * self.a * floor.slow_p)[:, None]
            slowest = slowest + (left[1] * d_weight * floor.slow_d)[None]
            found = np.maximum(found, bound + slowest * (1 - 1e-9))
            if min(shares) >= 1:
                break
        s_weight = self.ws + (1 - kappa) * self.z
        hops = floor.hops_p[:, None] + (s_weight * floor.hops_d)[None]
        return np.asarray(found + hops * (1 - 1e-9))

    def _on(
        self,
        groups: LayerGroups,
        kappa: float,
        multipliers: tuple[Floats, Floats, Floats],
        weights: tuple[float, float],
        counts: Floats,
    ) -> Floats:
        """Scale multipliers to every pair's weights; price layers, ends, memory of `counts`."""
        some = counts > 0
        per_p, per_d, per_byte = (prices[some] for prices in multipliers)
        by_a = self.a / weights[0] if weights[0] > 0 else np.zeros_like(self.a)
        d_weight = self.bd + kappa * self.z * self.md
        by_d = d_weight / weights[1] if weights[1] > 0 else np.zeros_like(d_weight)
        s_weight = self.ws + (1 - kappa) * self.z
        wp, wd = by_a[:, None] * per_p[None], by_d[:, None] * per_d[None]
        memory = self._memory
        in_memory = per_byte[:, None] * self.p.all_layer_bytes[0][None]
        prefill = self.prefill_s[:, some] + wp[..., None] * self.held_prefill_s[:, some]
        decode = s_weight[:, None, None] * self.decode_s[:, some]
        decode = decode + wd[..., None] * self.held_decode_s[:, some]
        prefill = prefill + in_memory
        layer = (prefill[:, None] + decode[None]).min(axis=2)
        total = np.zeros(self.open.shape)
        for omega, size in zip(groups.omega, groups.sizes, strict=True):
            total += size * (layer + omega).min(axis=-1)
        for end, less in ((0, memory.first), (1, memory.last)):
            of_prefill = self.ends_prefill_s[:, some, end]
            of_prefill = of_prefill + wp * self.held_ends_prefill_s[:, some, end]
            of_decode = s_weight[:, None] * self.ends_decode_s[:, some, end]
            of_decode = of_decode + wd * self.held_ends_decode_s[:, some, end]
            in_room = per_byte * less[:, :, some]
            total += (of_prefill[:, None] + of_decode[None] + in_room).min(axis=-1)
        total -= memory.middle[:, :, some] @ (per_byte * counts[some])
        return np.asarray(total - 1e-7 * np.abs(total))

    @cached_property
    def hop_tables(self) -> tuple[HopTables, HopTables]:
        """[E, C, C] of prefill, [X, C, C] of decode."""
        prefill, decode = ([(x.hop, x.back) for x in sizes] for sizes in self.hops)
        return (
            hop_tables(self.form, Phase.PREFILL, prefill),
            hop_tables(self.form, Phase.DECODE, decode),
        )

    @cached_property
    def islands(self) -> Islands | None:
        """Sets of devices with slow links between them, if there are."""
        return find_islands(self.p)

    @cached_property
    def _roomy(self) -> NDArray[np.int64]:
        """[C, 2, 2] layers that a device has memory for at the smallest micro-batches."""
        return whole_layers(self.p, self.roomiest)

    @cached_property
    def _memory(self) -> ClassMemory:
        """[E, X, C]: larger micro-batches of either phase leave no more room."""
        by_eta, by_xi = self._rooms
        return class_memory(np.minimum(by_eta[:, None], by_xi[None]))

    @cached_property
    def _rooms(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Capacity at every size of either phase, the other's the smallest: no pair has more."""
        p, (etas, xis) = self.p, (self.p.prefill_sizes, self.p.decode_sizes)
        by_eta = np.array([p.capacity(eta, xis[0]) for eta in etas])
        by_xi = np.array([p.capacity(etas[0], xi) for xi in xis])
        return by_eta, by_xi

    @cached_property
    def roomiest(self) -> NDArray[np.int64]:
        """Capacity of the smallest micro-batches: no pair has more."""
        return self.p.capacity(self.p.prefill_sizes[0], self.p.decode_sizes[0])

    def values(self, stages: tuple[Stage, ...]) -> Floats:
        """[E, X] F without theta omega of the same stages at every pair, whatever fits."""
        counts = np.array([np.bincount(s.choices, minlength=len(self.p.choices)) for s in stages])
        order = [s.cls for s in stages]
        tp, td, held_p, held_d = (
            _stage_times(layers, ends, order, counts)
            for layers, ends in (
                (self.prefill_s, self.ends_prefill_s),
                (self.decode_s, self.ends_decode_s),
                (self.held_prefill_s, self.held_ends_prefill_s),
                (self.held_decode_s, self.held_ends_decode_s),
            )
        )
        classes, (hops_p, hops_d) = np.array(order), self.hop_tables
        spend(90, 6 * self.open.size + 20 * sum(self.open.shape) * len(stages))
        sum_p, busy_p, back_p = hops_p.of(classes)
        sum_d, busy_d, back_d = hops_d.of(classes)
        by_prefill, by_decode = weighed(
            self.coefficients,
            slow_p=np.maximum(held_p.max(axis=1), busy_p),
            slow_d=np.maximum(held_d.max(axis=1), busy_d),
            tp=tp.sum(axis=1) + sum_p + back_p,
            td=td.sum(axis=1) + sum_d,
            back_d=back_d,
        )
        return np.asarray(by_prefill[:, None] + by_decode[None, :])

    def best_pair(self, stages: tuple[Stage, ...], most: float) -> tuple[int, int] | None:
        """Return the quickest pair (eta, xi) at which stages fit, below a time `most`."""
        counts = np.array([np.bincount(s.choices, minlength=len(self.p.choices)) for s in stages])
        needed = counts @ self.p.all_layer_bytes[0]
        sorts = sort_of(self.p.packed, counts)
        last = len(stages) - 1
        held = [(s.cls, int(j == 0), int(j == last), int(sorts[j])) for j, s in enumerate(stages)]
        by_eta, by_xi = (
            np.all([rooms[:, *at] >= needed[j] for j, at in enumerate(held)], axis=0)
            for rooms in self._rooms
        )
        may_fit = self.open & by_eta[:, None] & by_xi[None]
        times = np.where(may_fit, self.values(stages), np.inf)
        for flat in np.argsort(times, axis=None, kind="stable"):
            row, column = np.unravel_index(flat, times.shape)
            if not times[row, column] < most:
                return None
            eta, xi = self.p.prefill_sizes[row], self.p.decode_sizes[column]
            room = self.p.capacity(eta, xi)
            if all(needed[j] <= room[at] for j, at in enumerate(held)):
                return eta, xi
        return None


def _stage_times(
    layers: Floats, ends: Floats, order: list[int], counts: NDArray[np.int64]
) -> Floats:
    """[n, J] each stage's time at every size: `layers` [n, C, B], `ends` [n, C, 2]."""
    times = np.einsum("ejb,jb->ej", layers[:, order], counts)
    times[:, 0] += ends[:, order[0], 0]
    times[:, -1] += ends[:, order[-1], 1]
    return np.asarray(times)


def quick_bound(p: Problem) -> float:
    """Return a lower bound of every plan's value, found without a solver, as if all fitted."""
    tables = PairTables(p)
    bounds = tables.first_bounds(layer_groups(p))
    return float(np.where(tables.open, bounds, np.inf).min())

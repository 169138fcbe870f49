"""Checks a plan against its certificate: a small program of the standard library alone.

A certificate (planner/solving/certificate.py writes it) has tables of what layers, messages and
memory take, taken as given, and proofs: each says of an engine that, whatever its stages and bits,
it takes so long at least for so many rows in so many waves. Disjoint engines that all end sooner do
fewer rows than the job has: that bounds all plans. The value of an engine is

    F = A P + Bd D + sum tp + hops + wS S + Z max(md D, S + way back) + theta sum omega

(planner/evaluate/objective.py). A proof has multipliers for each pair of micro-batch sizes: P and
D, the slowest stages' times, are at least any weighted mean of all stages'; max(md D, S) is at
least kappa md D + (1 - kappa) S; bytes above the devices' memory have a price, as has a loss above
the budget (a Lagrangian relaxation). What is left is a sum over layers, each at its cheapest
choice: of all devices together, or of a shortest path over stages.

Times and losses of tables are whole numbers of 1/UNIT, multipliers of 1/PRICE, both rounded so that
a bound stays one; what follows from them is exact.

c: a certificate.  t: a table.  k: a class of devices.  i, j: layers.  b: a choice of bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise, product
from math import floor
from typing import Any

SCHEMA, PHASES = 2, ("prefill", "decode")
UNIT, PRICE, NEVER = 10**24, 2**40, 10**60
"""Units of a second, and of a multiplier of 1; the units that stand for impossible."""
CLOSE = Fraction(1, 10**9)
"""Relative difference that sums of floats may have for being rounded in another order."""
Data = Mapping[str, Any]
Vector = tuple[int, ...]
Stages = list[tuple[int, list[int]]]
"""The class of each stage, and the choices of its layers."""


class Refused(ValueError):
    """Says what of a plan or its certificate does not hold."""


@dataclass(frozen=True)
class Verified:
    """What was found to hold: a plan's value and seconds, and that no plan is below the bound."""

    value: float
    time_s: float
    bound: float
    parts: int


def digest(data: Data) -> str:
    """Return the SHA-256 of data as sorted JSON, without the field that holds it."""
    kept = {key: value for key, value in data.items() if key != "sha256"}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def verify(plan: Data, c: Data) -> Verified:
    """Return what holds of a plan; `Refused` says what does not."""
    _require(c["schema"] == SCHEMA, f"schema: {c['schema']}, expected {SCHEMA}")
    _require(c["sha256"] == digest(c), "sha256: the certificate was changed")
    _require(c["plan_sha256"] == digest(plan), "plan_sha256: it is of another plan")
    value, time = _value(plan, c)
    found = bounds(c)
    _require(Fraction(c["bound"]) <= min(found), f"bound: {float(min(found))} follows")
    _require(c["bound"] <= value * (1 + CLOSE), "bound: it is above the plan's value")
    return Verified(float(value), float(time), c["bound"], len(found))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)


def _agree(what: str, stated: float, found: Fraction) -> None:
    close = abs(Fraction(stated) - found) <= CLOSE * abs(found)
    _require(close, f"{what}: {stated} is stated, {float(found)} follows")


def _value(plan: Data, c: Data) -> tuple[Fraction, Fraction]:
    """Return the largest value of an engine, and the seconds until the last engine has ended."""
    names, rows, values, times = list[str](), 0, list[Fraction](), list[Fraction]()
    engines = plan["engines"] if "engines" in plan else [{"rows": c["rows"], "plan": plan}]
    for engine, own in zip(engines, c["engines"], strict=True):
        loss, time = _of_engine(engine["plan"], c, own)
        times.append(-(-engine["rows"] // engine["plan"]["workload"]["batch"]) * time)
        values.append(times[-1] + Fraction(c["theta"]) * loss)
        names += [stage["device"] for stage in engine["plan"]["stages"]]
        rows += engine["rows"]
    known = {name for names in c["classes"] for name in names}
    _require(len(set(names)) == len(names) and set(names) <= known, "engines: their devices")
    _require(rows == c["rows"] == plan["workload"]["batch"], f"engines: {rows} rows in all")
    _agree("value", c["value"], max(values))
    if not any(own["step_by_step"] for own in c["engines"]):
        _agree("predicted.total_s", plan["predicted"]["total_s"], max(times))
    return max(values), max(times)


def _of_engine(plan: Data, c: Data, own: Data) -> tuple[Fraction, Fraction]:
    """Return the quality loss of an engine's plan, and its seconds for a wave."""
    t, work, stages = c["tables"][own["table"]], plan["workload"], Stages()
    job = work["batch"], work["kv"], plan["prefill_chunk"]
    _require(job == (t["batch"], t["kv"], t["chunk"]), f"workload, prefill_chunk: {job}")
    classes = {name: k for k, names in enumerate(t["classes"]) for name in names}
    at, loss = 0, Fraction(0)
    for stage, room in zip(plan["stages"], own["room"], strict=True):
        name, (start, end), bits = stage["device"], stage["layers"], stage["precisions"]
        _require(name in classes, f"stage {name}: no such device")
        _require(start == at < end, f"stage {name}: layers {start} to {end}, but {at} is next")
        _require(set(bits) <= set(c["choices"]), f"stage {name}: {bits} are not all allowed")
        choices, at = [c["choices"].index(x) for x in bits], end
        layers = list(zip(range(start, end), choices, strict=True))
        omega = [t["omega"][i][b] for i, b in layers]
        _require(None not in omega, f"stage {name}: a layer has bits that it may not have")
        size = sum(t["sizes"][t["layers"][i]][b] for i, b in layers)
        _require(size <= room, f"stage {name}: its layers take {size} bytes of {room}")
        weights = sum(own["weights"][i][b] for i, b in layers)
        _require(stage["memory"]["weights_bytes"] == weights, f"stage {name}: weights_bytes")
        loss += Fraction(sum(omega), UNIT)
        stages.append((classes[name], choices))
    _require(at == len(t["omega"]), f"stages: {at} of {len(t['omega'])} layers")
    within = c["budget"] is None or loss <= Fraction(c["budget"]) * (1 + CLOSE)
    _require(within, f"stages: a quality loss of {float(loss)} is above {c['budget']}")
    _agree("predicted.sum_omega", plan["predicted"]["sum_omega"], loss)
    time = _time(plan, c["gen_len"], t, own, stages)
    if not own["step_by_step"]:
        _agree("predicted.total_s", plan["predicted"]["total_s"], time)
    return loss, time


def _time(plan: Data, n: int, t: Data, own: Data, stages: Stages) -> Fraction:
    """Return the seconds of a wave by F."""
    slow, way, back, counts = list[int](), list[int](), list[int](), list[int]()
    for phase in PHASES:
        (x,) = (one for one in t[phase] if one["size"] == plan[f"{phase}_microbatch"])
        total, held = (
            [sum(x[name][k][b] for b in choices) for k, choices in stages]
            for name in ("layer", "held_layer")
        )
        for end in (0, -1):
            total[end] += x["ends"][stages[end][0]][end]
            held[end] += x["held_ends"][stages[end][0]][end]
        hops = [x["hop"][a][b] for (a, _), (b, _) in pairwise(stages)]
        slow.append(max(held + own[phase]["messages_held"]))
        way.append(sum(total + hops))
        back.append(own[phase]["way_back"])
        counts.append(x["count"])
    w = TermCounts(n, *counts)
    units = w.a * slow[0] + way[0] + back[0] + w.bd * slow[1] + w.ws * way[1] + w.back * back[1]
    return Fraction(units + w.z * max(w.md * slow[1], way[1] + back[1]), UNIT)


class TermCounts:
    """A, Bd, wS and Z of n tokens a request, mp steps of prefill, md of a token of all requests."""

    def __init__(self, n: int, mp: int, md: int) -> None:
        self.md, self.a, self.bd = md, mp - 1, md - 1 if n > 1 else 0
        self.back = max(0, n - 2) if md == 1 else 0
        self.ws, self.z = int(n > 1) + self.back, max(0, n - 2) - self.back


def bounds(c: Data) -> list[Fraction]:
    """Return the bounds of all parts of all proofs; the least is one of all sets of engines.

    With fewer of its devices, or for more rows, an engine takes no less. So an engine that ends
    below the least bound of all proofs does fewer rows than any proof of its devices, or of more,
    is about; disjoint engines that do so many rows at most cannot do all.
    """
    if not c["proofs"]:  # by what a row takes at least in all layers on each device
        pairs = zip(c["classes"], c["row"], strict=True)
        return [c["rows"] / sum(Fraction(len(names) * UNIT, row) for names, row in pairs)]
    found, waves = list[Fraction](), dict[tuple[Vector, int], set[int]]()
    for proof in c["proofs"]:
        t, number = c["tables"][proof["table"]], proof["waves"]
        names = {name for own in t["classes"] for name in own}
        v = tuple(len(names.intersection(own)) for own in c["classes"])
        waves.setdefault((v, proof["rows"]), set()).add(number)
        _require(t["batch"] == -(-proof["rows"] // number), f"proofs: {t['batch']} rows a wave")
        found += bounds_of(c, proof)
    for (_, n), own in waves.items():
        _require(own == set(range(1, min(c["most_waves"], n) + 1)), f"proofs: {own} waves")
    counts = tuple(map(len, c["classes"]))
    vectors = product(*(range(n + 1) for n in counts)) if c["exactly"] != 1 else [counts]
    rows = {
        v: min([c["rows"], *(n - 1 for own, n in waves if all(map(int.__le__, v, own)))])
        for v in vectors
    }
    most = most_rows(counts, rows, c["exactly"])
    _require(most < c["rows"], f"proofs: engines may do {most} of {c['rows']} rows")
    return found


def most_rows(counts: Vector, rows: Mapping[Vector, int], exactly: int | None) -> int:
    """Return the most rows of disjoint engines, `exactly` so many or any number of them."""

    @cache
    def most(left: Vector, engines: int | None) -> int:
        if engines == 0:
            return 0
        fewer = None if engines is None else engines - 1
        able = [v for v in rows if any(v) and all(map(int.__le__, v, left))]
        ways = [rows[v] + most(tuple(map(int.__sub__, left, v)), fewer) for v in able]
        return max(ways, default=0 if engines is None else -NEVER)

    return most(counts, exactly)


def bounds_of(c: Data, proof: Data) -> list[Fraction]:
    """Return the bound of every pair of sizes, in seconds, by the multipliers named for it."""
    t, found = c["tables"][proof["table"]], list[Fraction]()
    for x in (*t["prefill"], *t["decode"]):
        each = -(-t["batch"] // x["size"])  # of a chunk of prompts, or of a token
        _require(x["count"] % each == 0 < x["count"], f"tables: {x['count']} steps for all rows")
    pairs = product(zip(t["prefill"], t["room"], strict=True), t["decode"])
    for ((pre, room), dec), which in zip(pairs, proof["of_pairs"], strict=True):
        m = proof["multipliers"][which]
        relaxed = Relaxed(c, proof, m, room, (pre, dec))
        bound = relaxed.of_stages() if m["path"] else relaxed.of_layers()
        found.append(Fraction(proof["waves"] * bound, UNIT * PRICE))
    return found


class Relaxed:
    """F of an engine's plans of a pair of sizes, as its multipliers m make it a sum over layers."""

    def __init__(self, c: Data, proof: Data, m: Data, room: Any, pair: tuple[Data, Data]) -> None:
        self.t = t = c["tables"][proof["table"]]
        self.room, self.pair, self.memory = room, pair, m["memory"]
        self.counts, self.kinds = tuple(map(len, t["classes"])), range(len(t["classes"]))
        most = max(m["kappa"], *(sum(map(int.__mul__, self.counts, m[x])) for x in PHASES))
        least = min(m["kappa"], m["loss"], *m["memory"], *m["prefill"], *m["decode"])
        _require(least >= 0 and most <= PRICE, "proof: a multiplier is out of its range")
        w = TermCounts(c["gen_len"], *(x["count"] for x in pair))
        self.once = PRICE, w.ws * PRICE + (PRICE - m["kappa"]) * w.z
        slowest = w.a * PRICE, w.bd * PRICE + m["kappa"] * w.z * w.md
        own = zip((m[phase] for phase in PHASES), slowest, strict=True)
        self.slow = [[share * weight // PRICE for share in shares] for shares, weight in own]
        free = c["budget"] is None
        self.loss = floor(Fraction(c["theta"]) / proof["waves"] * PRICE) if free else m["loss"]
        budget = 0 if free else floor(Fraction(c["budget"]) * (1 + 10 * CLOSE) * UNIT) + 1
        self.spare = self.loss * budget
        self.ends = [[self._cost("ends", k, end) for end in (0, 1)] for k in self.kinds]

    def _cost(self, name: str, k: int, b: int) -> int:
        """Return what a layer with choice b, or an end, adds to F on a device of a class."""
        return sum(
            once * x[name][k][b] + slow[k] * x[f"held_{name}"][k][b]
            for x, once, slow in zip(self.pair, self.once, self.slow, strict=True)
        )

    def _layers(self, kinds: Sequence[int]) -> list[int]:
        """Return what each layer costs at least on devices of these classes."""
        choices, prices = range(len(self.t["sizes"][0])), self.memory
        times = {k: [self._cost("layer", k, b) for b in choices] for k in kinds}
        costs = [
            [min(times[k][b] + prices[k] * own[b] for k in kinds) for b in choices]
            for own in self.t["sizes"]
        ]
        layers = zip((costs[kind] for kind in self.t["layers"]), self.t["omega"], strict=True)
        both = (zip(cost, omega, strict=True) for cost, omega in layers)
        return [min(x + self.loss * w for x, w in own if w is not None) for own in both]

    def of_layers(self) -> int:
        """Bound all plans: each layer on the device where it is cheapest."""
        total = sum(self._layers(self.kinds)) - self.spare
        total += sum(min(own[end] for own in self.ends) for end in (0, 1))
        for k, n in enumerate(self.counts):
            total -= n * self.memory[k] * max(0, *(x for own in self.room[k] for x in own))
        return total

    def of_stages(self) -> int:
        """Bound all plans: a shortest path over stages, of no more devices than there are."""
        layers = len(self.t["omega"])
        costs = [[0, *accumulate(self._layers([k]))] for k in self.kinds]
        sizes = [0, *accumulate(min(self.t["sizes"][kind]) for kind in self.t["layers"])]
        hops = list(zip(self.pair, self.once, strict=True))

        @cache
        def rest(i: int, left: Vector, last: int) -> int:
            """Return the least cost of the layers from i on, behind a stage of class `last`."""
            least = NEVER if i < layers else 0
            for k, j in product(self.kinds, range(i + 1, layers + 1)):
                room = self.room[k][i == 0][j == layers]
                if left[k] and sizes[j] - sizes[i] <= room:
                    own = costs[k][j] - costs[k][i] - self.memory[k] * room
                    own += self.ends[k][0] * (i == 0) + self.ends[k][1] * (j == layers)
                    own += sum(once * x["hop"][last][k] for x, once in hops if i)
                    fewer = (*left[:k], left[k] - 1, *left[k + 1 :])
                    least = min(least, own + rest(j, fewer, k))
            return least

        return rest(0, self.counts, -1) - self.spare

"""Checks a plan against its certificate: a small program of the standard library alone.

A certificate (planner/solving/certificate.py writes it) has tables of what layers, messages and
memory take, which are taken as given, and a tree that divides all plans into parts, whose value is

    F = A P + Bd D + sum tp + hops + wS S + Z max(md D, S + way back) + theta sum omega

(planner/evaluate/objective.py). Each part has multipliers. P and D, the slowest stages' times, are
at least any weighted mean of all stages'; max(md D, S) is at least kappa md D + (1 - kappa) S;
bytes above a device's memory have a price, as has a loss above the budget (a Lagrangian
relaxation). What is left is a sum over layers, each at its cheapest choice: of all devices together
(for any micro-batch sizes), or of a shortest path over stages (one pair of sizes, P and D in a
range).

Where several engines share a job, there is such a tree for each of some engines: it proves how many
rows that engine cannot do within the bound. Disjoint engines then do fewer rows than the job has.

Seconds are whole numbers of 1/UNIT, multipliers of 1/PRICE, both rounded so that a bound stays one.

c: a certificate.  v: a variant, its tables for one KV precision and prompt chunk.  k: a class of
devices.  i: a layer.  b: a choice of bits.  eta, xi: places of a prefill and a decode size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from math import floor, prod
from typing import Any

UNIT, PRICE, NEVER = 2**80, 2**40, 2**200
"""Units of a second, and of a multiplier of 1; the units that stand for impossible."""
CLOSE = Fraction(1, 10**9)
"""Relative difference that sums of floats may have for being rounded in another order."""
MOST_WAVES = 4
"""Waves in which an engine may run its rows."""
MOST_STATES = 64
"""Counts of devices used up to which a path knows them; of more, each device is paid for."""
Data = Mapping[str, Any]
Range = tuple[int, int | None]


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


def verify(plan: Data, certificate: Data) -> Verified:
    """Return what holds of a plan; `Refused` says what does not."""
    c = certificate
    _require(c["sha256"] == digest(c), "sha256: the certificate was changed")
    _require(c["plan_sha256"] == digest(plan), "plan_sha256: it is of another plan")
    value, time, bounds = Fraction(0), Fraction(0), list[int]()
    if "engines" in plan:
        value, time = _engines(plan, c)
        bounds = [topology_bound(c)]
        if c["proofs"]:
            parts, proven = engine_bounds(c)
            bounds = [max(bounds[0], proven)] * parts
    else:
        value, time = _value(plan, c)
        for variant, tree in zip(c["variants"], c["proof"], strict=True):
            bounds += bounds_of(Tables(c, variant), tree)
    proven, bound = min(bounds), Fraction(c["bound"])
    _require(bound * UNIT <= proven, f"bound: {c['bound']} is stated, {proven / UNIT} follows")
    _require(bound <= value * (1 + CLOSE), "bound: it is above the plan's value")
    return Verified(float(value), float(time), c["bound"], len(bounds))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)


def _agree(what: str, stated: float, found: Fraction) -> None:
    close = abs(Fraction(stated) - found) <= CLOSE * abs(found)
    _require(close, f"{what}: {stated} is stated, {float(found)} follows")


def _engines(plan: Data, c: Data) -> tuple[Fraction, Fraction]:
    """Return the value of engines that share a job, and the seconds until the last has ended."""
    names, rows, values = list[str](), 0, list[tuple[Fraction, Fraction]]()
    known = {name for one in c["classes"] for name in one["devices"]}
    for engine, own in zip(plan["engines"], c["engines"], strict=True):
        waves = -(-engine["rows"] // engine["plan"]["workload"]["batch"])
        value, time = _value(engine["plan"], own)
        loss = value - time
        values.append((waves * time + loss, waves * time))
        names += [stage["device"] for stage in engine["plan"]["stages"]]
        rows += engine["rows"]
        same = own["gen_len"] == c["gen_len"] and own["budget"] == c["budget"]
        _require(same and own["theta"] == c["theta"], "engines: planned for another job")
    _require(len(set(names)) == len(names) and set(names) <= known, "engines: their devices")
    _require(rows == c["rows"] == plan["workload"]["batch"], f"engines: {rows} rows in all")
    worst, last = max(values)[0], max(time for _, time in values)
    _agree("value", c["value"], worst)
    if not any(own["plan"]["step_by_step"] for own in c["engines"]):
        _agree("predicted.total_s", plan["predicted"]["total_s"], last)
    return worst, last


def topology_bound(c: Data) -> int:
    """Bound all sets of engines: every row passes every layer on the device quickest for it.

    A step of more rows takes no less, and a row of it no more, so sizes between those of the table
    take as long as the one below in as many steps as the one above needs.
    """
    speeds = Fraction(0)
    for k, one in enumerate(c["classes"]):
        rows = list[Fraction]()
        for steps in c["steps"]:
            ends = [*(size - 1 for size in steps["sizes"][1:]), c["rows"]]
            _require(steps["sizes"][0] == 1, "steps: the smallest has one row")
            _require(all(x < y for x, y in pairwise(steps["sizes"])), "steps: sizes ascend")
            row = [
                sum(
                    passes
                    * min(Fraction(of[k][b]) / end for of, end in zip(table, ends, strict=True))
                    for passes, table in zip(steps["passes"], steps["seconds"], strict=True)
                )
                for b in range(len(c["choices"]))
            ]
            rows.append(min(row) * steps["layers"])
        speeds += len(one["devices"]) / Fraction(min(rows))
    return floor(c["rows"] / speeds * UNIT)


def engine_bounds(c: Data) -> tuple[int, int]:
    """Return how many parts the proofs have, and a bound of all sets of engines.

    A proof says: an engine of these devices takes at least so long for so many rows. With fewer of
    the devices, or for more rows, an engine takes no less. So an engine that ends below the least
    bound of all proofs does fewer rows than any proof of its devices, or of more, is about; if
    disjoint engines that do so many rows at most cannot do all, no set of engines is below it.
    """
    classes = {name: k for k, one in enumerate(c["classes"]) for name in one["devices"]}
    counts = [len(one["devices"]) for one in c["classes"]]
    least, parts, fewer = NEVER, 0, list[tuple[tuple[int, ...], int]]()
    for proof in c["proofs"]:
        own = [0] * len(counts)
        names = [name for one in proof["classes"] for name in one["devices"]]
        for name in dict.fromkeys(names):
            own[classes[name]] += 1
        fewer.append((tuple(own), proof["rows"] - 1))
        needed = min(MOST_WAVES, proof["rows"])
        _require(len(proof["waves"]) == needed, f"proofs: {needed} numbers of waves")
        for waves, one in enumerate(proof["waves"], 1):
            found = _wave_bounds({**c, **proof, "theta": c["theta"] / waves}, one, waves)
            parts, least = parts + len(found), min(least, waves * min(found))
    rows = {
        v: min([c["rows"], *(n for own, n in fewer if all(map(int.__le__, v, own)))])
        for v in product(*(range(n + 1) for n in counts))
    }
    most = most_rows(tuple(counts), rows, c["exactly"])
    _require(most < c["rows"], f"proofs: engines may do {most} of {c['rows']} rows")
    return parts, least


def _wave_bounds(c: Data, one: Data, waves: int) -> list[int]:
    """Return the bounds of all parts of the tree of one wave: an engine's rows, over `waves`."""
    batch, found = -(-c["rows"] // waves), list[int]()
    for v, tree in zip(one["variants"], one["proof"], strict=True):
        for phase in ("prefill", "decode"):
            wrong = [x for x in v[phase] if x["count"] % -(-batch // x["size"])]
            _require(not wrong, f"proofs: counts of {phase} for {batch} rows")
        found += bounds_of(Tables(c, v), tree)
    return found


def most_rows(
    counts: tuple[int, ...], rows: Mapping[tuple[int, ...], int], exactly: int | None
) -> int:
    """Return the most rows that disjoint engines do, of so many devices of each class.

    `exactly`: how many engines; None: any number.
    """
    states = list(rows)
    best = dict.fromkeys(states, 0)
    for _ in range(sum(counts) if exactly is None else exactly):
        ways = best
        best = {
            state: max(
                (
                    rows[v] + ways[tuple(map(int.__sub__, state, v))]
                    for v in states
                    if any(v) and all(map(int.__le__, v, state))
                ),
                default=-NEVER,
            )
            for state in states
        }
        if exactly is None:
            best = {state: max(best[state], ways[state]) for state in states}
            if best == ways:
                break
    return best[counts]


def _value(plan: Data, c: Data) -> tuple[Fraction, Fraction]:
    """Return the value of one pipeline by the tables, and its seconds."""
    own, kv = c["plan"], plan["workload"]["kv"]
    found = [v for v in c["variants"] if (v["kv"], v["chunk"]) == (kv, plan["prefill_chunk"])]
    _require(len(found) == 1, "prefill_chunk, workload.kv: no variant has them")
    (v,), at, loss, stages = found, 0, Fraction(0), list[tuple[int, list[int]]]()
    classes = {name: k for k, one in enumerate(c["classes"]) for name in one["devices"]}
    for j, stage in enumerate(plan["stages"]):
        name, (start, end), bits = stage["device"], stage["layers"], stage["precisions"]
        _require(name in classes, f"stage {name}: no such device, or it has another stage")
        _require(start == at < end, f"stage {name}: layers {start} to {end}, but {at} is next")
        _require(len(bits) == end - start, f"stage {name}: {len(bits)} precisions")
        _require(set(bits) <= set(c["choices"]), f"stage {name}: {bits} are not all allowed")
        k, choices, at = classes.pop(name), [c["choices"].index(x) for x in bits], end
        layers = list(zip(range(start, end), choices, strict=True))
        omega = [v["omega"][i][b] for i, b in layers]
        _require(None not in omega, f"stage {name}: a layer has bits that it may not have")
        loss += sum(map(Fraction, omega))
        size = sum(v["layer_bytes"][i % len(v["layer_bytes"])][b] for i, b in layers)
        dense = {c["choices"][b].startswith("w16") for b in choices}
        sort = 2 if len(dense) == 2 else int(False in dense)  # all in 16 bits, none, some
        room = own["room"][k][j == 0][end == len(v["omega"])][sort]
        _require(size <= room, f"stage {name}: its layers take {size} bytes of {room}")
        memory = sum(c["weights"][i][b] for i, b in layers)
        _require(stage["memory"]["weights_bytes"] == memory, f"stage {name}: weights_bytes")
        stages.append((k, choices))
    _require(at == len(v["omega"]), f"stages: {at} of {len(v['omega'])} layers")
    time = _time(plan, c, v, stages)
    _agree("predicted.sum_omega", plan["predicted"]["sum_omega"], loss)
    _agree("predicted.total_s", plan["predicted"]["total_s"], Fraction(own["total_s"]))
    if not own["step_by_step"]:
        _agree("predicted.total_s", plan["predicted"]["total_s"], time)
    within = c["budget"] is None or loss <= Fraction(c["budget"]) * (1 + CLOSE)
    _require(within, f"stages: a quality loss of {float(loss)} is above {c['budget']}")
    value = time + (0 if c["budget"] is not None else Fraction(c["theta"]) * loss)
    if "value" in c:
        _agree("value", c["value"], value)
    return value, time


def _time(plan: Data, c: Data, v: Data, stages: Sequence[tuple[int, list[int]]]) -> Fraction:
    """Return the seconds of a job by F of a pipeline's stages: (class, choices of its layers)."""
    ring, ends = list(pairwise(k for k, _ in stages)), (stages[-1][0], stages[0][0])
    sums, slow, back = list[Fraction](), list[Fraction](), list[Fraction]()
    counts = list[int]()
    for number, phase in enumerate(("prefill", "decode")):
        size, hops = plan[f"{phase}_microbatch"], c["plan"][phase]
        found = [own for own in v[phase] if own["size"] == size]
        _require(len(found) == 1, f"{phase}_microbatch: {size} is not in the tables")
        held, own = [Fraction(hops["held_s"][a][b]) for a, b in ring], found[0]
        total = sum((Fraction(own["hop_s"][a][b]) for a, b in ring), Fraction(0))
        for j, (k, choices) in enumerate(stages):
            seconds = [
                sum(Fraction(own[key][k][b]) for b in choices)
                + (j == 0) * Fraction(own[key_ends][k][0])
                + (j == len(stages) - 1) * Fraction(own[key_ends][k][1])
                for key, key_ends in (("layer_s", "layer_ends_s"), ("held_s", "held_ends_s"))
            ]
            total, held = total + seconds[0], [*held, seconds[1]]
        if ring and c["gen_len"] > 1 + number:
            held.append(Fraction(hops["back_held_s"][ends[0]][ends[1]]))
        back.append(Fraction(hops["back_s"][ends[0]][ends[1]]) if ring else Fraction(0))
        sums, slow, counts = [*sums, total], [*slow, max(held)], [*counts, own["count"]]
    w = TermCounts(c["gen_len"], *counts)
    period = max(w.md * slow[1], sums[1] + back[1])
    once = w.a * slow[0] + sums[0] + (c["gen_len"] > 1) * back[0]
    return once + w.bd * slow[1] + w.ws * sums[1] + w.back * back[1] + w.z * period


class TermCounts:
    """How often each time counts in F: A, Bd, wS and Z, of n tokens a request.

    mp, md: steps of prefill, and of one token of all requests.
    """

    def __init__(self, n: int, mp: int, md: int) -> None:
        self.md, self.a, self.bd = md, mp - 1, md - 1 if n > 1 else 0
        self.back = max(0, n - 2) if md == 1 else 0
        self.ws, self.z = int(n > 1) + self.back, max(0, n - 2) - self.back


def units(data: Any) -> Any:
    """Return seconds, or lists of them, as whole numbers of 1/UNIT; NEVER for None."""
    if isinstance(data, list):
        return [units(one) for one in data]
    return NEVER if data is None else floor(Fraction(data) * UNIT)


class Tables:
    """A variant's costs in units; `losses` keeps priced losses by price, as parts share them."""

    def __init__(self, c: Data, v: Data) -> None:
        self.counts = [len(one["devices"]) for one in c["classes"]]
        self.dense = [choice.startswith("w16") for choice in c["choices"]]
        self.n, self.room, self.theta = c["gen_len"], v["room"], c["theta"]
        self.budget = None if c["budget"] is None else units(c["budget"] * (1 + 1e-8))
        self.omega, self.losses = units(v["omega"]), dict[int, list[list[int]]]()
        self.bytes = [v["layer_bytes"][i % len(v["layer_bytes"])] for i in range(len(self.omega))]
        self.sizes = [
            [{k: units(x) if k[-2:] == "_s" else x for k, x in one.items()} for one in v[phase]]
            for phase in ("prefill", "decode")
        ]
        self.states = prod(n + 1 for n in self.counts)


def bounds_of(tables: Tables, tree: Data) -> Iterator[int]:
    """Yield the bound of every part of a tree, in units.

    A node splits a range (of sizes, P or D) in two; a leaf has the multipliers of its part.
    """
    etas, xis = ((0, len(own)) for own in tables.sizes)
    waiting: list[tuple[Data, dict[str, Any]]] = [
        (tree, {"prefill": etas, "decode": xis, "P": (0, None), "D": (0, None)})
    ]
    while waiting:
        node, ranges = waiting.pop()
        if "split" in node:
            name = node["split"]
            (low, high), at = ranges[name], node["at"]
            at = units(at) if name in ("P", "D") else at
            _require(low < at and (high is None or at < high), f"proof: {name} at {node['at']}")
            waiting.append((node["low"], {**ranges, name: (low, at)}))
            waiting.append((node["high"], {**ranges, name: (at, high)}))
            continue
        for eta, xi in product(range(*ranges["prefill"]), range(*ranges["decode"])):
            part = Part(tables, node, eta, xi)
            path = node.get("path", False)
            yield part.of_stages(ranges["P"], ranges["D"]) if path else part.of_layers()


class Part:
    """A part at one pair of sizes: costs of layers and ends with the multipliers of the part."""

    def __init__(self, t: Tables, m: Data, eta: int, xi: int) -> None:
        self.t, self.room = t, t.room[eta]
        self.pre, self.dec = t.sizes[0][eta], t.sizes[1][xi]
        kappa, self.memory = floor(m["kappa"] * PRICE), units(m["memory"])
        loss = floor((t.theta if t.budget is None else m["loss"]) * PRICE)
        shares = [[floor(x * PRICE) for x in m[phase]] for phase in ("prefill", "decode")]
        signs = min(self.memory + shares[0] + shares[1]) >= 0 <= min(loss, kappa)
        _require(signs and kappa <= PRICE, "proof: a multiplier is out of its range")
        self.spare = 0 if t.budget is None else -loss * t.budget // PRICE
        w = TermCounts(t.n, self.pre["count"], self.dec["count"])
        self.s_weight = w.ws * PRICE + (PRICE - kappa) * w.z
        self.weights = w.a * PRICE, w.bd * PRICE + kappa * w.z * w.md
        self.slow = [
            [share * weight // PRICE for share in own]
            for own, weight in zip(shares, self.weights, strict=True)
        ]
        kinds = range(len(t.counts))
        self.times = [[self._priced(k, "", b) for b in range(len(t.dense))] for k in kinds]
        self.ends = [[self._priced(k, "_ends", end) for end in (0, 1)] for k in kinds]
        if loss not in t.losses:
            t.losses[loss] = [[loss * x // PRICE if x < NEVER else x for x in r] for r in t.omega]
        self.loss = t.losses[loss]

    def _priced(self, k: int, part: str, b: int) -> int:
        """Return what a layer ("") with choice b, or an end ("_ends"), adds to F on a device."""
        (p, held_p), (d, held_d) = (
            (one[f"layer{part}_s"][k][b], one[f"held{part}_s"][k][b])
            for one in (self.pre, self.dec)
        )
        slow = self.slow[0][k] * held_p + self.slow[1][k] * held_d
        return (PRICE * p + self.s_weight * d + slow) // PRICE

    def _over(self, phase: int, within: Range) -> int:
        """Return what prices above a weight cost: they are of stages no slower than the range."""
        paid = sum(n * x for n, x in zip(self.t.counts, self.slow[phase], strict=True))
        over = max(0, paid - self.weights[phase])
        _require(over == 0 or within[1] is not None, "proof: shares are above 1")
        return over * ((within[1] or 0) - within[0]) // PRICE + 1

    def _credit(self, k: int, low: Sequence[int]) -> int:
        """Return the most by which prices of its memory, P and D lower F where it has a stage."""
        most = max(0, *(x for a in self.room[k] for b in a for x in b))
        slow = self.slow[0][k] * low[0] + self.slow[1][k] * low[1]
        return int(self.memory[k] * most + slow // PRICE + 1)

    def of_layers(self) -> int:
        """Bound all plans of the pair: each layer where it is cheapest."""
        total, known = self.spare, dict[tuple[int, ...], list[int]]()
        for size, loss in zip(self.t.bytes, self.loss, strict=True):
            if (key := tuple(size)) not in known:
                kinds = list(zip(self.times, self.memory, strict=True))
                known[key] = [min(own[b] + x * r for own, x in kinds) for b, r in enumerate(size)]
            total += min(a + b for a, b in zip(known[key], loss, strict=True))
        total += sum(min(own[end] for own in self.ends) for end in (0, 1))
        total -= self._over(0, (0, None)) + self._over(1, (0, None))
        return total - sum(n * self._credit(k, (0, 0)) for k, n in enumerate(self.t.counts))

    def of_stages(self, p: Range, d: Range) -> int:
        """Bound the plans of the pair whose slowest stages are in these ranges: a shortest path."""
        t, layers, table, low = self.t, len(self.loss), self._stages(p, d), (p[0], d[0])
        kinds, counted = range(len(t.counts)), t.states <= MOST_STATES
        hops = [
            [
                self.pre["hop_s"][a][b] + self.s_weight * self.dec["hop_s"][a][b] // PRICE
                for b in kinds
            ]
            for a in kinds
        ]
        rents = [0 if counted else self._credit(k, low) for k in kinds]
        reached: list[dict[Any, int]] = [{} for _ in range(layers + 1)]
        reached[0][(0,) * len(t.counts), -1] = 0
        for i in range(layers):
            entered: dict[Any, int] = {}
            for (used, last), cost in reached[i].items():
                for k in kinds:
                    if used[k] < t.counts[k] and table[k][i]:
                        more = (*used[:k], used[k] + counted, *used[k + 1 :])
                        way = cost + rents[k] + (hops[last][k] if last >= 0 else 0)
                        entered[more, k] = min(way, entered.get((more, k), NEVER))
            for key, cost in entered.items():
                after = reached
                for j, own in table[key[1]][i]:
                    if cost + own < after[j].get(key, NEVER):
                        after[j][key] = cost + own
        best = min(reached[layers].values(), default=NEVER) + self.spare
        best -= sum(n * rent for n, rent in zip(t.counts, rents, strict=True))
        best += sum(w * x for w, x in zip(self.weights, low, strict=True)) // PRICE
        return best - self._over(0, p) - self._over(1, d)

    def _stages(self, p: Range, d: Range) -> list[list[list[tuple[int, int]]]]:
        """Return, of each class and first layer, where a stage may end, and its cost."""
        t, layers = self.t, len(self.loss)
        table: list[list[dict[int, int]]] = [[{} for _ in range(layers)] for _ in t.counts]
        for k, sort in product(range(len(t.counts)), range(3)):
            slow = self.slow[0][k] * p[0] + self.slow[1][k] * d[0]
            # `sort` as in `_value`: which choices a stage of that room may have.
            allowed = [b for b, own in enumerate(t.dense) if sort == 2 or own == (sort == 0)]
            sums, sizes, most = [0], [0], layers
            roomy = max(x[sort] for a in self.room[k] for x in a)
            for size, loss in zip(t.bytes, self.loss, strict=True):
                each = (self.times[k][b] + self.memory[k] * size[b] + loss[b] for b in allowed)
                sums.append(sums[-1] + min(each, default=NEVER))
                sizes.append(sizes[-1] + min((size[b] for b in allowed), default=0))
            for one, high in ((self.pre, p[1]), (self.dec, d[1])):
                quick = min((one["held_s"][k][b] for b in allowed), default=0)
                most = most if high is None else min(most, high // max(1, quick))
            for i in range(layers):
                for j in range(i + 1, min(layers, i + most) + 1):
                    room = self.room[k][i == 0][j == layers][sort]
                    if sums[j] - sums[i] >= NEVER or sizes[j] - sizes[i] > roomy:
                        break
                    if sizes[j] - sizes[i] <= room:
                        cost = sums[j] - sums[i] - self.memory[k] * room - slow // PRICE - 1
                        cost += self.ends[k][0] * (i == 0) + self.ends[k][1] * (j == layers)
                        table[k][i][j] = min(cost, table[k][i].get(j, NEVER))
        return [[list(own.items()) for own in kind] for kind in table]

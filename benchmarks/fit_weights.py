"""Fit steps of tiles to one form of weights, and say what the choice then loses.

    python benchmarks/fit_weights.py SEARCH.jsonl... --weights "bf16 zeros"
        [--rows 32] [--bm 32] [--write]

SEARCH comes from gemm_search.py with that form of weights. The constants of the machine stay as
fit_gemm.py found them; start, step and share of every form of `tile_kernel` that has three points
near the fastest of their product are fitted anew, each by itself. --write puts them into
step_times.json, in place of those of these weights.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from llmpq.devices.device_spec import canonical_kind, device_specs
from llmpq.kernels.gemm.config import Config
from llmpq.kernels.gemm.ranking import predict
from llmpq.kernels.gemm.ranking.candidates import TILE_FORMS, candidates
from llmpq.kernels.gemm.ranking.machine import REACHED, REFERENCE, Machine
from llmpq.kernels.gemm.ranking.predict import (
    Product,
    StepTime,
    bounds_us,
    form_key,
    resident,
    work,
)

TIMES = Path(predict.__file__).with_name("step_times.json")
REGISTERS = (96, 128, 168)
"""Of a thread: beside what is known of a form these are tried, and what fits best is kept: how many
programs a multiprocessor holds shows in the timings."""
NEAR = 2.5
"""Times the fastest of a product: slower ones are left out."""


@dataclass(frozen=True)
class Timing:
    """A configuration of a product on a machine; `near`: times the fastest."""

    product: Product
    machine: Machine
    config: Config
    us: float
    near: float


def machine_named(device: str) -> Machine:
    """Return a Hopper card's attributes: bandwidth by its name."""
    bandwidth = device_specs()[canonical_kind(device)].mem_gbps * 1e9
    return replace(REFERENCE, bandwidth=min(REFERENCE.bandwidth, bandwidth * REACHED))


def timings(paths: list[Path], weights: str, rows: set[int]) -> list[Timing]:
    """Return all timings of tiles."""
    names, found = {f.name for f in fields(Config)}, []
    for path in paths:
        for row in map(json.loads, path.read_text().splitlines()):
            if row.get("weights") != weights or (rows and row["m"] not in rows):
                continue
            product = Product(row["bits"], row["n"], row["k"], row["m"], weights)
            machine = machine_named(row["device"])
            right = [c for c in row["configs"] if "wrong" not in c]
            least = min(c["us"] for c in right)
            for c in right:
                config = Config(**{k: v for k, v in c.items() if k in names})
                if config.kernel == "tile" and config.x_stages == 1:
                    near = c["us"] / least
                    found.append(Timing(product, machine, config, c["us"], near))
    return found


def expected(timing: Timing, time: StepTime) -> float:
    """Return the model's microseconds."""
    t, registers = timing, time.of(timing.product.form)
    made = work(t.config, t.product, t.machine, resident(t.config, t.product, t.machine, registers))
    return bounds_us(t.config, t.product, t.machine, time, made)


def fitted(points: list[Timing], registers: int) -> tuple[StepTime, float]:
    """Return a form's times, and the spread of what they miss."""
    weights = points[0].product.form

    def made(logs: np.ndarray) -> StepTime:
        start, step, share = map(float, np.exp(logs))
        return StepTime(start, step, share, {weights: registers})

    def missed(logs: np.ndarray) -> list[float]:
        time = made(logs)
        return [math.log(expected(p, time) / p.us) * math.exp(-2.5 * (p.near - 1)) for p in points]

    found = least_squares(
        missed, np.log([0.3, 0.7, 0.18]), bounds=(np.log([0.02, 0.1, 0.03]), np.log([4, 3, 1])),
        loss="soft_l1", f_scale=0.05,
    )  # fmt: skip
    return made(found.x), float(np.std(missed(found.x)))


def best_fit(points: list[Timing]) -> tuple[StepTime, float]:
    """Return `fitted` with the registers that fit best, those already known first."""
    config, form = points[0].config, points[0].product.form
    known = predict.step_time(config, points[0].product.bits)
    tried = dict.fromkeys(([known.of(form)] if known else []) + list(REGISTERS))
    return min((fitted(points, registers) for registers in tried), key=lambda found: found[1])


def losses(points: list[Timing], forms: dict[str, StepTime]) -> None:
    """Print what the model chooses of every product among what was timed, and what it loses."""
    by_product: dict[tuple[Product, Machine], list[Timing]] = defaultdict(list)
    for p in points:
        by_product[p.product, p.machine].append(p)
    for (product, machine), timed in by_product.items():
        known = set(candidates(product, machine))
        of = [
            (expected(t, forms[form_key(t.config, product.bits)]), t)
            for t in timed
            if t.config in known and form_key(t.config, product.bits) in forms
        ]
        if of:
            us, t = min(of, key=lambda pair: pair[0])
            name = f"{form_key(t.config, product.bits)} split {t.config.split}"
            print(f"{product.k}x{product.n} m={product.rows}: {name}, {t.us:.1f} us "
                  f"(expected {us:.1f}), {t.near:.2f} of the fastest")  # fmt: skip


def main() -> None:
    """Fit, report, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("search", type=Path, nargs="+")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--rows", default="", help="rows of x, all if left out")
    parser.add_argument("--bm", type=int, help="tiles of so many rows of x alone")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    points = timings(args.search, args.weights, {int(m) for m in args.rows.split(",") if m})
    known = {form_key(config, 4) for config in TILE_FORMS if args.bm in (None, config.bm)}
    forms: dict[str, StepTime] = {}
    for form in sorted(known):
        near = [p for p in points if form_key(p.config, 4) == form and p.near < NEAR]
        if len(near) >= 3:
            forms[form], spread = best_fit(near)
            print(f"{form}: {len(near)} points, misses {spread:.3f}: {forms[form]}")
    losses(points, forms)
    if args.write:
        table = json.loads(TIMES.read_text())
        kept = [
            e
            for e in table["forms"]
            if (e["form"] not in forms, e.get("weights")) != (False, args.weights)
        ]
        new = [
            {"form": form, "weights": args.weights, "start_us": round(t.start_us, 4),
             "step_us": round(t.step_us, 4), "share_us": round(t.share_us, 4),
             "registers": t.registers}
            for form, t in forms.items()
        ]  # fmt: skip
        head = json.dumps({k: v for k, v in table.items() if k != "forms"})[:-1]
        lines = ",\n".join("  " + json.dumps(e) for e in kept + new)
        TIMES.write_text(f'{head}, "forms": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

"""Fit the model of the machine to timings of every configuration; say what its choice loses.

    python benchmarks/gemm_model.py fit SEARCH.jsonl... [--registers FILE] [--write] [--out ROWS]

SEARCH comes from `gemm_model.py search`. Fitted are start, step and share of every form and a few
rates; points near the fastest of their product count most, and to expect less time than was
measured counts more than to expect more: a configuration is chosen for being expected fast.
`--held-out` leaves a third of the shapes out of the fit and reports on them alone.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from lib.rows import write_row
from scipy.optimize import least_squares

from llmpq.kernels.gemm.ranking import predict
from llmpq.kernels.gemm.ranking.candidates import GLUON_FORMS, ROWS_FORMS, TILE_FORMS, candidates
from llmpq.kernels.gemm.ranking.config import Config
from llmpq.kernels.gemm.ranking.machine import REFERENCE
from llmpq.kernels.gemm.ranking.predict import (
    Product,
    StepTime,
    expected_us,
    form_key,
    past_the_end,
    resident,
    work,
)
from llmpq.kernels.gemm.ranking.wgmma_plan import tile_rows

TIMES = Path(predict.__file__).with_name("step_times.json")
CONSTANTS = {
    "launch_us": 2.0, "gemv_launch_us": 2.0, "split_us": 0.5, "l2": 20e12, "gemv_more": 0.05,
    "wgmma_launch_us": 1.0,
    "wgmma_l2": 6.2e12, "wgmma_read": 1.5, "cut_us": 3.0, "share_bytes_us": 0.05,
    "sharer_us": 0.5, "again_rate": 3.0,
}  # fmt: skip
Key = tuple[int, int, int, int]


def timings(paths: list[Path]) -> dict[Key, dict[Config, float]]:
    """Return microseconds by product (bits, k, n, rows) and configuration."""
    names = {f.name for f in fields(Config)}
    found: dict[Key, dict[Config, float]] = defaultdict(dict)
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            for c in row["configs"]:
                if "wrong" not in c:
                    config = Config(**{k: v for k, v in c.items() if k in names})
                    key = (row["bits"], row["k"], row["n"], row["m"])
                    found[key][config] = c["us"]
    return found


def product_of(key: Key) -> Product:
    """Return the product of a key."""
    bits, k, n, rows = key
    return Product(bits, n, k, rows)


class Fit:
    """One kernel's forms: features of every timing, parameters, the fit."""

    def __init__(self, kernel: str, measured: dict[Key, dict[Config, float]], registers: Any):
        self.kernel, self.registers = kernel, registers
        known = {*TILE_FORMS, *GLUON_FORMS, *ROWS_FORMS[4], *ROWS_FORMS[8]}
        known_keys = {form_key(c, b) for c in known for b in (4, 8)}
        self.points = [
            (key, config, us, us / min(of.values()))
            for key, of in measured.items()
            for config, us in of.items()
            if config.kernel == kernel and form_key(config, key[0]) in known_keys
        ]
        self.points = [p for p in self.points if p[3] < 4]
        self.forms = sorted({form_key(c, key[0]) for key, c, _, _ in self.points})
        place = {form: i for i, form in enumerate(self.forms)}
        self.of = np.array([place[form_key(c, key[0])] for key, c, _, _ in self.points])
        self.us = np.array([us for _, _, us, _ in self.points])
        self.near = np.array([near for *_, near in self.points])
        self.x = np.array([self._features(key, c) for key, c, _, _ in self.points])

    def _features(self, key: Key, config: Config) -> list[float]:
        product, r = product_of(key), 1
        if self.kernel != "wgmma_gemm":
            r = resident(config, product, REFERENCE, self._registers(form_key(config, key[0])))
        made = work(config, product, REFERENCE, max(1, r))
        one = tile_rows(config) * config.bm * 4 if self.kernel == "wgmma_gemm" else 0
        return [
            made.steps, made.turns, made.issued, made.l2_bytes, made.again_bytes, made.pieces,
            made.sharers, product.moved_bytes, key[3], config.split > 1, one,
            past_the_end(config, product.rows),
        ]  # fmt: skip

    def _registers(self, form: str) -> int:
        return int(self.registers.get(form, {}).get("fp16", 128))

    def times(self, p: Any) -> Any:
        """Return the model's times, as predict.bounds_us has them."""
        n, sharp = len(self.forms), predict.SHARPNESS
        g, (a, s, u) = np.exp(p[:6]), (np.exp(p[6 + i * n : 6 + (i + 1) * n])[self.of]
                                       for i in range(3))  # fmt: skip
        steps, turns, issued, l2, again, pieces, sharers, moved, rows, split, one, past = self.x.T
        bandwidth = REFERENCE.bandwidth / 1e6
        if self.kernel == "wgmma_gemm":
            launch, read, cut, per_byte, sharer, rate = g
            body = (issued * s * past + turns * a, moved / (bandwidth * read), l2 / 6.2e6)
            more = np.where(pieces > 0, cut + pieces * one / (per_byte * 1e6)
                            + sharer * np.maximum(0, sharers - 1) * one / 65536, 0)  # fmt: skip
            more = more + again / (bandwidth * rate)
        else:
            launch, split_us, rows_more = g[:3]
            grow = 1 + rows_more * (rows - 1) if self.kernel == "gemv" else 1.0
            body = (turns * (a + steps * s * grow), issued * u * grow, moved / bandwidth, l2 / 20e6)
            more = split_us * split
        return launch + sum(b**sharp for b in body) ** (1 / sharp) + more

    def run(self, inside: Any) -> tuple[dict[str, float], dict[str, StepTime]]:
        """Fit to the points whose key `inside` accepts."""
        n = len(self.forms)
        start = (
            [1.0, 1.5, 3.0, 0.05, 0.5, 3.0]
            if self.kernel == "wgmma_gemm"
            else [2.0, 0.5, 0.05, 1, 1, 1]
        )
        p0 = np.log([*start, *[1.0] * n, *[0.5] * n, *[0.15] * n])
        weight = np.exp(-2.5 * (self.near - 1))
        use = np.array([inside(key) for key, *_ in self.points])

        def residuals(p: Any) -> Any:
            error = np.log(self.times(p) / self.us)
            error *= np.where(error < 0, np.maximum(weight, 0.5), weight)
            return np.concatenate([error[use], 0.01 * (p - p0)])

        p = least_squares(residuals, p0, max_nfev=100).x
        near = use & (self.near < 1.3)
        spread = np.std(np.log(self.times(p) / self.us)[near])
        print(f"{self.kernel}: {use.sum()} points, rms {spread:.3f}")
        for i, form in enumerate(self.forms):
            its = near & (self.of == i)
            if its.any():
                print(
                    f"  {form}: {np.std(np.log(self.times(p) / self.us)[its]):.3f} of {its.sum()}"
                )
        g = [float(v) for v in np.exp(p[:6])]
        names = [
            "wgmma_launch_us",
            "wgmma_read",
            "cut_us",
            "share_bytes_us",
            "sharer_us",
            "again_rate",
        ]
        constants = dict(zip(names, g, strict=True))
        if self.kernel == "splitk_gemm":
            constants = {"launch_us": g[0], "split_us": g[1]}
        elif self.kernel == "gemv":
            constants = {"gemv_launch_us": g[0], "gemv_more": g[2]}
        values = np.exp(p[6:]).reshape(3, n)
        forms = {
            form: StepTime(*(round(float(values[j, i]), 4) for j in range(3)),
                           self.registers.get(form, {}))
            for i, form in enumerate(self.forms)
        }  # fmt: skip
        return constants, forms


def regrets(
    measured: dict[Key, dict[Config, float]], inside: Any
) -> list[tuple[float, Key, Config]]:
    """Return what the model's choice among the measured configurations loses, worst first."""
    found = []
    for key, of in measured.items():
        if not inside(key):
            continue
        product = product_of(key)
        allowed = [c for c in candidates(product, REFERENCE) if c in of]
        allowed = allowed or [c for c in of if expected_us(c, product, REFERENCE) < 1e9]
        choice = min(allowed, key=lambda c: expected_us(c, product, REFERENCE))
        found.append((of[choice] / min(of.values()) - 1, key, choice))
    return sorted(found, key=lambda f: -f[0])


def main(words: list[str], program: str) -> int:
    """Fit, report, and write the times if asked."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("search", type=Path, nargs="+")
    parser.add_argument("--registers", type=Path, help="JSON: form -> {weight form: registers}")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--write", action="store_true", help="write step_times.json")
    parser.add_argument("--rows", action="store_true", help="append rows of the choice's loss")
    args = parser.parse_args(words)
    measured = timings(args.search)
    old = json.loads(TIMES.read_text()) if TIMES.exists() else {"forms": []}
    apart = [e for e in old["forms"] if "weights" in e]  # of d2231297:benchmarks/fit_weights.py
    registers = {e["form"]: e.get("registers", {}) for e in old["forms"] if e not in apart}
    if args.registers:
        registers |= json.loads(args.registers.read_text())
    shapes = sorted({key[1:3] for key in measured})
    out = set(shapes[::3]) if args.held_out else set()
    constants, forms = dict(CONSTANTS), {}
    for kernel in ("rows", "tile", "gluon"):
        c, f = Fit(kernel, measured, registers).run(lambda key: key[1:3] not in out)
        constants |= c
        forms |= f
    predict._table.cache_clear()
    every = {(form, None): t for form, t in forms.items()}
    predict._table = lambda: (constants, every)  # type: ignore[assignment]
    found = regrets(measured, lambda key: key[1:3] in out or not out)
    loss = np.array([f[0] for f in found])
    p50, p90 = np.quantile(loss, 0.5), np.quantile(loss, 0.9)
    print(f"{len(loss)} products: loss p50 {p50:.3f}, p90 {p90:.3f}, most {loss.max():.3f}")
    for lost, key, choice in found[:12]:
        bits, k, n, rows = key
        how = f"{form_key(choice, bits)} split {choice.split} cut {choice.cut}"
        print(f"  {lost:.2f} w{bits} {k}x{n} m={rows} {how}")
    if args.rows:
        for name, value in (("p50", p50), ("p90", p90)):
            case = {"loss": name, "held_out": args.held_out, "products": len(loss)}
            write_row(
                "gemm_choice.jsonl", bench="gemm_choice", case=case, unit="share",
                samples=[float(value)], device="NVIDIA H200",
            )  # fmt: skip
    if args.write:
        entries = [
            {"form": form, "start_us": t.start_us, "step_us": t.step_us, "share_us": t.share_us,
             **({"registers": t.registers} if t.registers else {})}
            for form, t in sorted(forms.items())
        ] + apart  # fmt: skip
        rounded = {k: float(f"{v:.4g}") for k, v in constants.items()}
        lines = ",\n".join("  " + json.dumps(e) for e in entries)
        head = json.dumps({"schema": 1, "reference": "NVIDIA H200", "constants": rounded})[:-1]
        TIMES.write_text(f'{head}, "forms": [\n{lines}\n]}}\n')
    return 0

"""Speculation on one GPU at a large model's shape.

    python benchmarks/speculation_gpu.py --target w16a16 --modes w4kv4 kv4 ngram --auto --rows FILE

Weights are dummies, so nothing a draft says would agree with the verifier: acceptance is replayed
at rates measured on trained models, and prompts are not computed (speculation_replay.py).
Everything else is the engine as it serves: scheduler, loop, graphs.

    c, v     draft step and verify over a plain decode step, each a replayed graph; of n-grams, c is
             the look-up, shared out over the drafts it brings
    S        (1 - a^(gamma+1)) / (1 - a) / (gamma c + v)
    value    tokens/s of the engine from its 4th round to the end of the first request
    auto     the automatic choice and the best fixed length in turn, on the same verdicts; the row's
             `best_fixed` is of these runs

Weights are made once, a batch's caches once for all contexts, a mode's graphs once a batch. Rows
that the file has already are not measured again: a run that was cut off is taken up where it ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.speculation_bed import TIMED_ROUNDS, Bed, Target, Times, collect
from lib.speculation_replay import ROOM, add_arguments, measured_acceptance

from llmpq.kernels.gpu_timing import write_row
from llmpq.runtime.drafts.drafters import AutoDrafter, FixedDrafter
from llmpq.speculation import PRIOR_ACCEPTANCE, WORTHWHILE, expected_tokens

TURNS = 3
"""Runs of the automatic choice, and of the best fixed length beside it."""
FEW_ROUNDS = 12
"""Of a run that captures graphs."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One batch, context, mode and acceptance: what is measured together."""

    bed: Bed
    times: Times
    plain: Sequence[float]
    acceptance: float
    fully: bool
    """Several lengths and the automatic choice; else the best length alone."""
    case: dict[str, object]

    @property
    def base(self) -> float:
        """Tokens/s without drafts."""
        return statistics.median(self.plain)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--modes", nargs="+", default=["w4kv4"], help="how drafts are made")
    parser.add_argument("--kv", default="kv16", help="the target's cache")
    parser.add_argument("--atom", action="store_true", help="w4a16: Atom's weights, for QSpec's A4")
    parser.add_argument(
        "--lengths", type=int, default=2, help="fixed lengths at the first acceptance"
    )
    parser.add_argument("--auto", action="store_true", help="the automatic choice there, too")
    parser.add_argument("--seconds", type=float, help="begin nothing after so long")
    parser.add_argument("--layers", type=int, help="as many only, to compile kernels; no result")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Measure one target over batches, modes and contexts; append the rows."""
    started_s = time.perf_counter()
    target = Target.build(args)
    done = cases_of(Path(args.rows))
    print(f"{target.name}: loaded in {time.perf_counter() - started_s:.1f} s", flush=True)
    for batch, contexts in args.grid:
        bed = Bed(target=target, batch=batch, max_len=max(contexts) + ROOM)
        plain = {context: (bed.plain_s(context), bed.plain_rate(context)) for context in contexts}
        for mode in args.modes:
            bed.speculate(mode)
            for cell in cells(args, bed, plain):
                if args.seconds and time.perf_counter() - started_s > args.seconds:
                    return
                if key(cell.case) not in done:
                    measure_cell(args, cell)
        del bed
        collect()


def cells(
    args: argparse.Namespace, bed: Bed, plain: dict[int, tuple[float, list[float]]]
) -> Iterator[Cell]:
    """Yield what a mode is measured at, its steps timed at each context."""
    target, mode = bed.target, bed.mode
    assert mode is not None
    for context, (plain_s, samples) in plain.items():
        times = bed.times(context, plain_s)
        for name in args.acceptance:
            own = name == "measured"
            case: dict[str, object] = {
                "model": target.spec.name,
                "mode": f"{mode} on {target.name}",
                "batch": bed.batch,
                "context": context,
                "dtype": target.dtype,
                "acceptance": name,
                "weights": "dummy, acceptance replayed",
            }
            rate = measured_acceptance(mode, target.name.split()[0]) if own else float(name)
            yield Cell(
                bed=bed,
                times=times,
                plain=samples,
                acceptance=rate,
                fully=name == args.acceptance[0],
                case=case,
            )


def measure_cell(args: argparse.Namespace, cell: Cell) -> None:
    """Measure the most promising fixed lengths, then the automatic choice."""
    bed, times, base, acceptance = cell.bed, cell.times, cell.base, cell.acceptance
    assert bed.mode is not None
    fixed: dict[int, float] = {0: base}
    for gamma in args.gammas or times.best(acceptance, args.lengths if cell.fully else 1):
        drafter = FixedDrafter(bed.mode, gamma)
        tokens = expected_tokens(acceptance, gamma)
        bed.rate(drafter, times.context, acceptance, tokens, FEW_ROUNDS)
        samples = bed.rate(drafter, times.context, acceptance, tokens)
        fixed[gamma] = statistics.median(samples)
        c, v = times.ratios(gamma)
        s = times.speedup(acceptance, gamma)
        beside = {"rate": acceptance, "c": c, "v": v, "S": s, "plain_step_ms": times.plain_s * 1e3}
        add(args, "speculation_gpu", cell.case | {"gamma": gamma}, samples, base, beside, s * base)
        print(
            f"{cell.case['mode']} b{bed.batch} ctx{times.context} a {acceptance:.3f} gamma {gamma}:"
            f" c {c:.3f} v {v:.3f} S {s:.2f}, got {fixed[gamma] / base:.3f}x "
            f"({fixed[gamma] / base / s:.1%} of S, {min(samples) / base:.3f}..), plain {base:.0f} "
            f"tok/s (step {times.plain_s * 1e3:.2f} ms, loop {bed.batch / base * 1e3:.2f})",
            flush=True,
        )
    if args.auto and cell.fully:
        measure_auto(args, cell, fixed)


def measure_auto(args: argparse.Namespace, cell: Cell, fixed: dict[int, float]) -> None:
    """Measure what the engine chooses by itself; it starts from what its mode usually accepts."""
    bed, times, base = cell.bed, cell.times, cell.base
    assert bed.mode is not None
    lengths = times.steps.lengths
    drafter = AutoDrafter(
        bed.mode,
        times.steps,
        lengths=lengths,
        corners=times.steps.corners,
        clock=time.perf_counter,
    )
    usual = PRIOR_ACCEPTANCE[bed.mode]
    fastest = max(fixed, key=lambda gamma: fixed[gamma])
    pays = max(times.speedup(usual, gamma) for gamma in lengths) > WORTHWHILE
    pays = pays or bed.mode == "ngram"  # tried where it does not seem to
    samples, beside = list(cell.plain), [fixed[fastest]]
    if pays:  # else the engine is started without drafts
        tokens = expected_tokens(cell.acceptance, fastest or max(fixed))

        def run(one: FixedDrafter, rounds: int = TIMED_ROUNDS) -> list[float]:
            return bed.rate(one, times.context, cell.acceptance, tokens, rounds)

        run(drafter, 2 * FEW_ROUNDS)  # captures graphs, learns
        drafter.chosen.clear()
        samples, beside = [], []
        for _ in range(TURNS):
            samples += run(drafter)
            best = FixedDrafter(bed.mode, fastest) if fastest else None
            beside += bed.plain_rate(times.context) if best is None else run(best)
    got, best_rate = statistics.median(samples), statistics.median(beside)
    add(args, "speculation_auto", cell.case, samples, base, {"best_fixed": best_rate}, None)
    print(
        f"    auto {drafter.chosen if pays else 'off'} (a {drafter.estimate:.3f}"
        f"{', given up' if drafter.in_vain else ''}): "
        f"{got / base:.3f}x, {got / best_rate:.3f} of the best fixed length ({fastest})",
        flush=True,
    )


def add(
    args: argparse.Namespace,
    bench: str,
    case: dict[str, object],
    samples: Sequence[float],
    plain: float,
    beside: dict[str, float],
    predicted: float | None,
) -> None:
    """Append a row."""
    row: dict[str, Any] = {"bench": bench, "case": case, "unit": "tokens/s", "samples": samples}
    beside = {"plain": plain} | beside
    how = {"commit": args.commit, "program": f"python benchmarks/{Path(sys.argv[0]).name}"}
    write_row(Path(args.rows), **row, **how, baselines=beside, predicted=predicted)


def cases_of(rows: Path) -> set[str]:
    """Return the cells that a result file has fixed lengths of."""
    if not rows.exists():
        return set()
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    cases = [row["case"] for row in found if row["bench"] == "speculation_gpu"]
    return {key({k: v for k, v in case.items() if k != "gamma"}) for case in cases}


def key(case: dict[str, object]) -> str:
    """Return a case as text."""
    return json.dumps(case, sort_keys=True)


if __name__ == "__main__":
    main(parse())

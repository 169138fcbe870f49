"""Predicted against measured layer times at shapes the profile has not seen.

    python benchmarks/layer_fidelity.py --model llama-3.1-8b --cluster c.yaml --costs costs.json

For every device kind of the cluster that is here: draws workloads (precision, phase, an odd
micro-batch from 3 on, a prompt or cache length) inside the profiled ranges, times each as the
profiler does (on a GPU from a CUDA graph: the device's time, in both phases), and compares with the
costs. Writes two rows a kind: mean and 95th percentile of the
absolute relative error, in percent.

    python benchmarks/layer_fidelity.py --recorded samples.jsonl

Takes the samples that a profile kept instead of timing anything: micro-batches of 12, 24 and 48 and
prompts of 1.5 * 2^k tokens are left out of the fit, and predicted. Harder than the above, which
fits all of them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmpq.cluster import Cluster, Device
from llmpq.cost_model import CostModel, LatencyEntry, Phase
from llmpq.kernels.timing import write_row
from llmpq.profiler.links import gpus_of
from llmpq.profiler.messages import Case, Sample, Sampling, Target, model_spec
from llmpq.profiler.processes import Group, set_up_for
from llmpq.profiler.session import devices_here, fit_entry

RESULTS = Path(__file__).parent / "results" / "fidelity.jsonl"
LEAST_TOKENS = 16
LEAST_UNSEEN = 10
"""Left out samples that make a target worth comparing."""


class Compared(NamedTuple):
    """One workload: what the costs say and what it takes."""

    case: Case
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative error, signed."""
        return self.predicted_s / self.measured_s - 1


def main() -> None:
    """Compare every kind and write its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="directory, or a built-in name")
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--costs", type=Path, help="the profile to check")
    parser.add_argument("--recorded", type=Path, help="samples of a profile, instead of timing")
    parser.add_argument("--device", help="only this device kind")
    parser.add_argument("--workloads", type=int, default=50, help="of each kind (default 50)")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of one prefill")
    parser.add_argument("--seconds", type=float, default=0.02, help="of repeats a workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    if args.recorded is not None:
        for kind, (machine, compared) in recorded(args.recorded).items():
            report(args, kind, compared, machine)
        return
    if args.costs is None or args.cluster is None:
        parser.error("give --cluster and --costs, or --recorded")
    costs = CostModel.load_json(args.costs)
    for device in devices_here(Cluster.load(args.cluster), args.device):
        drawn = draw(costs, device, args.workloads, args.max_tokens, args.seed)
        compared = time_all(args.model, device, costs, drawn, args.seconds)
        report(args, device.profile_kind, compared)


def recorded(path: Path) -> dict[str, tuple[str, list[Compared]]]:
    """Return, by device kind, where it was timed and the samples left out of a fit, predicted."""
    lines = path.read_text().splitlines()
    samples = [Sample.parse_data(json.loads(line), where=str(path)) for line in lines]
    of_target: dict[Target, list[Sample]] = {}
    for sample in samples:
        if sample.case.target.part == "layer":
            of_target.setdefault(sample.case.target, []).append(sample)
    found: dict[str, tuple[str, list[Compared]]] = {}
    for target, its in of_target.items():
        unseen = [s for s in its if left_out(s.case)]
        if len(unseen) < LEAST_UNSEEN:
            continue
        entry = fit_entry(target, [s for s in its if not left_out(s.case)])
        machine = its[0].conditions.machine
        found.setdefault(target.device_kind, (machine, []))[1].extend(
            Compared(s.case, entry.device_s(v=s.case.v, length=s.case.length), s.timing.seconds)
            for s in unseen
        )
    return found


def left_out(case: Case) -> bool:
    """Whether a recorded sample is predicted, not fitted."""
    if case.target.phase is Phase.DECODE:
        return case.v in (12, 24, 48)
    tokens = case.new_tokens
    return tokens >= 384 and tokens % 3 == 0 and (tokens // 3).bit_count() == 1


def draw(costs: CostModel, device: Device, count: int, max_tokens: int, seed: int) -> list[Case]:
    """Return workloads inside the ranges of the device's layer entries, one precision's together.

    Half are prompts, half decode steps, precisions in turn.
    """
    entries = [
        e
        for e in costs.entries
        if e.device_kind == device.profile_kind
        and e.part == "layer"
        and e.phase is not Phase.VERIFY
        and e.source == "profile"
    ]
    if not entries:
        raise SystemExit(f"the costs hold no measured layer of {device.profile_kind}")
    rng = random.Random(seed)
    found = [_draw_one(rng, entries[i % len(entries)], max_tokens) for i in range(count)]
    return sorted(found, key=lambda case: (case.target.precision.value, case.target.title))


def _draw_one(rng: random.Random, entry: LatencyEntry, max_tokens: int) -> Case:
    assert entry.sampled_v is not None and entry.sampled_length is not None
    low, high = (max(LEAST_TOKENS, entry.sampled_length[0]), entry.sampled_length[1])
    target = Target(
        device_kind=entry.device_kind,
        part="layer",
        phase=entry.phase,
        precision=entry.precision,
        kv=entry.kv,
        dtype=entry.dtype,
    )
    knots = {tokens for regime in entry.regimes for tokens, _ in regime.curve}
    while True:
        v = rng.randrange(3, max(4, entry.sampled_v[1]), 2)
        length = round(low * (high / low) ** rng.random())
        most = max_tokens if entry.phase is Phase.PREFILL else 16 * max_tokens
        seen = entry.phase is Phase.DECODE and v in knots
        if v * length <= most and not seen:
            return Case(target=target, v=v, length=length)


def time_all(
    model: str, device: Device, costs: CostModel, drawn: Sequence[Case], seconds: float
) -> list[Compared]:
    """Time the workloads in a process that has the device."""
    set_up = set_up_for(
        device, model, sampling=Sampling(), rest_s=0.0, seconds_per_case=seconds, min_repeats=3
    )
    gpus: Sequence[int | None] = (None,) if device.spec.is_cpu else gpus_of(device)
    found = []
    with Group(set_up, copies=1, gpus=gpus) as group:
        print(f"{device.profile_kind} on {group.ready.machine}")
        for case in drawn:
            target = case.target
            entry = costs.find(
                target.device_kind,
                phase=target.phase,
                precision=target.precision,
                kv=target.kv,
                dtype=target.dtype,
            )
            assert entry is not None
            predicted_s = entry.device_s(v=case.v, length=case.length)
            found.append(Compared(case, predicted_s, group.time(case).seconds))
    return found


def report(
    args: argparse.Namespace, kind: str, compared: Sequence[Compared], machine: str | None = None
) -> None:
    """Print the workloads that are off most, and write the rows."""
    errors = np.abs([c.error for c in compared])
    worst = sorted(compared, key=lambda c: -abs(c.error))[:5]
    for c in worst:
        print(
            f"  {c.case.target.title} {c.case.v}x{c.case.length}: predicted "
            f"{1e6 * c.predicted_s:.1f} us, measured {1e6 * c.measured_s:.1f} us ({c.error:+.1%})"
        )
    spec = model_spec(args.model)
    precisions = sorted({c.case.target.precision.value for c in compared})
    dtype = compared[0].case.target.dtype
    figures = {"mean": float(errors.mean()), "p95": float(np.quantile(errors, 0.95))}
    print(f"{kind}: " + ", ".join(f"{k} {v:.1%}" for k, v in figures.items()))
    for statistic, value in figures.items():
        write_row(
            args.rows,
            bench="fidelity_layer",
            case={
                "model": spec.name,
                "kind": kind,
                "statistic": statistic,
                "workloads": len(compared),
                "unseen": "left out of the fit" if args.recorded else "drawn",
                "precisions": " ".join(precisions),
                "dtype": dtype,
            },
            unit="%",
            samples=[100 * value],
            commit=args.commit,
            device=machine,
            program="python benchmarks/layer_fidelity.py",
        )


if __name__ == "__main__":
    main()

"""Predicted against measured layer times at shapes the profile has not seen.

    python benchmarks/layer_fidelity.py --model llama-3.1-8b --cluster c.yaml --costs costs.json

For every device kind of the cluster that is here: draws workloads (precision, phase, an odd
micro-batch from 3 on, a prompt or cache length) inside the profiled ranges, times each as the
profiler does (on a GPU from a CUDA graph: the device's time, in both phases), and compares with the
costs. Decode steps have micro-batches that were not timed at any length. Writes two rows a kind:
mean and 95th percentile of the absolute relative error, in percent.

    python benchmarks/layer_fidelity.py --recorded drawn.jsonl --samples profile.samples.jsonl

Compares workloads that an earlier run kept (`--record drawn.jsonl`) instead of timing any, with the
costs or, as here, with a fit of the samples that a profile kept; needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmpq.cluster import Cluster, Device
from llmpq.cost_model import CostModel, LatencyEntry, Phase
from llmpq.kernels.gpu_timing import write_row
from llmpq.profiler.timing.cases import (
    Conditions,
    Sample,
    Sampling,
    Target,
    TimedCase,
    model_spec,
)
from llmpq.profiler.timing.host_links import gpus_of
from llmpq.profiler.timing.profile_host import devices_here, fit_entry, padded_to
from llmpq.profiler.timing.sample_file import SampleLog
from llmpq.profiler.timing.worker_processes import Group, set_up_for

RESULTS = Path(__file__).parent / "results" / "fidelity.jsonl"
LEAST_TOKENS = 16


class Compared(NamedTuple):
    """One workload: what it takes and what the costs say."""

    sample: Sample
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error, signed."""
        return self.predicted_s / self.sample.timing.seconds - 1


def main() -> None:
    """Compare every kind and write its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="directory, or a built-in name")
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--costs", type=Path, help="the profile to check")
    parser.add_argument("--samples", type=Path, help="its samples, to be fitted anew")
    parser.add_argument("--record", type=Path, help="where to append the timed workloads")
    parser.add_argument("--recorded", type=Path, help="workloads of a --record, not timed anew")
    parser.add_argument("--device", help="only this device kind")
    parser.add_argument("--workloads", type=int, default=50, help="of each kind (default 50)")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of one prefill")
    parser.add_argument("--seconds", type=float, default=0.02, help="of repeats a workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    if (args.costs is None) == (args.samples is None):
        parser.error("give --costs or --samples")
    if args.cluster is None and args.recorded is None:
        parser.error("give --cluster or --recorded")
    costs = fitted(args.samples) if args.costs is None else CostModel.load_json(args.costs)
    if args.recorded is not None:
        for kind, samples in recorded(args.recorded).items():
            if kind in costs.device_kinds:
                report(args, kind, compare(costs, samples))
        return
    for device in devices_here(Cluster.load(args.cluster), args.device):
        drawn = draw(costs, device, args.workloads, args.max_tokens, args.seed)
        samples = []
        with SampleLog(args.record or os.devnull) as kept:
            for sample in time_all(args.model, device, drawn, args.seconds):
                kept.append(sample)
                samples.append(sample)
        report(args, device.profile_kind, compare(costs, samples))


def recorded(path: Path) -> dict[str, list[Sample]]:
    """Return the workloads of a file by device kind."""
    found: dict[str, list[Sample]] = {}
    for line in path.read_text().splitlines():
        sample = Sample.parse_data(json.loads(line), where=str(path))
        found.setdefault(sample.case.target.device_kind, []).append(sample)
    return found


def fitted(path: Path) -> CostModel:
    """Return the layers' costs that a profile's samples make."""
    of_target: dict[Target, list[Sample]] = {}
    for samples in recorded(path).values():
        for sample in samples:
            if sample.case.target.part == "layer":
                of_target.setdefault(sample.case.target, []).append(sample)
    conditions = next(iter(of_target.values()))[0].conditions
    return CostModel(
        model=path.stem,
        model_fingerprint=conditions.model_fingerprint,
        entries=tuple(fit_entry(target, its) for target, its in of_target.items()),
    )


def compare(costs: CostModel, samples: Sequence[Sample]) -> list[Compared]:
    """Return what the costs say of each sample."""
    found = []
    for sample in samples:
        case, target = sample.case, sample.case.target
        entry = costs.find(
            target.device_kind,
            phase=target.phase,
            precision=target.precision,
            kv=target.kv,
            dtype=target.dtype,
        )
        assert entry is not None, f"the costs have no {target.title}"
        found.append(Compared(sample, entry.device_s(v=case.v, length=case.length)))
    return found


def draw(
    costs: CostModel, device: Device, count: int, max_tokens: int, seed: int
) -> list[TimedCase]:
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
    # As the profiler goes: decode before prompts, fewest tokens first.
    return sorted(
        found,
        key=lambda case: (
            case.target.precision.value,
            case.target.phase is Phase.PREFILL,
            case.new_tokens,
        ),
    )


def _draw_one(rng: random.Random, entry: LatencyEntry, max_tokens: int) -> TimedCase:
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
            return TimedCase(target=target, v=v, length=length)


def time_all(
    model: str, device: Device, drawn: Sequence[TimedCase], seconds: float
) -> Iterator[Sample]:
    """Time the workloads in a process that has the device."""
    set_up = set_up_for(
        device, model, sampling=Sampling(), rest_s=0.0, seconds_per_case=seconds, min_repeats=3
    )
    gpus: Sequence[int | None] = (None,) if device.spec.is_cpu else gpus_of(device)
    with Group(set_up, copies=1, gpus=gpus) as group:
        conditions = Conditions(
            model_fingerprint=model_spec(model).fingerprint(),
            machine=group.ready.machine,
            copies=1,
            padded_to=padded_to(device),
        )
        for case in drawn:
            yield Sample(conditions=conditions, case=case, timing=group.time(case))


def report(args: argparse.Namespace, kind: str, compared: Sequence[Compared]) -> None:
    """Print errors by target and the workloads that are off most, and write the rows."""
    errors = np.abs([c.error for c in compared])
    targets = sorted({c.sample.case.target.title for c in compared})
    for title in targets:
        its = np.abs([c.error for c in compared if c.sample.case.target.title == title])
        print(f"  {title}: {len(its)} workloads, mean {its.mean():.1%}, largest {its.max():.1%}")
    for c in sorted(compared, key=lambda c: -abs(c.error))[:5]:
        case, measured_s = c.sample.case, c.sample.timing.seconds
        print(
            f"  {case.target.title} {case.v}x{case.length}: predicted "
            f"{1e6 * c.predicted_s:.1f} us, measured {1e6 * measured_s:.1f} us ({c.error:+.1%})"
        )
    spec = model_spec(args.model)
    precisions = sorted({c.sample.case.target.precision.value for c in compared})
    dtype = compared[0].sample.case.target.dtype
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
                "unseen": "drawn",
                "precisions": " ".join(precisions),
                "dtype": dtype,
            },
            unit="%",
            samples=[100 * value],
            commit=args.commit,
            device=compared[0].sample.conditions.machine,
            program="python benchmarks/layer_fidelity.py",
        )


if __name__ == "__main__":
    main()

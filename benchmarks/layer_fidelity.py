"""Predicted against measured times at shapes and of jobs that the profile has not seen.

    python benchmarks/layer_fidelity.py --model llama-3.1-8b --cluster c.yaml --costs costs.json

For every device kind of the cluster that is here: draws workloads (precision, KV bits, phase, an
odd micro-batch from 3 on, a prompt's chunk or a cache length) inside the profiled ranges, times
each as the profiler does, and compares with the costs. Decode steps have micro-batches that were
not timed at any length. Writes two rows a kind: mean and 95th percentile of the absolute relative
error, in percent.

    python benchmarks/layer_fidelity.py --cluster clusters/h200x1.yaml --profile --workloads 64 \
        --kv kv16,kv4 --jobs 16 --out fidelity-out

Profiles first, what it finds kept in `--out`, and `--jobs` of drawn sizes are planned with the
profile and run by `llmpq-dist bench` with random weights, on one device of the cluster or on all: a
row a job, predicted and measured, and their mean error.

    python benchmarks/layer_fidelity.py --recorded drawn.jsonl --samples profile.samples.jsonl

Compares workloads that an earlier run kept (`--record drawn.jsonl`) instead of timing any, with the
costs or, as here, with a fit of the samples that a profile kept; needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase
from llmpq.devices.cluster import Cluster, Device, DeviceGroup
from llmpq.kernels.gpu_timing import write_row
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.profiler.timing.cases import (
    Effort,
    Sample,
    Sampling,
    Target,
    TimedCase,
    model_spec,
)
from llmpq.profiler.timing.host_links import gpus_of
from llmpq.profiler.timing.profile_host import conditions_of, devices_here, fit_entry
from llmpq.profiler.timing.sample_file import SampleLog
from llmpq.profiler.timing.worker_processes import Group, set_up_for

RESULTS = Path(__file__).parent / "results" / "fidelity.jsonl"
LEAST_TOKENS = 16
BEHIND_SHARE = 0.3
"""Of drawn prompts: chunks that stand behind other tokens."""


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
    parser.add_argument("--profile", action="store_true", help="profile the cluster first")
    parser.add_argument("--out", type=Path, default=Path("fidelity-out"), help="files of --profile")
    parser.add_argument("--quick", action="store_true", help="a quick profile")
    parser.add_argument("--bits", default="16,8,4,3", help="of --profile and of jobs")
    parser.add_argument("--kv", default="kv16", help="KV precisions of --profile and of jobs")
    parser.add_argument("--max-batch", type=int, default=64, help="of --profile and of jobs")
    parser.add_argument("--max-len", type=int, default=4096, help="of --profile and of jobs")
    parser.add_argument("--jobs", type=int, default=0, help="whole jobs to plan and run")
    parser.add_argument("--most-gen", type=int, default=128, help="new tokens of a job at most")
    parser.add_argument("--backend", help="of jobs: processes, threads or ray")
    args = parser.parse_args()
    if args.profile:
        args.costs, args.record = profile(args), args.record or args.out / "drawn.jsonl"
    if (args.costs is None) == (args.samples is None):
        parser.error("give --costs, --samples or --profile")
    if args.cluster is None and args.recorded is None:
        parser.error("give --cluster or --recorded")
    costs = (
        fitted(args.samples, model_spec(args.model))
        if args.costs is None
        else CostModel.load_json(args.costs)
    )
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
    if args.jobs:
        run_jobs(args, costs)


def profile(args: argparse.Namespace) -> Path:
    """Profile the cluster's devices that are here; return the costs' file."""
    args.out.mkdir(parents=True, exist_ok=True)
    path: Path = args.out / "costs.json"
    quick = ["--quick"] if args.quick else []
    run(
        "llmpq.profiler", "--model", args.model, "--cluster", str(args.cluster), "--bits",
        args.bits, "--kv", args.kv, "--max-batch", str(args.max_batch), "--max-len",
        str(args.max_len), "-o", str(path), *quick,
    )  # fmt: skip
    return path


def run_jobs(args: argparse.Namespace, costs: CostModel) -> None:
    """Plan and run drawn jobs, write a row each, and print their mean error."""
    rng, cluster = random.Random(args.seed + 1), Cluster.load(args.cluster)
    dtype = costs.entries[0].dtype
    errors = []
    for number in range(args.jobs):
        clusters = [(1, first_device(cluster))]
        if len(cluster.devices) > 1:
            clusters.append((len(cluster.devices), cluster))
        devices, used = clusters[number % len(clusters)]
        described = args.out / f"cluster-{devices}.yaml"
        args.out.mkdir(parents=True, exist_ok=True)
        # JSON is YAML.
        described.write_text(json.dumps(used.model_dump(mode="json", by_alias=True)))
        batch, kv = _log_drawn(rng, 1, args.max_batch), rng.choice(args.kv.split(","))
        gen = _log_drawn(rng, 4, args.most_gen)
        prompt = _log_drawn(rng, 16, args.max_len - gen)
        bits = rng.choice([*args.bits.split(","), args.bits])
        path = args.out / f"plan-{number}.json"
        run(
            "llmpq.planner", "--model", args.model, "--cluster", str(described), "--costs",
            str(args.costs), "--dtype", dtype, "--batch", str(batch), "--prompt-len", str(prompt),
            "--gen-len", str(gen), "--kv", kv, "--bits", bits, "--theta", "0.01", "-o", str(path),
        )  # fmt: skip
        plan = Plan.load(path)
        assert plan.predicted is not None
        backend = [] if args.backend is None else ["--backend", args.backend]
        said = run(
            "llmpq.runtime", "bench", "--plan", str(path), "--model", args.model, "--load-format",
            "dummy", "--repeat", "3", "--json", *backend,
        )  # fmt: skip
        found = json.loads(said[said.index("{") :])
        samples = [batch * gen / rate for rate in found["output_throughputs"]]
        # Other programs only add time to a CPU's; a GPU is alone.
        on_cpu = all(stage.is_cpu for stage in plan.stages)
        measured_s = (min if on_cpu else statistics.median)(samples)
        prefill_s = (min if on_cpu else statistics.median)(found["prefill_ms"]) / 1e3
        errors.append(plan.predicted.total_s / measured_s - 1)
        print(
            f"  {len(plan.stages)} stages, batch {batch} (micro-batches {plan.prefill_microbatch} "
            f"and {plan.decode_microbatch}, chunks {plan.prefill_chunk}), {prompt}/{gen}, {kv}, "
            f"{bits}: measured {measured_s:.3f} s (prefill {prefill_s:.3f}), predicted "
            f"{plan.predicted.total_s:.3f} ({plan.predicted.prefill_s:.3f}): {errors[-1]:+.1%}",
            flush=True,
        )
        write_row(
            args.rows,
            bench="fidelity_job",
            case={
                "model": model_spec(args.model).name, "stages": len(plan.stages), "batch": batch,
                "prompt": prompt, "gen": gen, "kv": kv, "bits": bits, "dtype": dtype,
            },
            unit="s",
            samples=samples,
            predicted=plan.predicted.total_s,
            commit=args.commit,
            device=costs.versions.get(plan.stages[0].profile_kind, plan.stages[0].kind),
            program="python benchmarks/layer_fidelity.py",
        )  # fmt: skip
    print(f"{len(errors)} jobs: mean error {np.abs(errors).mean():.1%}")


def first_device(cluster: Cluster) -> Cluster:
    """Return a cluster of the first device alone."""
    node, kind = cluster.nodes[0], cluster.devices[0].kind
    group = (node.devices or (DeviceGroup(kind=kind),))[0].model_copy(update={"count": 1})
    alone = node.model_copy(update={"devices": (group,), "accelerators": None})
    return Cluster(name="one", nodes=(alone,))


def _log_drawn(rng: random.Random, low: int, high: int) -> int:
    return round(low * (max(low, high) / low) ** rng.random())


def run(module: str, *arguments: str) -> str:
    """Run a command; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{module} ended with code {done.returncode}; its reason stands above")
    return done.stdout


def recorded(path: Path) -> dict[str, list[Sample]]:
    """Return the workloads of a file by device kind."""
    found: dict[str, list[Sample]] = {}
    for line in path.read_text().splitlines():
        sample = Sample.parse_data(json.loads(line), where=str(path))
        found.setdefault(sample.case.target.device_kind, []).append(sample)
    return found


def fitted(path: Path, spec: ModelSpec) -> CostModel:
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
        entries=tuple(fit_entry(target, its, spec) for target, its in of_target.items()),
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
        if target.phase is Phase.PREFILL:
            predicted_s = entry.chunk_s(v=case.v, start=case.start, length=case.length)
        else:
            predicted_s = entry.seconds(v=case.v, length=case.length, q_len=case.q_len)
        found.append(Compared(sample, predicted_s))
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
        length = _log_drawn(rng, low, high)
        start = 0
        if entry.phase is Phase.PREFILL and rng.random() < BEHIND_SHARE:
            start = rng.randrange(high)
            length = _log_drawn(rng, low, max(low, high - start))
        most = max_tokens if entry.phase is Phase.PREFILL else 16 * max_tokens
        seen = entry.phase is Phase.DECODE and v in knots
        if v * length <= most and start + length <= high and not seen:
            return TimedCase(target=target, v=v, length=length, start=start)


def time_all(
    model: str, device: Device, drawn: Sequence[TimedCase], seconds: float
) -> Iterator[Sample]:
    """Time the workloads in a process that has the device."""
    set_up = set_up_for(
        device, model, sampling=Sampling(), effort=Effort(seconds=seconds, min_repeats=3)
    )
    gpus: Sequence[int | None] = (None,) if device.spec.is_cpu else gpus_of(device)
    with Group(set_up, copies=1, gpus=gpus) as group:
        conditions = conditions_of(
            device, model_spec(model), group.ready.machine, sampling=Sampling()
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

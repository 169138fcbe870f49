"""Results of `llmpq-dist bench`: the median job's report, and rows for `benchmarks/results`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmpq.kernels.gpu_timing import write_row
from llmpq.plans.plan import Plan


def read_baselines(words: Sequence[str]) -> dict[str, float]:
    """Return tokens/s by engine of `--baseline NAME=VALUE`; `ValueError` for anything else."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not (name and math.isfinite(rate) and rate > 0):
            raise ValueError(
                f"--baseline '{word}': expected NAME=VALUE, another engine's tokens/s, such as "
                "vllm=1234.5"
            )
        if name in found:
            raise ValueError(f"--baseline names '{name}' twice; leave one of them out")
        found[name] = rate
    return found


def summary(reports: Sequence[dict[str, Any]], *, num_jobs: int) -> dict[str, Any]:
    """Return the report of the median job, with every job's throughput and times.

    Drafts are counted over all `num_jobs` jobs, warm-ups too: what they learned of acceptance
    chooses the lengths of later ones.
    """
    ordered = sorted(reports, key=lambda report: report["output_throughput"])
    median = ordered[(len(ordered) - 1) // 2]
    steps = median["workload"]["gen_len"] - 1
    prefill_ms = [1e3 * report["measured"]["prefill_s"] for report in reports]
    decode_ms = (
        [1e3 * report["measured"]["decode_s"] / steps for report in reports] if steps else []
    )
    speculation = median["speculation"]
    if speculation is not None:
        own = {key: speculation[key] for key in ("time_share", "plain")}
        speculation = reports[-1]["speculation"] | own | {"counted_jobs": num_jobs}
    return median | {
        "speculation": speculation,
        "recoveries": reports[-1].get("recoveries", []),
        "output_throughputs": [report["output_throughput"] for report in reports],
        "prefill_ms": prefill_ms,
        "decode_step_ms": decode_ms,
    }


def add_rows(
    path: Path,
    case: Mapping[str, Any],
    report: Mapping[str, Any],
    plan: Plan,
    baselines: Mapping[str, float],
    commit: str | None,
) -> None:
    """Append the job's rows, all or none: output tokens a second, the times of its two phases.

    With drafts also the share that was accepted; a plan's predicted decoding is without drafts and
    is not put beside the measured one.
    """
    drafts, predicted = report["speculation"], plan.predicted
    plainly = predicted if drafts is None else None
    per_step = 1e3 / max(1, plan.workload.gen_len - 1)
    accepted, expected_share = [], None
    if drafts is not None:
        accepted = [drafts["acceptance"]] if drafts["acceptance"] is not None else []
        if plan.speculation is not None and plan.speculation.mode == drafts["mode"]:
            expected_share = plan.speculation.acceptance
        if drafts["plain"] is not None:
            baselines = {**baselines, "plain": drafts["plain"]["output_throughput"]}
    rows = (
        ("e2e", "tok/s", report["output_throughputs"], plainly and plainly.output_tokens_per_s),
        ("e2e_prefill", "ms", report["prefill_ms"], predicted and 1e3 * predicted.prefill_s),
        ("e2e_step", "ms", report["decode_step_ms"], plainly and plainly.decode_s * per_step),
        ("e2e_acceptance", "of drafts", accepted, expected_share),
    )
    size = path.stat().st_size if path.exists() else None
    try:
        for name, unit, samples, expected in rows:
            if samples:
                write_row(
                    path,
                    bench=name,
                    case={**case, **_job(plan), "speculation": _in_words(drafts)},
                    unit=unit,
                    samples=samples,
                    baselines=baselines if name == "e2e" else None,
                    commit=commit,
                    predicted=expected or None,
                    program="llmpq-dist",
                )
    except OSError:
        _shorten(path, size)
        raise


def _job(plan: Plan) -> dict[str, Any]:
    return {
        "precision": "+".join(sorted({precision.value for precision in plan.precisions})),
        "kv": plan.workload.kv.value,
        "dtype": plan.workload.dtype,
        "cluster": plan.cluster.name,
        "batch": plan.workload.batch,
        "prompt": plan.workload.prompt_len,
        "gen": plan.workload.gen_len,
        "plan": plan.solver.method,
        "symmetric": plan.quantization.symmetric,
        **({"head_bits": 8} if plan.settings().head_bits == 8 else {}),
        **_rounded(plan),
    }


def _rounded(plan: Plan) -> dict[str, Any]:
    rounding = plan.quantization.cpu_activations
    return {} if rounding == "exact" else {"cpu_activations": rounding}


def _in_words(drafts: Mapping[str, Any] | None) -> str | None:
    """Return `kv4, gamma 3`; None for plain decoding."""
    return None if drafts is None else f"{drafts['mode']}, gamma {drafts['gamma']}"


def _shorten(path: Path, size: int | None) -> None:
    """Take away what this run wrote: a torn line would spoil the file for its readers."""
    if size is None:
        path.unlink(missing_ok=True)
    elif path.is_file():  # no pipe or device
        os.truncate(path, size)

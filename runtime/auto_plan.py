"""A plan for a run that was given none: which devices, what job, at what cost.

Devices: this machine's, a running Ray's, or a cluster's that the caller has. Job: read off the
rows. Costs: measured here before (kept in the user's cache directory), or estimated. The planner is
imported when a plan is asked for, not before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.cluster import Cluster
from llmpq.cost_model import CostModel
from llmpq.costs_cache import cache_folder, cached_costs, store_costs
from llmpq.default_dtype import default_dtype
from llmpq.devices.this_machine import assumed, this_machine, useful_threads
from llmpq.errors import ExitCode, StageLostError
from llmpq.gpu_memory import cluster_within
from llmpq.model_spec import ModelSpec
from llmpq.plan import Prefer
from llmpq.precision import KVPrecision
from llmpq.workload import DTYPE_BYTES, Dtype, Workload

if TYPE_CHECKING:
    from llmpq.planner.make import MadePlan

DEFAULT_NEW_TOKENS = 64
"""New tokens of a row that does not say, where no plan does either."""
MAX_WINDOW = 256
"""Rows of a job that are planned to be under way at once; the others follow as these end."""
MAX_CPU_WINDOW = 32
_MIDDLE, _MOST = 0.5, 0.95


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of the rows of a job: of each prompt, and what each may generate."""

    prompts: Sequence[int]
    new_tokens: Sequence[int]

    def text(self) -> str:
        """Return the rows' number and the quantiles of their lengths."""
        return (
            f"{len(self.prompts)} rows, prompts of {_quantiles(self.prompts)} tokens, "
            f"{_quantiles(self.new_tokens)} new ones"
        )


def workload_of(lengths: Lengths, *, dtype: Dtype, window: int, kv: KVPrecision) -> Workload:
    """Return the job that holds every row: the longest prompt, the longest prompt with its answer.

    Times are predicted for answers that 95 % of the rows stay within.
    """
    longest = max(lengths.prompts)
    whole = max(p + n for p, n in zip(lengths.prompts, lengths.new_tokens, strict=True))
    usual = quantile(lengths.new_tokens, _MOST)
    return Workload(
        batch=min(len(lengths.prompts), window),
        prompt_len=longest,
        gen_len=max(1, whole - longest, usual),
        kv=kv,
        dtype=dtype,
    )


def quantile(values: Sequence[int], share: float) -> int:
    """Return the least value that a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def plan_for(
    model_dir: str | Path,
    lengths: Lengths,
    *,
    cluster: Cluster | None = None,
    from_ray: str | None = None,
    gpu_memory_utilization: float | None = None,
    kv: KVPrecision = KVPrecision.KV16,
    profile: bool = False,
    prefer: Prefer = "quality",
) -> MadePlan:
    """Return a plan for rows of these lengths on the devices there are, and what to say about it.

    The devices are `cluster`'s, those of the Ray at `from_ray`, or this machine's. `profile`
    measures this machine's first and keeps the costs.
    """
    spec = ModelSpec.from_directory(model_dir)
    devices = cluster_within(cluster or devices_of(from_ray), gpu_memory_utilization)
    on_cpu = all(device.spec.is_cpu for device in devices.devices)
    dtype = default_dtype(spec, devices)
    work = workload_of(lengths, dtype=dtype, window=MAX_CPU_WINDOW if on_cpu else MAX_WINDOW, kv=kv)
    if cluster is None and from_ray is None and on_cpu:
        devices = _with_useful_threads(devices, spec.num_params * DTYPE_BYTES[dtype], work.batch)
    return plan_job(model_dir, devices, work, profile=profile, prefer=prefer)


def plan_job(
    model_dir: str | Path,
    cluster: Cluster,
    work: Workload,
    *,
    profile: bool = False,
    prefer: Prefer = "quality",
) -> MadePlan:
    """Return a plan of a job on a cluster's devices; a batch that does not fit is halved."""
    from llmpq.planner.make import plan_workload

    spec = ModelSpec.from_directory(model_dir)
    if profile:
        store_costs(measure(model_dir, cluster, work))
    kinds = {device.profile_kind for device in cluster.devices}
    costs, notes = cached_costs(spec.fingerprint(), kinds)
    if costs is not None:
        notes.append(f"costs measured here before: {cache_folder() / spec.fingerprint()}")
    windows = halved(work.batch)
    made = plan_workload(model_dir, cluster, work, costs=costs, prefer=prefer, windows=windows)
    return made.with_notes([*assumed(cluster), *notes])


def halved(batch: int) -> list[int]:
    """Return a batch and what is left of it by halving, down to one."""
    sizes = [batch]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def devices_of(from_ray: str | None) -> Cluster:
    """Return the devices of the Ray at an address, else this machine's."""
    if from_ray is None:
        return this_machine()
    from llmpq.planner.problem.discovery import cluster_from_ray

    return cluster_from_ray(from_ray)


def _with_useful_threads(cluster: Cluster, weight_bytes: int, rows: int) -> Cluster:
    """Return a machine without GPUs with as many threads as a model and its rows keep busy."""
    (node,) = cluster.nodes
    (group,) = node.devices
    threads = useful_threads(group.threads or 1, weight_bytes, rows)
    node = node.model_copy(update={"devices": (group.model_copy(update={"threads": threads}),)})
    return Cluster(name=cluster.name, nodes=(node,), links=cluster.links)


def measure(model_dir: str | Path, cluster: Cluster, work: Workload) -> CostModel:
    """Return costs of a job on this machine's devices, measured by llmpq-profile.

    Its micro-batches and lengths are within what is timed.
    """
    with tempfile.TemporaryDirectory(prefix="llmpq-profile-") as name:
        described, measured = Path(name) / "cluster.yaml", Path(name) / "costs.json"
        # JSON is YAML.
        described.write_text(json.dumps(cluster.model_dump(mode="json", by_alias=True)))
        command = [
            sys.executable, "-m", "llmpq.profiler", "--model", str(model_dir),
            "--cluster", str(described), "--dtype", work.dtype, "--kv", work.kv.value, "--quick",
            "--max-batch", str(work.batch), "--max-len", str(work.max_len), "-o", str(measured),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode not in (ExitCode.DONE, ExitCode.SOME_ROWS_FAILED):
            raise StageLostError(
                f"--profile: llmpq-profile ended with code {done.returncode}, its reason stands "
                "above; leave --profile out to plan with estimated costs"
            )
        return CostModel.load_json(measured)


def _quantiles(values: Sequence[int]) -> str:
    low, high, most = quantile(values, _MIDDLE), quantile(values, _MOST), max(values)
    if low == most:
        return str(most)
    return f"{low} (half of them), {high} (95 %) and at most {most}"

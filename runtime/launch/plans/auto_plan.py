"""A plan for a run that was given none: which devices, what job, at what cost.

Devices: this machine's, a running Ray's, or a cluster's that the caller has. Job: read off the
rows. Costs: measured here before (in the user's cache directory), or estimated. The planner is
imported when a plan is asked for, not before.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmpq.commands.ray_address import require_ray_of_stages
from llmpq.costs.cost_model import CostModel
from llmpq.costs.costs_cache import cache_folder, cached_costs, store_costs
from llmpq.devices.cluster import Cluster
from llmpq.devices.default_dtype import default_dtype, require_dtype
from llmpq.devices.joined_devices import crowded_notes, one_group
from llmpq.devices.this_machine import assumed, this_machine, useful_threads
from llmpq.errors import ExitCode, StageLostError
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.able_devices import Forced, able_devices
from llmpq.plans.gpu_memory import cluster_within
from llmpq.precision import KVPrecision
from llmpq.runtime.options.engine_options import AUTO, EngineOptions
from llmpq.sizes.pool_size import READS_KV4
from llmpq.workload import DTYPE_BYTES, Dtype, Workload

_log = logging.getLogger("llmpq.run")

if TYPE_CHECKING:
    from llmpq.planner.make import FitHere, MadePlan
    from llmpq.planner.problem.known_plan import PlanSearch

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


def plan_for(model_dir: str | Path, lengths: Lengths, options: EngineOptions) -> MadePlan:
    """Return a plan for rows of these lengths on the devices there are, and notes about it."""
    spec = ModelSpec.from_directory(model_dir)
    devices = devices_of(options)
    only_cpus = all(device.spec.is_cpu for device in devices.devices)
    devices = able_to(spec, options, devices)
    on_cpu = all(device.spec.is_cpu for device in devices.devices)
    dtype = dtype_of(spec, options, devices)
    kv = kv_of(options)
    work = workload_of(lengths, dtype=dtype, window=MAX_CPU_WINDOW if on_cpu else MAX_WINDOW, kv=kv)
    if options.cluster is None and options.ray_address is None and only_cpus:
        devices = _with_useful_threads(devices, spec.num_params * DTYPE_BYTES[dtype], work.batch)
    return plan_job(model_dir, devices, work, options)


def plan_job(
    model_dir: str | Path,
    cluster: Cluster,
    work: Workload,
    options: EngineOptions,
    *,
    spec: ModelSpec | None = None,
    search: PlanSearch | None = None,
) -> MadePlan:
    """Return a plan of a job on a cluster's devices; a batch that does not fit is halved.

    `spec`: the model, if known. `EngineOptions.profile` measures this machine's devices first and
    stores the costs.
    """
    from llmpq.planner.make import plan_workload
    from llmpq.planner.problem.known_plan import PlanSearch

    spec = spec or ModelSpec.from_directory(model_dir)
    if options.tensor_parallel_size is not None and options.tensor_parallel_size > 1:
        cluster = one_group(cluster, options.tensor_parallel_size, spec)
        for note in crowded_notes(cluster):
            _log.warning("%s", note.removeprefix("warning: "))
    if options.profile:
        if options.ray_address is not None:
            raise ValueError(
                "profile measures this machine, ray_address plans for others: leave profile out, "
                "or run llmpq-profile on each node and plan with llmpq-algo --costs"
            )
        store_costs(measure(model_dir, cluster, work))
    kinds = {device.profile_kind for device in cluster.devices}
    costs, notes = cached_costs(spec.fingerprint(), kinds)
    if costs is not None:
        notes.append(f"costs measured here before: {cache_folder() / spec.fingerprint()}")
    made = plan_workload(
        model_dir,
        cluster,
        work,
        costs=costs,
        head_bits=options.head_bits,
        spec=spec,
        search=replace(
            search or PlanSearch(),
            prefer=options.prefer or "quality",
            windows=halved(work.batch),
            groups=options.tensor_parallel_size is None,
        ),
    )
    if options.head_bits is None and made.plan.settings().head_bits == 8:
        _log.warning(
            "the output matrix is rounded to 8 bits on this CPU; 16 bits take more memory and "
            "time: head_bits=16 (--head-bits 16)"
        )
    said = spec.left_out_notes()  # of every model that is run, whatever its plan
    made = replace(made, notes=tuple(note for note in made.notes if note not in said))
    return made.with_notes([*assumed(cluster), *notes])


def fit_of(
    model: str, *, from_ray: str | None, context: int | None, batch: int, probe_cpu: bool
) -> FitHere:
    """Return whether a model fits the devices there are (planner/make.py)."""
    from llmpq.planner.make import fit_here

    return fit_here(model, from_ray=from_ray, context=context, batch=batch, probe_cpu=probe_cpu)


def dtype_of(spec: ModelSpec, options: EngineOptions, cluster: Cluster) -> Dtype:
    """Return the dtype of a plan made here; `ValueError` for one that a device cannot run."""
    if options.dtype == AUTO:
        return default_dtype(spec, cluster)
    require_dtype(cluster, options.dtype)
    return cast(Dtype, options.dtype)


def able_to(spec: ModelSpec, options: EngineOptions, cluster: Cluster) -> Cluster:
    """Return the devices that run what the options ask for; `ValueError` where none does."""
    dtype = None if options.dtype == AUTO else cast(Dtype, options.dtype)
    copies = options.speculate if options.speculate in READS_KV4 else None
    forced = Forced(spec=spec, kvs=(kv_of(options),), dtype=dtype, copies=copies)
    able, left_out = able_devices(cluster, forced)
    for line in left_out:
        _log.warning("%s", line)
    return able


def kv_of(options: EngineOptions) -> KVPrecision:
    """Return the KV precision of a plan made here."""
    kv = options.kv_cache_dtype
    return KVPrecision.KV16 if kv == AUTO else KVPrecision.parse(kv)


def halved(batch: int) -> list[int]:
    """Return a batch and what is left of it by halving, down to one."""
    sizes = [batch]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def devices_of(options: EngineOptions) -> Cluster:
    """Return the devices to plan for, and how much of their memory may be used."""
    return cluster_within(named_devices(options), options.gpu_memory_utilization)


def named_devices(options: EngineOptions) -> Cluster:
    """Return a cluster file's devices, a running Ray's, or this machine's."""
    if options.cluster is not None:
        given = options.cluster
        return given if isinstance(given, Cluster) else Cluster.load(given)
    if options.ray_address is None:
        return this_machine()
    from llmpq.planner.problem.discovery import cluster_from_ray

    require_ray_of_stages(options.ray_address)
    return cluster_from_ray(options.ray_address)


def _with_useful_threads(cluster: Cluster, weight_bytes: int, rows: int) -> Cluster:
    """Return a machine without GPUs with as many threads as a model and its rows can use."""
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
            sys.executable,
            "-m",
            "llmpq.profiler",
            "--model",
            str(model_dir),
            "--cluster",
            str(described),
            "--dtype",
            work.dtype,
            "--kv",
            work.kv.value,
            "--quick",
            "--max-batch",
            str(work.batch),
            "--max-len",
            str(work.max_len),
            "-o",
            str(measured),
        ]
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

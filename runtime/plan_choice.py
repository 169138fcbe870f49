"""Which plan a model is run by: the one that was given, or one made for the devices there are.

One device needs no planner: a whole, unquantised model, if it fits and quality is preferred.
Several devices, a directory that is stored quantised, a model that one device cannot hold, or
another preference are planned.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from llmpq.capabilities import gpu_pool_lack
from llmpq.checkpoints.hub import at_revision, local_model
from llmpq.checkpoints.model_config import read_config
from llmpq.cluster import Cluster
from llmpq.default_dtype import default_dtype, require_dtype
from llmpq.devices.this_machine import this_machine
from llmpq.errors import DoesNotFitError
from llmpq.gpu_memory import cluster_within, plan_within
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan, Prefer
from llmpq.precision import KVPrecision
from llmpq.runtime.auto_plan import plan_job
from llmpq.runtime.launch.plans.device_plan import device_plan
from llmpq.runtime.launch.plans.planned_kv import AUTO
from llmpq.speculation import SpeculationMode
from llmpq.workload import DTYPE_BYTES, Dtype, Workload

_log = logging.getLogger("llmpq.run")

MAX_MODEL_LEN = 2048
"""Tokens of a prompt and its answer, where nothing else is said and the model has as many."""
SLOTS = {True: 8, False: 32}
"""Requests at once on a cluster of CPUs, and on one with GPUs."""
POOL_ROWS = 256
"""Requests at once at most where a GPU keeps KV in blocks: what they hold bounds them."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a plan made here is asked for; None and `auto` leave it open."""

    max_model_len: int | None = None
    """Tokens of a prompt and its answer; a given plan's pool takes it, too."""
    max_num_seqs: int | None = None
    revision: str | None = None
    """Of a model on Hugging Face's hub: a branch, tag or commit."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU's memory that is used at most."""
    dtype: str = AUTO
    kv_cache_dtype: str = AUTO
    kv_pool: bool | None = None
    """Whether GPUs, too, keep KV in a pool of blocks; None: where they can."""
    speculate: SpeculationMode | Literal["off"] | None = None
    """Who drafts; None: the plan says it."""
    prefer: Prefer | None = None
    """Which plan of time and quality to make; None: `quality`."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A model and the plan it is run by."""

    directory: Path
    spec: ModelSpec
    plan: Plan
    cluster: Cluster | None
    pooled: bool
    """Whether live requests have a pool of blocks, so that the run may say how long they are."""


def choose_plan(
    model: str | Path | None,
    plan: Plan | str | Path | None,
    cluster: Cluster | str | Path | None,
    wishes: Wishes,
) -> Chosen:
    """Return the plan to run; `LlmpqError` or `ValueError` says why there is none."""
    if wishes.prefer is not None and wishes.prefer not in get_args(Prefer):
        raise ValueError(f"prefer must be {', '.join(get_args(Prefer))}, got '{wishes.prefer}'")
    if plan is None:
        if model is None:
            raise ValueError("nothing to run: give a model directory, or plan= that names one")
        directory, spec = _read(model, wishes.revision)
        made, known = _made(directory, spec, cluster, wishes)
        pooled = _is_pooled(made, spec, wishes)
        return Chosen(directory=directory, spec=spec, plan=made, cluster=known, pooled=pooled)
    given = plan if isinstance(plan, Plan) else Plan.load(plan)
    if model is None and given.model.path is None:
        raise ValueError("the plan names no model directory; give it: LLM('DIR', plan=...)")
    directory, spec = _read(model if model is not None else str(given.model.path), wishes.revision)
    given.require_model(spec)
    given = plan_within(given, wishes.gpu_memory_utilization)
    pooled = _is_pooled(given, spec, wishes)
    for name, value in (
        ("max_model_len", None if pooled else wishes.max_model_len),
        ("max_num_seqs", wishes.max_num_seqs),
        ("dtype", None if wishes.dtype == AUTO else wishes.dtype),
        ("prefer", wishes.prefer),
    ):
        if value is not None:
            raise ValueError(f"{name} has no effect with plan=, which says it; leave it out")
    _max_len(spec, wishes)
    known = None if cluster is None else _loaded(cluster)
    if known is not None:
        given.require_cluster(known.name, known.fingerprint())
    return Chosen(directory=directory, spec=spec, plan=given, cluster=known, pooled=pooled)


def _is_pooled(plan: Plan, spec: ModelSpec, wishes: Wishes) -> bool:
    if all(stage.is_cpu for stage in plan.stages):
        return True
    planned = wishes.speculate is None and plan.speculation is not None
    kv = plan.workload.kv if wishes.kv_cache_dtype == AUTO else _kv(wishes)
    return _gpus_page(spec, kv, plan.workload.dtype, wishes, drafts=planned)


def _gpus_page(
    spec: ModelSpec, kv: KVPrecision, dtype: Dtype, wishes: Wishes, *, drafts: bool = False
) -> bool:
    """Whether GPUs keep KV in blocks; `drafts`: by the plan."""
    if wishes.kv_pool is not None:
        return wishes.kv_pool
    drafts = drafts or wishes.speculate not in (None, "off")
    return not gpu_pool_lack(spec, kv, dtype, drafts=drafts)


def _read(model: str | Path, revision: str | None) -> tuple[Path, ModelSpec]:
    directory = local_model(at_revision(model, revision))
    return directory, ModelSpec.from_directory(directory)


def _made(
    directory: Path, spec: ModelSpec, cluster: Cluster | str | Path | None, wishes: Wishes
) -> tuple[Plan, Cluster | None]:
    """Make a plan for a cluster's devices, or for this machine's."""
    known = this_machine() if cluster is None else _loaded(cluster)
    known = cluster_within(known, wishes.gpu_memory_utilization)
    cpus = all(device.spec.is_cpu for device in known.devices)
    max_len = _max_len(spec, wishes)
    slots = SLOTS[cpus] if wishes.max_num_seqs is None else _at_least_one("max_num_seqs", wishes)
    prefer = wishes.prefer or "quality"
    stored = read_config(directory).get("quantization_config") is not None
    if len(known.devices) == 1 and not stored and prefer == "quality":
        whole = _whole(directory, spec, known, wishes, max_len=max_len, slots=slots)
        if whole is not None:
            return whole, known
    prompt_len = max(1, max_len // 2)
    work = Workload(
        batch=slots,
        prompt_len=prompt_len,
        gen_len=max_len - prompt_len + 1,
        kv=_kv(wishes),
        dtype=_dtype(spec, wishes, known),
    )
    made = plan_job(directory, known, work, prefer=prefer)
    for note in made.notes:
        _log.info("%s", note)
    return made.plan, known


def _whole(
    directory: Path,
    spec: ModelSpec,
    known: Cluster,
    wishes: Wishes,
    *,
    max_len: int,
    slots: int,
) -> Plan | None:
    """Return the plan of a whole model on the one device there is, None where it does not fit."""
    dtype, kv, open_end = _dtype(spec, wishes, known), _kv(wishes), wishes.max_num_seqs is None

    def plan(slots: int, *, pool: bool) -> Plan | None:
        return device_plan(
            *(spec, known.devices[0]),
            model_dir=str(directory),
            dtype=dtype,
            kv=kv,
            max_len=max_len,
            slots=slots,
            may_shrink=open_end,
            pool=pool,
        )

    on_gpu = not known.devices[0].spec.is_cpu
    if on_gpu and _gpus_page(spec, kv, dtype, wishes):
        try:
            return plan(POOL_ROWS if open_end else slots, pool=True)
        except DoesNotFitError:
            if wishes.kv_pool:
                raise
    return plan(slots, pool=False)


def _loaded(cluster: Cluster | str | Path) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)


def _max_len(spec: ModelSpec, wishes: Wishes) -> int:
    if wishes.max_model_len is None:
        return min(MAX_MODEL_LEN, spec.max_positions)
    longest = _at_least_one("max_model_len", wishes)
    if longest > spec.max_positions:
        raise ValueError(
            f"max_model_len must be at most {spec.max_positions}, the positions of {spec.name}, "
            f"got {longest}"
        )
    return longest


def _at_least_one(name: str, wishes: Wishes) -> int:
    value: object = getattr(wishes, name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
    return value


def _dtype(spec: ModelSpec, wishes: Wishes, known: Cluster) -> Dtype:
    if wishes.dtype == AUTO:
        return default_dtype(spec, known)
    if wishes.dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPE_BYTES)}, got '{wishes.dtype}'")
    require_dtype(known, wishes.dtype)
    return cast(Dtype, wishes.dtype)


def _kv(wishes: Wishes) -> KVPrecision:
    wish = wishes.kv_cache_dtype
    return KVPrecision.KV16 if wish == AUTO else KVPrecision.parse(wish)

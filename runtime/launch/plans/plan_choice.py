"""Which plan a model is run by: the one that was given, or one made for the devices there are.

One device needs no planner: a whole, unquantised model, if it fits and quality is preferred.
Several devices, a directory that is stored quantised, a model that one device cannot hold, or
another preference are planned.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_model
from llmpq.checkpoints.hub import absolute, at_revision, local_model
from llmpq.checkpoints.quantization_config import quantization_of, require_method
from llmpq.checkpoints.stored_codes import stored_codes
from llmpq.devices.cluster import Cluster
from llmpq.errors import BadPlanError, DoesNotFitError
from llmpq.models.model_spec import ModelSpec, builtin_name
from llmpq.models.stored_head import has_mtp_head
from llmpq.plans.gpu_memory import plan_within
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.runtime.launch.plans.auto_plan import (
    able_to,
    devices_of,
    dtype_of,
    kv_of,
    named_devices,
    plan_job,
)
from llmpq.runtime.launch.plans.complete_plan import complete_plan
from llmpq.runtime.launch.plans.manual_plan import device_plan, requests_of
from llmpq.runtime.options.engine_options import PLANNING, EngineOptions
from llmpq.workload import Workload

_log = logging.getLogger("llmpq.run")

MAX_MODEL_LEN = 2048
"""Tokens of a prompt and its answer, where nothing else is said and the model has as many."""
ROWS = {True: 8, False: 32}
"""Requests at once on a cluster of CPUs, and on one with GPUs."""
POOL_ROWS = 256
"""Requests at once at most on one GPU: what its blocks hold bounds them."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A model, the plan it is run by, and the options with all that was left open decided."""

    directory: Path
    spec: ModelSpec
    plan: Plan
    options: EngineOptions
    """`cluster`: the devices, as read; `speculate`, `gamma` and `costs`: the decision on drafts."""


def choose_plan(
    model: str | Path | None, plan: Plan | Topology | str | Path | None, options: EngineOptions
) -> Chosen:
    """Return the plan to run; `LlmpqError` or `ValueError` says why there is none."""
    if isinstance(plan, Topology):
        raise ValueError(
            f"an LLM is one engine and the plan has {len(plan.engines)}: run it with "
            "llmpq.runtime.entrypoints.engines.Engines, llmpq-dist run or serve, or plan one "
            "pipeline"
        )
    if isinstance(model, Plan):
        raise ValueError("a plan is given by --plan, not as the model")
    given = _given(plan)
    if model is None:
        if given is None:
            raise ValueError("nothing to run: give a model directory, or plan= that names one")
        if given.model.path is None:
            raise ValueError("the plan names no model directory; give it with model='DIR'")
        model = given.model.path
    try:
        directory, spec = read_model(model, options)
    except ValueError as error:
        if given is None or str(model) != given.model.path:
            raise
        missing = f"the plan names it so, and there is no '{absolute(model)}'"
        raise ValueError(f"{error}; {missing}") from None
    for note in spec.left_out_notes():
        _log.warning("'%s': %s", directory, note)
    if given is None:
        known = devices_of(options)
        options = replace(options, cluster=known)
        given = _made(directory, spec, known, options)
    else:
        given.require_model(spec)
        options = _as_planned(options, given)
        _max_len(spec, options)
        given = plan_within(given, options.gpu_memory_utilization)
        if options.cluster is not None:
            known = named_devices(options)
            given.require_cluster(known.name, known.fingerprint())
            options = replace(options, cluster=known)
    given, options = complete_plan(
        given,
        spec,
        options,
        stored_codes(directory),
        mtp=has_mtp_head(directory if options.load_format == "auto" else None, spec),
    )
    return Chosen(directory=directory, spec=spec, plan=given, options=options)


def _as_planned(options: EngineOptions, plan: Plan) -> EngineOptions:
    """Return the options without those that a plan says, where they say the same.

    `ValueError` for one that says something else, or that only a planner heeds.
    """
    sizes = sorted({len(stage.members) for stage in plan.stages})
    said: dict[str, Any] = {
        "dtype": plan.workload.dtype,
        "head_bits": plan.settings().head_bits,
        "tensor_parallel_size": sizes[0] if len(sizes) == 1 else None,
    }
    default = EngineOptions()
    for name in PLANNING:
        value = getattr(options, name)
        if value == getattr(default, name) or value == said.get(name):
            continue
        if name not in said:
            raise ValueError(f"{name} has no effect with plan=, which says it; leave it out")
        own = " and ".join(map(str, sizes)) if name == "tensor_parallel_size" else said[name]
        raise ValueError(
            f"{name}={value!r} is not what plan= says, {own}; leave it out, or plan again"
        )
    return replace(options, **{name: getattr(default, name) for name in PLANNING})


def _given(plan: object) -> Plan | None:
    """Return a plan that was given as itself, as a file's path, or as the data of a file."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, str) and plan.lstrip().startswith("{"):
        try:
            plan = json.loads(plan)
        except ValueError as error:
            raise BadPlanError(f"the plan is not JSON: {error}") from None
    if isinstance(plan, Mapping):
        return Plan.from_data(dict(plan), where="the plan")
    if not isinstance(plan, (str, Path)):
        raise ValueError(f"plan must be a Plan, a file's path or its data, got {plan!r:.100}")
    return Plan.load(plan)


def read_model(model: str | Path, options: EngineOptions) -> tuple[Path, ModelSpec]:
    """Return where a model is and what it is; random weights need no more than a built-in name."""
    random, name = options.load_format != "auto", str(model)
    if random and not is_model(model) and ("/" not in name or builtin_name(name) is not None):
        directory, spec = Path(name), ModelSpec.by_name(name)
    else:
        directory = local_model(at_revision(model, options.revision), config_only=random)
        spec = ModelSpec.from_directory(directory)
    if options.quantization is not None:
        require_method(directory, options.quantization)
    return directory, spec


def _made(directory: Path, spec: ModelSpec, known: Cluster, options: EngineOptions) -> Plan:
    """Make a plan for a cluster's devices, or for this machine's."""
    known = able_to(spec, options, known)
    cpus = all(device.spec.is_cpu for device in known.devices)
    max_len = _max_len(spec, options)
    rows = ROWS[cpus] if options.max_num_seqs is None else options.max_num_seqs
    stored = is_model(directory) and quantization_of(directory) is not None
    alone = options.tensor_parallel_size in (None, 1) and not options.profile
    one = len(known.devices) == 1 and alone
    if one and not stored and options.prefer in (None, "quality") and options.head_bits != 8:
        whole = _whole(directory, spec, known, options, max_len=max_len, rows=rows)
        if whole is not None:
            return whole
    dtype = dtype_of(spec, options, known)
    work = requests_of(rows, max_len, kv=kv_of(options), dtype=dtype)
    made = plan_job(directory, known, work, options, spec=spec)
    for note in made.notes:
        _log.info("%s", note)
    return made.plan


def _whole(
    directory: Path,
    spec: ModelSpec,
    known: Cluster,
    options: EngineOptions,
    *,
    max_len: int,
    rows: int,
) -> Plan | None:
    """Return the plan of a whole model on the one device there is, None where it does not fit."""
    open_end, on_gpu = not options.max_num_seqs, not known.devices[0].spec.is_cpu
    job = Workload(
        batch=POOL_ROWS if on_gpu and open_end else rows,
        # One new token beyond a prompt as long as the cache: any prompt that fits may come.
        prompt_len=max_len,
        gen_len=1,
        kv=kv_of(options),
        dtype=dtype_of(spec, options, known),
    )
    try:
        return device_plan(
            spec, known.devices[0], job, model_dir=str(directory), may_shrink=open_end
        )
    except DoesNotFitError:
        return None  # at fewer bits it may


def _max_len(spec: ModelSpec, options: EngineOptions) -> int:
    """Return the longest request of a plan made here; `ValueError` beyond the model's positions."""
    longest = options.max_model_len
    if longest is None:
        return min(MAX_MODEL_LEN, spec.max_positions)
    if longest > spec.max_positions:
        raise ValueError(
            f"max_model_len must be at most {spec.max_positions}, the positions of {spec.name}, "
            f"got {longest}"
        )
    return longest

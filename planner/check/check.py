"""Checks a plan against the nouns, sharing no code with any solver.

Recomputes every layer's device, every stage's bytes and every time: from the entries that the plan
carries, and from a cluster and costs where they are given. A plan that passes can be run.
Used on every plan the command writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

from llmpq.costs.cost_model import LatencyEntry, Phase
from llmpq.devices.cluster import Cluster, Device
from llmpq.devices.joined_devices import group_of
from llmpq.errors import BadPlanError, DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.check.recomputed import Recomputed, recomputed
from llmpq.planner.costs.cost_book import CostBook
from llmpq.planner.evaluate.add_drafts import round_bytes
from llmpq.plans.member_memory import planned_shape
from llmpq.plans.plan import Plan, PoolForm, StagePlan
from llmpq.plans.plan_inputs import DeviceInput, LinkInput, PlanInputs
from llmpq.plans.prefix_states import with_prefix_states
from llmpq.plans.shared_run import SharedRun, predicted_of
from llmpq.precision import Precision
from llmpq.sizes.memory import stage_memory
from llmpq.units import format_size
from llmpq.workload import Workload

RELATIVE_TOLERANCE = 1e-6
"""Sums in another order differ in the last bits; a wrong layer differs by far more."""


def check_plan(plan: Plan, *, spec: ModelSpec, cluster: Cluster, costs: CostBook | None) -> None:
    """Raise `BadPlanError`, `PlanMismatchError` or `DoesNotFitError` unless all is well.

    The devices are the cluster's, the times the costs'; then the plan's own entries are checked.
    """
    plan.require_model(spec)
    plan.require_cluster(cluster.name, cluster.fingerprint())
    devices = [_device(cluster, stage, spec) for stage in plan.stages]
    _check_layers_and_memory(plan, spec, devices)
    if costs is not None:
        precisions = [stage.precisions for stage in plan.stages]
        stages = list(zip(devices, precisions, strict=True))
        inputs = used_inputs(spec, cluster, costs, plan.workload, stages)
        _check_times(plan, recomputed(plan, inputs))
        if plan.inputs == inputs:  # of the same entries the same times
            _check_entries(plan)
            return
    if plan.inputs is not None:
        check_alone(plan)


def check_alone(plan: Plan) -> Recomputed | None:
    """Check a plan by the entries it carries; return its times, None where it predicts none."""
    inputs = _check_entries(plan)
    if plan.predicted is None:
        return None
    try:
        times = recomputed(plan, inputs)
    except ValueError as error:
        raise BadPlanError(f"{error}; re-plan with llmpq-algo") from None
    _check_times(plan, times)
    return times


def _check_entries(plan: Plan) -> PlanInputs:
    """Check a plan's layers, devices and memory by the entries it carries; return those."""
    inputs = plan.inputs
    if inputs is None:
        raise BadPlanError(
            "the plan carries no device, link and cost entries (an older llmpq made it, or a "
            "hand): re-plan with llmpq-algo, or name the devices with --cluster or --devices"
        )
    plan.require_model(inputs.model)
    names = [device.name for device in inputs.devices]
    stages = [stage.device for stage in plan.stages]
    if names != stages:
        raise BadPlanError(
            f"the plan carries entries of devices {', '.join(names)}, its stages are on "
            f"{', '.join(stages)}; re-plan with llmpq-algo"
        )
    devices = [entry.device() for entry in inputs.devices]
    for stage, device in zip(plan.stages, devices, strict=True):
        _require_kind(device, stage.device, stage.profile_kind, "its entry")
        if stage.memory is not None and stage.memory.limit_bytes != device.limit_bytes:
            raise BadPlanError(
                f"stage {stage.device}: the plan states a limit of {stage.memory.limit_bytes} "
                f"bytes, its entry has {device.limit_bytes}; re-plan with llmpq-algo"
            )
    _check_layers_and_memory(plan, inputs.model, devices)
    return inputs


def _device(cluster: Cluster, stage: StagePlan, spec: ModelSpec) -> Device:
    if stage.shares:
        device = group_of(cluster, stage.device_names, stage.shares, spec)
    else:
        device = cluster.device(stage.device)
    _require_kind(device, stage.device, stage.profile_kind, "the cluster")
    return device


def _require_kind(device: Device, name: str, profile_kind: str, where: str) -> None:
    if device.profile_kind != profile_kind:
        raise BadPlanError(
            f"stage {name}: the plan has a {profile_kind}, {where} a {device.profile_kind}"
        )


def _check_layers_and_memory(plan: Plan, spec: ModelSpec, devices: Sequence[Device]) -> None:
    covered = [i for stage in plan.stages for i in range(*stage.layers)]
    if covered != list(range(spec.num_layers)):
        raise BadPlanError(f"layers are run as {covered}, expected each of {spec.num_layers} once")
    for stage in plan.stages:
        try:
            spec.require_cut(stage.layers[0], f"stage {stage.device}")
        except ValueError as error:
            raise BadPlanError(f"{error}; re-plan with llmpq-algo") from None
    _check_pool(plan, spec)
    for position, device in enumerate(devices):
        _check_memory(plan, spec, position, device)
    _check_prefix_states(plan, spec, devices)


def _check_pool(plan: Plan, spec: ModelSpec) -> None:
    """Refuse a plan that states another pool than its workload needs."""
    if plan.pool is None:
        return
    found = PoolForm.planned(
        spec,
        plan.workload,
        plan.stages,
        chunk=plan.prefill_chunk,
        prefill_microbatch=plan.prefill_microbatch,
    )
    if plan.pool != found:
        raise BadPlanError(
            f"the plan states a KV pool of {_in_words(plan.pool)}, its workload needs "
            f"{_in_words(found)}: re-plan with llmpq-algo, or leave `pool` out of the file"
        )


def _in_words(pool: PoolForm | None) -> str:
    """Return a pool's size for people."""
    if pool is None:
        return "none"
    windows = f", {pool.window_blocks} of layers with a window" if pool.window_blocks else ""
    size = ", ".join(map(format_size, pool.stage_bytes))
    return f"{pool.num_blocks} blocks{windows} ({pool.tokens} tokens; {size})"


def _check_memory(plan: Plan, spec: ModelSpec, position: int, device: Device) -> None:
    stage = plan.stages[position]
    memory = stage_memory(
        spec,
        plan.workload,
        planned_shape(plan, position, device.spec, on_gpu=not device.spec.is_cpu),
        quantization=plan.settings(),
        context_bytes=device.spec.context,
        first_layer=stage.layers[0],
    )
    needed = memory.total_bytes
    if plan.speculation is not None:
        chosen = plan.speculation
        needed += round_bytes(plan, spec, position, device, chosen.mode, chosen.gamma)
    short = needed - device.limit_bytes
    if short > 0:
        raise DoesNotFitError(
            f"stage {device.name}: needs {format_size(needed)}, the device has "
            f"{format_size(device.limit_bytes)}; short by {format_size(short)}"
        )
    if stage.memory is None:
        return
    total = memory.total_bytes + stage.memory.prefix_bytes
    for part in (field.name for field in fields(memory)):
        _require_bytes(device, part, getattr(stage.memory, part), getattr(memory, part))
    _require_bytes(device, "total_bytes", stage.memory.total_bytes, total)


def _check_prefix_states(plan: Plan, spec: ModelSpec, devices: Sequence[Device]) -> None:
    """Refuse a plan that states other bytes of kept states than a run keeps."""
    drafts = plan.speculation
    beside = [
        0 if drafts is None else round_bytes(plan, spec, index, device, drafts.mode, drafts.gamma)
        for index, device in enumerate(devices)
    ]
    found = with_prefix_states(plan.stages, spec, plan.workload, beside=beside)
    for stage, own, device in zip(plan.stages, found, devices, strict=True):
        if stage.memory is not None and own.memory is not None:
            stated = stage.memory.prefix_bytes
            _require_bytes(device, "prefix_bytes", stated, own.memory.prefix_bytes)


def _require_bytes(device: Device, part: str, stated: int, found: int) -> None:
    if stated != found:
        raise BadPlanError(
            f"stage {device.name}: the plan states {stated} bytes for {part}, the formulas "
            f"give {found}: re-plan with llmpq-algo"
        )


def _check_times(plan: Plan, times: Recomputed) -> None:
    """Refuse a plan that predicts other times than its entries give."""
    predicted = plan.predicted
    if predicted is None:
        return
    if _differ(predicted.total_s, times.total_s):
        raise BadPlanError(
            f"the plan predicts {predicted.total_s:.6f} s, its own stages take "
            f"{times.total_s:.6f} s; re-plan with llmpq-algo"
        )
    work = plan.workload
    rate = work.batch * work.gen_len / times.total_s
    pairs: list[tuple[str, float | None, float]] = [
        ("prefill", predicted.prefill_s, times.prefill_s),
        ("decode", predicted.decode_s, times.decode_s),
        ("tokens/s", predicted.output_tokens_per_s, rate),
    ]
    for j, stage in enumerate(plan.stages):
        pairs += [
            (f"stage {stage.device}'s prefill", stage.prefill_s, times.stage_prefill_s[j]),
            (f"stage {stage.device}'s decode", stage.decode_s, times.stage_decode_s[j]),
        ]
    for what, stated, found in pairs:
        if stated is not None and _differ(stated, found):
            raise BadPlanError(
                f"the plan states {stated:.6g} for {what}, its entries give {found:.6g}; re-plan "
                "with llmpq-algo"
            )


def _differ(stated: float, found: float) -> bool:
    return not abs(stated - found) <= RELATIVE_TOLERANCE * max(abs(found), 1e-12)


def used_inputs(
    spec: ModelSpec,
    cluster: Cluster,
    costs: CostBook,
    work: Workload,
    stages: Sequence[tuple[Device, Sequence[Precision]]],
) -> PlanInputs:
    """Return the entries of stages, given as their devices and the precisions of their layers."""
    devices = [device for device, _ in stages]
    ways = [*pairwise(devices), (devices[-1], devices[0])] if len(devices) > 1 else []
    entries: dict[tuple[object, ...], LatencyEntry] = {}
    for position, (device, precisions) in enumerate(stages):
        ends = ("embedding",) * (position == 0) + ("head",) * (position == len(stages) - 1)
        for phase in (Phase.PREFILL, Phase.DECODE):
            for precision in sorted(set(precisions), key=lambda p: p.value):
                entry = costs.entry(device, "layer", phase, work, precision)
                entries[device.profile_kind, "layer", phase, precision] = entry
            for part in ends:
                entry = costs.entry(device, part, phase, work)  # type: ignore[arg-type]
                entries[device.profile_kind, part, phase, None] = entry
    return PlanInputs(
        model=spec,
        devices=tuple(DeviceInput.of(d, time_factor=costs.factor(d)) for d in devices),
        links=tuple(_link(cluster, costs, source, target) for source, target in ways),
        costs=tuple(entries.values()),
    )


def _link(cluster: Cluster, costs: CostBook, source: Device, target: Device) -> LinkInput:
    terms = costs.link(cluster, source, target)
    return LinkInput(
        source=source.name,
        target=target.name,
        delay_s=terms.delay_s,
        handshake_s=terms.handshake_s,
        per_byte_s=terms.per_byte_s,
    )


def check_run(run: SharedRun) -> None:
    """Raise `BadPlanError` unless a shared run's numbers follow from one another.

    The plan's prediction is computed again from its entries; what was measured cannot be.
    """
    check_alone(run.plan)
    if len(run.stages) != len(run.plan.stages):
        raise BadPlanError(
            f"the run has {len(run.stages)} measured stages, its plan {len(run.plan.stages)}; "
            "share the report again with llmpq-dist report --share"
        )
    predicted = predicted_of(
        run.plan,
        completed=run.completed,
        prompt_tokens=run.total_input_tokens,
        output_tokens=run.total_output_tokens,
    )
    _agree("output_throughput", run.output_throughput, run.total_output_tokens / run.total_s)
    expected = None if predicted is None else predicted["total_s"]
    if (expected is None) != (run.predicted_s is None):
        raise BadPlanError(f"predicted_s is {run.predicted_s}, the plan's entries give {expected}")
    if expected is not None and run.predicted_s is not None:
        _agree("predicted_s", run.predicted_s, expected)
    for stage in run.stages:
        if stage.busy_share is not None and not 0 <= stage.busy_share <= 1 + 1e-6:
            raise BadPlanError(f"busy_share is a share of time, got {stage.busy_share:g}")


def _agree(name: str, said: float, computed: float) -> None:
    if abs(said - computed) > RELATIVE_TOLERANCE * abs(computed):
        raise BadPlanError(
            f"{name} is {said:.9g}, the run's other numbers give {computed:.9g}; share the report "
            "again with llmpq-dist report --share"
        )

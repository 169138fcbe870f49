"""From a solver's assignment to the plan file: names devices, predicts memory and times.

The plan is deterministic: the same inputs give the same bytes, except `solver.seconds`, which is
left out of the file unless asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from llmpq.devices.cluster import Device
from llmpq.errors import DoesNotFitError
from llmpq.planner.check.check import used_inputs
from llmpq.planner.evaluate.objective import (
    PhaseTimes,
    StageTimes,
    job_time,
    stage_times,
    sum_omega,
)
from llmpq.planner.evaluate.simulator import reported_time, step_note
from llmpq.planner.problem.limits import positions_note
from llmpq.planner.problem.outcome import Assignment, Outcome, Stage
from llmpq.planner.problem.problem import Problem
from llmpq.plans.member_memory import member_memory, planned_shape
from llmpq.plans.plan import (
    ClusterRef,
    MemberPlan,
    MemoryForm,
    ModelRef,
    Plan,
    PoolForm,
    Predicted,
    Prefer,
    QuantizationForm,
    SolverReport,
    StagePlan,
    StoredForm,
    Worker,
)
from llmpq.plans.plan_nodes import node_plans
from llmpq.plans.prefix_states import with_prefix_states
from llmpq.precision import Precision
from llmpq.sizes.memory import StageMemory, stage_memory, unpacks_prompts
from llmpq.sizes.stage_shape import StageShape
from llmpq.units import format_size
from llmpq.version import __version__


def build_plan(
    p: Problem,
    outcome: Outcome,
    *,
    model_path: str | None = None,
    prefer: Prefer | None = None,
) -> Plan:
    """Return the plan of an outcome."""
    a = outcome.assignment
    times, job = stage_times(p, a), reported_time(p, a)
    devices = list(_devices(p, a))
    stages = with_prefix_states(
        [_stage_plan(p, a, position, device, times) for position, device in enumerate(devices)],
        p.spec,
        p.workload,
    )
    plan = Plan(
        model=ModelRef(
            name=p.spec.name,
            num_layers=p.spec.num_layers,
            fingerprint=p.spec.fingerprint(),
            path=model_path,
        ),
        cluster=ClusterRef(name=p.cluster.name, fingerprint=p.cluster.fingerprint()),
        workload=p.workload,
        quantization=QuantizationForm(
            group_size=p.quantization.group_size,
            symmetric=p.quantization.symmetric,
            outliers=p.quantization.outliers,
            head_bits=_head_bits(p, devices[-1]),
            cpu_activations=p.quantization.cpu_activations,
            codes=p.quantization.codes,
            stored=_stored(p, stages),
        ),
        prefill_microbatch=a.prefill_microbatch,
        prefill_chunk=p.chunk,
        decode_microbatch=a.decode_microbatch,
        stages=stages,
        pool=PoolForm.planned(
            p.spec,
            p.workload,
            stages,
            chunk=p.chunk,
            prefill_microbatch=a.prefill_microbatch,
        ),
        nodes=node_plans(p.cluster, {device.node for device in devices}),
        predicted=_predicted(p, a, times, devices, job),
        inputs=used_inputs(
            p.spec,
            p.cluster,
            p.costs,
            p.workload,
            [(d, s.precisions) for d, s in zip(devices, stages, strict=True)],
        ),
        solver=_solver_report(p, outcome, prefer, job),
    )
    return _with_members(p, plan, devices)


def _with_members(p: Problem, plan: Plan, devices: Sequence[Device]) -> Plan:
    """Return the plan with the devices that share a stage, each with its own memory.

    `DoesNotFitError` where one has no room for its part.
    """
    if not any(device.joined for device in devices):
        return plan
    stages = []
    for stage, device in zip(plan.stages, devices, strict=True):
        members = tuple(
            MemberPlan(
                device=one.name,
                device_index=one.index,
                kind=one.kind,
                profile_kind=one.profile_kind,
                threads=one.threads,
                sms=one.emulate.sms if one.emulate else None,
            )
            for one in device.joined
        )
        update = {"devices": members, "shares": device.shares}
        stages.append(stage.model_copy(update=update))
    shared = plan.model_copy(update={"stages": tuple(stages)})
    memory = [
        _member_memory(p, shared, worker, devices[worker.stage])
        if worker.shares
        else worker.place.memory
        for worker in shared.workers
    ]
    # As read from a file: what a stage may not have is refused here.
    whole = Plan.parse_data(json.loads(shared.with_memory(memory).dump_json()), where="the plan")
    pool = PoolForm.planned(
        p.spec,
        p.workload,
        whole.stages,
        chunk=p.chunk,
        prefill_microbatch=plan.prefill_microbatch,
    )
    kept = with_prefix_states(whole.stages, p.spec, p.workload)
    return whole.model_copy(update={"pool": pool, "stages": kept})


def _member_memory(p: Problem, plan: Plan, worker: Worker, device: Device) -> MemoryForm:
    own = device.joined[worker.member]
    context = 0 if own.spec.is_cpu else own.spec.context
    shape = planned_shape(plan, worker.stage, own.spec, on_gpu=not own.spec.is_cpu)
    needed = member_memory(plan, worker, p.spec, shape, context_bytes=context)
    limit = own.limit_bytes
    if needed.total_bytes > limit:
        raise DoesNotFitError(
            f"stage {plan.stages[worker.stage].device}: {own.name} needs "
            f"{format_size(needed.total_bytes)} for its share, it has {format_size(limit)}; give "
            "other shares, a smaller --reserve or fewer bits"
        )
    return MemoryForm(
        weights_bytes=needed.weights_bytes,
        embedding_bytes=needed.embedding_bytes,
        kv_bytes=needed.kv_bytes,
        workspace_bytes=needed.workspace_bytes,
        context_bytes=needed.context_bytes,
        total_bytes=needed.total_bytes,
        limit_bytes=limit,
        reserve_bytes=own.reserve_bytes,
    )


def _stored(p: Problem, stages: Sequence[StagePlan]) -> tuple[StoredForm, ...]:
    """Return what the plan's layers keep of the checkpoint's own codes."""
    used = {precision for stage in stages for precision in stage.precisions}
    return tuple(StoredForm.of(one) for one in p.quantization.stored if one.precision in used)


def _head_bits(p: Problem, last: Device) -> Literal[8, 16]:
    """Return the bits of the output matrix where the last stage has it."""
    return 8 if p.quantization.head(on_cpu=last.spec.is_cpu) is Precision.W8A16 else 16


def stage_precisions(p: Problem, stage: Stage) -> tuple[Precision, ...]:
    """Return the precision of every layer of a stage, groups expanded."""
    found: list[Precision] = []
    for group, choice in zip(range(stage.start, stage.end), stage.choices, strict=True):
        start, end = p.groups[group]
        found += [p.choices[choice]] * (end - start)
    return tuple(found)


def assigned_memory(p: Problem, a: Assignment, position: int, device: Device) -> StageMemory:
    """Return what a device holds of an assignment's stage, as the runtime will allocate it."""
    stage = a.stages[position]
    precisions = stage_precisions(p, stage)
    shape = StageShape(
        precisions=precisions,
        first=position == 0,
        last=position == len(a.stages) - 1,
        prefill_microbatch=a.prefill_microbatch,
        decode_microbatch=a.decode_microbatch,
        prefill_chunk=p.chunk,
        on_gpu=not device.spec.is_cpu,
        unpacks=unpacks_prompts(device.spec, precisions, p.quantization),
    )
    return stage_memory(
        p.spec,
        p.workload,
        shape,
        quantization=p.quantization,
        context_bytes=device.spec.context,
        first_layer=p.groups[stage.start][0],
    )


def _devices(p: Problem, a: Assignment) -> Iterator[Device]:
    """Give each stage the next unused device of its class."""
    unused = [list(cls.devices) for cls in p.classes]
    for stage in a.stages:
        yield unused[stage.cls].pop(0)


def _stage_plan(
    p: Problem, a: Assignment, position: int, device: Device, times: StageTimes
) -> StagePlan:
    stage = a.stages[position]
    precisions = stage_precisions(p, stage)
    memory = assigned_memory(p, a, position, device)
    return StagePlan(
        device=device.name,
        node=device.node,
        device_index=device.index,
        kind=device.kind,
        profile_kind=device.profile_kind,
        threads=device.threads,
        sms=device.emulate.sms if device.emulate else None,
        layers=(p.groups[stage.start][0], p.groups[stage.end - 1][1]),
        precisions=precisions,
        memory=MemoryForm(
            weights_bytes=memory.weights_bytes,
            embedding_bytes=memory.embedding_bytes,
            kv_bytes=memory.kv_bytes,
            workspace_bytes=memory.workspace_bytes,
            context_bytes=memory.context_bytes,
            total_bytes=memory.total_bytes,
            limit_bytes=device.limit_bytes,
            reserve_bytes=device.reserve_bytes,
        ),
        prefill_s=times.prefill_s[position],
        decode_s=times.decode_s[position],
    )


def _predicted(
    p: Problem, a: Assignment, times: StageTimes, devices: list[Device], job: PhaseTimes
) -> Predicted:
    longer = times.decode_s if job.decode_s >= job.prefill_s else times.prefill_s
    slowest = max(range(len(devices)), key=lambda j: longer[j])
    used = tuple(sorted({p.choices[b] for b in a.choices}, key=lambda c: c.value))
    return Predicted(
        prefill_s=job.prefill_s,
        decode_s=job.decode_s,
        total_s=job.total_s,
        output_tokens_per_s=p.workload.batch * p.workload.gen_len / job.total_s,
        sum_omega=sum_omega(p, a),
        all_8bit_omega=_uniform_omega(p, Precision.W8A16),
        all_4bit_omega=_uniform_omega(p, Precision.W4A16),
        bottleneck=devices[slowest].name,
        estimated=any(p.costs.estimated(d, used, p.workload) for d in devices),
    )


def _uniform_omega(p: Problem, precision: Precision) -> float | None:
    """Return the quality loss of every layer at one precision, if the indicator knows it."""
    values = p.sensitivity.weights.get(precision)
    return None if values is None else float(sum(values))


def _with_phase_times(p: Problem, outcome: Outcome, job: PhaseTimes) -> Outcome:
    """Return an outcome whose value is of the time that the plan predicts.

    Where that is more than the search counts its bound holds still, but it proves less.
    """
    a = outcome.assignment
    late = job.total_s - job_time(p, a).total_s
    if p.objective != "makespan" or late <= 0:
        return outcome
    proven = outcome.status == "optimal"
    status = "feasible" if proven else outcome.status
    return replace(outcome, value=outcome.value + late, status=status)


def _solver_report(
    p: Problem, outcome: Outcome, prefer: Prefer | None, job: PhaseTimes
) -> SolverReport:
    """Return what the plan says of its solver; a bound of zero or less says nothing of a time."""
    outcome = _with_phase_times(p, outcome, job)
    notes = (
        outcome.note,
        positions_note(p.spec, p.workload),
        step_note(p, outcome.assignment, job),
    )
    bounded = outcome.gap is not None and math.isfinite(outcome.gap)
    return SolverReport(
        method=outcome.method,
        status=outcome.status,
        objective=p.objective,
        prefer=prefer,
        theta=p.theta,
        value=outcome.value,
        bound=outcome.bound if bounded else None,
        gap=outcome.gap if bounded else None,
        version=outcome.version or __version__,
        sensitivity=p.sensitivity.indicator,
        note="; ".join(filter(None, notes)),
    )

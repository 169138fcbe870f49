"""Checks a plan against the nouns, sharing no code with any solver.

Recomputes every layer's device, every stage's bytes and every time from the plan file, the model,
the cluster and the costs; a plan that passes can be run. Used on every plan the command writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.cluster import Cluster, Device
from llmpq.cost_model import Phase
from llmpq.errors import BadPlanError, DoesNotFitError
from llmpq.memory import stage_memory
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.costs import CostBook
from llmpq.planner.speculation import round_bytes
from llmpq.units import format_size

RELATIVE_TOLERANCE = 1e-6
"""Sums in another order differ in the last bits; a wrong layer differs by far more."""


def check_plan(plan: Plan, *, spec: ModelSpec, cluster: Cluster, costs: CostBook | None) -> None:
    """Raise `BadPlanError`, `PlanMismatchError` or `DoesNotFitError` unless all is well."""
    plan.require_model(spec)
    plan.require_cluster(cluster.name, cluster.fingerprint())
    covered = [i for stage in plan.stages for i in range(*stage.layers)]
    if covered != list(range(spec.num_layers)):
        raise BadPlanError(f"layers are run as {covered}, expected each of {spec.num_layers} once")
    devices = [_device(cluster, stage.device, stage.profile_kind) for stage in plan.stages]
    for position, device in enumerate(devices):
        _check_memory(plan, spec, position, device)
    if costs is not None and plan.predicted is not None:
        total = recomputed_seconds(plan, spec, cluster, devices, costs)
        if abs(total - plan.predicted.total_s) > RELATIVE_TOLERANCE * total:
            raise BadPlanError(
                f"the plan predicts {plan.predicted.total_s:.6f} s, its own stages take "
                f"{total:.6f} s; re-plan with llmpq-algo"
            )


def _device(cluster: Cluster, name: str, profile_kind: str) -> Device:
    device = cluster.device(name)
    if device.profile_kind != profile_kind:
        raise BadPlanError(
            f"stage {name}: the plan has a {profile_kind}, the cluster a {device.profile_kind}"
        )
    return device


def _check_memory(plan: Plan, spec: ModelSpec, position: int, device: Device) -> None:
    stage = plan.stages[position]
    memory = stage_memory(
        spec,
        plan.workload,
        stage.precisions,
        first=position == 0,
        last=position == len(plan.stages) - 1,
        prefill_microbatch=plan.prefill_microbatch,
        decode_microbatch=plan.decode_microbatch,
        quantization=plan.quantization.settings(),
        kv=plan.workload.kv,
        context_bytes=device.spec.context,
        on_gpu=not device.spec.is_cpu,
        unpacks=device.spec.unpacks_weights,
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
    if stage.memory is not None and stage.memory.total_bytes != memory.total_bytes:
        raise BadPlanError(
            f"stage {device.name}: the plan states {stage.memory.total_bytes} bytes, the formulas "
            f"give {memory.total_bytes}"
        )


def recomputed_seconds(
    plan: Plan, spec: ModelSpec, cluster: Cluster, devices: Sequence[Device], costs: CostBook
) -> float:
    """Return the plan's makespan from its stages, written out a second time."""
    work, eta, xi = plan.workload, plan.prefill_microbatch, plan.decode_microbatch
    last = len(devices) - 1
    tp, td, hp, hd = [], [], [], []
    hidden = spec.hidden * work.dtype_bytes
    for j, (stage, device) in enumerate(zip(plan.stages, devices, strict=True)):
        scale = costs.factor(device)
        prefill = [
            costs.entry(device, "layer", Phase.PREFILL, work, b).seconds(
                v=eta, length=work.prompt_len
            )
            for b in stage.precisions
        ]
        decode = [_mean(costs, device, "layer", plan, xi, b) for b in stage.precisions]
        for part, here in (("embedding", j == 0), ("head", j == last)):
            if here:
                entry = costs.entry(device, part, Phase.PREFILL, work)  # type: ignore[arg-type]
                prefill.append(entry.seconds(v=eta, length=work.prompt_len))
                decode.append(_mean(costs, device, part, plan, xi))
        tp.append(sum(prefill) * scale)
        td.append(sum(decode) * scale)
        if j < last:
            hp.append(costs.hop_s(cluster, device, devices[j + 1], eta * work.prompt_len * hidden))
            hd.append(costs.hop_s(cluster, device, devices[j + 1], xi * hidden))
    mp, md, n = -(-work.batch // eta), -(-work.batch // xi), work.gen_len
    ring = [costs.hop_s(cluster, devices[-1], devices[0], v * 8.0) for v in (eta, xi)]
    rp, rd = ring if last else (0.0, 0.0)
    if n == 1:
        return (mp - 1) * max(tp + hp) + sum(tp) + sum(hp)
    total = (mp - 1) * max([*tp, *hp, rp]) + sum(tp) + sum(hp)
    slowest = max(td + hd + ([rd] if n > 2 else []))
    through = sum(td) + sum(hd)
    total += rp + through + (md - 1) * slowest
    return total + (n - 2) * max(md * slowest, through + rd)


def _mean(
    costs: CostBook, device: Device, part: str, plan: Plan, xi: int, b: object = None
) -> float:
    """Mean of a decode entry over t = 1..n-1."""
    work = plan.workload
    args = () if b is None else (b,)
    entry = costs.entry(device, part, Phase.DECODE, work, *args)  # type: ignore[arg-type]
    steps = range(1, work.gen_len)
    if not steps:
        return 0.0
    return sum(entry.seconds(v=xi, length=work.prompt_len + t) for t in steps) / len(steps)

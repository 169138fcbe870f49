"""Adds speculation to a finished plan where it fits and is predicted to pay.

The drafts' bytes and what a verify of gamma + 1 tokens a request works with must fit beside the
stage on every device; the speed-up is that of the formulas the runtime obeys
(`llmpq.plans.speculation`), in the middle of the job, at the prior acceptance.
"""

from __future__ import annotations

from dataclasses import replace

from llmpq.checkpoints.stored_codes import stored_codes
from llmpq.costs.cost_model import CostModel
from llmpq.devices.cluster import Cluster, Device
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.models.stored_head import has_mtp_head
from llmpq.plans.capabilities import execution_modes, lacking_sentence
from llmpq.plans.member_memory import planned_shape
from llmpq.plans.plan import MAX_GAMMA, Plan, Speculation
from llmpq.plans.prefix_states import with_prefix_states
from llmpq.plans.speculation import (
    PRIOR_ACCEPTANCE,
    PlanTimes,
    SpeculationMode,
    best_gamma,
    draft_bytes,
    kv_refusal,
    usable_modes,
)
from llmpq.precision import KVPrecision
from llmpq.sizes.pool_size import READS_KV4
from llmpq.sizes.workspace import workspace_bytes
from llmpq.units import format_size


def with_speculation(
    plan: Plan, spec: ModelSpec, cluster: Cluster, costs: CostModel, asked: str
) -> Plan:
    """Return the plan with drafts of a mode, or with `auto` of the one that gains most, if any.

    `DoesNotFitError` if the mode that was asked for does not fit; `ValueError` if it makes nothing
    of this plan cheaper or is predicted to slow it down.
    """
    gpu = any(not stage.is_cpu for stage in plan.stages)
    ways = [
        way for way in execution_modes(gpu=gpu, kv=plan.workload.kv, drafts=True) if "drafts" in way
    ]
    lacking = lacking_sentence(spec, ways, max_len=plan.workload.max_len)
    if lacking is not None and asked == "auto":
        return plan
    if lacking is not None:
        raise ValueError(lacking)
    context = plan.workload.prompt_len + plan.workload.gen_len / 2
    rows = plan.decode_microbatch
    mtp = has_mtp_head(plan.model.path, spec)
    no_copies = kv_refusal(plan, spec, KVPrecision.KV4)
    if no_copies is not None and asked in READS_KV4:
        raise ValueError(no_copies)
    stored = stored_codes(plan.model.path)
    usable = usable_modes(plan, stored, mtp=mtp, packed_copies=no_copies is None)

    def best(mode: SpeculationMode) -> tuple[int, float]:
        return best_gamma(
            PlanTimes(plan, costs, mode),
            PRIOR_ACCEPTANCE[mode],
            rows=rows,
            context=context,
            lengths=[
                gamma
                for gamma in range(1, MAX_GAMMA + 1)
                if shortfall(plan, spec, cluster, mode, gamma) is None
            ],
        )

    if asked == "auto":
        found = {mode: best(mode) for mode in usable}
        most = max(usable, key=lambda mode: found[mode][1])
        return plan if found[most][0] == 0 else _added(plan, spec, cluster, most, *found[most])
    for mode in usable:
        if mode == asked:
            short = shortfall(plan, spec, cluster, mode, 1)
            if short is not None:
                raise DoesNotFitError(f"drafts of {mode} do not fit: {short}; choose another mode")
            gamma, speedup = best(mode)
            if gamma == 0:
                raise ValueError(
                    f"drafts of {mode} are not predicted to pay at a batch of {rows} and a context "
                    f"of {context:.0f}; leave --speculate out, or --speculate auto takes what pays"
                )
            return _added(plan, spec, cluster, mode, gamma, speedup)
    raise ValueError(
        f"--speculate {asked}: this plan can use auto, {', '.join(usable)}; other modes need "
        "layers it does not have, or whose codes drafts cannot read at less cost"
    )


def describe(plan: Plan) -> str:
    """Return one sentence on a plan's drafts."""
    chosen = plan.speculation
    if chosen is None or chosen.predicted_speedup is None:
        return "no drafts: none fit and are predicted to pay"
    return (
        f"drafts of {chosen.mode}, gamma {chosen.gamma}: decoding {chosen.predicted_speedup:.2f}x "
        f"as fast if {chosen.acceptance:.0%} of the tokens are accepted, "
        f"{format_size(chosen.extra_bytes)} more memory"
    )


def shortfall(
    plan: Plan, spec: ModelSpec, cluster: Cluster, mode: SpeculationMode, gamma: int
) -> str | None:
    """Return which device lacks how many bytes for rounds of gamma drafts, None if none."""
    for index, stage in enumerate(plan.stages):
        if stage.memory is None:
            continue
        device = cluster.device(stage.device)
        wanted = stage.memory.least_bytes + round_bytes(plan, spec, index, device, mode, gamma)
        short = wanted - stage.memory.limit_bytes
        if short > 0:
            return f"{stage.device} is short by {format_size(short)}"
    return None


def round_bytes(
    plan: Plan, spec: ModelSpec, index: int, device: Device, mode: SpeculationMode, gamma: int
) -> int:
    """Return what rounds of gamma drafts take beside a stage: their own bytes and the verify's.

    A verify of gamma + 1 tokens a request works with what a decode step of so many times as many
    requests does: on the last stage, with as many logits.
    """
    decode = planned_shape(plan, index, device.spec, on_gpu=not device.spec.is_cpu)
    verify = replace(decode, decode_microbatch=plan.decode_microbatch * (gamma + 1))
    ends = [workspace_bytes(spec, plan.workload, shape) for shape in (decode, verify)]
    own = (rank for rank, worker in enumerate(plan.workers) if worker.stage == index)
    return sum(draft_bytes(plan, spec, rank, mode) for rank in own) + max(0, ends[1] - ends[0])


def _added(
    plan: Plan,
    spec: ModelSpec,
    cluster: Cluster,
    mode: SpeculationMode,
    gamma: int,
    speedup: float,
) -> Plan:
    """Return the plan with drafts; states of prefixes are kept where there is room beside them."""
    chosen = Speculation(
        mode=mode,
        gamma=gamma,
        acceptance=PRIOR_ACCEPTANCE[mode],
        extra_bytes=sum(draft_bytes(plan, spec, i, mode) for i in range(len(plan.workers))),
        predicted_speedup=speedup,
    )
    beside = [
        round_bytes(plan, spec, index, cluster.device(stage.device), mode, gamma)
        for index, stage in enumerate(plan.stages)
    ]
    stages = with_prefix_states(plan.stages, spec, plan.workload, beside=beside)
    return plan.model_copy(update={"speculation": chosen, "stages": stages})

"""Adds speculation to a finished plan where it fits and is predicted to pay.

The drafts' bytes must fit beside the stage on every device; the speed-up is that of the formulas
the runtime obeys (`llmpq.speculation`), in the middle of the job, at the prior acceptance.
"""

from __future__ import annotations

from llmpq.cost_model import CostModel
from llmpq.errors import DoesNotFitError
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan, Speculation
from llmpq.speculation import (
    PRIOR_ACCEPTANCE,
    PlanTimes,
    SpeculationMode,
    StepTimes,
    best_gamma,
    choose_mode,
    draft_bytes,
    usable_modes,
)
from llmpq.units import format_size


def with_speculation(plan: Plan, spec: ModelSpec, costs: CostModel, wish: str) -> Plan:
    """Return the plan with drafts of a mode, or with `auto` of the one that gains most, if any.

    `DoesNotFitError` if the mode that was asked for does not fit; `ValueError` if it makes nothing
    of this plan cheaper or is predicted to slow it down.
    """
    context = plan.workload.prompt_len + plan.workload.gen_len / 2
    rows = plan.decode_microbatch
    usable = usable_modes(plan)
    if wish == "auto":
        times: dict[SpeculationMode, StepTimes] = {
            mode: PlanTimes(plan, costs, mode)
            for mode in usable
            if shortfall(plan, spec, mode) is None
        }
        best = choose_mode(times, rows=rows, context=context)
        return plan if best is None else _added(plan, spec, *best)
    for mode in usable:
        if mode == wish:
            short = shortfall(plan, spec, mode)
            if short is not None:
                raise DoesNotFitError(f"drafts of {mode} do not fit: {short}; choose another mode")
            gamma, speedup = best_gamma(
                PlanTimes(plan, costs, mode), PRIOR_ACCEPTANCE[mode], rows=rows, context=context
            )
            if gamma == 0:
                raise ValueError(
                    f"drafts of {mode} are not predicted to pay at a batch of {rows} and a context "
                    f"of {context:.0f}; leave --speculate out or choose one of {', '.join(usable)}"
                )
            return _added(plan, spec, mode, gamma, speedup)
    raise ValueError(
        f"--speculate {wish}: this plan can use auto, {', '.join(usable)}; other modes need layers "
        "it does not have"
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


def shortfall(plan: Plan, spec: ModelSpec, mode: SpeculationMode) -> str | None:
    """Return which device lacks how many bytes for the drafts, None if all have room."""
    for index, stage in enumerate(plan.stages):
        if stage.memory is None:
            continue
        wanted = stage.memory.total_bytes + draft_bytes(plan, spec, index, mode)
        short = wanted - stage.memory.limit_bytes
        if short > 0:
            return f"{stage.device} is short by {format_size(short)}"
    return None


def _added(plan: Plan, spec: ModelSpec, mode: SpeculationMode, gamma: int, speedup: float) -> Plan:
    chosen = Speculation(
        mode=mode,
        gamma=gamma,
        acceptance=PRIOR_ACCEPTANCE[mode],
        extra_bytes=sum(draft_bytes(plan, spec, i, mode) for i in range(len(plan.stages))),
        predicted_speedup=speedup,
    )
    return plan.model_copy(update={"speculation": chosen})

"""Loads a stage and warms it up: with a pool of KV blocks, or with the plan's slots and drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from llmpq.cost_model import CostModel
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.backends.build_stage import build_head, build_slot_stage, build_stage
from llmpq.runtime.backends.slot_stage_runner import SlotStageRunner
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.drafts.drafters import AutoDrafter, FixedDrafter
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options import EngineOptions
from llmpq.runtime.trace import LoadReport
from llmpq.runtime.weights.sources import TensorSource
from llmpq.speculation import PlanTimes


def load_with_pool(
    pool: PoolPlan,
    index: int,
    source: TensorSource,
    device: torch.device,
    *,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[StageRunner, LoadReport]:
    """Load a stage of live requests."""
    limits = pool.limits
    compute, report = build_stage(
        *(pool.plan, index, pool.spec, source, device, pool.size),
        step_tokens=limits.step_tokens,
        graphs=not pool.options.enforce_eager,
        on_layer=on_layer,
    )
    mode, drafted = pool.options.draft_mode, 0
    if mode is not None:
        layers = range(*pool.plan.stages[index].layers)
        head = build_head(pool.plan, index, source, compute, device) if mode == "mtp" else None
        extra = compute.enable_speculation(
            mode, pool.size, layers=layers, kv=pool.plan.workload.kv, head=head
        )
        report, drafted = replace(report, draft_bytes=extra), pool.options.fixed_gamma or 0
    compute.warm_up(limits.decode_rows, limits.step_tokens, gamma=drafted)
    return compute, report


def load_with_slots(
    plan: Plan,
    index: int,
    options: EngineOptions,
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    *,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[SlotStageRunner, LoadReport]:
    """Load a stage of a job that the plan foresees."""
    compute, report = build_slot_stage(
        plan,
        index,
        spec,
        source,
        device,
        graphs=not options.enforce_eager,
        packed_prompts=options.packed_prompts,
        on_layer=on_layer,
    )
    if options.draft_mode is not None:
        extra = compute.enable_speculation(options.draft_mode, plan.workload)
        report = replace(report, draft_bytes=extra)
    workload = plan.workload
    rows = min(plan.decode_microbatch, workload.batch)
    # The plan's own shapes only: any other compiles kernels that no job needs.
    compute.warm_up_prompts(plan)
    compute.warm_up(rows, 0)
    return compute, report


def make_drafter(plan: Plan, options: EngineOptions) -> FixedDrafter | None:
    """Return the drafter of the options, None for plain decoding."""
    if options.draft_mode is None:
        return None
    if options.fixed_gamma is not None:
        return FixedDrafter(options.draft_mode, options.fixed_gamma)
    if options.costs is None:
        return None  # made once the device has timed itself
    costs = CostModel.load_json(options.costs)
    times = PlanTimes(plan, costs, options.draft_mode)
    return AutoDrafter(options.draft_mode, times, clock=time.perf_counter)


def timed_drafter(
    compute: SlotStageRunner | StageRunner, options: EngineOptions, rows: int
) -> AutoDrafter | None:
    """Return a drafter that goes by the device's own times; None for plain decoding.

    `rows`: that decode at once at most.
    """
    if options.draft_mode is None:
        return None
    from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner
    from llmpq.runtime.backends.gpu.cuda_stage_runner import (
        CudaStageRunner,  # Triton: half a second
    )

    if isinstance(compute, CudaStageRunner):
        times = compute.step_times(rows)
    else:
        assert isinstance(compute, CudaSlotStageRunner), "draft lengths need a cost model"
        times = compute.step_times()
    return AutoDrafter(
        options.draft_mode,
        times,
        lengths=times.lengths,
        corners=times.corners,
        clock=time.perf_counter,
    )

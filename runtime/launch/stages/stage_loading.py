"""Loads a stage and warms it up: with a pool of KV blocks, or with the plan's slots and drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from llmpq.cost_model import CostModel
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.backends.build_stage import build_slot_stage, build_stage
from llmpq.runtime.backends.slot_stage_runner import SlotStageRunner
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.drafts.drafters import AutoDrafter, FixedDrafter
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.launch.stages.stage_settings import StageSettings
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
        graphs=pool.settings.graphs,
        on_layer=on_layer,
    )
    mode, drafted = pool.settings.speculate, 0
    if mode is not None:
        layers = range(*pool.plan.stages[index].layers)
        extra = compute.enable_speculation(mode, pool.size, layers=layers)
        report, drafted = replace(report, draft_bytes=extra), pool.settings.gamma or 0
    compute.warm_up(limits.decode_rows, limits.step_tokens, gamma=drafted)
    return compute, report


def load_with_slots(
    plan: Plan,
    index: int,
    settings: StageSettings,
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
        graphs=settings.graphs,
        packed_prompts=settings.packed_prompts,
        on_layer=on_layer,
    )
    if settings.speculate is not None:
        extra = compute.enable_speculation(settings.speculate, plan.workload)
        report = replace(report, draft_bytes=extra)
    workload = plan.workload
    rows = min(plan.decode_microbatch, workload.batch)
    # The plan's own shapes only: any other compiles kernels that no job needs.
    compute.warm_up_prompts(plan)
    compute.warm_up(rows, 0)
    return compute, report


def make_drafter(plan: Plan, settings: StageSettings) -> FixedDrafter | None:
    """Return the drafter of the settings, None for plain decoding."""
    if settings.speculate is None:
        return None
    if settings.gamma is not None:
        return FixedDrafter(settings.speculate, settings.gamma)
    if settings.costs is None:
        return None  # made once the device has timed itself
    costs = CostModel.load_json(settings.costs)
    times = PlanTimes(plan, costs, settings.speculate)
    return AutoDrafter(settings.speculate, times, clock=time.perf_counter)


def timed_drafter(
    compute: SlotStageRunner | StageRunner, settings: StageSettings, rows: int
) -> AutoDrafter | None:
    """Return a drafter that goes by the device's own times; None for plain decoding.

    `rows`: that decode at once at most.
    """
    if settings.speculate is None:
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
        settings.speculate,
        times,
        lengths=times.lengths,
        corners=times.corners,
        clock=time.perf_counter,
    )

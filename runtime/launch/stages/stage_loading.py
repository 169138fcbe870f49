"""Loads a stage on its device, with what drafts tokens, and runs the first steps for warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from llmpq.costs.cost_model import CostModel
from llmpq.kernels.native.library import library
from llmpq.plans.plan import Plan
from llmpq.plans.speculation import PlanTimes
from llmpq.runtime.backends.build_stage import build_head, build_stage
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.drafts.drafters import AutoDrafter, FixedDrafter
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.models.layer_tensors import TensorSource
from llmpq.runtime.models.linear import Reduce
from llmpq.runtime.models.stage_model import HeldParts
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.steps.trace import LoadReport


def load_stage(
    pool: PoolPlan,
    index: int,
    source: TensorSource,
    device: torch.device,
    *,
    on_layer: Callable[[int | None], None] | None = None,
    reduce: Reduce | None = None,
    held: HeldParts | None = None,
    capture: bool = True,
) -> tuple[StageRunner, LoadReport]:
    """Return a device's runner, its weights loaded, and what was allocated and how long it took.

    `index`: of `plan.workers`; the rest as for `build_stage`. `capture` as for
    `StageRunner.warm_up`.
    """
    limits = pool.limits
    began_s = time.perf_counter()
    if device.type == "cpu":
        library()  # compiled now if it never was: no part of the first layer's load time
    library_s = time.perf_counter() - began_s
    compute, report = build_stage(
        pool.plan,
        index,
        pool.spec,
        source,
        device,
        pool.size,
        step_tokens=limits.step_tokens,
        graphs=not pool.options.enforce_eager,
        on_layer=on_layer,
        reduce=reduce,
        held=held,
    )
    mode, drafted = pool.options.draft_mode, 0
    if mode is not None:
        layers = range(*pool.plan.places[index].layers)
        head = build_head(pool.plan, index, source, compute, device) if mode == "mtp" else None
        extra = compute.enable_speculation(
            mode, pool.size, layers=layers, kv=pool.plan.workload.kv, head=head
        )
        report, drafted = replace(report, draft_bytes=extra), pool.options.fixed_gamma or 0
    began_s = time.perf_counter()
    compute.warm_up(limits.decode_rows, limits.step_tokens, gamma=drafted, capture=capture)
    warm_s = time.perf_counter() - began_s - compute.compiled_s
    report = replace(report, compiled_s=compute.compiled_s + library_s, warm_s=warm_s)
    return compute, report


def warm_up_together(pool: PoolPlan, compute: StageRunner) -> None:
    """Warm up a device of a shared stage, once all are connected: graphs contain all-reduces."""
    limits = pool.limits
    drafted = (pool.options.fixed_gamma or 0) if pool.options.draft_mode is not None else 0
    compute.warm_up(limits.decode_rows, limits.step_tokens, gamma=drafted)


def make_drafter(plan: Plan, options: EngineOptions) -> FixedDrafter | None:
    """Return the drafter of the options; None for plain decoding.

    None, too, where the number of drafts is open and no costs are given: `timed_drafter` makes it.
    """
    if options.draft_mode is None:
        return None
    if options.fixed_gamma is not None:
        return FixedDrafter(options.draft_mode, options.fixed_gamma)
    if options.costs is None:
        return None  # timed_drafter makes it, once the device has timed itself
    costs = CostModel.load_json(options.costs)
    times = PlanTimes(plan, costs, options.draft_mode)
    return AutoDrafter(options.draft_mode, times, clock=time.perf_counter)


def timed_drafter(compute: StageRunner, options: EngineOptions, rows: int) -> AutoDrafter | None:
    """Return a drafter that chooses by the device's own step times; None for plain decoding.

    `rows`: most rows that decode at once.
    """
    if options.draft_mode is None:
        return None
    # Imported here: Triton takes half a second.
    from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner

    assert isinstance(compute, CudaStageRunner), "draft lengths need a cost model"
    times = compute.step_times(rows)
    return AutoDrafter(
        options.draft_mode,
        times,
        lengths=times.lengths,
        corners=times.corners,
        clock=time.perf_counter,
    )

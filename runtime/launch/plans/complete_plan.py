"""A plan, completed by the options it is run with: KV precision, pool of KV blocks, drafts.

`complete_plan` is the one way from a plan that was given or made to the plan that stages get, and
`decide_drafts` in it the one decision about speculative decoding.
Errors name options as keywords; the command line shows them as flags.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from llmpq.costs.cost_model import CostModel
from llmpq.devices.device_spec import device_specs
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.member_memory import planned_shape
from llmpq.plans.plan import MemoryForm, Plan, PoolForm
from llmpq.plans.prefix_states import with_prefix_states
from llmpq.plans.speculation import (
    MAX_GAMMA,
    PlanTimes,
    SpeculationMode,
    StepTimes,
    choose_mode,
    kv_refusal,
    usable_modes,
)
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options.engine_options import AUTO, EngineOptions
from llmpq.sizes.pool_size import READS_KV4, planned_kv_bytes
from llmpq.sizes.workspace import workspace_bytes
from llmpq.units import format_size
from llmpq.workload import CHUNK_TOKENS

_log = logging.getLogger("llmpq.run")


def complete_plan(
    plan: Plan,
    spec: ModelSpec,
    options: EngineOptions,
    stored: Collection[Precision] = frozenset(),
    *,
    mtp: bool = False,
) -> tuple[Plan, EngineOptions]:
    """Return a plan and options as stages get them: nothing is left open.

    The plan has the KV precision of the options, its memory counted anew, and states the pool of KV
    blocks that its stages allocate, what drafts keep taken off. The options say who drafts.
    `stored`, `mtp`: as for `decide_drafts`. `DoesNotFitError` names a device that has no room,
    `ValueError` what GPUs do not run.
    """
    plan = _with_kv(plan, spec, options)
    packed = kv_refusal(plan, spec, KVPrecision.KV4) is None
    options = decide_drafts(plan, options, stored, mtp=mtp, packed_copies=packed)
    _require_kv(plan, spec, options)
    planned = None if plan.speculation is None else plan.speculation.mode
    if options.draft_mode != planned:  # the plan counts what its own drafts keep
        plan = plan.model_copy(update={"pool": None})
    packed = plan.workload.kv is not KVPrecision.KV16
    if spec.recurrent is not None and packed and options.enable_prefix_caching:
        _log.info("prefix cache: off; states of recurrent layers are kept beside 16-bit KV only")
    if plan.pool is None:
        stated = PoolPlan(plan, spec, options).stated
        plan = plan.model_copy(update={"pool": stated})
    return plan, options


def _require_kv(plan: Plan, spec: ModelSpec, options: EngineOptions) -> None:
    """Raise `ValueError` for a KV cache, or a packed copy for drafts, that no kernel reads."""
    work = plan.workload
    copies = (KVPrecision.KV4,) if options.draft_mode in READS_KV4 else ()
    for kv in (work.kv, *copies):
        refusal = kv_refusal(plan, spec, kv)
        if refusal is not None:
            raise ValueError(refusal)


def _with_kv(plan: Plan, spec: ModelSpec, options: EngineOptions) -> Plan:
    """Return the plan in the KV precision of the options, its memory counted anew."""
    name = options.kv_cache_dtype
    kv = plan.workload.kv if name == AUTO else KVPrecision.parse(name)
    if kv is plan.workload.kv:
        return plan
    _log.info("KV cache: %s instead of the plan's %s", kv.value, plan.workload.kv.value)
    workload = plan.workload.model_copy(update={"kv": kv})
    chunk = plan.prefill_chunk or CHUNK_TOKENS
    plan = plan.model_copy(update={"prefill_chunk": chunk})
    eta = plan.prefill_microbatch
    stages = []
    for index, stage in enumerate(plan.stages):
        memory = stage.memory
        if memory is not None:
            device = device_specs().get(stage.kind)
            shape = planned_shape(plan, index, device, on_gpu=not stage.is_cpu)
            layers = range(*stage.layers)
            kv_bytes = planned_kv_bytes(spec, workload, layers, chunk=chunk, prefill_microbatch=eta)
            memory = _changed(memory, kv_bytes, workspace_bytes(spec, workload, shape))
            short = memory.least_bytes - memory.limit_bytes
            if short > 0:
                raise DoesNotFitError(
                    f"stage {stage.device} has no room for a {kv.value} cache: short by "
                    f"{format_size(short)}; leave kv_cache_dtype out or re-plan with llmpq-algo "
                    f"--kv {kv.value}"
                )
        stages.append(stage.model_copy(update={"memory": memory}))
    kept = with_prefix_states(stages, spec, workload)
    pool = PoolForm.planned(spec, workload, kept, chunk=chunk, prefill_microbatch=eta)
    return plan.model_copy(update={"workload": workload, "stages": kept, "pool": pool})


def _changed(memory: MemoryForm, kv_bytes: int, workspace_bytes: int) -> MemoryForm:
    changed = {"kv_bytes": kv_bytes, "workspace_bytes": workspace_bytes}
    grown = sum(changed.values()) - memory.kv_bytes - memory.workspace_bytes
    return memory.model_copy(update={**changed, "total_bytes": memory.total_bytes + grown})


def decide_drafts(
    plan: Plan,
    options: EngineOptions,
    stored: Collection[Precision] = frozenset(),
    *,
    mtp: bool = False,
    packed_copies: bool = True,
) -> EngineOptions:
    """Return the options with who drafts (`speculate`), how many tokens (`gamma`), by which times.

    `speculate` None means plain decoding then, `gamma` None a length chosen from step times: of
    `costs`, or of a whole model on a GPU, which times its own steps. `stored`: precisions whose
    layers have a checkpoint's own codes; `mtp`, `packed_copies`: as of `usable_modes`, this for
    `speculate` auto. `ValueError` says why an option cannot be obeyed.
    """
    mode, gamma, costs = options.speculate, options.gamma, options.costs
    if mode == "off" or (mode is None and plan.speculation is None):
        given = {name: value for name, value in (("gamma", gamma), ("costs", costs)) if value}
        if given:
            what = " and ".join(f"{name}={value!r}" for name, value in given.items())
            verb, them = ("has", "it") if len(given) == 1 else ("have", "them")
            why = (
                "with speculate='off'" if mode == "off" else "without drafts, and the plan has none"
            )
            raise ValueError(
                f"{what} {verb} no effect {why}: give speculate a mode, or leave {them} out"
            )
        return replace(options, speculate=None)
    length = options.fixed_gamma
    if costs is not None and length is not None and mode != "auto":
        raise ValueError(
            f"costs has no effect with gamma={gamma}: costs choose the number of drafts, or with "
            "speculate='auto' the mode; leave one of them out"
        )
    if mode is None:
        assert plan.speculation is not None
        mode = plan.speculation.mode
        if gamma is None and costs is None:
            length = plan.speculation.gamma
    if mode == "auto":
        usable = usable_modes(plan, stored, mtp=mtp, packed_copies=packed_copies)
        chosen = _mode_of_times(plan, costs, usable)
        if chosen is None:
            return replace(options, speculate=None, gamma=None, costs=None)
        mode = chosen
    else:
        _require_usable(plan, mode, stored, mtp=mtp)
    if mode == "mtp" and options.copy_weights:
        raise ValueError(
            "speculate='mtp' does not go with copy_weights: slices of checkpoints have no such "
            "head; give every host the model's directory, or choose another mode"
        )
    if length is None and costs is None and not times_itself(plan):
        raise ValueError(
            f"speculate='{mode}' without gamma=1..{MAX_GAMMA} needs a cost model to weigh drafts: "
            "give gamma, or costs='costs.json' (llmpq-profile)"
        )
    # Differences of a few percent decide, which is what cost models err by.
    by_costs = None if costs is None or times_itself(plan) else str(Path(costs).resolve())
    return replace(options, speculate=mode, gamma=length, costs=by_costs)


def times_itself(plan: Plan) -> bool:
    """Whether the engine times its own drafts and verifies at the start: a whole model on a GPU."""
    return len(plan.stages) == 1 and not plan.stages[0].is_cpu


def _mode_of_times(
    plan: Plan, costs: str | Path | None, usable: Collection[SpeculationMode]
) -> SpeculationMode | None:
    """Return the mode with the highest predicted speed-up in the middle of the job, if one has."""
    if costs is None:
        raise ValueError("speculate='auto' needs costs='costs.json' (llmpq-profile)")
    model = CostModel.load_json(costs)
    times: dict[SpeculationMode, StepTimes] = {
        mode: PlanTimes(plan, model, mode) for mode in usable
    }
    context = plan.workload.prompt_len + plan.workload.gen_len / 2
    best = choose_mode(times, rows=plan.decode_microbatch, context=context)
    if best is None:
        _log.info("speculation: off, no draft is predicted to pay at this batch and context")
        return None
    mode, gamma, speedup = best
    _log.info("speculation: %s, predicted %.2fx with a gamma of %d", mode, speedup, gamma)
    return mode


def _require_usable(
    plan: Plan, mode: SpeculationMode, stored: Collection[Precision], *, mtp: bool
) -> None:
    modes = usable_modes(plan, stored, mtp=mtp)
    usable = ", ".join(modes)
    if mode in modes:
        return
    if mode == "mtp":
        raise ValueError(
            f"speculate='mtp' needs a head that predicts a further token, and "
            f"{plan.model.name} has none that llmpq knows among its tensors; choose one of {usable}"
        )
    if mode in usable_modes(plan):
        raise ValueError(
            f"speculate='{mode}' would draft at the target's cost: the model's layers have codes "
            "of its checkpoint (FP8, or 4 bits that stand for a table's values), which such drafts "
            f"cannot read at less; choose one of {usable}"
        )
    held = ", ".join(sorted({precision.value for precision in plan.precisions}))
    needs = {
        "qspec": "4-bit layers (w4a16)",
        "w4kv4": "16- or 8-bit layers and a 16-bit KV cache",
        "kv4": "a 16-bit KV cache",
    }[mode]
    also = f" with {plan.workload.kv.value}" if mode in READS_KV4 else ""
    raise ValueError(
        f"speculate='{mode}' needs {needs}, the plan has {held}{also}; choose one of {usable}"
    )

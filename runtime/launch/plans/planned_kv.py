"""`--kv-cache-dtype`: run a plan with another KV precision than it was made for."""

from __future__ import annotations

import logging

from llmpq.capabilities import gpu_pool_lack
from llmpq.devices.device_spec import device_specs
from llmpq.errors import DoesNotFitError
from llmpq.memory import unpacks_prompts
from llmpq.model_spec import ModelSpec
from llmpq.plan import MemoryForm, Plan, StagePlan
from llmpq.precision import KVPrecision
from llmpq.sizes.pool_size import planned_kv_bytes
from llmpq.sizes.stated_pool import stated_pool
from llmpq.sizes.workspace import workspace_bytes
from llmpq.units import format_size
from llmpq.workload import CHUNK_TOKENS, Workload

AUTO = "auto"

_log = logging.getLogger("llmpq.run")


def with_kv(plan: Plan, spec: ModelSpec, wish: str) -> Plan:
    """Return the plan with the KV precision wished for, its memory counted anew.

    `auto` keeps what the plan says. `DoesNotFitError` names a device that has no room for it.
    """
    kv = plan.workload.kv if wish == AUTO else KVPrecision.parse(wish)
    if kv is plan.workload.kv:
        return plan
    _log.info("KV cache: %s instead of the plan's %s", kv.value, plan.workload.kv.value)
    workload = plan.workload.model_copy(update={"kv": kv})
    on_cpus = all(stage.is_cpu for stage in plan.stages)
    pooled = on_cpus or not gpu_pool_lack(spec, kv, workload.dtype, drafts=False)
    chunk = plan.prefill_chunk or CHUNK_TOKENS if pooled else None
    plan = plan.model_copy(update={"prefill_chunk": chunk})
    eta = plan.prefill_microbatch
    stages = []
    for stage in plan.stages:
        memory = stage.memory
        if memory is not None:
            layers = range(*stage.layers)
            kv_bytes = planned_kv_bytes(
                spec, workload, layers, pooled=pooled, chunk=chunk, prefill_microbatch=eta
            )
            memory = _changed(memory, kv_bytes, _workspace_bytes(plan, spec, stage, workload))
            short = memory.total_bytes - memory.limit_bytes
            if short > 0:
                raise DoesNotFitError(
                    f"stage {stage.device} has no room for a {kv.value} cache: short by "
                    f"{format_size(short)}; leave --kv-cache-dtype out or re-plan with llmpq-algo "
                    f"--kv {kv.value}"
                )
        stages.append(stage.model_copy(update={"memory": memory}))
    pool = None
    if pooled:
        pool = stated_pool(spec, workload, stages, chunk=chunk, prefill_microbatch=eta)
    return plan.model_copy(update={"workload": workload, "stages": tuple(stages), "pool": pool})


def _workspace_bytes(plan: Plan, spec: ModelSpec, stage: StagePlan, workload: Workload) -> int:
    """Return the largest temporary of a stage at this workload's KV precision."""
    device = device_specs().get(stage.kind)
    return workspace_bytes(
        spec,
        workload,
        precisions=stage.precisions,
        first=stage is plan.stages[0],
        last=stage is plan.stages[-1],
        prefill_microbatch=plan.prefill_microbatch,
        prefill_chunk=plan.prefill_chunk,
        decode_microbatch=plan.decode_microbatch,
        on_gpu=not stage.is_cpu,
        unpacks=unpacks_prompts(device, stage.precisions, plan.settings()),
    )


def _changed(memory: MemoryForm, kv_bytes: int, workspace_bytes: int) -> MemoryForm:
    changed = {"kv_bytes": kv_bytes, "workspace_bytes": workspace_bytes}
    grown = sum(changed.values()) - memory.kv_bytes - memory.workspace_bytes
    return memory.model_copy(update={**changed, "total_bytes": memory.total_bytes + grown})

"""Bytes of one device of a plan: of a stage of its own, or of its part of one that it shares."""

from __future__ import annotations

from dataclasses import replace

from llmpq.devices.device_spec import DeviceSpec
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan, Worker
from llmpq.sizes.memory import StageMemory, of_member, stage_memory, unpacks_prompts
from llmpq.sizes.stage_shape import StageShape


def planned_shape(
    plan: Plan,
    index: int,
    device: DeviceSpec | None,
    *,
    on_gpu: bool,
) -> StageShape:
    """Return what decides the size of a stage's temporaries; `device`: None for unknown kinds."""
    precisions = plan.stages[index].precisions
    return StageShape(
        precisions=precisions,
        first=index == 0,
        last=index == len(plan.stages) - 1,
        prefill_microbatch=plan.prefill_microbatch,
        decode_microbatch=plan.decode_microbatch,
        prefill_chunk=plan.prefill_chunk,
        on_gpu=on_gpu,
        unpacks=unpacks_prompts(device, precisions, plan.settings()),
    )


def member_memory(
    plan: Plan, worker: Worker, spec: ModelSpec, stage: StageShape, *, context_bytes: int = 0
) -> StageMemory:
    """Return the bytes that a device of a plan holds.

    Weights and KV are of `Member.own` where devices share the stage; of the last stage's devices
    the first one holds the output matrix. `stage`: the shape of the whole stage.
    """
    member, quantization = worker.member_of(spec), plan.settings()
    return stage_memory(
        spec if member is None else member.own,
        plan.workload,
        replace(stage, last=stage.last and worker.leads),
        quantization=quantization
        if member is None
        else of_member(quantization, member, plan.workload.dtype_bytes),
        context_bytes=context_bytes,
        first_layer=worker.place.layers[0],
    )

"""Bytes of one device of a plan: of a stage of its own, or of its part of one that it shares."""

from __future__ import annotations

from llmpq.memory import Quantization, StageMemory, of_member, stage_memory
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan, Worker


def member_memory(
    plan: Plan,
    worker: Worker,
    spec: ModelSpec,
    *,
    quantization: Quantization,
    context_bytes: int = 0,
    on_gpu: bool = False,
    unpacks: bool = True,
) -> StageMemory:
    """Return what a device of a plan holds; the output matrix is the last stage's first device's.

    Its weights and keys are those of `Member.own`; the other options are `stage_memory`'s.
    """
    stage, member = worker.place, worker.member_of(spec)
    return stage_memory(
        spec if member is None else member.own,
        plan.workload,
        stage.precisions,
        first=worker.stage == 0,
        last=worker.leads and worker.stage == len(plan.stages) - 1,
        prefill_microbatch=plan.prefill_microbatch,
        prefill_chunk=plan.prefill_chunk,
        decode_microbatch=plan.decode_microbatch,
        quantization=quantization if member is None else of_member(quantization, member),
        context_bytes=context_bytes,
        on_gpu=on_gpu,
        unpacks=unpacks,
        first_layer=stage.layers[0],
    )

"""What a GPU leaves for a pool of KV blocks, stated in a plan that was not counted by a planner.

Slots take the longest request for each, so that a plan of slots bounds how many there are. A pool
takes what its requests need: the plan may have any number of them, and its blocks are what fits.
"""

from __future__ import annotations

from llmpq.errors import DoesNotFitError
from llmpq.memory import stage_memory
from llmpq.model_spec import ModelSpec
from llmpq.plan import MemoryForm, Plan
from llmpq.units import format_size

CONTEXT_BYTES = 1 << 30
"""What CUDA, libraries and captured steps take on a GPU beside tensors, about."""


def with_pool_room(plan: Plan, spec: ModelSpec, memory_bytes: int, *, share: float) -> Plan:
    """Return the plan with memory stated: KV has what weights leave of a share of every GPU.

    `DoesNotFitError` where not even one request of the plan's length would fit.
    """
    stages, limit = [], int(share * memory_bytes)
    for index, stage in enumerate(plan.stages):
        needed = stage_memory(
            spec,
            plan.workload,
            stage.precisions,
            first=index == 0,
            last=index == len(plan.stages) - 1,
            prefill_microbatch=plan.prefill_microbatch,
            prefill_chunk=plan.prefill_chunk,
            decode_microbatch=plan.decode_microbatch,
            quantization=plan.settings(),
            pooled=True,
            context_bytes=CONTEXT_BYTES,
            on_gpu=True,
            first_layer=stage.layers[0],
        )
        room = limit - (needed.total_bytes - needed.kv_bytes)
        each = -(-needed.kv_bytes // plan.workload.batch)
        if room < each:
            raise DoesNotFitError(
                f"stage {stage.device} has {format_size(max(0, room))} for KV beside its weights, "
                f"a request of {plan.workload.max_len} tokens needs {format_size(each)}; take "
                "fewer tokens (max_model_len) or fewer bits"
            )
        kv_bytes = min(needed.kv_bytes, room)
        memory = MemoryForm(
            weights_bytes=needed.weights_bytes,
            embedding_bytes=needed.embedding_bytes,
            kv_bytes=kv_bytes,
            workspace_bytes=needed.workspace_bytes,
            context_bytes=needed.context_bytes,
            total_bytes=needed.total_bytes - needed.kv_bytes + kv_bytes,
            limit_bytes=limit,
            reserve_bytes=memory_bytes - limit,
        )
        stages.append(stage.model_copy(update={"memory": memory}))
    return plan.model_copy(update={"stages": tuple(stages)})

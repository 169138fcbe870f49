"""The pool of KV blocks that a plan states: what every stage's device has room for.

Plans on CPUs always state one. On GPUs a plan that does has its run keep it, instead of slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.capabilities import require_gpu_pool
from llmpq.errors import DoesNotFitError
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan, PoolForm, StagePlan
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.sizes.pool_size import fitting_pool, wanted_pool
from llmpq.workload import Workload


def with_pool(plan: Plan, spec: ModelSpec) -> Plan:
    """Return a plan that states a pool; `ValueError` for GPUs that have none for it.

    `DoesNotFitError` where a stage has no room for a block.
    """
    work = plan.workload
    if not all(stage.is_cpu for stage in plan.stages):
        require_gpu_pool(spec, work.kv, work.dtype, drafts=plan.speculation is not None)
    pool = stated_pool(spec, work, plan.stages)
    if pool is None:
        raise DoesNotFitError(
            "the plan leaves no room for a block of 128 tokens of KV cache on every stage; leave "
            "the pool out (--kv-pool), or plan for fewer tokens"
        )
    return plan.model_copy(update={"pool": pool})


def stated_pool(
    spec: ModelSpec, workload: Workload, stages: Sequence[StagePlan]
) -> PoolForm | None:
    """Return the pool of a plan's stages; None where one has no room for a block."""
    wanted = wanted_pool(spec, workload, max_len=workload.max_len)
    try:
        size = fitting_pool(wanted, stages, spec, workload)
    except DoesNotFitError:
        return None
    return PoolForm(
        num_blocks=size.num_blocks,
        tokens=size.num_blocks * BLOCK_TOKENS,
        stage_bytes=tuple(
            size.nbytes(
                spec,
                workload.kv,
                layers=range(*stage.layers),
                dtype_bytes=workload.dtype_bytes,
            )
            for stage in stages
        ),
    )

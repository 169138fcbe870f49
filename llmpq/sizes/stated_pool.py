"""The pool of KV blocks that a plan states: what it counts for its stages."""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.model_spec import ModelSpec
from llmpq.plan import PoolForm, StagePlan
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.sizes.pool_size import PoolSize, held_specs, planned_pool
from llmpq.sizes.state_size import state_bytes
from llmpq.workload import Workload


def stated_pool(
    spec: ModelSpec,
    workload: Workload,
    stages: Sequence[StagePlan],
    *,
    chunk: int | None,
    prefill_microbatch: int,
) -> PoolForm:
    """Return the pool that a plan counts for its stages."""
    size = planned_pool(spec, workload, chunk, prefill_microbatch=prefill_microbatch)
    return pool_form(size, spec, workload, stages)


def pool_form(
    size: PoolSize, spec: ModelSpec, workload: Workload, stages: Sequence[StagePlan]
) -> PoolForm:
    """Return a pool as a plan states it."""
    states = state_bytes(spec, range(spec.num_layers), slots=1, dtype_bytes=workload.dtype_bytes)
    return PoolForm(
        num_blocks=size.num_blocks,
        tokens=size.num_blocks * BLOCK_TOKENS,
        window_blocks=size.window_blocks,
        state_bytes=states,
        stage_bytes=tuple(
            sum(
                size.nbytes(
                    own,
                    workload.kv,
                    layers=range(*place.layers),
                    dtype_bytes=workload.dtype_bytes,
                )
                for place, own in held_specs([stage], spec)
            )
            for stage in stages
        ),
    )

"""The pool of KV blocks that a plan states: what every stage's device has room for."""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.errors import DoesNotFitError
from llmpq.kv_format import BLOCK_TOKENS
from llmpq.model_spec import ModelSpec
from llmpq.plan import PoolForm, StagePlan
from llmpq.pool_size import fitting_pool, wanted_pool
from llmpq.workload import Workload


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

"""How many blocks of KV cache a plan's stages have room for: one definition for plan and runtime.

A plan counts its KV as requests of one length. A pool gives the same requests as many blocks as
they need at their longest, and fewer where the plan leaves a device no room for what is rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmpq.errors import DoesNotFitError
from llmpq.kv_format import kv_pool_bytes, pool_blocks
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.workload import Workload

if TYPE_CHECKING:
    from llmpq.plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """The pool of every stage: as many blocks on each."""

    num_blocks: int
    slots: int
    """Requests at once."""
    max_len: int
    """Tokens of the longest request."""
    prefix_cache: bool = True

    def nbytes(self, spec: ModelSpec, kv: KVPrecision, *, num_layers: int, dtype_bytes: int) -> int:
        """Return the bytes of a stage's pool; `make_paged_kv` allocates exactly those."""
        return num_layers * kv_pool_bytes(
            kv,
            num_blocks=self.num_blocks,
            slots=self.slots,
            kv_heads=spec.kv_heads,
            vectors=spec.kv_vectors,
            head_dim=spec.head_dim,
            dtype_bytes=dtype_bytes,
            prefix_cache=self.prefix_cache,
        )


def wanted_pool(workload: Workload, *, max_len: int, prefix_cache: bool = True) -> PoolSize:
    """Return the pool of all requests that are planned to be under way at once."""
    return PoolSize(
        num_blocks=workload.batch * max(1, pool_blocks(workload.kv, workload.max_len)),
        slots=workload.batch,
        max_len=max_len,
        prefix_cache=prefix_cache,
    )


def fits(size: PoolSize, stages: Sequence[StagePlan], spec: ModelSpec, workload: Workload) -> bool:
    """Whether every stage's device has room for a pool."""
    return all(_excess(size, stage, spec, workload) <= 0 for stage in stages)


def fitting_pool(
    size: PoolSize, stages: Sequence[StagePlan], spec: ModelSpec, workload: Workload
) -> PoolSize:
    """Return the pool, smaller where a stage has no room for it; `DoesNotFitError` without any."""
    while not fits(size, stages, spec, workload):
        if size.num_blocks == 1:
            raise DoesNotFitError(
                "the plan leaves no room for a block of 128 tokens of KV cache on every stage; "
                "re-plan with a larger --n or a smaller reserve"
            )
        size = replace(size, num_blocks=max(1, size.num_blocks * 15 // 16))
    return size


def _excess(size: PoolSize, stage: StagePlan, spec: ModelSpec, workload: Workload) -> int:
    """Return the bytes by which a stage's pool exceeds what its device has left for it."""
    if stage.memory is None:
        return 0
    memory = stage.memory
    room = memory.limit_bytes - (memory.total_bytes - memory.kv_bytes)
    nbytes = size.nbytes(
        spec, workload.kv, num_layers=stage.num_layers, dtype_bytes=workload.dtype_bytes
    )
    return nbytes - max(room, memory.kv_bytes)

"""The pool of KV blocks of a stage, and its bytes: one definition for planner, check and runtime.

A plan counts the blocks of all its requests at their longest. Layers with a window have a pool of
their own, of the windows' blocks and those of a step's prompts. A run has fewer blocks where a
device has no room for as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import (
    BLOCK_TOKENS,
    HOLDBACK_TOKENS,
    kv_pool_bytes,
    pool_blocks,
    spanned_blocks,
)
from llmpq.sizes.state_size import layers_with_kv, note_bytes, state_bytes
from llmpq.workload import CHUNK_TOKENS, Workload

if TYPE_CHECKING:
    from llmpq.plans.plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """The pool of every stage: as many blocks on each."""

    num_blocks: int
    slots: int
    """Requests at once."""
    max_len: int
    """Tokens of the longest request."""
    prefix_cache: bool = True
    window: int = 0
    """Tokens that the layers with a window see; 0 where all layers share one pool."""
    window_blocks: int = 0
    """Blocks of the pool of the layers with a window."""
    snapshots: int = 0
    """States of recurrent layers that are kept of prefixes, to go on from."""
    is_copy: bool = False
    """It is another pool's copy, which keeps the recurrent states of both."""

    def nbytes(
        self, spec: ModelSpec, kv: KVPrecision, *, layers: Sequence[int], dtype_bytes: int
    ) -> int:
        """Return the bytes of a stage's pool; `make_paged_kv` allocates exactly those.

        Blocks of the layers that keep keys and values, and a slot of state per request of others.
        """
        total = state_bytes(spec, layers, slots=self.state_slots, dtype_bytes=dtype_bytes)
        for (kv_heads, head_dim, windowed), count in _alike(spec, layers).items():
            total += count * kv_pool_bytes(
                kv,
                num_blocks=self.window_blocks if windowed and self.window else self.num_blocks,
                slots=self.slots,
                kv_heads=kv_heads,
                vectors=spec.kv_vectors,
                head_dim=head_dim,
                dtype_bytes=dtype_bytes,
                prefix_cache=self.prefix_cache,
            )
        return total

    def prefix_bytes(
        self, spec: ModelSpec, kv: KVPrecision, *, layers: Sequence[int], dtype_bytes: int
    ) -> int:
        """Return how much of `nbytes` only found prefixes need.

        States of recurrent layers behind prefixes (which a plan states where there is room), the
        16-bit tokens behind packed blocks (which no plan counts).
        """
        plain = replace(self, prefix_cache=False, snapshots=0)
        whole, counted = (
            size.nbytes(spec, kv, layers=layers, dtype_bytes=dtype_bytes) for size in (self, plain)
        )
        return whole - counted

    @property
    def state_slots(self) -> int:
        """Recurrent states that it keeps: of requests, and of prefixes."""
        return 0 if self.is_copy else self.slots + self.snapshots

    def of_blocks(self, num_blocks: int) -> PoolSize:
        """Return a smaller pool of as many blocks, those of windows in proportion."""
        share = self.window_blocks * num_blocks // self.num_blocks
        return replace(self, num_blocks=num_blocks)._with_window(self.window, share)

    def _with_window(self, window: int, window_blocks: int) -> PoolSize:
        """Return the pool with blocks for a window, as many as one request needs at least.

        One pool serves all layers where that would take no more.
        """
        blocks = max(window_blocks, spanned_blocks(window, CHUNK_TOKENS)) if window else 0
        if blocks >= self.num_blocks:
            window = blocks = 0
        return replace(self, window=window, window_blocks=blocks)


def _alike(spec: ModelSpec, layers: Sequence[int]) -> Counter[tuple[int, int, bool]]:
    """Return how many layers keep keys and values of so many heads and channels, windowed or not.

    Layers that attend to another layer's keep none.
    """
    own = layers_with_kv(spec, layers)
    return Counter((*spec.kv_shape(layer), spec.is_windowed(layer)) for layer in own)


@lru_cache(maxsize=64)  # planners ask for the same again and again
def kv_kinds(spec: ModelSpec) -> tuple[int, ...]:
    """Return of each layer the first one that keeps as much: keys, values and state alike."""
    found: dict[tuple[object, ...], int] = {}
    kinds = []
    for layer in range(spec.num_layers):
        kept = (*_alike(spec, (layer,)), spec.has_state(layer))
        kinds.append(found.setdefault(kept, layer))
    return tuple(kinds)


def draft_pool(size: PoolSize) -> PoolSize:
    """Return the packed copy of a 16-bit pool that drafts read, under the same block tables.

    All layers share one pool, no prefix is found in it, and its tables have a column for every
    block of the pool's, which the newest tokens take, too.
    """
    return replace(
        size,
        window=0,
        window_blocks=0,
        prefix_cache=False,
        max_len=size.max_len + BLOCK_TOKENS + HOLDBACK_TOKENS,
        is_copy=True,
    )


def mtp_pool(size: PoolSize) -> PoolSize:
    """Return the pool of the model's own head (MTP), a layer that sees all tokens."""
    return replace(size, window=0, window_blocks=0)


READS_KV4 = ("w4kv4", "kv4")
"""Modes of speculation whose drafts read a 4-bit copy of the pool."""


def drafted_bytes(
    size: PoolSize,
    mode: str,
    spec: ModelSpec,
    *,
    layers: Sequence[int],
    kv: KVPrecision,
    dtype_bytes: int,
) -> int:
    """Return what drafts of a mode of speculation keep of requests beside a stage's pool.

    The copy that they read, notes of the tokens that recurrent layers may have to take back, on the
    last stage the cache of the model's own head.
    """
    notes = note_bytes(spec, layers, slots=size.slots, dtype_bytes=dtype_bytes)
    if mode == "mtp" and spec.num_layers - 1 in layers:
        own = mtp_pool(size)
        return notes + own.nbytes(spec.of_mtp(), kv, layers=range(1), dtype_bytes=dtype_bytes)
    if mode not in READS_KV4:
        return notes
    copy = draft_pool(size)
    return notes + copy.nbytes(spec, KVPrecision.KV4, layers=layers, dtype_bytes=dtype_bytes)


WINDOW_STEP_TOKENS = 2048
"""Prompt tokens of a step, at least a chunk, for which pools of windows have blocks beside them."""


LEAST_SNAPSHOTS = 4
"""States of prefixes that a pool keeps at least; else as many as there are requests at once."""


def num_snapshots(spec: ModelSpec, workload: Workload) -> int:
    """Return how many prefixes' recurrent states are kept where there is room.

    None of packed caches: snapshots are taken at block ends, where no packed cache begins.
    """
    if spec.recurrent is None or workload.kv is not KVPrecision.KV16:
        return 0
    return max(LEAST_SNAPSHOTS, workload.batch)


def window_step_tokens(workload: Workload, chunk: int | None, *, prefill_microbatch: int) -> int:
    """Return the prompt tokens of a step for which a plan's pools of windows have room."""
    tokens = min(workload.prompt_len, chunk or workload.prompt_len)
    usual = min(workload.batch * tokens, max(tokens, WINDOW_STEP_TOKENS))
    return max(usual, prefill_microbatch * tokens)


def planned_pool(
    spec: ModelSpec, workload: Workload, chunk: int | None, *, prefill_microbatch: int
) -> PoolSize:
    """Return the pool that a plan counts.

    Packed blocks have no 16-bit tokens behind them, and no states of recurrent layers are kept,
    which only found prefixes need: a run has those where its devices have room beside this
    (a plan's `prefix_bytes`, plans/prefix_states.py).
    """
    return wanted_pool(
        spec,
        workload,
        max_len=workload.max_len,
        prefix_cache=workload.kv is KVPrecision.KV16 and spec.recurrent is None,
        step_tokens=window_step_tokens(workload, chunk, prefill_microbatch=prefill_microbatch),
    )


def wanted_pool(
    spec: ModelSpec,
    workload: Workload,
    *,
    max_len: int,
    prefix_cache: bool = True,
    step_tokens: int = CHUNK_TOKENS,
) -> PoolSize:
    """Return the pool of all requests that are planned to be under way at once.

    On layers with a window each has its window's blocks, and `step_tokens` prompt tokens of a step
    have theirs beside them.
    """
    each = max(1, pool_blocks(workload.kv, workload.max_len))
    whole = PoolSize(
        num_blocks=workload.batch * each,
        slots=workload.batch,
        max_len=max_len,
        prefix_cache=prefix_cache,
        snapshots=num_snapshots(spec, workload) if prefix_cache else 0,
    )
    # Packed caches keep all blocks, a quarter of the bytes or less: their tables are one.
    window = spec.widest_window if workload.kv is KVPrecision.KV16 else 0
    own = min(each, spanned_blocks(window, 1)) if window else 0
    return whole._with_window(window, workload.batch * own + -(-step_tokens // BLOCK_TOKENS))


def planned_kv_bytes(
    spec: ModelSpec,
    workload: Workload,
    layers: Sequence[int],
    *,
    chunk: int | None,
    prefill_microbatch: int,
) -> int:
    """Return the bytes of the pool that a plan counts for layers, by their numbers."""
    size = planned_pool(spec, workload, chunk, prefill_microbatch=prefill_microbatch)
    return size.nbytes(spec, workload.kv, layers=layers, dtype_bytes=workload.dtype_bytes)


def held_specs(stages: Sequence[StagePlan], spec: ModelSpec) -> list[tuple[StagePlan, ModelSpec]]:
    """Return every device of stages, as a stage of its own, and what it has of the model."""
    found = []
    for stage in stages:
        for number, place in enumerate(stage.members):
            own = spec
            if stage.shares:
                own = Member(spec=spec, shares=stage.shares, index=number).own
            found.append((place, own))
    return found


def fits(
    size: PoolSize,
    stages: Sequence[StagePlan],
    spec: ModelSpec,
    workload: Workload,
    *,
    drafts: str | None = None,
    draft_weights: Sequence[int] = (),
) -> bool:
    """Whether every stage's device has room for a pool, and for what drafts of a mode keep beside.

    `draft_weights`: bytes of weights that drafts hold on each device.
    """
    places = held_specs(stages, spec)
    held = draft_weights or [0] * len(places)
    return all(
        _excess(size, place, own, workload, drafts=drafts) + weights <= 0
        for (place, own), weights in zip(places, held, strict=True)
        if place.memory is not None
    )


def fitting_pool(
    size: PoolSize,
    stages: Sequence[StagePlan],
    spec: ModelSpec,
    workload: Workload,
    *,
    drafts: str | None = None,
    draft_weights: Sequence[int] = (),
) -> PoolSize:
    """Return the pool, smaller where a stage has no room for it; `DoesNotFitError` without any.

    `drafts`, `draft_weights`: as for `fits`.
    """
    while not fits(size, stages, spec, workload, drafts=drafts, draft_weights=draft_weights):
        if size.num_blocks == 1:
            raise DoesNotFitError(
                "the plan leaves no room for a block of 128 tokens of KV cache on every stage; "
                "re-plan with a larger --gen-len or a smaller reserve"
            )
        size = size.of_blocks(max(1, size.num_blocks * 15 // 16))
    return size


def _excess(
    size: PoolSize, stage: StagePlan, spec: ModelSpec, workload: Workload, *, drafts: str | None
) -> int:
    """Return the bytes by which a stage's pool exceeds what its device has left for it."""
    memory = stage.memory
    assert memory is not None
    room = memory.limit_bytes - (memory.least_bytes - memory.kv_bytes)
    layers, dtype_bytes = range(*stage.layers), workload.dtype_bytes
    nbytes = size.nbytes(spec, workload.kv, layers=layers, dtype_bytes=dtype_bytes)
    beside = 0
    if drafts is not None:
        beside = drafted_bytes(
            size, drafts, spec, layers=layers, kv=workload.kv, dtype_bytes=dtype_bytes
        )
    return nbytes + beside - max(room, memory.kv_bytes)

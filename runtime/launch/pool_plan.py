"""How many KV blocks a plan's stages have room for, when requests come as they like.

The plan counts its KV as slots of one length. A pool gives the same requests as many blocks as they
need at their longest, and fewer where the plan leaves a device no room for what is rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmpq.capabilities import lacking_sentence, ways_of
from llmpq.errors import DoesNotFitError
from llmpq.kv_format import pool_blocks
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.runtime.cache.paged_by_precision import PoolSize
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Limits
from llmpq.runtime.launch.stage_settings import StageSettings, limits_of

RequestLimits = PoolLimits | Limits

STEP_TOKENS = 512
"""Tokens of a step, where nobody says: a long prompt holds answers up for no longer than these."""


@dataclass(frozen=True)
class PoolPlan:
    """The pool of a plan's stages, for stages and for the scheduler."""

    plan: Plan
    spec: ModelSpec
    settings: StageSettings

    @property
    def serves(self) -> bool:
        """Whether the paged engine serves the plan; else requests have the plan's slots.

        On CPUs it does. Slots remain for drafts by the model's own weights, which keep caches of
        their own, and for jobs known beforehand with drafts, or of which fewer requests would be
        under way at once than planned, since blocks round their lengths up.
        """
        if not all(stage.is_cpu for stage in self.plan.stages):
            return False
        if self.settings.live:
            return self.settings.speculate in (None, "ngram")
        return self.settings.speculate is None and self._fits(self._wanted)

    @property
    def size(self) -> PoolSize:
        """Return what every stage allocates; `DoesNotFitError` if one has no room for a block."""
        size = self._wanted
        while not self._fits(size):
            if size.num_blocks == 1:
                raise DoesNotFitError(
                    "the plan leaves no room for a block of 128 tokens of KV cache on every stage; "
                    "re-plan with a larger --n or a smaller reserve"
                )
            size = replace(size, num_blocks=max(1, size.num_blocks * 15 // 16))
        return size

    @property
    def _wanted(self) -> PoolSize:
        """Return the pool of all that is planned to be under way at once."""
        workload = self.plan.workload
        return PoolSize(
            num_blocks=workload.batch * max(1, pool_blocks(workload.kv, workload.max_len)),
            slots=workload.batch,
            max_len=self.settings.max_model_len or self._longest + 1,
            prefix_cache=self.settings.prefix_cache,
        )

    def _fits(self, size: PoolSize) -> bool:
        """Whether every stage's device has room for a pool."""
        return all(self._excess(index, size) <= 0 for index in range(len(self.plan.stages)))

    @property
    def limits(self) -> PoolLimits:
        """Return what the scheduler may do."""
        workload, plan = self.plan.workload, self.plan
        size = self.size
        return PoolLimits(
            num_blocks=size.num_blocks,
            kv=workload.kv,
            max_rows=size.slots,
            max_len=size.max_len,
            step_tokens=self._step_tokens,
            decode_rows=min(plan.decode_microbatch, size.slots),
            num_stages=len(plan.stages),
            prefix_cache=size.prefix_cache,
            batching="static" if self.settings.batching == "static" else "continuous",
        )

    @property
    def _step_tokens(self) -> int:
        """Return the tokens of a step: of a job known beforehand, the plan's prompts together."""
        if self.settings.step_tokens is not None or self.settings.live:
            return self.settings.step_tokens or STEP_TOKENS
        return max(STEP_TOKENS, self.plan.prefill_microbatch * self.plan.workload.prompt_len)

    @property
    def max_blocks(self) -> int:
        """Return how many blocks a request's table has at most."""
        limits = self.limits
        return min(limits.num_blocks, pool_blocks(limits.kv, limits.room))

    @property
    def _longest(self) -> int:
        """Return the positions that requests may have where nobody says.

        All of the model's, unless it computes otherwise, or needs what this plan cannot, at that
        length: then what the plan was made for. The last token of an answer needs no position.
        """
        planned, most = self.plan.workload.max_len, self.spec.max_positions
        ways = ways_of(gpu=False, kv=self.plan.workload.kv, drafts=False)
        alike = self.spec.at_length(most) == self.spec.at_length(planned)
        able = lacking_sentence(self.spec, ways, max_len=most) is None
        return most if alike and able else min(planned, most)

    def _excess(self, index: int, size: PoolSize) -> int:
        """Return the bytes by which a stage's pool exceeds what its device has left for it."""
        stage, workload = self.plan.stages[index], self.plan.workload
        if stage.memory is None:
            return 0
        memory = stage.memory
        room = memory.limit_bytes - (memory.total_bytes - memory.kv_bytes)
        nbytes = size.nbytes(
            self.spec,
            workload.kv,
            num_layers=stage.num_layers,
            dtype_bytes=workload.dtype_bytes,
        )
        return nbytes - max(room, memory.kv_bytes)


def request_limits(plan: Plan, spec: ModelSpec, settings: StageSettings) -> RequestLimits:
    """Return what says which requests can never run, of the engine that serves the plan."""
    pool = PoolPlan(plan, spec, settings)
    return pool.limits if pool.serves else limits_of(plan)

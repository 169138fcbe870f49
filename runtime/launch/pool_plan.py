"""Whether and with what limits the paged engine serves a plan (its pool: llmpq/pool_size.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmpq.capabilities import lacking_sentence, require_gpu_pool, ways_of
from llmpq.errors import DoesNotFitError
from llmpq.kv_format import pool_blocks
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.pool_size import PoolSize, fits, fitting_pool, wanted_pool
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.slot_limits import Limits
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

        On CPUs it does, on GPUs if the settings say so: `ValueError` where they cannot. Slots
        remain for drafts by the model's own weights, which keep caches of their own, and for jobs
        known beforehand with drafts, or of which fewer requests would be under way at once than
        planned, since blocks round their lengths up.
        """
        if self._has_gpus:
            if not self.settings.gpu_pool:
                return False
            drafts = self.settings.speculate is not None
            workload = self.plan.workload
            require_gpu_pool(self.spec, workload.kv, workload.dtype, drafts=drafts)
        if self.settings.live:
            return self.settings.speculate in (None, "ngram")
        return self.settings.speculate is None and fits(
            self._wanted, self.plan.stages, self.spec, self.plan.workload
        )

    @property
    def _has_gpus(self) -> bool:
        return not all(stage.is_cpu for stage in self.plan.stages)

    @property
    def size(self) -> PoolSize:
        """Return what every stage allocates, which is what the plan states if it states a pool.

        `DoesNotFitError` if a stage has no room for a block, or the plan states another number.
        """
        size = fitting_pool(self._wanted, self.plan.stages, self.spec, self.plan.workload)
        stated = self.plan.pool
        if stated and self.settings.prefix_cache and stated.num_blocks != size.num_blocks:
            raise DoesNotFitError(
                f"the plan states a pool of {stated.num_blocks} blocks of KV cache, its stages "
                f"have room for {size.num_blocks}; re-plan with this version of llmpq-algo"
            )
        return size

    @property
    def _wanted(self) -> PoolSize:
        """Return the pool of all that is planned to be under way at once."""
        return wanted_pool(
            self.spec,
            self.plan.workload,
            max_len=self.settings.max_model_len or self._longest + 1,
            prefix_cache=self.settings.prefix_cache,
        )

    @property
    def limits(self) -> PoolLimits:
        """Return what the scheduler may do."""
        workload, plan = self.plan.workload, self.plan
        size = self.size
        return PoolLimits(
            num_blocks=size.num_blocks,
            kv=workload.kv,
            window=size.window,
            window_blocks=size.window_blocks,
            max_rows=size.slots,
            max_len=size.max_len,
            step_tokens=self._step_tokens,
            decode_rows=min(plan.decode_microbatch, size.slots),
            num_stages=len(plan.stages),
            # A device that samples by itself is told the next step before its tokens are known.
            tokens_ahead=2 if self._has_gpus and len(plan.stages) == 1 else 1,
            prefix_cache=size.prefix_cache,
            batching="static" if self.settings.batching == "static" else "continuous",
        )

    def limits_over(self, links: object | None) -> PoolLimits:
        """Return the limits of stages that are met; links between GPUs bring tokens by themselves.

        Then the first stage, too, is told the next step before the last one's tokens are known.
        """
        return self.limits if links is None else replace(self.limits, tokens_ahead=2)

    @property
    def _step_tokens(self) -> int:
        """Return the tokens of a step: of a job known beforehand, the plan's prompts together."""
        if self.settings.step_tokens is not None or self.settings.live:
            return self.settings.step_tokens or STEP_TOKENS
        return max(STEP_TOKENS, self.plan.prefill_microbatch * self.plan.workload.prompt_len)

    @property
    def max_blocks(self) -> int:
        """Return how many blocks a request's tables have at most."""
        limits = self.limits
        longest = pool_blocks(limits.kv, limits.room)
        return min(limits.num_blocks, longest) + min(limits.window_blocks, longest)

    @property
    def _longest(self) -> int:
        """Return the positions that requests may have where nobody says.

        All of the model's, unless it computes otherwise, or needs what this plan cannot, at that
        length: then what the plan was made for. The last token of an answer needs no position.
        """
        planned, most = self.plan.workload.max_len, self.spec.max_positions
        ways = ways_of(gpu=self._has_gpus, kv=self.plan.workload.kv, drafts=False, pool=True)
        alike = self.spec.at_length(most) == self.spec.at_length(planned)
        able = lacking_sentence(self.spec, ways, max_len=most) is None
        return most if alike and able else min(planned, most)


def request_limits(plan: Plan, spec: ModelSpec, settings: StageSettings) -> RequestLimits:
    """Return what says which requests can never run, of the engine that serves the plan."""
    pool = PoolPlan(plan, spec, settings)
    return pool.limits if pool.serves else limits_of(plan)

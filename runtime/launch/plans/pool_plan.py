"""The pool of KV blocks of a plan, and what the scheduler may do with it (sizes/pool_size.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from llmpq.devices.device_spec import device_specs
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.capabilities import execution_modes, lacking_sentence
from llmpq.plans.plan import Plan, PoolForm, StagePlan
from llmpq.plans.speculation import draft_weight_bytes
from llmpq.precision import KVPrecision
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.sizes.kv_format import BLOCK_TOKENS, pool_blocks
from llmpq.sizes.pool_size import PoolSize, fits, fitting_pool, wanted_pool, window_step_tokens
from llmpq.workload import CHUNK_TOKENS

HOST_BYTES, HOST_BYTES_PER_S = 4 << 30, 12e9
"""Most bytes of preempted requests that a stage's host stores, and how fast it copies (PCIe 3)."""
LEAST_TOKENS = 32
STEP_S = 0.1
"""Longest step, unless its decoding rows take half of that by themselves: a streamed answer waits
for one step a token (MLPerf's servers allow 100 ms)."""
MIXED_TOKENS = 2048
"""Most tokens of a step beside rows that decode. Of 512 each, prompts of a busy server wait in line
for steps that are no quicker for it: Llama-3.1-8B on an H200 by its costs, 15 Azure conversations a
second: first token 216 ms at 512, 47 at 2,048; a further token 13.5 and 10.8 ms."""
FIRST_STEP_S = 0.5
"""Longest step of prompts where none decodes: a prompt that comes then waits for its end
(MLPerf's interactive servers allow 450 to 500 ms for a first token)."""


@dataclass(frozen=True)
class PoolPlan:
    """The pool of a plan's stages, for stages and for the scheduler."""

    plan: Plan
    spec: ModelSpec
    options: EngineOptions

    @property
    def _has_gpus(self) -> bool:
        return not all(stage.is_cpu for stage in self.plan.stages)

    @cached_property
    def size(self) -> PoolSize:
        """Return what every stage allocates: what the plan counts, as far as its devices have room.

        `DoesNotFitError` if a stage has no room for a block, or less than the plan states.
        """
        stated, counted = self.plan.pool, self._counted
        if stated and stated.num_blocks != counted.num_blocks:
            raise DoesNotFitError(
                f"the plan states a pool of {stated.num_blocks} blocks of KV cache, its stages "
                f"have room for {counted.num_blocks}; re-plan with this version of llmpq-algo"
            )
        return self._fitting(self._wanted)

    @property
    def stated(self) -> PoolForm:
        """The pool as a plan states it."""
        return PoolForm.of(self._counted, self.spec, self.plan.workload, self.plan.stages)

    @cached_property
    def _counted(self) -> PoolSize:
        """The pool as plans count it: nothing that only found prefixes need."""
        wanted = self._wanted
        beside = self._has_tails(wanted) or wanted.snapshots > 0
        plain = replace(wanted, prefix_cache=False, snapshots=0) if beside else wanted
        return self._fitting(plain)

    def _fitting(self, wanted: PoolSize) -> PoolSize:
        """Return the pool, smaller where it and what is drafted with do not fit together."""
        plan, mode = self.plan, self.options.draft_mode
        weights = self._draft_weights
        return fitting_pool(
            wanted, plan.stages, self.spec, plan.workload, drafts=mode, draft_weights=weights
        )

    def _fits(self, size: PoolSize) -> bool:
        """Whether a pool and what is drafted with fit together."""
        plan, mode = self.plan, self.options.draft_mode
        weights = self._draft_weights
        return fits(size, plan.stages, self.spec, plan.workload, drafts=mode, draft_weights=weights)

    @cached_property
    def _draft_weights(self) -> list[int]:
        """Bytes of weights that drafts hold on each stage."""
        plan, mode = self.plan, self.options.draft_mode
        if mode is None:
            return []
        places = range(len(plan.workers))
        return [draft_weight_bytes(plan, self.spec, index, mode) for index in places]

    def _has_tails(self, size: PoolSize) -> bool:
        """Whether a pool has 16-bit tokens behind packed blocks, for prefixes found again.

        A plan counts none: of live requests fewer may be under way at once for them.
        """
        return size.prefix_cache and self.plan.workload.kv is not KVPrecision.KV16

    @cached_property
    def _wanted(self) -> PoolSize:
        """Return the pool of all that is planned to be under way at once.

        An offline job caches prefixes of packed blocks, and any run those of recurrent layers, only
        if all requests fit beside what they need.
        """
        plan = self.plan
        work = plan.workload
        planned = window_step_tokens(
            work, plan.prefill_chunk, prefill_microbatch=plan.prefill_microbatch
        )
        size = wanted_pool(
            self.spec,
            work,
            max_len=self.options.max_model_len or min(self._longest + 1, self.spec.max_positions),
            # No states are kept beside a packed cache (`num_snapshots`).
            prefix_cache=self.options.enable_prefix_caching
            and (self.spec.recurrent is None or work.kv is KVPrecision.KV16),
            step_tokens=max(planned, self.options.max_num_batched_tokens or 0),
        )
        if size.snapshots and not self._fits(size):
            return replace(size, prefix_cache=False, snapshots=0)
        whole = not self.options.offline or not self._has_tails(size)
        if whole or fits(size, plan.stages, self.spec, work):
            return size
        return replace(size, prefix_cache=False)

    @cached_property
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
            max_positions=self.spec.max_positions,
            step_tokens=self._step_tokens,
            mixed_tokens=self._mixed_tokens,
            fill_tokens=0.0 if self.options.offline else self._filling_tokens,
            prompt_tokens=self._prompt_tokens,
            decode_rows=min(plan.decode_microbatch, size.slots),
            num_stages=len(plan.stages),
            tokens_ahead=2 if self._runs_ahead and len(plan.stages) == 1 else 1,
            prefix_cache=size.prefix_cache,
            snapshots=size.snapshots,
            host_blocks=self._host_blocks(size),
        )

    def limits_over(self, links: object | None) -> PoolLimits:
        """Return the limits of stages that are met; links between GPUs bring tokens by themselves.

        Then the first stage, too, gets the next step before the last one's tokens are known.
        """
        ahead = links is not None and self._is_alone and self._has_gpus and self.tokens_over_links
        return replace(self.limits, tokens_ahead=2) if ahead else self.limits

    @property
    def tokens_over_links(self) -> bool:
        """Whether links between GPUs bring tokens of steps without drafts to the first stage.

        Tables of drafts are made and read by hosts. Where the model's own head drafts (MTP), rows
        that it does not see decode as without.
        """
        return self.options.draft_mode in (None, "mtp")

    @property
    def _runs_ahead(self) -> bool:
        """Whether a device that samples by itself gets a step before it knows the last tokens.

        Not where tokens are looked up in the text for drafts of the next, nor where several devices
        share one of several stages: links between GPUs know stages of one device.
        """
        return self._is_alone and self._has_gpus and self.options.draft_mode is None

    @property
    def _is_alone(self) -> bool:
        """Whether every stage has one device, or there is one stage."""
        return len(self.plan.workers) == len(self.plan.stages) or len(self.plan.stages) == 1

    @property
    def _step_tokens(self) -> int:
        """Return the tokens of a step: of a job known beforehand, the plan's chunks together.

        No fewer than a chunk; of several stages whose times are known, than fill a step behind its
        decoding rows: in larger steps than planned the stages would wait for each other, on two
        CPUs for 5 to 9 % of a job.

        Steps of live prompts alone have as many as every stage computes before it is long for a
        first token, and no more than the plan counts memory for.
        """
        if self.options.max_num_batched_tokens is not None:
            return self.options.max_num_batched_tokens
        if self.options.offline:
            least = min(CHUNK_TOKENS, self.plan.prefill_chunk or CHUNK_TOKENS)
            if len(self.plan.stages) > 1 and self._filling_tokens:
                filling = max(LEAST_TOKENS, math.ceil(self._filling_tokens))
                least = min(least, self.plan.decode_microbatch + filling)
            return max(least, self.plan.prefill_step_tokens)
        if self.plan.traffic is not None:
            return self._live_tokens
        return max(self._tokens_within(FIRST_STEP_S, self._counted_tokens), self._live_tokens)

    @property
    def _mixed_tokens(self) -> int | None:
        """Return the tokens of a step while requests decode; None: as many as without."""
        whole = self.options.offline or self.options.max_num_batched_tokens is not None
        return None if whole else self._live_tokens

    @property
    def _filling_tokens(self) -> float:
        """Return the tokens of prompts that take the slowest stage as long as a step of decoding.

        As short as that a step of prompts is no quicker; 0 where it is not known.
        """
        stages = [stage for stage in self.plan.stages if stage.decode_s and self._token_s(stage)]
        if len(stages) < len(self.plan.stages):
            return 0.0
        slowest = max(stages, key=self._token_s)
        return (slowest.decode_s or 0.0) / self._token_s(slowest)

    @property
    def _prompt_tokens(self) -> int:
        """Return the tokens of one prompt in a step at most: the plan's chunk."""
        if self.options.max_num_batched_tokens is not None or not self.options.offline:
            return self._step_tokens
        return self.plan.prefill_chunk or self._step_tokens

    def _host_blocks(self, size: PoolSize) -> int:
        """Return how many blocks of preempted requests hosts store: none if copying takes longer.

        There and back, beside computing a block's tokens again, by the plan's times or the table's
        rates. GPUs alone, 16 bits without windows; what is drafted may be taken back, and what
        recurrent layers keep is not stored.
        """
        plan, kv = self.plan, self.plan.workload.kv
        gpus = not any(stage.is_cpu for stage in plan.stages)
        if not gpus or kv is not KVPrecision.KV16 or size.window or self.options.draft_mode:
            return 0
        if self.spec.recurrent is not None:
            return 0
        most = size.num_blocks
        for stage in plan.stages:
            one = replace(size, num_blocks=1).nbytes(
                self.spec,
                kv,
                layers=range(*stage.layers),
                dtype_bytes=plan.workload.dtype_bytes,
            )
            if 2 * one / HOST_BYTES_PER_S > BLOCK_TOKENS * self._token_s(stage):
                return 0
            most = min(most, HOST_BYTES // one)
        return most

    def _token_s(self, stage: StagePlan) -> float:
        """Return the seconds that a stage computes a prompt's token in, 0 where it is not known."""
        if stage.prefill_s:
            tokens = self.plan.prefill_microbatch * self.plan.workload.prompt_len
            return stage.prefill_s * len(self.plan.chunks) / tokens
        card = device_specs().get(stage.kind)
        if card is None:
            return 0.0
        share = stage.num_layers / self.spec.num_layers
        rate = card.fp16_tflops * 1e12 * card.matmul_efficiency
        return 2 * self.spec.num_params * share / rate

    @property
    def _counted_tokens(self) -> int:
        """Return the tokens of the largest step that the plan counts memory for, at least a chunk.

        Prompts of live requests may be longer than those of the plan.
        """
        return max(self.plan.prefill_chunk or CHUNK_TOKENS, self.plan.prefill_step_tokens)

    @property
    def _live_tokens(self) -> int:
        """Return the tokens of a step beside requests that decode.

        What a plan for live traffic states. Else as many as every stage computes within what a
        streamed answer may wait for a token.
        """
        if self.plan.traffic is not None:
            return self.plan.traffic.step_tokens
        return self._tokens_within(STEP_S, min(self._counted_tokens, MIXED_TOKENS))

    def _tokens_within(self, limit_s: float, most: int) -> int:
        """Return how many tokens every stage computes in time, by the plan's costs; `most` at most.

        No stage gets less time than twice its decoding rows take. CPUs without measured costs, and
        stages of which nothing is known, take the default chunk at most.
        """
        plan = self.plan
        measured = plan.predicted is not None and not plan.predicted.estimated
        for stage in plan.stages:
            token_s = self._token_s(stage)
            if stage.prefill_s and stage.decode_s and (measured or not stage.is_cpu):
                most = min(most, int(max(limit_s, 2 * stage.decode_s) / token_s))
            elif stage.is_cpu or not token_s:
                most = min(most, CHUNK_TOKENS)
            else:
                most = min(most, max(CHUNK_TOKENS, int(limit_s / token_s)))
        return max(LEAST_TOKENS, most - most % LEAST_TOKENS)

    @property
    def max_blocks(self) -> int:
        """Return how many blocks a request's tables have at most."""
        limits = self.limits
        longest = pool_blocks(limits.kv, limits.room)
        return min(limits.num_blocks, longest) + min(limits.window_blocks, longest)

    @property
    def _longest(self) -> int:
        """Return the positions that requests may have if `max_model_len` is not given.

        All of the model's, unless it computes otherwise, or needs what this plan cannot, at that
        length: then what the plan was made for.
        """
        planned, most = self.plan.workload.max_len, self.spec.max_positions
        ways = execution_modes(gpu=self._has_gpus, kv=self.plan.workload.kv, drafts=False)
        alike = self.spec.at_length(most) == self.spec.at_length(planned)
        able = lacking_sentence(self.spec, ways, max_len=most) is None
        return most if alike and able else min(planned, most)


def request_limits(plan: Plan, spec: ModelSpec, options: EngineOptions) -> PoolLimits:
    """Return what says which requests can never run, of the engine that serves the plan."""
    return PoolPlan(plan, spec, options).limits

"""Requests of tiny models served from a pool, on a CPU or as on a GPU: tokens and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import Request
from llmpq.runtime.requests.token_rules import LogitsConstraints
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from reference.open_stages import OpenStages


@dataclass(frozen=True)
class Served:
    """What became of requests, in their order."""

    tokens: list[list[int]]
    scores: list[list[float]]
    """Log-probabilities of the answers' tokens."""
    prompt_scores: list[list[float]]
    """... and of the prompts', but the first; nothing where they were not asked for."""

    below_best: list[list[float]]
    """How far those of the prompts' tokens are below the most likely token's."""

    def furthest(self, other: Served) -> float:
        """Return how far log-probabilities are apart at most, up to where answers part."""
        apart = [0.0]
        for row, own in enumerate(zip(self.tokens, other.tokens, strict=True)):
            ends = (i for i, (a, b) in enumerate(zip(*own, strict=True)) if a != b)
            alike = next(ends, len(own[0]))
            pairs = [*zip(self.scores[row][:alike], other.scores[row][:alike], strict=True)]
            if self.prompt_scores and other.prompt_scores:
                pairs += zip(self.prompt_scores[row], other.prompt_scores[row], strict=True)
            apart += [abs(a - b) for a, b in pairs]
        return max(apart)


class Knowing(FixedDrafter):
    """Drafts what the answers are known to be, but for the last token."""

    def __init__(self, answers: Sequence[Sequence[int]], vocab: int) -> None:
        super().__init__("ngram", 3)
        self._answers, self._vocab = answers, vocab

    def propose(self, request: Request, gamma: int) -> list[int] | None:
        """Return the next tokens of a request's answer."""
        done = len(request.output)
        found = [*self._answers[request.id][done : done + gamma]]
        return [*found[:-1], (found[-1] + 1) % self._vocab] if found else None


def stages_of(
    directory: Path, plan: Plan, size: PoolSize, *, device: str = "cpu", **options: Any
) -> OpenStages:
    """Return the stages of a plan over a pool."""
    spec = ModelSpec.from_directory(directory)
    source = CheckpointSource(directory, spec)
    return OpenStages(plan, spec, source, device=device, pool=size, **options)


def served(
    stages: OpenStages,
    prompts: Sequence[Sequence[int]],
    size: PoolSize,
    *,
    new: int,
    step_tokens: int = 64,
    drafter: FixedDrafter | None = None,
    prompts_too: bool = True,
) -> Served:
    """Serve greedy requests in chunks of so many tokens; `drafter`: what drafts for them.

    `prompts_too`: whether prompts are scored, in steps that no graph holds. What is drafted for has
    no scores.
    """
    workload = stages.plan.workload
    limits = PoolLimits(
        num_blocks=size.num_blocks,
        kv=workload.kv,
        window=size.window,
        window_blocks=size.window_blocks,
        max_rows=size.slots,
        max_len=size.max_len,
        step_tokens=step_tokens,
        decode_rows=size.slots,
        num_stages=len(stages.computes),
        tokens_ahead=1,
        prefix_cache=False,
    )
    last, requests = stages.computes[-1], []
    for i, prompt in enumerate(prompts):
        rules = None
        if drafter is None:
            scored = 1 if prompts_too else None
            rules = LogitsConstraints(prompt=tuple(prompt), logprobs=0, prompt_logprobs=scored)
            last.sampler.take_rules(i, rules)
        requests.append(Request(id=i, prompt=tuple(prompt), max_new=new, rules=rules))
    tokens = stages.run(Scheduler(limits, drafter=drafter), requests).tokens
    noted = [last.sampler.noted(i) for i in range(len(prompts))]
    of_prompts = [one.prompt for one in noted] if prompts_too else []
    return Served(
        tokens=[tokens[i] for i in range(len(prompts))],
        scores=[[float(own.logprob) for own, *_ in one.output] for one in noted],
        prompt_scores=[[float(own.logprob) for own, *_ in row] for row in of_prompts],
        below_best=[[best.logprob - own.logprob for own, best in row] for row in of_prompts],
    )

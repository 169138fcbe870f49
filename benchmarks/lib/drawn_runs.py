"""A drawn run of a tiny model over stages in this process, and how it differs from Transformers.

A run has one to three stages and steps of 1, 64 or an odd number of tokens over a pool that may be
too small for its requests. Some of them share a prefix, which is found again; some are preempted at
any step, one is aborted; drafts come from the text, from the known answer with some of its tokens
changed, or from the model's own head (MTP). Whatever was drawn, greedy tokens are those of
Transformers, and log-probabilities within `TOLERANCE` of its.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.drafts.drafters import Drafter, FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.requests.request import MicroBatch, Request
from llmpq.runtime.requests.token_rules import LogitsConstraints
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.kv_format import BLOCK_TOKENS, spanned_blocks
from llmpq.sizes.pool_size import PoolSize
from llmpq.workload import Workload
from reference.open_stages import OpenStages

NEW = 12
"""Tokens of an answer."""
TOLERANCE = 1e-3
"""Of log-probabilities."""
SLOTS = 3
MOST_PREEMPTED = 12
"""Preemptions of a run at random, beside those that its pool asks for."""


@dataclass(frozen=True)
class Oracle:
    """What Transformers gives."""

    greedy: Callable[[list[int]], list[int]]
    """A prompt's `NEW` most likely next tokens, one by one."""
    logits: Callable[[list[int]], Tensor]
    """Logits [T, V] behind every one of T tokens."""


@dataclass(frozen=True, kw_only=True)
class DrawnRun:
    """What a run has beside its model."""

    splits: tuple[int, ...]
    step_tokens: int
    num_blocks: int
    window_blocks: int
    """Of the layers with a window; 0: they share the other layers' pool."""
    prefix_cache: bool
    drafts: str
    """`none`, `ngram`, `known` (the answer, some tokens of it wrong) or `mtp`."""
    gamma: int
    preempts: float
    """Share of the steps before which a running request is preempted."""
    aborts: bool
    """The first request that is not alone in its step ends behind its second token."""
    seed: int

    @classmethod
    def draw(
        cls,
        rng: random.Random,
        prompts: DrawnPrompts,
        *,
        splits: tuple[int, ...],
        has_head: bool,
    ) -> DrawnRun:
        """Draw one for some prompts; `has_head`: the model has one that predicts a further token.

        Prompts of a rope that turns with a request's length are computed whole, once.
        """
        whole = prompts.turns_with_length
        step_tokens = rng.choice((1, 64, rng.randrange(3, 100, 2), rng.randrange(101, 300, 2)))
        each, window = -(-prompts.longest // BLOCK_TOKENS), prompts.spec.widest_window
        num_blocks, window_blocks = each + rng.randrange(SLOTS * each), 0
        if window and rng.random() < 0.5:
            window_blocks = spanned_blocks(window, BLOCK_TOKENS) + rng.randrange(2 * SLOTS)
            window_blocks = window_blocks if window_blocks < num_blocks else 0
        drafts = ["none", "known", "known", *(["mtp"] * 3 if has_head else ["ngram"])]
        return cls(
            splits=splits,
            step_tokens=SLOTS * prompts.longest if whole else step_tokens,
            num_blocks=SLOTS * each if whole else num_blocks,
            window_blocks=window_blocks,
            prefix_cache=rng.random() < 0.8 and not whole,
            drafts="none" if whole else rng.choice(drafts),
            gamma=rng.randrange(1, 8),
            preempts=0.0 if whole else rng.choice((0.0, 0.05, 0.3)),
            aborts=rng.random() < 0.5,
            seed=rng.randrange(1 << 30),
        )


class Disturbed(Scheduler):
    """Preempts requests at random steps and aborts one in the middle of its answer."""

    def __init__(
        self,
        limits: PoolLimits,
        drawn: DrawnRun,
        *,
        drafter: Drafter | None,
        doomed: Request | None = None,
    ) -> None:
        super().__init__(limits, drafter=drafter)
        self._preempts, self._rng = drawn.preempts, random.Random(drawn.seed)
        self.doomed = doomed

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step."""
        few = self.num_preemptions < MOST_PREEMPTED  # a prompt in steps of one token ends, too
        if few and self._running and self._rng.random() < self._preempts:
            self._preempt(self._rng.choice(self._running))
            self.check()
        batch = super().next_micro_batch()
        doomed = self.doomed
        if doomed is not None and len(doomed.output) >= 2 and not doomed.aborted:
            self.abort(doomed)
        return batch


class Knowing(FixedDrafter):
    """Drafts what requests go on with, but for some tokens."""

    def __init__(
        self, answers: Mapping[int, Sequence[int]], gamma: int, *, vocab: int, seed: int
    ) -> None:
        super().__init__("ngram", gamma)
        self._answers, self._vocab, self._rng = answers, vocab, random.Random(seed)

    def propose(self, request: Request, gamma: int) -> list[int]:
        """Return drafts of which some are wrong."""
        at = len(request.output)
        known = self._answers[request.id][at : at + gamma]
        return [t if self._rng.random() < 0.7 else (t + 1) % self._vocab for t in known]


class DrawnPrompts:
    """Prompts for a model, what Transformers makes of them, and what runs make of them."""

    def __init__(self, directory: Path, oracle: Oracle, rng: random.Random) -> None:
        """Draw prompts of one token, of a few, repeated ones, and some with a shared prefix."""
        self.spec = spec = ModelSpec.from_directory(directory)
        self._directory, self._source = directory, CheckpointSource(directory, spec)
        self._oracle = oracle
        self.happened: Counter[str] = Counter()
        """What happened in all runs: prefix hits, preemptions, aborted requests, drafts."""

        def draw(count: int) -> list[int]:
            return [rng.randrange(1, spec.vocab) for _ in range(count)]

        trunk = draw(BLOCK_TOKENS + rng.randrange(1, 9))
        self.prompts = [
            draw(1),
            draw(rng.randrange(5, 40)),
            [*trunk, *draw(rng.randrange(1, 30))],
            [*trunk[:BLOCK_TOKENS], *draw(rng.randrange(1, 50))],
            (draw(4) * 20)[: rng.randrange(20, 80)],
            trunk,
        ]
        scaling = spec.rope_scaling
        self.turns_with_length = scaling is not None and scaling.kind == "dynamic"
        """Earlier keys stay turned as they were when they were computed."""
        if self.turns_with_length:  # Transformers' model keeps the longest turn: each is longer
            self.prompts = [draw(count) for count in (1, 20, 40, 70)]
        if scaling is not None and scaling.kind == "longrope" and scaling.by_length:
            # Requests of a run are all short, or all long.
            least = scaling.original_max_positions - NEW
            self.prompts = [prompt[: rng.randrange(1, least)] for prompt in self.prompts]
        self.longest = max(map(len, self.prompts)) + NEW
        self.answers = [oracle.greedy(prompt) for prompt in self.prompts]
        self._logprobs: dict[int, Tensor] = {}
        if not self.turns_with_length:
            self._require_one_answer()

    def _require_one_answer(self) -> None:
        """Refuse a model of which Transformers, with a cache, gives other tokens than without."""
        for index, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            whole = self._logprobs_of(index)[len(prompt) - 1 : -1].argmax(-1).tolist()
            if whole != answer:
                raise ValueError(f"Transformers gives {answer} with its cache, {whole} without")

    def _logprobs_of(self, index: int) -> Tensor:
        """Return log-probabilities [T, V] behind every token of a prompt and its answer."""
        if index not in self._logprobs:
            tokens = [*self.prompts[index], *self.answers[index]]
            self._logprobs[index] = self._oracle.logits(tokens).float().log_softmax(-1)
        return self._logprobs[index]

    def difference(self, drawn: DrawnRun) -> str:
        """Run the requests twice, the second time with what the cache has; say what differs."""
        plan = manual_plan(
            self.spec,
            splits=drawn.splits,
            precision=Precision.W16A16,
            prefill_microbatch=2,
            decode_microbatch=2,
            model_dir=str(self._directory),
            workload=Workload.parse_data(
                {"batch": SLOTS, "prompt_len": 32, "gen_len": 16, "dtype": "float32"},
                where="a drawn run",
            ),
        )
        recurrent = self.spec.recurrent is not None
        pool = PoolSize(
            num_blocks=drawn.num_blocks,
            slots=SLOTS,
            max_len=self.longest,
            prefix_cache=drawn.prefix_cache,
            window=self.spec.widest_window if drawn.window_blocks else 0,
            window_blocks=drawn.window_blocks,
            snapshots=2 if recurrent and drawn.prefix_cache else 0,
        )
        mode: Any = {"none": None, "known": "ngram"}.get(drawn.drafts, drawn.drafts)
        stages = OpenStages(plan, self.spec, self._source, pool=pool, speculate=mode)
        limits = PoolLimits(
            num_blocks=pool.num_blocks,
            kv=KVPrecision.KV16,
            window=pool.window,
            window_blocks=pool.window_blocks,
            max_rows=SLOTS,
            max_len=pool.max_len,
            step_tokens=drawn.step_tokens,
            decode_rows=2,
            num_stages=len(plan.stages),
            prefix_cache=drawn.prefix_cache,
            snapshots=pool.snapshots,
        )
        drafter: FixedDrafter | None = None
        if drawn.drafts == "known":
            answers = dict(enumerate(self.answers))
            drafter = Knowing(answers, drawn.gamma, vocab=self.spec.vocab, seed=drawn.seed)
        elif mode is not None:
            drafter = FixedDrafter(mode, drawn.gamma)
        scheduler = Disturbed(limits, drawn, drafter=drafter)
        rng = random.Random(drawn.seed)
        for turn in ("first", "second"):
            try:
                found = self._turn(stages, scheduler, rng, aborts=drawn.aborts)
            except Exception as error:  # whatever a stage trips over is what came of the config
                found = f"{type(error).__name__}: {error}"
            if found:
                return f"{turn} turn of {asdict(drawn)}: {found}"
        self.happened["preemptions"] += scheduler.num_preemptions
        self.happened["prefix hits"] += scheduler.tables.prefix_hits
        if drafter is not None:
            self.happened["accepted drafts"] += sum(drafter.acceptance.accepted)
            self.happened["refused drafts"] += drafter.acceptance.refusals
        return ""

    def _turn(
        self, stages: OpenStages, scheduler: Disturbed, rng: random.Random, *, aborts: bool
    ) -> str:
        """Serve all requests, some of them with log-probabilities; return what differs."""
        last, requests = stages.computes[-1], []
        for i, prompt in enumerate(self.prompts):
            rules = None
            if rng.random() < 0.5 and not self.turns_with_length:
                of_prompt = 0 if rng.random() < 0.3 else None
                rules = LogitsConstraints(
                    prompt=tuple(prompt), logprobs=0, prompt_logprobs=of_prompt
                )
                last.sampler.take_rules(i, rules)
            requests.append(
                Request(
                    id=i,
                    prompt=tuple(prompt),
                    max_new=NEW,
                    rules=rules,
                    may_draft=rules is None,
                )
            )
        scheduler.doomed = rng.choice(requests) if aborts else None
        stages.run(scheduler, requests)
        scheduler.check()
        self.happened["aborted"] += sum(request.aborted for request in requests)
        for i, request in enumerate(requests):
            want = self.answers[i][: len(request.output)]
            if request.output != want or (len(want) < NEW and not request.aborted):
                return (
                    f"request {i}: tokens {request.output} for {want}, {self._margin(i, request)}"
                )
            if request.rules is not None:
                noted = last.sampler.noted(i)
                places = [
                    (len(request.prompt) + k, own) for k, (own, *_) in enumerate(noted.output)
                ]
                places += [(1 + k, own) for k, (own, *_) in enumerate(noted.prompt or [])]
                apart = max((self._apart(i, at, own) for at, own in places), default=0.0)
                if not apart <= TOLERANCE:
                    return f"request {i}: log-probabilities {apart:.2g} apart"
                self.happened["log-probabilities"] += len(places)
        return ""

    def _apart(self, index: int, at: int, score: Any) -> float:
        tokens = [*self.prompts[index], *self.answers[index]]
        if at >= len(tokens):
            return 0.0  # a token more than asked for, of a request that was ended
        return abs(float(self._logprobs_of(index)[at - 1, tokens[at]]) - score.logprob)

    def _margin(self, index: int, request: Request) -> str:
        """Return how far the two likeliest tokens are apart where an answer parts from its own."""
        pairs = zip(request.output, self.answers[index], strict=False)
        parts = next((k for k, (own, other) in enumerate(pairs) if own != other), None)
        if parts is None:
            return "too few"
        best = self._logprobs_of(index)[len(request.prompt) + parts - 1].topk(2).values.tolist()
        return f"the likeliest two {best[0] - best[1]:.2g} apart"

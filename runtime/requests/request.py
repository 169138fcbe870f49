"""One request on its way through the engine: the micro-batches it travels in, and the mailbox
between the driver and the first stage's loop.

Knows nothing of devices or text: tokens in, tokens out. No torch.

Legend: B rows of a step, T their new tokens, one row's behind the other's.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmpq.errors import ContextLengthError
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.requests.token_rules import NO_RULES, LogitsConstraints, LogprobOutput

Ints = NDArray[np.int64]
FinishReason = Literal["stop", "length", "abort", "error"]

NO_INTS = np.zeros(0, dtype=np.int64)
PENDING_TOKEN = -1
"""Stands for a token, or a position, that a step under way has yet to bring."""
NOT_FINITE_TOKEN = -2
"""Stands for a token that could not be chosen: NaN or infinity is the largest of its logits."""
NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): its weights hold such values, or its "
    "activations exceed what its dtype can hold; download the weights again, or run it in another "
    "dtype (float32 holds most)"
)
"""Why a request fails whose token could not be chosen."""


def too_long(
    length: int, room: int, *, max_positions: int | None = None, counted: bool = True
) -> ContextLengthError:
    """Return the error of a prompt that leaves no room for an answer.

    `max_positions`: the model's, where they are known: no option gives more room than those.
    `counted`: else it has so many tokens at least, by the length of its text.
    """
    least = "" if counted else "at least "
    begin = f"the prompt is too long: it has {least}{length} tokens, and the maximum context length"
    if max_positions is not None and room >= max_positions:
        return ContextLengthError(
            f"{begin} of the model is {room} with the answer (it has so many positions); shorten it"
        )
    return ContextLengthError(
        f"{begin} of the model and its KV cache is {room} with the answer; shorten it, or give "
        "more with max_model_len or another plan"
    )


class StepKind(IntEnum):
    """What a micro-batch does; the number travels in message headers and names trace events."""

    STOP = 0
    PREFILL = 1
    DECODE = 2
    DRAFT = 3
    VERIFY = 4
    ROUND = 5
    """Drafts and their verify in one step."""
    MIXED = 6
    """Chunks of prompts beside decoding rows."""


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class Request:
    """A prompt and what has been generated for it so far."""

    id: int
    prompt: tuple[int, ...]
    max_new: int
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    sampling: SamplerConfig = field(default_factory=SamplerConfig)
    rules: LogitsConstraints | None = None
    """What it asks of its tokens beyond `sampling`; sent to the last stage."""
    min_new: int = 0
    """Tokens before which nothing but the limit ends it."""
    priority: int = 0
    """Lower numbers go first; equal ones first come first served."""
    cache_salt: str | None = None
    """Blocks of its prompt are shared only with requests of the same salt; None is one of them."""
    timeout_s: float | None = None
    """Seconds after which it is ended between two steps; None: it may take its time."""
    may_draft: bool = True
    """False: decoded plainly, whatever the drafter wants."""
    stream: bool = False
    """Whether its tokens are published as they come, not only at its end."""
    recorded: bool = False
    """Whether they are published, too, with what is published next: the driver goes on from them
    when a stage is lost."""
    aborted: bool = False
    """Its tokens are not wanted any more: it ends with the step under way."""
    slot: int = -1
    """Its row of the block tables while running, -1 otherwise."""
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    """Tokens proposed after `output` and not verified yet."""
    num_prefix_hits: int = 0
    """Prompt tokens that were found in the prefix cache when the request was first admitted."""
    num_preemptions: int = 0
    """How often its KV was given up for another request's."""
    finish_reason: FinishReason | None = None

    def fresh(self) -> Request:
        """Return the request as it was submitted: with the answer that it goes on from, if any."""
        return replace(
            self, output=list(self.output), drafts=[], slot=-1, aborted=False,
            finish_reason=None, num_prefix_hits=0, num_preemptions=0,
        )  # fmt: skip

    @property
    def num_cached(self) -> int:
        """Tokens whose KV is final: all but the newest one."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def drafts_plainly(self) -> bool:
        """Whether a device may draft and verify it by the model's most likely tokens alone."""
        return self.sampling.greedy and self.rules is None

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new - len(self.output)


@dataclass(slots=True, kw_only=True)  # not frozen: making one would take three times as long
class PagedRow:
    """What a step says of a row beyond its tokens; most rows of a step need none."""

    slot: int
    samples: bool = True
    """Whether the row's last token brings a new one; a prompt's earlier chunks do not."""
    drafts: tuple[int, ...] = ()
    """Tokens behind its newest one that the step verifies."""
    first_block: int = 0
    """Where in the request's block table `new_blocks` go."""
    new_blocks: tuple[int, ...] = ()
    """Blocks the table got since the request's last row."""
    first_window_block: int = 0
    new_window_blocks: tuple[int, ...] = ()
    """The same of the layers with a window, where those have a pool of their own."""
    resumes: bool = False
    """Its first row goes on from blocks found in the prefix cache."""
    saves: tuple[tuple[int, int], ...] = ()
    """Blocks of others, and under which number hosts are to keep them, before all else."""
    loads: tuple[tuple[int, int], ...] = ()
    """Numbers that hosts keep for the request, and the blocks where they go."""
    loads_state: int = -1
    """The snapshot of recurrent states that its request begins from; -1 without one."""
    saves_state: int = -1
    """The snapshot that its recurrent states are kept as behind this step; -1: they are not."""
    drafts_wanted: int = -1
    """How many tokens the model's own head (MTP) drafts behind what the row samples; 0: it is to
    see the row nevertheless; -1: it need not."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRequests:
    """The requests of a step's rows, and of each what is alike in all its steps."""

    requests: list[Request]
    numbers: tuple[int, ...]
    """Of the requests."""
    outputs: list[list[int]]
    """Each request's own list of its new tokens."""
    sampling: RowSampling
    rules_B: Ints
    """Numbers by which the last stage knows rules, `NO_RULES` of a request without; or empty."""

    @classmethod
    def of(cls, requests: list[Request]) -> StepRequests:
        """Collect what there is of some requests."""
        rules = [NO_RULES if request.rules is None else request.id for request in requests]
        return cls(
            requests,
            tuple([request.id for request in requests]),
            [request.output for request in requests],
            RowSampling([request.sampling for request in requests]),
            np.array(rules if set(rules) - {NO_RULES} else [], dtype=np.int64),
        )


NO_NEWS = PagedRow(slot=-1)
"""Of rows that only decode: a token that brings another one."""


class RowSampling(tuple[SamplerConfig, ...]):
    """How the tokens of a step's rows are chosen, collected once for all steps of the same rows."""

    @cached_property
    def greedy(self) -> bool:
        """Whether every row's most likely token is taken."""
        return all([config.greedy for config in self])

    @cached_property
    def has_min_p(self) -> bool:
        """Whether a row leaves out tokens that are unlikely beside the most likely one."""
        return any([config.min_p for config in self])

    @cached_property
    def seeds_B(self) -> NDArray[np.uint64]:
        """The seed of each."""
        return np.array([config.seed for config in self], dtype=np.uint64)

    @cached_property
    def choices_3B(self) -> NDArray[np.float64]:
        """Temperature, top-k (0: all) and top-p of each; of greedy ones 1, 1 and 1."""
        rows = [
            (1.0, 1, 1.0)
            if config.greedy
            else (config.temperature, config.top_k or 0, config.top_p)
            for config in self
        ]
        return np.array(rows, dtype=np.float64).reshape(len(rows), 3).T


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMessage:
    """One step as every stage gets it: which requests, where each stands, its new tokens."""

    kind: StepKind
    seq: int = 0
    slots_B: Ints = field(default_factory=lambda: NO_INTS)
    starts_B: Ints = field(default_factory=lambda: NO_INTS)
    num_new_B: Ints = field(default_factory=lambda: NO_INTS)
    sample_steps_B: Ints = field(default_factory=lambda: NO_INTS)
    """Index of the token each row samples, which seeds its random draw."""
    sampling: RowSampling = field(default_factory=RowSampling)
    rules_B: Ints = field(default_factory=lambda: NO_INTS)
    """Numbers of the rows' requests, by which the last stage knows their rules; -1 without any."""
    tokens_T: Ints = field(default_factory=lambda: NO_INTS, repr=False)
    """New tokens, one row's behind the other's: known to the first stage, and to others that ask
    for them."""
    news: Mapping[int, PagedRow] = field(default_factory=dict)
    """What a stage's cache has to know of rows, and what these do beyond decoding a token."""
    every_place: bool = False
    """Whether hidden states of all places are wanted behind the last layer, by the first of a
    stage's devices, which has the head and gives this message to the others."""

    @property
    def sends_tokens(self) -> bool:
        """Whether the last stage needs the rows' tokens; `news` has the drafts."""
        return any(row.drafts_wanted >= 0 for row in self.news.values())

    @cached_property
    def q_len(self) -> int:
        """New tokens of the longest row."""
        if self.num_tokens == self.num_rows:  # each has one at least
            return min(1, self.num_rows)
        return int(self.num_new_B.max(initial=0))

    @property
    def num_rows(self) -> int:
        """Requests in the micro-batch."""
        return len(self.slots_B)

    @cached_property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return len(self.tokens_T) or int(self.num_new_B.sum())

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its hidden states: the rows' tokens, one row behind the other."""
        return 1, self.num_tokens

    @property
    def rows_with_news(self) -> list[PagedRow]:
        """What there is to say of some rows, in order."""
        return list(self.news.values())

    @property
    def starts_with_news(self) -> list[int]:
        """Where these rows start."""
        return [int(self.starts_B[row]) for row in self.news]

    def row(self, number: int) -> PagedRow:
        """Return what there is to say of a row."""
        return self.news.get(number, NO_NEWS)

    def tokens_of(self, number: int) -> list[int]:
        """Return the new tokens of a row."""
        first = int(self.num_new_B[:number].sum())
        tokens: list[int] = self.tokens_T[first : first + int(self.num_new_B[number])].tolist()
        return tokens

    @property
    def samples_B(self) -> NDArray[np.bool_]:
        """Whether each row's last token brings a new one."""
        samples_B = np.ones(self.num_rows, dtype=np.bool_)
        samples_B[[number for number, row in self.news.items() if not row.samples]] = False
        return samples_B

    @property
    def wanted_B(self) -> Ints:
        """How many logits each row wants: of its newest tokens."""
        wanted_B = np.ones(self.num_rows, dtype=np.int64)
        for number, row in self.news.items():
            wanted_B[number] = 1 + len(row.drafts) if row.samples else 0
        return wanted_B

    @property
    def revocable_B(self) -> Ints:
        """How many of each row's last tokens are drafts, none of which counts yet."""
        if self.kind is StepKind.DRAFT:
            return self.num_new_B
        revocable_B = np.zeros(self.num_rows, dtype=np.int64)
        for number, row in self.news.items():
            revocable_B[number] = len(row.drafts)
        return revocable_B

    def of_rows(self, rows: Sequence[int]) -> StepMessage:
        """Return a message of some of the rows, in order; tokens are left out."""
        if len(rows) == self.num_rows:
            return self
        at = np.array(rows, dtype=np.int64)
        return StepMessage(
            kind=self.kind,
            seq=self.seq,
            every_place=self.every_place,
            slots_B=self.slots_B[at],
            starts_B=self.starts_B[at],
            num_new_B=self.num_new_B[at],
            sample_steps_B=self.sample_steps_B[at],
            sampling=RowSampling([self.sampling[row] for row in rows]),
            rules_B=self.rules_B[at] if len(self.rules_B) else self.rules_B,
            news={place: self.news[row] for place, row in enumerate(rows) if row in self.news},
        )


STOP = StepMessage(kind=StepKind.STOP)
"""Ends the loops of all stages."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch(StepMessage):
    """A step that the scheduler issued: its message, and whose rows they are."""

    of: StepRequests
    num_decoding: int = 0
    """So many rows, the first ones, only decode: a token each, without drafts."""
    members_B: Ints
    """Each request's row of the scheduler's table (engine/request_table.py)."""
    arrivals_B: Ints
    """How many requests were submitted before it: what is in its row later is another."""
    admissions_B: Ints
    """The how many-th admission of the request each row belongs to."""
    changes: int
    """How often a request had come or gone by then."""

    @property
    def requests(self) -> list[Request]:
        """Whose rows they are."""
        return self.of.requests

    @property
    def not_only_decoding(self) -> list[int]:
        """Rows with news, and those that do more than decode: all first rows of a request."""
        first = [row for row in self.news if row < self.num_decoding]
        return [*first, *range(self.num_decoding, len(self.of.requests))]

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each row."""
        ends = np.cumsum(self.num_new_B).tolist()
        tokens: list[int] = self.tokens_T.tolist()
        return [tokens[end - n : end] for end, n in zip(ends, self.num_new_B.tolist(), strict=True)]

    @property
    def num_prompt_tokens(self) -> int:
        """New tokens that stand in a prompt."""
        first = self.num_decoding
        starts, counts = self.starts_B[first:].tolist(), self.num_new_B[first:].tolist()
        rows = zip(self.requests[first:], starts, counts, strict=True)
        return sum(min(count, max(0, len(r.prompt) - start)) for r, start, count in rows)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A request that ended, with its times since it was submitted."""

    id: int
    tokens: list[int]
    finish_reason: str
    first_token_s: float
    total_s: float
    queue_s: float = 0.0
    """Until its first step was issued."""
    num_prefix_hits: int = 0
    """Tokens of its prompt that were found in the prefix cache."""
    num_preemptions: int = 0
    failure: str | None = None
    """Why its answer could not go on; `finish_reason` is `error` then."""


@dataclass(frozen=True, kw_only=True)
class RequestOutputDelta:
    """The new output of one request: tokens, its end, or the error that ended the engine."""

    id: int
    tokens: Sequence[int] = ()
    finished: Finished | None = None
    noted: LogprobOutput | None = None
    """Logprobs of those tokens, where they were asked for."""
    error: BaseException | None = None
    """What ended the engine; beside `finished`, what ended this request alone."""
    heard_s: float = 0.0
    """When it was read from the stages, by `time.perf_counter`; 0 for errors."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters of a running job."""

    waiting: int = 0
    running: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    phase: str = "idle"
    gauges: Mapping[str, int] = field(default_factory=dict)
    """Blocks of the pool and what came of the prefix cache."""


@dataclass(frozen=True, kw_only=True)
class EngineOutputs:
    """Finished requests, streamed tokens and counters since the driver's last poll."""

    finished: Sequence[Finished]
    tokens: Mapping[int, Sequence[int]]
    """New tokens of the requests that are streamed or recorded, by id."""
    progress: Progress


@dataclass(frozen=True)
class Abort:
    """Ends a request with the step under way."""

    id: int | None
    """None: that all do."""


@dataclass(frozen=True)
class ResetPrefixCache:
    """Lets requests behind it find nothing that was computed before it."""


@dataclass(frozen=True)
class Halt:
    """Ends all loops with the steps under way; requests stay as they are."""


NewTokens = tuple[Sequence[int], Sequence[int]]
"""Numbers of requests, and a new token of each; one that got several stands there as often."""


@dataclass
class Mailbox:
    """Requests on their way to the first stage's loop, and its outputs on their way back."""

    requests: queue.Queue[Request | Abort | ResetPrefixCache | Halt | None] = field(
        default_factory=queue.Queue
    )
    """Submissions; None closes: the loop ends when all submitted requests have ended."""
    finished: deque[Finished] = field(default_factory=deque)
    tokens: list[NewTokens] = field(default_factory=list)
    """Of each step, in order; sorted out by request where they are collected, beside the loop."""
    awaited: bool = False
    """Whether there is something for which the driver is woken."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    progress: Progress = field(default_factory=Progress)

    def wake(self) -> None:
        """Let the driver's poll return at once: there is something to look at."""
        with self.changed:
            self.awaited = True
            self.changed.notify_all()

    def collect(self, timeout_s: float) -> EngineOutputs:
        """Return what happened since the last call, waiting up to `timeout_s` for something."""
        with self.changed:
            self.changed.wait_for(lambda: self.awaited, timeout_s)
            self.awaited = False
            finished, steps, progress = list(self.finished), self.tokens, self.progress
            self.finished.clear()
            self.tokens = []
        tokens: dict[int, list[int]] = {}
        for numbers, new in steps:
            for number, token in zip(numbers, new, strict=True):
                tokens.setdefault(number, []).append(token)
        return EngineOutputs(finished=finished, tokens=tokens, progress=progress)

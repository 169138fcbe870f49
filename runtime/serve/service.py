"""Shared by all endpoints: the engine behind the server, its limits, answers as they come."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llmpq.errors import GuideError, LlmpqError
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.entrypoints.response_stream import ResponseStream
from llmpq.runtime.requests.request_output import CompletionDelta, Logprob
from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.serve.errors import RETRY_AFTER_S, ApiError
from llmpq.runtime.serve.gate import ARRIVED_S, REQUEST_ID, TALLY, log_time
from llmpq.runtime.serve.metrics import AnswerClock, Metrics
from llmpq.runtime.serve.parsers.reading import AnswerForm
from llmpq.runtime.serve.response_store import ResponseStore
from llmpq.runtime.serve.settings import ServeSettings
from llmpq.runtime.text.conversation import Messages
from llmpq.runtime.text.request_factory import Prompt
from llmpq.runtime.text.text_threads import TextThreads, TooManyTextsError
from llmpq.runtime.text.thinking import template_marks
from llmpq.runtime.text.tokenizer import Tokenizer

_log = logging.getLogger("llmpq.serve.prompts")
_T = TypeVar("_T")


@dataclass
class Choice:
    """One answer, gathered."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0

    def take(self, delta: CompletionDelta) -> None:
        """Add what is new."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason or self.stop_reason
        self.num_cached_tokens += delta.num_cached_tokens


class Service:
    """The engine of a server and what is under way."""

    def __init__(self, settings: ServeSettings, *, engine: str = "0") -> None:
        """`engine`: its label in metrics, where there are several."""
        self.settings = settings
        self.llm: LLM | None = None
        """None while it loads."""
        self.planned_len: int | None = None
        """Tokens that a prompt and its answer may have by the plan; None until there is one."""
        self.failure: str | None = None
        """Why there is no engine."""
        self.asks: dict[str, Any] | None = None
        """What the page offers to ask; None until it was opened."""
        self.draining = False
        self.num_under_way = 0
        """Answers that were begun, or are about to be, and have not ended."""
        self._left: dict[ResponseStream, int] = {}
        """Prompts under way, and how many of their answers have not ended."""
        self._deadlines: set[asyncio.Timeout] = set()
        """Of the answers under way."""
        self._cut_off = False
        self._num_named = 0
        self._threads = TextThreads()
        self._forms: dict[bool, AnswerForm] = {}
        """How the model writes, without and with tools."""
        self.began_s = time.time()
        self.responses = ResponseStore(settings.max_stored_responses)
        self.metrics = Metrics(self.model_name, settings.metrics_prefix, self.stats, engine)

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.settings.model_names[0]

    @property
    def max_model_len(self) -> int | None:
        """Tokens that a prompt and its answer may have; None until there is a plan."""
        return self.planned_len if self.llm is None else self.llm.max_model_len

    def stats(self) -> Mapping[str, Any]:
        """Return the engine's counters, empty while there is none; asks the stages, so it waits."""
        if self.llm is None:
            return {}
        try:
            return self.llm.live_stats()
        except (LlmpqError, RuntimeError, OSError):
            return {}

    def check_engine(self) -> None:
        """Refuse where the engine is lost or could not be loaded; one that loads is well."""
        if self.failure is not None:
            raise ApiError(503, f"the engine has stopped: {self.failure}")
        if self.llm is not None:
            self.llm.check_alive()

    def ready(self) -> LLM:
        """Return the engine, or refuse: it loads, has failed, or the server is about to end."""
        if self.failure is not None:
            raise ApiError(503, f"the engine has stopped: {self.failure}")
        if self.llm is None:
            raise ApiError(503, "the model is loading; try again in a moment")
        if self.draining:
            raise ApiError(503, "the server is about to end; ask another one")
        return self.llm

    def check_stages(self, llm: LLM) -> None:
        """Refuse while a stage that was lost is recovered: what is under way goes on then."""
        if (recovery := llm.recovering) is not None:
            raise ApiError(
                503,
                f"being recovered since {recovery.since}: {recovery.reason}; try again in a moment",
                code="recovering",
                retry_after_s=max(RETRY_AFTER_S, math.ceil(recovery.left_s)),
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, once it is loaded."""
        assert self.llm is not None
        return self.llm.tokenizer

    def encode_chat(self, messages: Messages, **how: Any) -> list[int]:
        """Return the tokens of a conversation, by the server's template or else the model's."""
        template = self.settings.chat_template
        if template is None and not self.tokenizer.has_chat_template:
            raise ApiError(
                400,
                "the model's tokenizer has no chat template: send a prompt instead of messages "
                "(/v1/completions), or give one: llmpq-dist serve --chat-template FILE",
                param="messages",
            )
        return self.tokenizer.encode_chat(messages, template=template, **how)

    def answer_form(self, *, tools: bool) -> AnswerForm:
        """Return how the model writes thoughts, and calls where there are `tools`."""
        if tools not in self._forms:
            settings = self.settings
            self._forms[tools] = AnswerForm.of(
                self._template(tools=tools),
                self.tokenizer.has_token,
                tool_parser=settings.tool_parser,
                reasoning_parser=settings.reasoning_parser,
            )
        return self._forms[tools]

    def _with_marks(self, prompt: Prompt, *, tools: bool) -> Prompt:
        """Return a prompt with the marks of thoughts of the template in use."""
        thinking = self.answer_form(tools=tools).thinking
        if thinking is not None:
            marks: tuple[str, ...] = (thinking.begin, thinking.end)
        else:
            marks = template_marks(self._template(tools=tools), self.tokenizer.has_token)
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        return {key: prompt, "thinking_marks": marks}

    def _template(self, *, tools: bool) -> str:
        """Return the server's template or else the model's, empty for neither."""
        return self.settings.chat_template or self.tokenizer.chat_template(tools=tools) or ""

    @property
    def default_sampling(self) -> SamplingParams:
        """What requests are sampled by that say nothing."""
        return SamplingParams() if self.llm is None else self.llm.get_default_sampling_params()

    @property
    def default_max_tokens(self) -> int | None:
        """Tokens of an answer of which nothing else is said; None: as many as there is room for."""
        if self.llm is None:
            return None
        said: int | None = self.llm.generation_config.sampling.get("max_tokens")
        return said

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return self.ready().tokenizer.encode(text, special=False)

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name is not None and name not in self.settings.model_names:
            raise ApiError(
                404,
                f"the model {name!r:.200} does not exist; this server has "
                f"{', '.join(self.settings.model_names)}",
                param="model",
                code="model_not_found",
            )

    def cut_off(self) -> None:
        """End the answers under way with an error; called from the event loop."""
        self._cut_off, now_s = True, asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            deadline.reschedule(now_s)

    @asynccontextmanager
    async def _in_time(self) -> AsyncGenerator[None]:
        """Bound what a block takes: by the server's limit and by its end."""
        try:
            async with asyncio.timeout(self.settings.request_timeout_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    yield
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if self._cut_off:
                raise ApiError(503, "the server has ended before the answer was complete") from None
            raise

    async def begin(
        self,
        prompts: Sequence[Prompt | Callable[[], Awaitable[Prompt]]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        guided_by: str = "structured_outputs",
        tools: bool = False,
        n_field: str = "n",
    ) -> list[ResponseStream]:
        """Begin the answers to prompts; all or none.

        A prompt may be a function that makes it, called once there is room for its answers. The
        caller then reads the answers by `choices`, or drops them by `give_up`.
        `guided_by`: the field of the request that says what the text must be. `tools`: the prompts
        are of the template for tools. `n_field`: the field that says how many answers each gets.
        """
        llm, limits = self.ready(), self.settings
        self.check_stages(llm)
        if not 1 <= len(prompts) <= limits.max_prompts:
            raise ApiError(
                400,
                f"a request may have 1 to {limits.max_prompts} prompts, got {len(prompts)}",
                param="prompt",
            )
        if params.n > limits.max_n:
            raise ApiError(400, f"{n_field} may be at most {limits.max_n}", param=n_field)
        asked = len(prompts) * params.n
        if asked > limits.max_requests:  # it would be refused however long it waits
            raise ApiError(
                400,
                f"a request may ask for {limits.max_requests} answers, got {len(prompts)} prompts "
                f"with {n_field}={params.n}; split it",
                param=n_field,
            )
        if self.num_under_way + asked > limits.max_requests:
            raise ApiError(
                429,
                f"{self.num_under_way} requests are under way and {limits.max_requests} may be; "
                "try again in a moment",
                code="rate_limit_exceeded",
            )
        guide = params.structured_outputs
        waits = guide is not None and guide.after_thought
        bounded = waits or params.thinking_token_budget is not None
        begun: list[ResponseStream] = []
        self.num_under_way += asked
        try:
            for given in prompts:
                prompt = await given() if callable(given) else given
                name = self._named(prompt)
                prompt = self._with_marks(prompt, tools=tools) if bounded else prompt
                begun.append(
                    await llm.submit(
                        prompt, params, request_id=name, priority=priority, cache_salt=cache_salt
                    )
                )
                self.metrics.asked(params.n, params.max_tokens)
        except BaseException as error:
            self.num_under_way -= asked
            for answers in begun:
                answers.give_up()
            if isinstance(error, GuideError):
                raise ApiError(400, f"{guided_by}: {error}", param=guided_by) from None
            raise
        self._left |= dict.fromkeys(begun, params.n)
        return begun

    def give_up(self, begun: Sequence[ResponseStream]) -> None:
        """End what has not ended of answers that were begun; again does nothing."""
        for answers in begun:
            answers.give_up()
            self.num_under_way -= self._left.pop(answers, 0)

    def close(self) -> None:
        """End the threads for texts."""
        self._threads.close()

    async def read_text(self, work: Callable[[], _T], length: int) -> _T:
        """Return what `work` on a text returns, beside the event loop if that takes long."""
        try:
            return await self._threads.run(work, length)
        except TooManyTextsError as error:
            raise ApiError(
                429, f"{error}; try again in a moment", code="rate_limit_exceeded"
            ) from None

    def _named(self, prompt: Prompt) -> str:
        """Return what a prompt's answers are called in the engine: the HTTP request's id first."""
        self._num_named += 1
        name = f"{REQUEST_ID.get() or 'request'}-{self._num_named}"
        if self.settings.log_prompts:
            _log.info(json.dumps({"time": log_time(), "id": name, "prompt": prompt}))
        return name

    async def choices(
        self, begun: Sequence[ResponseStream], n: int, *, streamed: bool = True
    ) -> AsyncGenerator[Choice]:
        """Yield what is new of each answer, as a choice of its own, counted.

        `streamed`: the next one is asked for when this one has been sent.
        """
        clocks: dict[int, AnswerClock] = {}
        for place, answers in enumerate(begun):
            for j in range(n):
                # A prompt with several answers counts once.
                length = len(answers.prompt_token_ids) if j == 0 else 0
                clocks[place * n + j] = AnswerClock(self.metrics, length, streamed=streamed)
        open_clocks = dict(clocks)
        try:
            async with self._in_time(), aclosing(_merged(begun, n)) as deltas:
                async for index, delta in deltas:
                    clocks[index].tokens(len(delta.token_ids))
                    _count(sum(len(a.prompt_token_ids) for a in begun), clocks.values())
                    new = Choice(index)
                    new.take(delta)
                    if delta.finish_reason == "error":
                        raise ApiError(
                            400, f"what the text must be cannot be followed: {delta.stop_reason}"
                        )
                    if delta.finish_reason is not None:
                        open_clocks.pop(index).end(delta)
                        self._left[begun[index // n]] -= 1
                        self.num_under_way -= 1
                    yield new
                    if streamed:
                        clocks[index].sent(delta)
        finally:
            self.give_up(begun)
            for clock in open_clocks.values():
                clock.abort()
            for first in range(0, len(clocks), n):
                self.metrics.longest(max(clocks[first + j].num_tokens for j in range(n)))

    async def gather(self, begun: Sequence[ResponseStream], n: int) -> list[Choice]:
        """Return all answers once they have ended."""
        whole = [Choice(index) for index in range(len(begun) * n)]
        async with aclosing(self.choices(begun, n, streamed=False)) as choices:
            async for new in choices:
                own = whole[new.index]
                own.text += new.text
                own.token_ids += new.token_ids
                own.logprobs += new.logprobs
                own.finish_reason = new.finish_reason or own.finish_reason
                own.stop_reason = new.stop_reason or own.stop_reason
                own.num_cached_tokens += new.num_cached_tokens
        return whole


def _count(prompt_tokens: int, clocks: Iterable[AnswerClock]) -> None:
    """Note for the access log how far the answers of a request are."""
    tally = TALLY.get()
    if tally is None:
        return
    tokens = sum(clock.num_tokens for clock in clocks)
    tally |= {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    if tokens:
        began_s = ARRIVED_S.get() or time.perf_counter()
        tally.setdefault("first_token_s", round(time.perf_counter() - began_s, 4))


async def _merged(
    begun: Sequence[ResponseStream], n: int
) -> AsyncGenerator[tuple[int, CompletionDelta]]:
    """Yield the deltas of several prompts as they come, by the number of the choice."""
    if len(begun) == 1:
        async with aclosing(begun[0].deltas()) as deltas:
            async for delta in deltas:
                yield delta.index, delta
        return
    news: asyncio.Queue[tuple[int, CompletionDelta] | BaseException | None] = asyncio.Queue()

    async def read(place: int, answers: ResponseStream) -> None:
        try:
            async with aclosing(answers.deltas()) as deltas:
                async for delta in deltas:
                    news.put_nowait((place * n + delta.index, delta))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(read(i, answers)) for i, answers in enumerate(begun)]
        for task in tasks:
            stack.callback(task.cancel)
        left = len(tasks)
        while left:
            heard = await news.get()
            if isinstance(heard, BaseException):
                raise heard
            if heard is None:
                left -= 1
            else:
                yield heard


def usage(prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """Return what an answer took, in OpenAI's form."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }

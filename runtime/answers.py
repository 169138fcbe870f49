"""The answers to one prompt while they come: for event loops, which may serve many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from llmpq.runtime.entrance import AsyncSubmitter, NewsQueue, OutputQueue
from llmpq.runtime.launch.engine_thread import EngineThread, RequestOutputDelta
from llmpq.runtime.request_output import CompletionDelta, Logprob
from llmpq.runtime.text.answer_text import TextStream
from llmpq.runtime.text.prompts import PreparedPrompt, RequestFactory
from llmpq.runtime.token_rules import LogprobOutput, TokenScores


@dataclass
class _Open:
    """One answer that has not ended."""

    index: int
    text: TextStream
    scores: list[TokenScores] = field(default_factory=list)
    """Of tokens that have not been told."""
    num_told: int = 0


def _joined(news: Sequence[RequestOutputDelta]) -> RequestOutputDelta:
    """Return the news of one answer as one, which has waited as long as the first."""
    if len(news) == 1:
        return news[0]
    noted = [own.noted for own in news if own.noted is not None]
    both = LogprobOutput(
        output=[score for own in noted for score in own.output],
        prompt=[score for own in noted for score in own.prompt],
    )
    return replace(
        news[-1],
        tokens=[token for own in news for token in own.tokens],
        noted=both if noted else None,
        heard_s=news[0].heard_s,
    )


class ResponseStream:
    """The answers to one prompt; made by `LLM.submit`, read once by `deltas`."""

    def __init__(
        self,
        ask: PreparedPrompt,
        prompts: RequestFactory,
        engine: EngineThread,
        inbox: OutputQueue,
        *,
        ended: Callable[[], None],
    ) -> None:
        """`ended` is called once nobody reads them any more."""
        self._ended = ended
        self._ask, self._prompts, self._engine, self._inbox = ask, prompts, engine, inbox
        self._news: NewsQueue = asyncio.Queue()
        self._open = {
            request.id: _Open(index, prompts.stream_of(ask))
            for index, request in enumerate(ask.requests)
        }
        alone = ask.params.prompt_logprobs is not None and len(ask.tokens) == 1
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if alone else None
        """For each token of the prompt, from the first delta on; the first has none."""

    @property
    def request_id(self) -> str:
        """The name by which they can be aborted."""
        return self._ask.name

    @property
    def prompt(self) -> str | None:
        """The prompt's text; None where tokens were given."""
        return self._ask.prompt

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens, as the model gets them."""
        return self._ask.tokens

    async def begin(self, entrance: AsyncSubmitter) -> None:
        """Queue the requests; waits for the first stage."""
        put = self._inbox.put
        await entrance.submit(self._ask.requests, lambda heard: put(self._news, heard))

    async def deltas(self) -> AsyncGenerator[CompletionDelta]:
        """Yield what is new of each answer, until all have ended; leaving early aborts them."""
        try:
            while self._open:
                for heard in self._waiting(await self._news.get()):
                    if heard.error is not None:
                        raise heard.error
                    if heard.id in self._open:
                        yield self._delta(heard)
        finally:
            self.give_up()

    def _waiting(self, news: list[RequestOutputDelta]) -> list[RequestOutputDelta]:
        """Return all that has come, of each answer as one: a reader who is late is told at once."""
        while not self._news.empty():
            news += self._news.get_nowait()
        if len(news) == 1:
            return news
        whole: dict[int, list[RequestOutputDelta]] = {}
        for heard in news:
            whole.setdefault(heard.id, []).append(heard)
        return [_joined(own) for own in whole.values()]

    def give_up(self) -> None:
        """End what has not ended; again does nothing."""
        left, self._open = list(self._open), {}
        self._ended()
        if left:  # in another thread: a stage is asked
            self._inbox.loop.run_in_executor(None, self._engine.abort, left)

    def _delta(self, heard: RequestOutputDelta) -> CompletionDelta:
        """Return what is new of one answer."""
        own, end = self._open[heard.id], heard.finished
        if heard.noted is not None:
            own.scores += heard.noted.output
            if heard.noted.prompt:
                self.prompt_logprobs = [None, *self._prompts.logprobs(heard.noted.prompt)]
        told = list(heard.tokens) if end is None else end.tokens[own.num_told :]
        tokens = [] if self._ask.params.max_tokens == 0 else told
        own.num_told += len(told)
        text = own.text.push(tokens)
        scores, own.scores = own.scores[: len(tokens)], own.scores[len(tokens) :]
        logprobs = None
        if self._ask.params.logprobs is not None:
            logprobs = self._prompts.logprobs(scores)
        if end is None:
            return CompletionDelta(
                index=own.index, text=text, token_ids=tokens, logprobs=logprobs,
                heard_s=heard.heard_s,
            )  # fmt: skip
        del self._open[heard.id]
        text += own.text.finish()
        return CompletionDelta(
            index=own.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=self._prompts.finish_reason(self._ask, end),
            stop_reason=self._prompts.stop_reason(self._ask, end, own.text),
            first_token_s=end.first_token_s,
            total_s=end.total_s,
            queue_s=end.queue_s,
            num_cached_tokens=end.num_prefix_hits,
            num_preemptions=end.num_preemptions,
            heard_s=heard.heard_s,
        )

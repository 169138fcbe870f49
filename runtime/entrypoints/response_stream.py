"""ResponseStream: the answers to one prompt as they are generated, for event loops.

Callers that submit in the same round of the loop cost the stages one call (`AsyncSubmitter`), and a
loop that is late gets several tokens of a request at once (`OutputQueue`).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from llmpq.runtime.launch.engine_thread import EngineThread
from llmpq.runtime.launch.request_record import Listener
from llmpq.runtime.requests.request import Request, RequestOutputDelta
from llmpq.runtime.requests.request_output import CompletionDelta, Logprob
from llmpq.runtime.requests.token_rules import LogprobOutput, TokenScores
from llmpq.runtime.text.answer_text import TextStream
from llmpq.runtime.text.request_factory import PreparedPrompt, RequestFactory

_NEWS_SHARE = 0.9
"""Share of the loop's time that outputs may take; the rest is for requests that arrive."""
_LONGEST_WAIT_S = 0.25
DeltaQueue = asyncio.Queue[list[RequestOutputDelta]]
"""One caller's outputs, in the batches in which they were delivered."""


class OutputQueue:
    """Delivers an engine's outputs to queues of an event loop, in batches.

    A loop that spends all its time on outputs gets them less often, more tokens at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._waiting: dict[DeltaQueue, list[RequestOutputDelta]] = {}
        self._delivered_s = self._busy_s = 0.0
        """When outputs were delivered last, and how long its thread had computed by then."""

    def put(self, queue: DeltaQueue, news: RequestOutputDelta) -> None:
        """Put an output into a queue of the loop; called in any thread."""
        with self._lock:
            first = not self._waiting
            self._waiting.setdefault(queue, []).append(news)
        if first:
            with suppress(RuntimeError):  # the loop is closed: no queue is read any more
                self.loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        # Ends wait as well: what follows them then comes, and its prompts are computed, together.
        busy_s = time.thread_time() - self._busy_s
        wait_s = busy_s / _NEWS_SHARE - (time.perf_counter() - self._delivered_s)
        if wait_s > 0:
            self.loop.call_later(min(wait_s, _LONGEST_WAIT_S), self._hand_out)
        else:
            self._hand_out()

    def _hand_out(self) -> None:
        self._delivered_s, self._busy_s = time.perf_counter(), time.thread_time()
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for queue, news in waiting.items():
            queue.put_nowait(news)


_Asked = tuple[Sequence[Request], Listener]
_Waiting = tuple[_Asked, asyncio.Future[None]]


class AsyncSubmitter:
    """Submits requests of an event loop to an engine, all that wait in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: EngineThread) -> None:
        self.loop, self._engine = loop, engine
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    async def submit(self, requests: Sequence[Request], listener: Listener) -> None:
        """Queue requests; returns once the first stage has them, or raises why it cannot."""
        done: asyncio.Future[None] = self.loop.create_future()
        self._waiting.append(((requests, listener), done))
        if self._sending is None:  # in the next round, with all of this one
            self._sending = self.loop.create_task(self._send())
        await done

    async def _send(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                await self._hand_over(waiting)
        finally:
            self._sending = None

    async def _hand_over(self, waiting: Sequence[_Waiting]) -> None:
        """Queue all callers' requests in one call; where it is refused, caller by caller."""
        asked = [one for one, _ in waiting]
        try:
            await self.loop.run_in_executor(None, self._engine.submit_all, asked)
        except Exception as error:
            if len(waiting) > 1:
                for one in waiting:
                    await self._hand_over([one])
            elif not waiting[0][1].done():
                waiting[0][1].set_exception(error)
            return
        for _, done in waiting:
            if not done.done():  # else its caller has gone
                done.set_result(None)


@dataclass
class _Open:
    """One answer that has not ended."""

    index: int
    text: TextStream
    scores: list[TokenScores] = field(default_factory=list)
    """Of tokens that have not been sent."""
    num_sent: int = 0


def _joined(news: Sequence[RequestOutputDelta]) -> RequestOutputDelta:
    """Return the deltas of one answer as one, with the arrival time of the first."""
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


class _Running:
    """A stream's requests while they run; refers to no stream, so that one not read is freed."""

    def __init__(
        self, prompt: PreparedPrompt, engine: EngineThread, ended: Callable[[], None]
    ) -> None:
        self._left = {*prompt.named[1]}
        self._engine = engine
        self._ended = ended
        self._process = os.getpid()

    def add(self, delta: RequestOutputDelta) -> None:
        """Note a delta that ends its request; called in the engine's thread."""
        if delta.finished is not None or delta.error is not None:
            self._left.discard(delta.id)
            if not self._left:
                self._ended()

    def refuse(self) -> None:
        """Note that the engine took none of the requests."""
        self._left.clear()
        self._ended()

    def abort(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """End those that run, beside the caller: a stage is asked.

        Without an event loop in a thread of its own: a stream may be freed in any, the engine's
        too, and in a forked child, where nothing runs.
        """
        self._ended()
        left, self._left = [*self._left], set()
        if not left or os.getpid() != self._process:
            return
        if loop is None or loop.is_closed():
            abort = threading.Thread(target=self._engine.abort, args=(left,), daemon=True)
            abort.start()
        else:
            loop.run_in_executor(None, self._engine.abort, left)


class ResponseStream:
    """The answers to one prompt; made by `LLM.submit`, read once by `deltas`.

    They run whether or not they are read, until they end or the stream is freed.
    """

    def __init__(
        self,
        prompt: PreparedPrompt,
        prompts: RequestFactory,
        engine: EngineThread,
        outputs: OutputQueue,
        *,
        owner: object,
        ended: Callable[[], None],
    ) -> None:
        """`ended` is called once all answers have ended, or the stream was left or freed.

        `owner`: what lives as long as the stream does, which `ended` may not refer to.
        """
        self._owner = owner
        self._prompt = prompt
        self._prompts = prompts
        self._outputs = outputs
        self._deltas: DeltaQueue = asyncio.Queue()
        self._running = _Running(prompt, engine, ended)
        weakref.finalize(self, self._running.abort).atexit = False
        self._open = {
            request.id: _Open(index, prompts.stream_of(prompt))
            for index, request in enumerate(prompt.requests)
        }
        single = prompt.params.prompt_logprobs is not None and len(prompt.tokens) == 1
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if single else None
        """For each token of the prompt, from the first delta on; the first has none."""

    @property
    def request_id(self) -> str:
        """The name by which they can be aborted."""
        return self._prompt.name

    @property
    def prompt(self) -> str | None:
        """The prompt's text; None where tokens were given."""
        return self._prompt.prompt

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens, as the model gets them."""
        return self._prompt.tokens

    async def begin(self, submitter: AsyncSubmitter) -> None:
        """Queue the requests; waits for the first stage."""
        put, deltas, running = self._outputs.put, self._deltas, self._running

        def listen(delta: RequestOutputDelta) -> None:  # refers to no stream, as `_Running`
            running.add(delta)
            put(deltas, delta)

        try:
            await submitter.submit(self._prompt.requests, listen)
        except Exception:
            running.refuse()
            raise

    async def deltas(self) -> AsyncGenerator[CompletionDelta]:
        """Yield what is new of each answer, until all have ended; leaving early aborts them.

        `RuntimeError` in another event loop than that of `LLM.submit`, which brings the tokens.
        """
        if asyncio.get_running_loop() is not self._outputs.loop:
            raise RuntimeError(
                f"request '{self.request_id}' was submitted in another event loop; read it there, "
                "or submit it again in this one"
            )
        try:
            while self._open:
                for delta in self._joined_with_queued(await self._deltas.get()):
                    if delta.error is not None:
                        raise delta.error
                    if delta.id in self._open:
                        yield self._delta(delta)
        finally:
            self.give_up()

    def _joined_with_queued(self, deltas: list[RequestOutputDelta]) -> list[RequestOutputDelta]:
        """Return these and all that is queued, one delta an answer: a late reader gets one."""
        while not self._deltas.empty():
            deltas += self._deltas.get_nowait()
        if len(deltas) == 1:
            return deltas
        whole: dict[int, list[RequestOutputDelta]] = {}
        for delta in deltas:
            whole.setdefault(delta.id, []).append(delta)
        return [_joined(own) for own in whole.values()]

    def give_up(self) -> None:
        """End what has not ended; again does nothing."""
        self._open = {}
        self._running.abort(self._outputs.loop)

    def _delta(self, heard: RequestOutputDelta) -> CompletionDelta:
        """Return what is new of one answer."""
        own, end = self._open[heard.id], heard.finished
        if heard.noted is not None:
            own.scores += heard.noted.output
            if heard.noted.prompt:
                self.prompt_logprobs = [None, *self._prompts.logprobs(heard.noted.prompt)]
        new = list(heard.tokens) if end is None else end.tokens[own.num_sent :]
        tokens = [] if self._prompt.params.max_tokens == 0 else new
        own.num_sent += len(new)
        text = own.text.push(tokens)
        scores, own.scores = own.scores[: len(tokens)], own.scores[len(tokens) :]
        logprobs = None
        if self._prompt.params.logprobs is not None:
            logprobs = self._prompts.logprobs(scores)
        if end is None:
            return CompletionDelta(
                index=own.index,
                text=text,
                token_ids=tokens,
                logprobs=logprobs,
                heard_s=heard.heard_s,
            )
        del self._open[heard.id]
        text += own.text.finish()
        return CompletionDelta(
            index=own.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=self._prompts.finish_reason(self._prompt, end),
            stop_reason=self._prompts.stop_reason(self._prompt, end, own.text),
            first_token_s=end.first_token_s,
            total_s=end.total_s,
            queue_s=end.queue_s,
            num_cached_tokens=end.num_prefix_hits,
            num_preemptions=end.num_preemptions,
            heard_s=heard.heard_s,
        )

"""Between an event loop and an engine: requests submitted together, outputs delivered together.

Callers that submit in the same round of the loop cost the stages one call, and a loop that is late
gets several tokens of a request at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from llmpq.runtime.launch.engine_thread import EngineThread, Listener, RequestOutputDelta
from llmpq.runtime.request import Request

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
        if self._sending is None:  # it begins in the next round: who comes in this one goes along
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
        """Queue requests together; where that is refused, each caller's alone, who learns why."""
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

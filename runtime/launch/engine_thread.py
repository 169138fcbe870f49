"""A running pipeline for many callers: a thread hands each the outputs of its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmpq.errors import StageLostError
from llmpq.runtime.engine.mailbox import EngineOutputs
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.request import Finished, Progress, Request
from llmpq.runtime.token_rules import LogprobOutput

_END_S = 5.0
"""How long the loops may take to end before the stages are taken down."""


@dataclass(frozen=True, kw_only=True)
class RequestOutputDelta:
    """What is new of one request: tokens, its end, or the error that ended the engine."""

    id: int
    tokens: Sequence[int] = ()
    finished: Finished | None = None
    noted: LogprobOutput | None = None
    """Logprobs of those tokens, where they were asked for."""
    error: BaseException | None = None
    heard_s: float = 0.0
    """When it was read from the stages, by `time.perf_counter`; 0 for errors."""


Listener = Callable[[RequestOutputDelta], None]
"""Called in the engine's thread; it may not wait."""


class EngineThread:
    """Owns a running pipeline and the thread that reads its outputs."""

    def __init__(self, engine: PipelineClient, stack: ExitStack) -> None:
        """`stack` takes the engine down."""
        self.engine, self._stack = engine, stack
        self._listeners: dict[int, Listener] = {}
        self._ruled: set[int] = set()
        """Running requests whose rules the last stage has."""
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._closed = False
        self.progress = Progress()
        self._thread = threading.Thread(target=self._read, daemon=True, name="llmpq news")
        self._thread.start()

    def submit(self, requests: Sequence[Request], listener: Listener) -> None:
        """Queue requests; the listener gets the outputs of each until it has ended."""
        self.submit_all([(requests, listener)])

    def submit_all(self, asked: Sequence[tuple[Sequence[Request], Listener]]) -> None:
        """Queue the requests of several callers in one call of the stages, all or none."""
        requests = [request for own, _ in asked for request in own]
        with self._lock:
            self._require_open()
            self._listeners |= {request.id: tell for own, tell in asked for request in own}
            self._ruled |= {request.id for request in requests if request.rules is not None}
        try:
            self.engine.submit(requests, more=True)
        except BaseException:
            with self._lock:
                for request in requests:
                    self._listeners.pop(request.id, None)
                    self._ruled.discard(request.id)
            raise

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests between steps; their listeners get that as any end."""
        if request_ids and self._error is None and not self._closed:
            self.engine.abort(request_ids)

    def close(self, last: Callable[[PipelineClient], None] | None = None) -> None:
        """End all requests and the stages; `last` is called between, unless a stage was lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if (
            threading.current_thread() is self._thread
        ):  # the last caller was dropped by its listener
            threading.Thread(target=self._take_down, args=(last,), name="llmpq end").start()
        else:
            self._take_down(last)

    def _take_down(self, last: Callable[[PipelineClient], None] | None) -> None:
        with self._lock:
            left = list(self._listeners)
        try:
            if self._error is None:
                self.engine.abort(left)
                self.engine.submit((), more=False)
                self._thread.join(_END_S)
                if last is not None and self._error is None:
                    last(self.engine)
        except Exception as error:  # whatever it is, the stages are taken down
            self._fail(error)
        finally:
            self._stack.close()
            self._thread.join(_END_S)
            self._fail(StageLostError("the engine was closed"))

    def check_alive(self) -> None:
        """Raise what ended the engine, if it has ended."""
        self._require_open()

    def stats(self) -> Mapping[str, Any]:
        """Return the counters of the whole run."""
        return asdict(self.progress)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed; make another one")
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        """Hand out outputs until the loops have ended or a stage is lost."""
        try:
            for update in self.engine.updates():
                self.progress, now_s = update.progress, time.perf_counter()
                noted = self._noted(update)
                for number, tokens in update.tokens.items():
                    own = noted.get(number)
                    self._tell(
                        RequestOutputDelta(id=number, tokens=tokens, noted=own, heard_s=now_s)
                    )
                for finished in update.finished:
                    number = finished.id
                    own = noted.get(number)
                    if own is not None and own.failure is not None:
                        finished = replace(finished, finish_reason="error", failure=own.failure)
                    news = RequestOutputDelta(
                        id=number, finished=finished, noted=own, heard_s=now_s
                    )
                    self._tell(news, last=True)
        except BaseException as error:
            self._fail(error)

    def _noted(self, update: EngineOutputs) -> dict[int, LogprobOutput]:
        """Return the scores that belong to an update's tokens; who ended is forgotten."""
        ended = [f.id for f in update.finished if f.id in self._ruled]
        asked = {*ended, *(number for number in update.tokens if number in self._ruled)}
        if not asked:
            return {}
        self._ruled.difference_update(ended)
        return self.engine.noted(sorted(asked), ended)

    def _tell(self, news: RequestOutputDelta, *, last: bool = False) -> None:
        with self._lock:
            listener = self._listeners.get(news.id)
            if last:
                self._listeners.pop(news.id, None)
        if listener is not None:
            listener(news)

    def _fail(self, error: BaseException) -> None:
        """End all listeners that still wait with the error."""
        with self._lock:
            self._error = self._error or error
            left, self._listeners = self._listeners, {}
        for number, listener in left.items():
            listener(RequestOutputDelta(id=number, error=self._error))

"""One of several engines behind one port: the application and its engine, run by Ray Serve.

The process that listens (replica_front.py) hands every request over as plain data and gets what the
application says as it comes. Nothing here listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from llmpq.plan import Plan
from llmpq.runtime.gc_freeze import gc_freeze
from llmpq.runtime.launch.stages.stage_host import LOCAL_HOST
from llmpq.runtime.llm import LLM
from llmpq.runtime.serve.app import make_app
from llmpq.runtime.serve.arrival import ARRIVED, ARRIVED_S, REQUEST_ID, TALLIED, TALLY
from llmpq.runtime.serve.gate import Message
from llmpq.runtime.serve.page import state_of
from llmpq.runtime.serve.service import Service
from llmpq.runtime.serve.settings import ServeSettings

_KEPT_FAILED_S = 10.0
"""How long one that could not load stays to say why, before it is replaced."""


class Replica:
    """The class of a Ray Serve deployment; one process, one engine with its own stages."""

    def __init__(
        self, number: int, settings: Mapping[str, Any], model: str | None, engine: Mapping[str, Any]
    ) -> None:
        """Begin to load; `model` and `engine` are what `LLM` is given, the plan as JSON."""
        logging.getLogger("llmpq").setLevel(logging.WARNING)
        _stay_on_loopback()
        self._service = Service(ServeSettings(**settings), engine=str(number))
        self._app = make_app(self._service, gated=False)
        self._failure: BaseException | None = None
        self._failed_s = 0.0
        self._loading = threading.Thread(target=self._load, args=(model, engine), daemon=True)
        self._loading.start()

    def _load(self, model: str | None, engine: Mapping[str, Any]) -> None:
        try:
            plan = Plan.parse_data(json.loads(engine["plan"]), where="plan")
            self._service.llm = LLM(model, **{**engine, "plan": plan})
            gc_freeze()
        except BaseException as error:
            self._failure, self._failed_s = error, time.monotonic()
            self._service.failure = str(error)

    def _alive(self) -> bool:
        try:
            self._service.ready().check_alive()
        except Exception:
            return False
        return True

    async def answer(self, scope: Message, body: bytes) -> AsyncGenerator[list[Message] | None]:
        """Yield what the application answers: all that is new at a time.

        First an empty list, once the request is taken, or None where it is not: there is no engine.
        """
        if not self._alive():
            yield None
            return
        yield []
        ARRIVED_S.set(scope.pop(ARRIVED, None) or time.perf_counter())
        REQUEST_ID.set(dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1"))
        tally: dict[str, float] = {}
        TALLY.set(tally)
        news: asyncio.Queue[Message | None] = asyncio.Queue()
        given = False

        async def receive() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # a client that goes away cancels the whole call
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            news.put_nowait(message)

        work = asyncio.ensure_future(self._app({**scope, "type": "http"}, receive, send))
        work.add_done_callback(lambda _: news.put_nowait(None))
        try:
            more = True
            while more:
                messages, more = _all_of(news, await news.get())
                if messages:
                    yield [{"type": TALLIED, "tally": {**tally}}, *messages] if tally else messages
            await work
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def state(self) -> dict[str, Any]:
        """Return whether it answers, and why it could not load (an error's name and sentence)."""
        failure = self._failure
        told = None if failure is None else [type(failure).__name__, str(failure)]
        return {"ready": self._alive(), "failure": told}

    async def metrics(self) -> bytes:
        """Return its metrics in Prometheus' text format; asks the stages."""
        return await asyncio.to_thread(self._service.metrics.text)

    async def page(self) -> dict[str, Any]:
        """Return what the page draws of it; asks the stages."""
        return await asyncio.to_thread(state_of, self._service)

    def check_health(self) -> None:
        """Raise where it has to be replaced: Ray Serve asks."""
        if self._service.llm is not None:
            self._service.llm.check_alive()
        elif self._failure is not None and time.monotonic() > self._failed_s + _KEPT_FAILED_S:
            raise RuntimeError(f"the engine could not be loaded: {self._failure}")


def _stay_on_loopback() -> None:
    """Have Ray Serve open this process's port, for calls that are not made here, on loopback.

    Once this class is constructed it opens one on every address of the machine, whatever is set.
    """
    from ray.serve._private import replica

    add_port: Any = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: add_port(server, f"{LOCAL_HOST}:0")


def _all_of(
    news: asyncio.Queue[Message | None], first: Message | None
) -> tuple[list[Message], bool]:
    """Return what has come by now, and whether more follows."""
    messages: list[Message] = []
    one: Message | None = first
    while one is not None:
        messages.append(one)
        if news.empty():
            return messages, True
        one = news.get_nowait()
    return messages, False

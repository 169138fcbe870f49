"""One of several engines behind one port: the application and its engine in a child process.

The process that listens (replica_front.py) sends every request as plain data and receives the
application's ASGI messages as they come. Nothing here listens.
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

from llmpq.child import serve_calls
from llmpq.plans.plan import Plan
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.launch.stages.gc_freeze import gc_freeze
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.serve.app import make_app
from llmpq.runtime.serve.gate import ARRIVED, ARRIVED_S, REQUEST_ID, TALLIED, TALLY, Message
from llmpq.runtime.serve.page import state_of
from llmpq.runtime.serve.replicas.plain_messages import from_plain, to_plain
from llmpq.runtime.serve.service import Service
from llmpq.runtime.serve.settings import ServeSettings

CALLS = ("answer", "state", "metrics", "page", "reset_prefix_cache")


class Replica:
    """One process, one engine with its own stages."""

    asynchronous = True
    """Its calls are coroutines and asynchronous generators (`llmpq.child`)."""

    def __init__(
        self, number: int, settings: Mapping[str, Any], model: str | None, engine: Mapping[str, Any]
    ) -> None:
        """Begin to load `model`; `engine` has the plan as text and `EngineOptions` as data."""
        logging.getLogger("llmpq").setLevel(logging.WARNING)
        self._service = Service(ServeSettings(**settings), engine=str(number))
        self._app = make_app(self._service, gated=False)
        self._failure: BaseException | None = None
        self._loading = threading.Thread(target=self._load, args=(model, engine), daemon=True)
        self._loading.start()

    def _load(self, model: str | None, engine: Mapping[str, Any]) -> None:
        try:
            plan = Plan.parse_data(json.loads(engine["plan"]), where="plan")
            options = EngineOptions.from_data(engine["options"])
            self._service.llm = LLM(model, plan=plan, options=options)
            gc_freeze()
        except BaseException as error:
            self._failure = error
            self._service.failure = str(error)

    def _unready(self) -> Exception | None:
        """Return why it does not answer: it loads, could not, or has lost its engine."""
        try:
            self._service.ready().check_alive()
        except Exception as error:
            return error
        return None

    async def answer(self, plain: Message, text: str) -> AsyncGenerator[list[Message] | None]:
        """Yield the application's ASGI messages: all that are new at a time.

        First an empty list, once the request is taken, or None where it is not: there is no engine.
        """
        scope, body = from_plain(plain), text.encode("latin-1")
        llm = self._service.llm
        if self._unready() is not None or (llm is not None and llm.recovering is not None):
            yield None
            return
        yield []
        ARRIVED_S.set(scope.pop(ARRIVED, None) or time.perf_counter())
        REQUEST_ID.set(dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1"))
        tally: dict[str, float] = {}
        TALLY.set(tally)
        outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        given = False

        async def receive() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # a client that goes away cancels the whole call
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            outbox.put_nowait(message)

        work = asyncio.ensure_future(self._app({**scope, "type": "http"}, receive, send))
        work.add_done_callback(lambda _: outbox.put_nowait(None))
        try:
            more = True
            while more:
                messages, more = _all_of(outbox, await outbox.get())
                if messages:
                    new = [to_plain(message) for message in messages]
                    yield [{"type": TALLIED, "tally": {**tally}}, *new] if tally else new
            await work
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def state(self) -> dict[str, Any]:
        """Return whether it answers, what of its engine was lost, and why it could not load."""
        failure, unready = self._failure, self._unready()
        lost = unready is not None and self._service.llm is not None
        return {
            "ready": unready is None,
            "lost": (str(unready) or type(unready).__name__) if lost else None,
            "failure": None if failure is None else [type(failure).__name__, str(failure)],
        }

    async def metrics(self) -> str:
        """Return its metrics in Prometheus' text format; asks the stages."""
        return (await asyncio.to_thread(self._service.metrics.text)).decode()

    async def reset_prefix_cache(self) -> None:
        """Let requests to come find no prefix of those before."""
        await asyncio.to_thread(self._service.ready().reset_prefix_cache)

    async def page(self) -> dict[str, Any]:
        """Return what the page draws of it; asks the stages."""
        return await asyncio.to_thread(state_of, self._service)


def _all_of(
    outbox: asyncio.Queue[Message | None], first: Message | None
) -> tuple[list[Message], bool]:
    """Return what has come by now, and whether more follows."""
    messages: list[Message] = []
    one: Message | None = first
    while one is not None:
        messages.append(one)
        if outbox.empty():
            return messages, True
        one = outbox.get_nowait()
    return messages, False


def make(first: dict[str, Any]) -> Replica:
    """Return the replica of a first line: {"number": 0, "settings": {...}, "model": ..., ...}."""
    settings = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in first["settings"].items()
    }
    return Replica(**{**first, "settings": settings})


if __name__ == "__main__":
    serve_calls(make, CALLS)

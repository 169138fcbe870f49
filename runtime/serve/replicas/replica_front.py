"""Before several engines: one socket, one gate, every request to the one that should end it first.

A replica is a child process (replica_server.py), which is asked for its state, and replaced when
it is gone, silent for long, or has lost its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest

from llmpq.runtime.serve.answering import event
from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.gate import ARRIVED, TALLIED, TALLY, Message, Receive, Send
from llmpq.runtime.serve.replicas.merged_replicas import merged_metrics
from llmpq.runtime.serve.replicas.plain_messages import from_plain, to_plain
from llmpq.runtime.serve.replicas.routing import ReplicaLoad, RequestWork
from llmpq.runtime.serve.settings import ServeSettings

_log = logging.getLogger("llmpq.serve")
_TAKEN_S = 30.0
"""How long a replica may take to take a request."""
_LOOK_S = 0.25
_ANSWER_S = 10.0
"""How long a replica may take to say whether it is ready."""
_SILENT_S = 3.0
"""After how long without such a word it is not counted on: busy, or gone."""
_IMPORT_S, _DEAF_S = 120.0, 30.0
"""After how long without an answer it is replaced: one that has just started, and any other."""
_PAUSE_S, _FAILED_PAUSE_S = 1.0, 10.0
"""How long one that is lost, or could not load, stays: to end its answers, and to say why."""
_LOST = "the replica that answered was lost; try again"


class Counted:
    """HTTP answers by status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._responses = Counter(
            "llmpq:http_responses", "HTTP answers by status.", ("status",), registry=self.registry
        )

    def answered(self, status: int) -> None:
        """Count an HTTP answer."""
        self._responses.labels(status=str(status)).inc()


class Process(Protocol):
    """A replica's process, which is started anew when it is lost."""

    async def ask(self, method: str) -> Any:
        """Return what a method of the replica returns."""
        ...

    def stream(self, method: str, *args: object) -> AsyncGenerator[Any]:
        """Yield what a method of the replica yields; closing it ends the call."""
        ...

    @property
    def obituary(self) -> str | None:
        """Why the process has ended, None while it runs."""
        ...

    def restart(self) -> None:
        """End the process and start another."""
        ...


class ReplicaHandle:
    """A replica as the front sees it."""

    def __init__(self, number: int, process: Process, speed: float) -> None:
        """`speed`: tokens/s that its plan promises, to compare by."""
        self.number, self.speed = number, speed
        self.ready = False
        """What it said last."""
        self.num_under_way = 0
        self.load = ReplicaLoad()
        self._logged_ready = False
        """Whether the log's last word of it is that it is ready."""
        self._heard_s = -_SILENT_S
        self.failure: list[str] | None = None
        """Why it could not load: an error's name and its sentence."""
        self._process = process
        self._replace_s: float | None = None
        """When it is replaced; None while there is no reason to."""
        self._deaf_s = time.monotonic() + _IMPORT_S
        """When its silence is a reason to replace it."""

    @property
    def silent(self) -> bool:
        """Whether it has said nothing for long."""
        return time.monotonic() > self._heard_s + _SILENT_S

    def answer(self, scope: Message, body: bytes) -> AsyncGenerator[Any]:
        """Begin a request; yields the application's messages as they come."""
        return self._process.stream("answer", to_plain(scope), body.decode("latin-1"))

    async def ask(self, method: str) -> Any:
        """Return what a method of the replica returns; `TimeoutError` where it is silent."""
        return await asyncio.wait_for(self._process.ask(method), _ANSWER_S)

    async def look(self) -> None:
        """Ask whether it is ready; replace a process that is gone or of no use."""
        now_s = time.monotonic()
        try:
            state = await self.ask("state")
        except Exception as error:
            if self._logged_ready:
                why = self._process.obituary or f"no answer: {error or type(error).__name__}"
                _log.info("replica %d is lost: %s", self.number, why)
            self.ready = self._logged_ready = False
            obituary = self._process.obituary
            if obituary is not None and self._heard_s < 0:
                self.failure = ["StageLostError", f"replica {self.number} was lost: {obituary}"]
            if obituary is not None or now_s > self._deaf_s:
                self._replace_after(_PAUSE_S)
        else:
            self._heard_s, self._deaf_s = time.monotonic(), time.monotonic() + _DEAF_S
            if state["ready"] and not self._logged_ready:
                _log.info("replica %d is ready", self.number)
            elif state["lost"] and self._logged_ready:
                _log.info("replica %d has lost its engine: %s", self.number, state["lost"])
            self._logged_ready = state["ready"]
            self.ready, self.failure = state["ready"], state["failure"]
            if state["lost"]:
                self._replace_after(_PAUSE_S)
            elif state["failure"] is not None:
                self._replace_after(_FAILED_PAUSE_S)
        if self._replace_s is not None and time.monotonic() > self._replace_s:
            self._replace_s, self.ready = None, False
            self._deaf_s = time.monotonic() + _IMPORT_S
            self.load.forget()
            await asyncio.to_thread(self._process.restart)

    def _replace_after(self, seconds: float) -> None:
        if self._replace_s is None:
            self._replace_s = time.monotonic() + seconds


class ReplicaFront:
    """The replicas of a server and what is under way; what `Server` and the gate ask for."""

    def __init__(self, settings: ServeSettings, replicas: Sequence[ReplicaHandle]) -> None:
        self.settings, self.replicas = settings, tuple(replicas)
        self.metrics = Counted()
        self.draining = False
        self.num_under_way = 0
        self._running: set[asyncio.Future[Any]] = set()
        self._cut_off = False
        self._was_ready = False
        self._turn = 0

    async def watch(
        self, on_ready: Callable[[], None], on_failure: Callable[[str, str], None]
    ) -> None:
        """Ask the replicas for ever; tell once when all are ready, or that one cannot load."""

        async def keep(replica: ReplicaHandle) -> None:
            while True:
                await replica.look()
                if replica.failure is not None and not self._was_ready:
                    on_failure(*replica.failure)
                if not self._was_ready and all(one.ready for one in self.replicas):
                    self._was_ready = True
                    on_ready()
                await asyncio.sleep(_LOOK_S)

        await asyncio.gather(*(keep(replica) for replica in self.replicas))

    @property
    def status(self) -> str:
        """What the page says of the server."""
        if self.draining:
            return "ending"
        ready, whole = self._num_ready, len(self.replicas)
        return "ready" if ready == whole else f"{ready} of {whole} replicas ready"

    @property
    def _num_ready(self) -> int:
        return sum(replica.ready and not replica.silent for replica in self.replicas)

    def check_ready(self) -> None:
        """Refuse until all replicas were ready, where none is, and before the server's end."""
        self._check_open()
        ready, whole = self._num_ready, len(self.replicas)
        if ready < (1 if self._was_ready else whole):
            raise ApiError(503, f"{ready} of {whole} replicas are ready")

    def _check_open(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is about to end; ask another one")

    def cut_off(self) -> None:
        """End the answers under way with an error; called from the event loop."""
        self._cut_off = True
        for running in self._running:
            running.cancel()

    async def metrics_text(self) -> bytes:
        """Return all replicas' metrics, and the counts of HTTP answers."""
        texts = [text.encode() for text in await self._all("metrics")]
        return merged_metrics([*texts, generate_latest(self.metrics.registry)])

    async def reset_prefix_caches(self) -> None:
        """Let requests to come find no prefix of those before, on any replica."""
        await self._all("reset_prefix_cache")

    async def pages(self) -> list[Any]:
        """Return what the page draws of each replica that answers."""
        return await self._all("page")

    async def _all(self, method: str) -> list[Any]:
        asked = (replica.ask(method) for replica in self.replicas if replica.ready)
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [one for one in found if not isinstance(one, BaseException)]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Have a replica answer one HTTP request (ASGI)."""
        self._check_open()
        body = await _body_of(receive)
        answer = _Answer(self, scope["path"], send)
        self.num_under_way += 1
        work = asyncio.ensure_future(answer.run(_plain(scope), body))
        gone = asyncio.ensure_future(_gone(receive))
        self._running.add(work)
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and answer.whole:
                await asyncio.wait((work,))
            if not work.done():
                answer.left()
            elif work.cancelled():
                await answer.end(
                    ApiError(503, "the server has ended before the answer was complete")
                )
            else:
                work.result()
        finally:
            self._running.discard(work)
            self.num_under_way -= 1
            for one in (work, gone):
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await one

    def choose(self, tried: Sequence[ReplicaHandle], work: RequestWork) -> ReplicaHandle:
        """Return the replica that should end a request first, the longest idle of equals."""
        able = [one for one in self.replicas if one.ready and one not in tried]
        if not able:
            what = "no replica is ready" if self._was_ready else "the model is loading"
            raise ApiError(503, f"{what}; try again in a moment")
        self._turn += 1
        start, count = self._turn, len(self.replicas)
        return min(
            able,
            key=lambda one: (
                one.silent,
                one.load.finish(work, one.speed),
                (one.number - start) % count,
            ),
        )


class _Answer:
    """One request's way through the replicas: begun by at most one."""

    def __init__(self, front: ReplicaFront, path: str, send: Send) -> None:
        self._front, self._path, self._send = front, path, send
        self._begun = self._streams = False
        self.whole = False
        """Whether all of it has been said."""

    async def run(self, scope: Message, body: bytes) -> None:
        """Have the first replica that takes it answer."""
        tried: list[ReplicaHandle] = []
        work = RequestWork.of(body)
        while True:
            replica = self._front.choose(tried, work)
            tried.append(replica)
            replica.num_under_way += 1
            own = replica.load.begin(work)
            try:
                if await self._answered(replica, scope, body):
                    return
            finally:
                replica.num_under_way -= 1
                replica.load.end(own)
            replica.ready = False  # until it says otherwise

    async def _answered(self, replica: ReplicaHandle, scope: Message, body: bytes) -> bool:
        """Pass a replica's answer on; False where it did not take the request."""
        async with contextlib.aclosing(replica.answer(scope, body)) as parts:
            try:
                taken = await asyncio.wait_for(anext(parts), _TAKEN_S)
            except Exception as error:
                why = str(error) or type(error).__name__
                _log.info("replica %d took no request: %s", replica.number, why)
                return False
            if taken is None:
                return False
            await self._passed_on(replica, parts)
        return True

    async def _passed_on(self, replica: ReplicaHandle, parts: Any) -> None:
        try:
            async for messages in parts:
                for message in map(from_plain, messages):
                    if message["type"] == TALLIED:
                        if (tally := TALLY.get()) is not None:
                            tally |= message["tally"]
                        continue
                    if message["type"] == "http.response.start":
                        self._begun, self._streams = True, _is_stream(message)
                    elif not message.get("more_body", False):
                        self.whole = True
                    await self._send(message)
        except Exception as error:
            if self.whole:
                return
            replica.ready = False
            why = str(error) or type(error).__name__
            _log.info("replica %d lost an answer: %s", replica.number, why)
            await self.end(ApiError(503, _LOST))

    def left(self) -> None:
        """End a request whose client has gone away: no answer is sent."""
        if not self._begun:
            raise ApiError(499, "the client went away before the answer")

    async def end(self, error: ApiError) -> None:
        """End with an error: the last event of a stream, else a refusal."""
        if not self._begun:
            raise error
        if not self._streams:
            raise ConnectionError(error.message)  # half a body: the connection is cut
        name = "error" if self._path.startswith("/v1/messages") else None
        last = event(error.body(self._path), name).encode()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


def _is_stream(start: Message) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )


def _plain(scope: Message) -> Message:
    """Return what a replica needs of a request."""
    names = (
        "asgi",
        "http_version",
        "method",
        "scheme",
        "path",
        "raw_path",
        "query_string",
        ARRIVED,
    )
    return {
        **{name: scope[name] for name in names if name in scope},
        "headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]],
        "client": scope.get("client"),
        "server": scope.get("server"),
        "root_path": "",
    }


async def _body_of(receive: Receive) -> bytes:
    """Return a request's whole body; the gate bounds it."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ApiError(499, "the client went away before the answer")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

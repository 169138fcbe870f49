"""What stands before every endpoint: keys, sizes, deadlines, the log; pure ASGI.

A body that is too large or too slow is refused before it is held. Nothing of a body, and no key, is
logged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Protocol

from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.settings import ServeSettings

ARRIVED = "llmpq.arrived_s"
"""Under which a request's scope tells when its head was read; clocks of one host's processes agree.
"""
ARRIVED_S: ContextVar[float | None] = ContextVar("ARRIVED_S", default=None)
"""When the head of the request was read from its connection, by `time.perf_counter`."""
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
"""Its `X-Request-Id`: in the answer's head, the access log and the stages' trace."""
TALLY: ContextVar[dict[str, float] | None] = ContextVar("TALLY", default=None)
"""What the access log says of its answers: tokens, and the seconds to the first one."""
TALLIED = "llmpq.tally"
"""Type of the message in which a replica says its `TALLY` to the process that logs."""


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_log = logging.getLogger("llmpq.serve.access")
_OPEN = ("/health", "/ready", "/ping", "/load", "/version", "/metrics", "/")
"""Paths that need no key: they tell nothing of requests."""
_PROBES = ("/health", "/ready", "/metrics", "/ping", "/load", "/page/state")
"""Paths that are asked every few seconds: the log has them where something is wrong."""


class Counts(Protocol):
    """Where answers are counted."""

    def answered(self, status: int) -> None:
        """Count an HTTP answer."""
        ...


class Gated(Protocol):
    """What the gate asks of the service behind it."""

    @property
    def settings(self) -> ServeSettings:
        """Keys and limits."""
        ...

    @property
    def metrics(self) -> Counts:
        """Counts of answers."""
        ...


class _Body:
    """A request's body: whether all of it has come."""

    def __init__(self, scope: Message) -> None:
        length = _header(scope, b"content-length")
        self.complete = length in (b"", b"0") and not _header(scope, b"transfer-encoding")


class Turns:
    """Lets one request begin in a round of the event loop.

    Taking one in costs as much as many tokens: of several that come together each lets the tokens
    go first that have come meanwhile.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._waiting[0].done():  # its client has gone
            self._waiting.popleft()
        self._taken = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft().set_result(None)
            loop.call_soon(self._next, loop)


class Gate:
    """Lets requests through to the application, or refuses them."""

    def __init__(self, app: App, service: Gated) -> None:
        self._app, self._service = app, service
        self._turns = Turns()
        self._keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status, begun, whole = time.perf_counter(), 0, False, False
        method, asked_path = scope["method"], scope["path"]
        self._leave_root(scope)
        ARRIVED_S.set(scope.get(ARRIVED, started_s))
        body = _Body(scope)
        name = _header(scope, b"x-request-id")[:64].decode("latin-1") or uuid.uuid4().hex
        REQUEST_ID.set(name)
        tally: dict[str, float] = {}
        TALLY.set(tally)
        kept = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
        scope["headers"] = [*kept, (b"x-request-id", name.encode("latin-1"))]  # for replicas

        async def send_counted(message: Message) -> None:
            nonlocal status, begun, whole
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                more = [(b"x-request-id", name.encode("latin-1"))]
                if not body.complete:  # what is left of it is not waited for
                    more.append((b"connection", b"close"))
                message["headers"] = [*message["headers"], *more]
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._turns.wait()
            if asked_path == self._service.settings.root_path != "":
                await _to_folder(asked_path, send_counted)
                return
            self._check_key(scope)
            _check_form(scope)
            # A HEAD is a GET of which the server sends the head.
            read = {**scope, "method": "GET"} if method == "HEAD" else scope
            await self._app(read, self._bounded(scope, receive, body), send_counted)
        except ApiError as error:
            if not begun:
                await _refuse(error, scope["path"], send_counted)
        except Exception:
            status = status or 500
            raise
        finally:
            self._service.metrics.answered(status or 499)
            if not (scope["path"] in _PROBES and status in (200, 503)):
                _log.info(
                    json.dumps(
                        {
                            "time": log_time(),
                            "id": name,
                            "client": _client(scope),
                            "method": method,
                            "path": scope["path"],
                            "status": status or 499,
                            "seconds": round(time.perf_counter() - started_s, 4),
                            **tally,
                            **({"complete": False} if begun and not whole else {}),
                        }
                    )
                )

    def _leave_root(self, scope: Message) -> None:
        """Take a proxy's prefix, which some leave there, and a slash at its end from a path.

        From the slash the application would redirect, to an address that clients of a proxy lack.
        """
        root, path = self._service.settings.root_path, scope["path"]
        if root and (path == root or path.startswith(root + "/")):
            path = path[len(root) :]
            scope["raw_path"] = scope["raw_path"].removeprefix(root.encode()) or b"/"
        scope["path"] = path.rstrip("/") or "/"

    def _check_key(self, scope: Message) -> None:
        if not self._keys or _open(scope["path"]) or scope["method"] == "OPTIONS":
            return
        word, _, given = _header(scope, b"authorization").partition(b" ")
        if word.lower() != b"bearer":
            given = _header(scope, b"x-api-key")
        # Every key is compared, however soon one is right.
        right = [hmac.compare_digest(key, given.strip()) for key in self._keys]
        if not any(right):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    def _bounded(self, scope: Message, receive: Receive, body: _Body) -> Receive:
        """Return a receive that refuses bodies too large or too slow."""
        most, limit_s = self._service.settings.max_body_bytes, self._service.settings.read_timeout_s
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > most:
            raise _too_large(most)
        received, end_s = 0, time.monotonic() + limit_s

        async def bounded() -> Message:
            nonlocal received
            if body.complete:
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, f"the request's body did not arrive within {limit_s:g} s"
                ) from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                body.complete = not message.get("more_body", False)
                if received > most:
                    raise _too_large(most)
            return message

        return bounded


def log_time() -> str:
    """Return now, as every line of JSON in the log has it."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def _client(scope: Message) -> str:
    """Return who asked: at a socket of the file system, whom the proxy there names last."""
    if client := scope.get("client"):
        return str(client[0])
    return _header(scope, b"x-forwarded-for").decode("latin-1").rpartition(",")[2].strip()[:64]


def _check_form(scope: Message) -> None:
    """Refuse a body that is not called JSON (pages of other sites could send it), or compressed."""
    coding = _header(scope, b"content-encoding").strip().lower()
    if coding not in (b"", b"identity") and not _Body(scope).complete:
        raise ApiError(
            415,
            "the body must be sent as it is, without 'Content-Encoding', got "
            f"{coding.decode('latin-1'):.100}",
        )
    kind = _header(scope, b"content-type").partition(b";")[0].strip().lower()
    if scope["method"] != "POST" or _Body(scope).complete or kind == b"application/json":
        return
    if not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        shown = kind.decode("latin-1")[:100] or "none"
        raise ApiError(
            415, f"the body must be sent with 'Content-Type: application/json', got {shown}"
        )


def _open(path: str) -> bool:
    return path in _OPEN or path.startswith("/page/")


def _header(scope: Message, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {most} bytes (--max-body-bytes)")


async def _to_folder(root: str, send: Send) -> None:
    """Send a browser to the page's folder, to which its links are relative."""
    place = [(b"location", f"{root}/".encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 308, "headers": place})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(error: ApiError, path: str, send: Send) -> None:
    body = json.dumps(error.body(path)).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.response_headers,
    }
    pairs = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})

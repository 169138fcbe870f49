"""How an answer leaves: whole as JSON, or as server-sent events while it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from llmpq.runtime.serve.errors import ApiError, as_api_error

_T = TypeVar("_T")
DONE = "data: [DONE]\n\n"
_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event(data: Any, name: str | None = None) -> str:
    """Return one server-sent event."""
    text = _compact(data)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


class _Ended(StreamingResponse):
    """A stream that says when it has ended, also where it never began: its client had gone."""

    def __init__(self, *args: Any, ended: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._when_ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._when_ended()


def stream(
    events: AsyncIterator[str], path: str, *, ended: Callable[[], None]
) -> StreamingResponse:
    """Return a stream of events; an error in it is its last event, without `[DONE]`."""

    async def guarded() -> AsyncIterator[str]:
        try:
            async for one in events:
                yield one
        except Exception as error:
            name = "error" if path.startswith("/v1/messages") else None
            yield event(as_api_error(error).body(path), name)

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return _Ended(guarded(), media_type="text/event-stream", headers=headers, ended=ended)


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what work returns; a client that goes away cancels it: `ApiError` 499 then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away before the answer")
        return await task
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

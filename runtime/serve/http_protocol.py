"""HTTP/1.1 by uvicorn, with deadlines for requests that arrive and answers that are read."""

from __future__ import annotations

import time
from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

from llmpq.runtime.serve.gate import ARRIVED


class _WriteDeadline(H11Protocol):
    """Hangs up on clients that take nothing of an answer for `limit_s`.

    Of h11, not httptools: that one is quicker, but bounds no head and drops the body of a request
    that offers another protocol, as all requests of Java's client do.
    """

    limit_s: float
    _clock: TimerHandle | None = None
    """Runs while an answer waits for its reader."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What the system does not take at once is known at once. TLS waits at a limit, not above.
        encrypted = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(high=1 if encrypted else 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_clock()

    def resume_writing(self) -> None:
        self._stop_clock()
        super().resume_writing()

    def _start_clock(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._clock = self.loop.call_later(self.limit_s, self._check_progress, left)

    def _check_progress(self, before: int) -> None:
        """Hang up on a client that has taken nothing; what is not sent is dropped."""
        if self.transport.get_write_buffer_size() < before:
            self._start_clock()
        else:
            self.transport.abort()

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def protocol(head_timeout_s: float, write_timeout_s: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a deadline for the head of every request, and for readers.

    uvicorn bounds how long a connection is idle after a request, not how long a request takes to
    arrive, nor an answer to be read: clients that send a byte now and then, or never read, would
    hold connections, and their answers' memory, for ever.
    """

    class Bounded(_WriteDeadline):
        limit_s = write_timeout_s
        _head_clock: TimerHandle | None = None

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._head_clock = self.loop.call_later(head_timeout_s, self._head_is_late)

        def data_received(self, data: bytes) -> None:
            read_s, waited = time.perf_counter(), not self._busy()
            if self._head_clock is None and waited:
                self._head_clock = self.loop.call_later(head_timeout_s, self._head_is_late)
            super().data_received(data)
            if self._busy():
                self._stop_head_clock()
                if waited:  # the application begins in the loop's next round
                    self.scope[ARRIVED] = read_s  # type: ignore[literal-required]

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_clock()
            super().connection_lost(exc)

        def _busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _stop_head_clock(self) -> None:
            if self._head_clock is not None:
                self._head_clock.cancel()
                self._head_clock = None

        def _head_is_late(self) -> None:
            self._head_clock = None
            if not self._busy() and not self.transport.is_closing():
                self.transport.close()

    return Bounded

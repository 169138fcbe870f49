"""Where long texts are tokenised: beside an event loop, of the longest one at a time.

Knows nothing of models or servers. The tokenizers library works without the interpreter's lock, so
that the loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

_T = TypeVar("_T")
QUICK_LENGTH = 4096
"""Characters or token ids that take less than a millisecond or two: no thread is worth it."""
LONG_LENGTH = 256 << 10
"""Characters or token ids that may take seconds."""
MAX_WAITING = 16
"""Long texts that may wait for the thread, or be in it."""


class TooManyTextsError(Exception):
    """More long texts than may wait."""


class TextThreads:
    """Threads for texts: several for those of some length, one for long ones."""

    def __init__(self) -> None:
        self._several = ThreadPoolExecutor(4, thread_name_prefix="llmpq text")
        self._one = ThreadPoolExecutor(1, thread_name_prefix="llmpq long text")
        self._num_long, self._lock = 0, Lock()
        self._closed = False

    def close(self) -> None:
        """Let the threads end; a text that comes later is read by its caller."""
        self._closed = True
        self._several.shutdown(wait=False)
        self._one.shutdown(wait=False)

    async def run(self, work: Callable[[], _T], length: int) -> _T:
        """Return what `work` on a text of such a length returns; a short one is done at once.

        `TooManyTextsError` where `MAX_WAITING` long ones are under way.
        """
        if length <= QUICK_LENGTH or self._closed:
            return work()
        loop = asyncio.get_running_loop()
        if length <= LONG_LENGTH:
            return await loop.run_in_executor(self._several, work)
        with self._lock:
            if self._num_long >= MAX_WAITING:
                raise TooManyTextsError(f"{self._num_long} long texts are waiting to be read")
            self._num_long += 1
        done = self._one.submit(work)
        done.add_done_callback(self._ended)  # of a caller who has gone, too
        return await asyncio.wrap_future(done)

    def _ended(self, _: object) -> None:
        with self._lock:
            self._num_long -= 1

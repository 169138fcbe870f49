"""A replica's child process, called from the event loop, and started anew when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from llmpq.child import Child

_REPLICA = "llmpq.runtime.serve.replicas.replica"


class ReplicaProcess:
    """The process of one replica; calls go to the one that is there now."""

    def __init__(self, first: Mapping[str, Any], gpus: Sequence[int]) -> None:
        """`first`: what `Replica` is given; `gpus`: numbers of those that it sees, of ours."""
        self._first, self._environment = first, {**os.environ, **_seen(gpus)}
        self._child = self._start()

    @property
    def obituary(self) -> str | None:
        """Why the process has ended, None while it runs."""
        return None if self._child.gone is None else str(self._child.gone)

    async def ask(self, method: str) -> Any:
        """Return what a method of the replica returns; `CallFailed` if its process is gone."""
        return await asyncio.wrap_future(self._child.call(method))

    async def stream(self, method: str, *args: object) -> AsyncGenerator[Any]:
        """Yield what a method of the replica yields; closing it ends the call."""
        loop, child = asyncio.get_running_loop(), self._child
        parts: asyncio.Queue[list[Any]] = asyncio.Queue()

        def put(item: list[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(parts.put_nowait, item)

        answer: Future[Any] = child.call(method, *args, on_part=lambda part: put([part]))
        answer.add_done_callback(lambda _: put([]))
        try:
            while item := await parts.get():
                yield item[0]
            answer.result()
        finally:
            if not answer.done():
                child.cancel(answer)

    def restart(self) -> None:
        """End the process and start another."""
        self.close()
        self._child = self._start()

    def close(self) -> None:
        """End the process; its stages end with it."""
        self._child.kill()
        self._child.wait()

    def _start(self) -> Child:
        return Child(_REPLICA, self._first, environment=self._environment)


def _seen(gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables that show a process these of the GPUs that this one sees."""
    if not gpus:
        return {}
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    chosen = [names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(chosen)}

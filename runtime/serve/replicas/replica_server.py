"""Starts several engines as child processes and serves them behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from llmpq import errors
from llmpq.child import Child
from llmpq.errors import StageLostError
from llmpq.runtime.serve.app import add_gate
from llmpq.runtime.serve.errors import handle_errors
from llmpq.runtime.serve.page import add_page, state_of
from llmpq.runtime.serve.replicas.merged_replicas import merged_page
from llmpq.runtime.serve.replicas.replica_front import ReplicaFront, ReplicaHandle
from llmpq.runtime.serve.server import Server
from llmpq.runtime.serve.service import Service
from llmpq.runtime.serve.settings import ServeSettings
from llmpq.version import __version__

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


_log = logging.getLogger("llmpq.serve")


@dataclass(frozen=True, kw_only=True)
class ReplicaLaunch:
    """How one replica is started."""

    model: str | None
    engine: dict[str, Any]
    """What its `LLM` is given as JSON data: the plan, and the options."""
    gpus: tuple[int, ...]
    """Numbers of its GPUs among those that this process sees; none on CPUs."""
    speed: float
    """Tokens/s that its plan promises; 1 for all where a plan promises nothing."""


def serve_replicas(
    settings: ServeSettings, launches: Sequence[ReplicaLaunch], *, host: str, port: int
) -> BaseException | None:
    """Serve until a signal ends it; return why a replica could not be loaded, if one could not."""
    with ExitStack() as stack:
        handles = []
        for number, launch in enumerate(launches):
            first = {"number": number, "settings": asdict(settings)}
            first |= {"model": launch.model, "engine": launch.engine}
            process = ReplicaProcess(first, launch.gpus)
            stack.callback(process.close)
            handles.append(ReplicaHandle(number, process, launch.speed))
        server = ReplicaServer(ReplicaFront(settings, handles), host, port)
        server.run()
        return server.failure


class ReplicaServer(Server):
    """Listens, and watches the replicas."""

    def __init__(self, front: ReplicaFront, host: str, port: int) -> None:
        super().__init__(front, front_app(front), host, port)
        self._front, self._url = front, front.settings.url(host, port)
        self._watching: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to watch."""
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._front.watch(self._on_ready, self._on_failure))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to watch and to listen."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await super().shutdown(sockets)

    def _on_ready(self) -> None:
        names, count = self._front.settings.model_names, len(self._front.replicas)
        _log.info("ready: %s serves %s, %d replicas", self._url, names[0], count)

    def _on_failure(self, kind: str, text: str) -> None:
        found = ValueError if kind == "ValueError" else getattr(errors, kind, StageLostError)
        self.failure = found(text)
        self.should_exit = True


def front_app(front: ReplicaFront) -> FastAPI:
    """Return the application that listens: it answers for all replicas and passes requests on."""
    app = FastAPI(title="llmpq", version=__version__, openapi_url=None)
    nothing = state_of(Service(front.settings))
    handle_errors(app)

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        front.check_ready()
        return {"status": "ready"}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": front.num_under_way}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        front.check_ready()
        await front.reset_prefix_caches()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await front.metrics_text(), media_type="text/plain; version=0.0.4")

    async def drawn() -> dict[str, Any]:
        return merged_page(await front.pages(), {**nothing, "status": front.status})

    add_page(app, drawn)
    app.mount("/", front)
    add_gate(app, front)
    return app

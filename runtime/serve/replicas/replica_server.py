"""Starts several engines through Ray Serve and serves them behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from ray import serve as ray_serve

from llmpq import errors
from llmpq.errors import StageLostError
from llmpq.runtime.launch.on_ray.own_ray import own_ray
from llmpq.runtime.serve.app import add_gate
from llmpq.runtime.serve.errors import handle_errors
from llmpq.runtime.serve.page import add_page, state_of
from llmpq.runtime.serve.replicas.merged_replicas import merged_page
from llmpq.runtime.serve.replicas.replica import Replica
from llmpq.runtime.serve.replicas.replica_front import ReplicaFront, ReplicaHandle
from llmpq.runtime.serve.server import Server
from llmpq.runtime.serve.service import Service
from llmpq.runtime.serve.settings import ServeSettings
from llmpq.version import __version__

_log = logging.getLogger("llmpq.serve")
_HEALTH_EVERY_S, _HEALTH_WITHIN_S = 1.0, 30.0
_MORE = 256
"""Calls beside requests that a replica may have open: looks, metrics, the page."""


@dataclass(frozen=True, kw_only=True)
class ReplicaLaunch:
    """How one replica is started."""

    model: str | None
    engine: dict[str, Any]
    """What its `LLM` is given; the plan as JSON."""
    gpus: tuple[int, ...]
    """Numbers of its GPUs among those that this process sees; none on CPUs."""
    speed: float
    """Tokens/s that its plan promises; 1 for all where a plan promises nothing."""


def serve_replicas(
    settings: ServeSettings, launches: Sequence[ReplicaLaunch], *, host: str, port: int
) -> BaseException | None:
    """Serve until told to end; return why a replica could not be loaded, if one could not.

    Ray is started on this machine, on loopback, and ended with all that it started.
    """
    with own_ray():
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
        front = ReplicaFront(settings, _started(settings, launches))
        server = ReplicaServer(front, host, port)
        server.run()
        return server.failure


def _started(settings: ServeSettings, launches: Sequence[ReplicaLaunch]) -> list[ReplicaHandle]:
    """Start a deployment for each replica, not waiting for its engine."""
    quiet = {"log_level": "CRITICAL", "enable_access_log": False}
    ray_serve.start(proxy_location="Disabled", logging_config=quiet)
    targets = []
    for number, launch in enumerate(launches):
        deployment = ray_serve.deployment(
            name="engine",
            num_replicas=1,
            max_ongoing_requests=settings.max_requests * 2 + _MORE,
            ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _seen(launch.gpus)}},
            health_check_period_s=_HEALTH_EVERY_S,
            health_check_timeout_s=_HEALTH_WITHIN_S,
            graceful_shutdown_timeout_s=1,
            graceful_shutdown_wait_loop_s=0.1,
            logging_config=quiet,
        )(Replica)
        bound = deployment.bind(number, asdict(settings), launch.model, launch.engine)
        targets.append(ray_serve.RunTarget(bound, name=f"llmpq-{number}", route_prefix=None))
    handles = ray_serve.run_many(targets, wait_for_applications_running=False)
    return [
        ReplicaHandle(number, handle, launch.speed)
        for number, (handle, launch) in enumerate(zip(handles, launches, strict=True))
    ]


def _seen(gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables that show a process these of the GPUs that this one sees."""
    if not gpus:
        return {}
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    chosen = [names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(chosen)}


class ReplicaServer(Server):
    """Listens, and watches the replicas."""

    def __init__(self, front: ReplicaFront, host: str, port: int) -> None:
        super().__init__(front, front_app(front), host, port)
        self._front, self._url = front, front.settings.url(host, port)
        self._watching: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to watch."""
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._front.watch(self._told_ready, self._told_failed))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to watch and to listen."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await super().shutdown(sockets)

    def _told_ready(self) -> None:
        names, count = self._front.settings.model_names, len(self._front.replicas)
        _log.info("ready: %s serves %s, %d replicas", self._url, names[0], count)

    def _told_failed(self, kind: str, text: str) -> None:
        found = ValueError if kind == "ValueError" else getattr(errors, kind, StageLostError)
        self.failure = found(text)
        self.should_exit = True


def front_app(front: ReplicaFront) -> FastAPI:
    """Return the application that listens: what is told of all replicas, the rest handed over."""
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

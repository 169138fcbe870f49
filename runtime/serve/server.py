"""Runs the application: loads the model behind it, bounds connections, ends in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from llmpq.commands.interrupts import END_S, end_within
from llmpq.precision import bits_of
from llmpq.runtime.elastic.control_socket import answering
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.launch.stages.gc_freeze import gc_freeze
from llmpq.runtime.serve.app import make_app
from llmpq.runtime.serve.gate import Gated
from llmpq.runtime.serve.http_protocol import protocol
from llmpq.runtime.serve.service import Service

_log = logging.getLogger("llmpq.serve")
_HEAD_BYTES = 32 << 10
"""The most bytes of a request's head."""
_IDLE_S = 75
"""How long a connection may stay open between two requests: longer than proxies keep theirs (60 s),
which else send a request into a connection that closes."""
_FULL_S = 10.0
"""How often the log says that no further connection can be opened."""
_POLL_S = 0.05
_BACKLOG = 2048
"""Connections that may wait to be taken: as many as uvicorn's."""
_LOST_S = 1.0
"""How long a server whose engine is lost answers 503 before it ends: its clients hear of it."""


def listening(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at each address of a host; `ValueError` where one cannot.

    `localhost` has two. They listen from here on: two that are bound alone do not exclude each
    other.
    """
    sockets: list[socket.socket] = []
    try:
        with ExitStack() as undo:
            for family, kind, number, _, address in dict.fromkeys(
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            ):
                try:
                    found = socket.socket(family, kind, number)
                except OSError:  # no IPv6 on this machine
                    continue
                undo.callback(found.close)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                found.bind(address)
                found.listen(_BACKLOG)
                sockets.append(found)
            undo.pop_all()
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from None
    return sockets


class Served(Gated, Protocol):
    """What a server ends in order."""

    draining: bool
    num_under_way: int

    def cut_off(self) -> None:
        """End the answers under way with an error; called from the event loop."""
        ...


class Server(uvicorn.Server):
    """Ends in order: what is under way is answered, nothing new begun."""

    def __init__(self, service: Served, app: FastAPI, host: str, port: int) -> None:
        self.service, settings = service, service.settings
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            uds=settings.uds,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=settings.client_certificates,
            http=protocol(settings.read_timeout_s, settings.write_timeout_s),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        super().__init__(config)
        self.failure: BaseException | None = None
        """What ended the engine, or kept it from loading."""
        self._full_said_s = float("-inf")
        self._listeners: list[socket.socket] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """End in order at SIGHUP, too, unless it is ignored (nohup)."""
        with super().capture_signals():
            hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
            main = threading.current_thread() is threading.main_thread()
            if not main or hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(hang_up, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(hang_up, before)

    def listen(self) -> None:
        """Take the address, before a model is loaded for it; `ValueError` where another has it."""
        if self._listeners is None and self.config.uds is None:
            self._listeners = listening(self.config.host, self.config.port)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until asked to end."""
        self.listen()
        super().run(sockets or self._listeners)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        asyncio.get_running_loop().set_exception_handler(self._loop_error)
        await super().startup(sockets=sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more; a socket of the file system goes first, while no other server can be."""
        if self.config.uds is not None:
            Path(self.config.uds).unlink(missing_ok=True)
        await super().shutdown(sockets=sockets)

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say in one line that files ran out: asyncio has thousands of tracebacks a second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif loop.time() >= self._full_said_s + _FULL_S:
            self._full_said_s = loop.time()
            _log.warning(
                "further connections wait: all file descriptors are in use (%s; 'ulimit -n', "
                "LimitNOFILE of systemd)",
                error.strerror,
            )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end at the first signal, end at the second; called between two steps."""
        if self.service.draining:
            self.should_exit = self.force_exit = True
            end_within(END_S)
            return
        self.service.draining = True
        end_within(self.service.settings.drain_timeout_s + END_S)
        if sig == signal.SIGINT and self.loads:
            self.failure = KeyboardInterrupt()
        _log.info("ending: no new requests, %d under way", self.service.num_under_way)

    async def main_loop(self) -> None:
        """Serve until asked to end, then until what is under way has, or its time is over."""
        while not self.service.draining and not self.should_exit:
            await self._beat()
            if (lost := self.engine_error()) is not None and self.failure is None:
                self._end_with(lost)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.service.settings.drain_timeout_s
        while self.service.num_under_way and not self.should_exit and loop.time() < end_s:
            await self._beat()
        if self.service.num_under_way:
            _log.info("ending: %d answers are cut off", self.service.num_under_way)
            self.service.cut_off()

    def engine_error(self) -> BaseException | None:
        """Return what ended the engine, None while it serves or loads."""
        return None

    @property
    def loads(self) -> bool:
        """Whether the engine has not served yet."""
        return False

    def _end_with(self, error: BaseException) -> None:
        """Say that the engine is lost, and end once those who wait have been answered so."""
        self.failure = error
        _log.error("the engine has stopped, the server ends: %s", error)
        asyncio.get_running_loop().call_later(_LOST_S, self._exit)

    def _exit(self) -> None:
        self.should_exit = True

    async def _beat(self) -> None:
        for counter in range(2):
            if await self.on_tick(counter):
                return
            await asyncio.sleep(_POLL_S)


class EngineServer(Server):
    """Serves one engine, and ends when it is lost: a supervisor starts the server again."""

    service: Service

    @property
    def loads(self) -> bool:
        """Whether the model is loading."""
        return self.service.llm is None and self.failure is None

    def engine_error(self) -> BaseException | None:
        """Return what ended the engine."""
        if self.service.llm is None:
            return None
        try:
            self.service.llm.check_alive()
        except Exception as error:
            self.service.failure = str(error)
            return error
        return None


def engine_lines(llm: LLM) -> Iterator[str]:
    """Yield what an operator wants to know of an engine: its stages, precisions and limits."""
    plan = llm.plan
    for number, stage in enumerate(plan.stages):
        first, end = stage.layers
        bits = bits_of(stage.precisions)
        devices = " + ".join(stage.device_names)
        if stage.shares:
            devices += f" (shares {':'.join(map(str, stage.shares))})"
        yield f"stage {number}: {devices} on {stage.node}, layers {first}-{end - 1}, {bits}"
    work, pool = plan.workload, plan.pool
    tokens = "" if pool is None else f", {pool.tokens:,} tokens at once"
    yield (
        f"{work.dtype}; KV cache {work.kv.value}{tokens}; requests of up to "
        f"{llm.max_model_len:,} tokens"
    )


def serve(
    service: Service,
    open_llm: Callable[[], LLM],
    *,
    host: str,
    port: int,
    on_start: Callable[[Server], None] | None = None,
) -> BaseException | None:
    """Serve until asked to end; return why the engine could not be loaded or what ended it."""
    server = EngineServer(service, make_app(service), host, port)
    control = ExitStack()

    def load() -> None:
        try:
            llm = open_llm()
            service.planned_len = llm.max_model_len
            llm.start()
            service.llm = llm
            control.enter_context(answering(service.llm))
            gc_freeze()
            if sampling := dict(service.llm.generation_config.sampling):
                _log.info(
                    "default sampling of %s: %s (--generation-config vllm ignores it)",
                    service.llm.generation_config.path,
                    sampling,
                )
            for line in engine_lines(service.llm):
                _log.info(line)
            url = service.settings.url(host, port)
            _log.info("ready: %s serves %s", url, ", ".join(service.settings.model_names))
        except BaseException as error:
            server.failure = error
            server.should_exit = True

    server.listen()
    loading = threading.Thread(target=load, daemon=True, name="llmpq loading")
    loading.start()
    if on_start is not None:
        on_start(server)
    try:
        server.run()
    finally:
        control.close()
        if service.llm is not None:
            service.llm.close()
        service.close()
    return server.failure


def started(server: Any) -> bool:
    """Whether a server listens."""
    return bool(server.started)

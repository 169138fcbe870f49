"""One server for each module, in this process, over the demo model on two CPU stages."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Running:
    """A server that listens."""

    def __init__(self, server: Any, port: int) -> None:
        self.server, self.port = server, port
        self.url = f"http://127.0.0.1:{port}"

    @property
    def service(self) -> Any:
        return self.server.service

    @property
    def llm(self) -> Any:
        return self.service.llm


@contextmanager
def _running(open_llm: Callable[[], Any], **settings: Any) -> Iterator[Running]:
    from llmpq.runtime.serve.server import serve
    from llmpq.runtime.serve.service import Service
    from llmpq.runtime.serve.settings import ServeSettings

    values = {"model_names": ("demo-7m", "gpt-test"), "drain_timeout_s": 5.0} | settings
    service, port = Service(ServeSettings(**values)), free_port()
    found: list[Any] = []
    failed: list[Any] = []

    def work() -> None:
        failed.append(serve(service, open_llm, host="127.0.0.1", port=port, on_start=found.append))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s and thread.is_alive():
        if found and found[0].started and service.llm is not None:
            break
        time.sleep(0.02)
    assert service.llm is not None, failed
    try:
        yield Running(found[0], port)
    finally:
        found[0].handle_exit(15, None)
        thread.join(30)
        assert not thread.is_alive() and failed == [found[0].failure]


@pytest.fixture(scope="module")
def two_stages(demo_model, make_plan) -> Callable[[], Any]:
    from llmpq import LLM

    plan = make_plan(
        demo_model, (3,), batch=8, prompt_len=200, gen_len=200, decode_microbatch=4, dtype="float32"
    )
    return lambda: LLM(demo_model, plan=plan, backend="threads")


@pytest.fixture(scope="module")
def server(two_stages) -> Iterator[Running]:
    with _running(two_stages) as made:
        yield made


@pytest.fixture(scope="session")
def running() -> Callable[..., Any]:
    """Return what opens a server for a block, with settings of its own."""
    return _running

"""Joins a running Ray, or starts one on this machine: `ray.init` and `ray.shutdown`, nothing else.

Ray takes seconds to start or to be joined. It does so in a thread, so that a signal or a deadline
ends the wait at once. That thread lives as long as the Ray is used: the processes that Ray starts
end with the thread that started them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from llmpq.commands.ray_address import (
    environment,
    named_ray,
    on_loopback,
    require_ray_of_stages,
    signals_kept,
)
from llmpq.errors import DeadlineError, StageLostError
from llmpq.out_of_memory import first_line

START_S = 90.0
"""How long Ray may take to start or to be joined: 3 to 7 s on two busy cores."""
_OBJECT_STORE_BYTES = 80 << 20


@contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Join the Ray at `address`, or start one on this machine that ends with the block.

    A Ray that this process has joined before is used and left running.
    """
    if ray.is_initialized():
        yield
        return
    if address is None:
        with (
            environment(_local()),
            on_loopback(True),
            _started(_start, "start Ray on this machine"),
        ):
            yield
        return
    require_ray_of_stages(address)
    named, local = named_ray(address)

    def join() -> None:
        ray.init(address=named, **_options())

    with environment(_settings()), on_loopback(local), _started(join, f"join Ray at '{address}'"):
        yield


def _start() -> None:
    ray.init(
        address="local",  # whatever RAY_ADDRESS says
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        **_options(),
    )


def _options() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "llmpq"}


def _settings() -> dict[str, str]:
    return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def _local() -> dict[str, str]:
    """Return the environment of a Ray on this machine; its processes inherit it."""
    # Where cores are busy its agents take longer to start than Ray's 15 s.
    return {**_settings(), "RAY_agent_register_timeout_ms": "60000"}


@contextmanager
def _started(start: Callable[[], None], doing: str) -> Iterator[None]:
    """Have a thread call `start`, which a signal or the deadline does not wait for; end it after.

    `StageLostError` or `DeadlineError` says why it did not start.
    """
    started, over = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def hold() -> None:
        try:
            start()
        except Exception as error:
            failures.append(error)
        finally:
            started.set()
        over.wait()

    # Ray warns that a thread cannot handle signals; this process does.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        with signals_kept():
            threading.Thread(target=hold, name="ray", daemon=True).start()
            if not started.wait(START_S):
                raise DeadlineError(
                    f"could not {doing} within {START_S:.0f} s; look at the load of its machine "
                    "and run it again"
                )
        if failures:
            raise StageLostError(
                f"could not {doing}: {first_line(failures[0])}; check it with: ray status (where "
                "it wants a token: RAY_AUTH_MODE=token and ~/.ray/auth_token)"
            )
        yield
    finally:
        if started.is_set():
            with signals_kept(), contextlib.suppress(Exception):
                ray.shutdown()
        over.set()

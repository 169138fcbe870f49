"""An actor's calls as futures, and Ray's errors as a stage's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import Any

import ray

from llmpq.child import CallFailed
from llmpq.out_of_memory import first_line
from llmpq.runtime.launch.stages.stage_wire import RemoteStage


class RayStage(RemoteStage):
    """An actor's calls as futures."""

    def __init__(self, actor: Any) -> None:
        super().__init__(
            lambda method, *data: getattr(actor, method).remote(*data).future(), failure_of
        )
        self._actor = actor

    def kill(self, pid: int = 0) -> None:
        """End the actor's process; by its number, if it is known, even if it is stopped."""
        with contextlib.suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        if pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def failure_of(error: BaseException) -> CallFailed:
    """Return Ray's error as a stage's: what was raised there, or why its process is gone."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return CallFailed(f"{type(cause).__name__}: {first_line(cause)}", cause)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return CallFailed(f"the host ran out of memory ({first_line(error)})")
    text = str(error)
    exit_type = re.search(r"Worker exit type: (\w+)", text)
    detail = re.search(r"Worker exit detail: (.*?)(?:\. |\n|$)", text)
    if exit_type is None:
        return CallFailed(first_line(error))
    return CallFailed(
        f"its process died ({exit_type[1]}: {detail[1] if detail else 'no detail'}; killed by a "
        "signal such as SIGKILL from the kernel's out-of-memory killer, or crashed)"
    )

"""A watched Ray: its head must answer, and its stages must get heartbeats of the driver.

Ray itself waits a minute for a head that is gone, and then ends the process without a word. A host
that is cut off cannot be reached when the job ends, so a stage without a heartbeat for a while ends
itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from llmpq.commands.ray_address import require_ray
from llmpq.errors import StageLostError
from llmpq.runtime.launch.stages.heartbeat import BEAT_S

SILENCE = 0.8
"""Of a step's deadline: how long the driver may be silent; stages end then."""
HEAD_S = 15.0
"""How long Ray's head may be silent; a cable may be out for a few seconds."""

_ANSWER_S = 1.0
"""How long the raylet may take to accept a connection: others wait for it."""
_GREETING_BYTES = 4096


class Hearer(Protocol):
    """A stage that can be called."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of its actor."""
        ...


class RayWatch:
    """The driver's side: threads that send heartbeats to the stages and look at the head."""

    def __init__(self, head: str, stages: Sequence[Hearer], silence_s: float) -> None:
        """`head`: address of Ray's head, HOST:PORT; `silence_s`: after which a stage ends."""
        self._head = head
        self._stages = stages
        self._silence_s = silence_s
        self._lost: StageLostError | None = None
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True, name="llmpq ray watch")
            for target in (self._send_heartbeats, self._look)
        ]
        for thread in self._threads:
            thread.start()

    def lost(self) -> StageLostError | None:
        """Return what to say once the head is gone."""
        return self._lost

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    def _send_heartbeats(self) -> None:
        open_calls: dict[int, Future[Any]] = {}
        while not self._over.wait(BEAT_S):
            for index, stage in enumerate(self._stages):
                if index not in open_calls or open_calls[index].done():
                    open_calls[index] = stage.call("heartbeat", self._silence_s)

    def _look(self) -> None:
        seen_s = time.monotonic()
        while not self._over.wait(BEAT_S):
            try:
                require_ray(self._head, token=False)
                seen_s = time.monotonic()
            except ValueError as error:
                silent_s = time.monotonic() - seen_s
                if silent_s >= HEAD_S:
                    reason = str(error).partition("(")[2].partition(")")[0]
                    self._lost = StageLostError(
                        f"Ray's head at {self._head} has not answered for {silent_s:.0f} s "
                        f"({reason}): it was killed, or its network is down; start it again with: "
                        "ray start --head"
                    )
                    return


class Raylet:
    """Ray's process on the driver's host: workers of this host end with it, drivers do not.

    Ray takes up to a minute to find it dead. A connection to it ends with it, and nothing listens
    at its port from then on; it also ends one on which nothing is said for two minutes.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._lost: StageLostError | None = None
        self._link: socket.socket | None = None

    def lost(self) -> StageLostError | None:
        """Return what to say once it is gone."""
        if self._lost is None and not self._is_connected():
            self.close()
            try:
                self._link = socket.create_connection(self._address, timeout=_ANSWER_S)
                self._link.setblocking(False)
            except ConnectionRefusedError:
                self._lost = StageLostError(
                    f"Ray's own process on this host (raylet, {self._address[0]}:"
                    f"{self._address[1]}) has ended, and the stages of this host with it"
                )
            except OSError:
                pass  # busy: it is there
        return self._lost

    def close(self) -> None:
        """Look no more."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _is_connected(self) -> bool:
        try:
            return self._link is not None and bool(self._link.recv(_GREETING_BYTES))
        except BlockingIOError:
            return True
        except OSError:
            return False

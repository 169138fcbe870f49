"""A stage of a run over Ray ends itself when its driver has been silent for too long.

A host that is cut off cannot be reached when the job ends, and Ray itself waits a minute.
"""

from __future__ import annotations

import logging
import os
import threading
import time

BEAT_S = 2.0
"""Seconds between heartbeats."""
_log = logging.getLogger("llmpq.ray")


class Heartbeat:
    """Ends the process when the driver has not been heard for a while."""

    def __init__(self) -> None:
        self._heard_s = time.monotonic()
        self._limit_s = 0.0
        self._thread: threading.Thread | None = None

    def heard(self, limit_s: float) -> None:
        """Note that the driver lives and may be silent for so long; the first starts the watch."""
        self._heard_s, self._limit_s = time.monotonic(), limit_s
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="llmpq heartbeat")
            self._thread.start()

    def _watch(self) -> None:
        while time.monotonic() - self._heard_s < self._limit_s:
            time.sleep(BEAT_S / 2)
        _log.error("the driver has not been heard for %.0f s: this stage ends", self._limit_s)
        os._exit(1)

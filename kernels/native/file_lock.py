"""A lock on a file, and how long this process has waited for it: processes compile in turn.

Imports no torch, so that a driver may ask for the time.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_ASK_AGAIN_S = 0.1
_waited_s = 0.0


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a file's lock: processes that start together compile once."""
    global _waited_s
    with path.open("w") as file:
        while not _taken(file):
            time.sleep(_ASK_AGAIN_S)
            _waited_s += _ASK_AGAIN_S
        yield


def waited_s() -> float:
    """Return how long this process has waited for another one that compiles."""
    return _waited_s


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

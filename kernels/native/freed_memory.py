"""Freed memory of a CPU stage goes back to the system, so that it takes what its plan says.

glibc raises the size from which an allocation is a mapping of its own to that of the largest one
freed, up to 32 MiB: temporaries of a prompt's chunk then lie in its heap, which keeps them. A tiny
model, chunks of 2,048 tokens behind 30,000, beside KV: 45 MiB kept and at most, now 24 at most and
1 kept; steps take as long.
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM, _MAPPED = -1, -3
"""mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (malloc.h)."""
_MAPPED_FROM_BYTES, _KEPT_BYTES = 256 << 10, 1 << 20
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")
"""Environment variables by which somebody has chosen already."""


@functools.cache
def give_back_freed_memory() -> None:
    """Have this process map large allocations one by one; nothing where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _CHOSEN):
        return
    mallopt(_MAPPED, _MAPPED_FROM_BYTES)
    mallopt(_TRIM, _KEPT_BYTES)

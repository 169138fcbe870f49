"""A folder in this host's memory that is gone once its owner has ended, however it ends."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmpq.errors import DoesNotFitError
from llmpq.units import format_size

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has a file system in memory."""
_REMOVE = 'read -r line; rm -rf -- "$1"'
"""Run by a shell whose standard input ends with the owner, also where that is killed."""


@contextmanager
def ram_folder(num_bytes: int) -> Iterator[Path]:
    """Make a folder in memory with room for so many bytes; remove it at the end.

    `DoesNotFitError` where less is free.
    """
    if not SHARED_MEMORY.is_dir():
        raise ValueError(
            f"keep_layers_in='ram' needs a file system in memory at {SHARED_MEMORY}, and there is "
            "none: leave it out, or give layer_cache=DIR"
        )
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    if free_bytes < num_bytes:
        raise DoesNotFitError(
            f"keep_layers_in='ram': quantised layers take {format_size(num_bytes)}, "
            f"{SHARED_MEMORY} has {format_size(free_bytes)} free; make it larger (mount -o "
            f"remount,size=N {SHARED_MEMORY}), or give layer_cache=DIR"
        )
    folder = Path(tempfile.mkdtemp(prefix="llmpq-layers-", dir=SHARED_MEMORY))
    try:
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, "sh", str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a signal to the owner's group is not for it
        )
        try:
            yield folder
        finally:
            with suppress(OSError):
                assert remover.stdin is not None
                remover.stdin.close()
            remover.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""Which kernels a time was measured with: a mark of their sources.

Times kept on this machine outlive the kernels they were measured with. Nothing is imported: files
of the kernels' room are read, without its tools.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_ROOM = Path(__file__).parent.parent / "kernels"
_OF_A_KERNEL = {".py", ".h", ".cpp", ".json"}
CPU = ("cpu", "native", "formats")
"""Folders that decide how quick a CPU's products are."""


@functools.cache
def kernels_mark(folders: tuple[str, ...] = ("",)) -> str:
    """Return a mark of the sources in some of the room's folders; without, in all of them."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted((_ROOM / folder).rglob("*")):
            if path.suffix in _OF_A_KERNEL and "tools" not in path.relative_to(_ROOM).parts:
                found.update(str(path.relative_to(_ROOM)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]

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
_CPU, _BOTH, _NEITHER = {"cpu", "native"}, {"formats"}, {"tools"}


@functools.cache
def kernels_mark(*, on_cpu: bool) -> str:
    """Return a mark of the sources that decide how quick products are on a CPU, or on a GPU."""
    found = hashlib.sha256()
    for path in sorted(_ROOM.rglob("*")):
        place = path.relative_to(_ROOM)
        folder = place.parts[0]
        if path.suffix not in _OF_A_KERNEL or _NEITHER & set(place.parts):
            continue
        if folder in _BOTH or (folder in _CPU) == on_cpu:
            found.update(str(place).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]

"""Which sources a time was measured with: marks of the kernels, and of the stage that runs them.

Times kept on this machine outlive the sources they were measured with. Nothing is imported: files
of the kernels' room are read, without its tools, of the runtime what a stage computes with, and
what the profiler times of it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_OF_A_KERNEL = {".py", ".h", ".cpp", ".cu", ".json"}
_CPU, _BOTH, _NEITHER = {"cpu", "native"}, {"formats", "weights", "kernel_table.py"}, {"tools"}
_STAGE = ("runtime/backends", "runtime/cache", "runtime/models", "profiler/timing/timed_layers.py")


@functools.cache
def kernels_mark(*, on_cpu: bool) -> str:
    """Return a mark of the sources that decide how quick products are on a CPU, or on a GPU."""
    return _mark(_kernels(on_cpu))


@functools.cache
def stage_mark(*, on_cpu: bool) -> str:
    """Return a mark of the sources that decide how quick a stage is: its kernels, and its steps."""
    return _mark((*_kernels(on_cpu), *_stage(on_cpu)))


def _mark(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def _kernels(on_cpu: bool) -> Iterator[Path]:
    room = _PACKAGE / "kernels"
    for path in sorted(room.rglob("*")):
        place = path.relative_to(room)
        folder = place.parts[0]
        if path.suffix not in _OF_A_KERNEL or _NEITHER & set(place.parts):
            continue
        if folder in _BOTH or (folder in _CPU) == on_cpu:
            yield path


def _stage(on_cpu: bool) -> Iterator[Path]:
    for name in _STAGE:
        path = _PACKAGE / name
        for source in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if not (on_cpu and source.parent.name == "gpu"):
                yield source

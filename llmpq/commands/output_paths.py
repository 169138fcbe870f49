"""Output files are looked at before a job starts, not found unwritable when it has ended.

A disk that fills up while they are written is named with its file, and with what was kept.

Standard library only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmpq.errors import open_files_hint


def require_writable(flag: str, path: str | Path) -> None:
    """`ValueError` unless `path` can be written; an existing file is left as it is."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{flag} '{path}' is a directory, expected a file to write")
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{flag} '{path}' cannot be written ({error.strerror or error}); give another path"
        ) from None


def require_folder(flag: str, path: str | Path) -> None:
    """`ValueError` unless `path` is a folder that can be written in, or was made one."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{flag} '{path}' is a file, expected a folder; give another path")
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"{flag} '{path}' is no folder that can be written in ({error.strerror or error}); "
            f"give another path, or leave {flag} out"
        ) from None


@contextmanager
def naming(path: str | Path, *, kept: str) -> Iterator[None]:
    """Turn what the system refuses while `path` is written into a sentence: what, what is kept."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{cannot_write(path, error)}; {kept}, free some space or give another path"
        ) from None


def cannot_write(path: str | Path, error: OSError) -> str:
    """Say what the system refused to write, and why: a full disk's own error names no file."""
    return f"cannot write '{path}': {(error.strerror or str(error)).lower()}"


def check_files(
    inputs: Mapping[str, str | None], outputs: Mapping[str, str | Sequence[str] | None]
) -> None:
    """`ValueError` if an output cannot be written, or is also an input or another output.

    Both map a flag to its path; None for a flag that was not given, several where it may repeat.
    """
    seen = {_real(path): flag for flag, path in inputs.items() if path is not None}
    given = [
        (flag, path)
        for flag, paths in outputs.items()
        for path in ([paths] if isinstance(paths, str) else paths or ())
    ]
    for flag, path in given:
        if _real(path) in seen:
            raise ValueError(
                f"{flag} and {seen[_real(path)]} are the same file, '{path}': it would be "
                "overwritten; give another path"
            )
        seen[_real(path)] = flag
    for flag, path in given:
        require_writable(flag, path)


def refusal(error: OSError) -> str:
    """Say what the system refused, and about which file."""
    reason = error.strerror or str(error) or type(error).__name__
    named = reason if error.filename is None else f"'{error.filename}': {reason}"
    return f"{named}{open_files_hint(reason)}"


def _real(path: str) -> tuple[int, int] | str:
    """Return what tells a file from others: its inode, or its path while it does not exist."""
    try:
        found = Path(path).stat()
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


def write_all(writers: Mapping[str, Callable[[], None]], *, kept: str) -> None:
    """Write to every path; what one refuses takes nothing of the others, then raises.

    `kept`: what the message says of the rest.
    """
    refused: list[ValueError] = []
    for path, write in writers.items():
        try:
            with naming(path, kept=kept):
                write()
        except ValueError as error:
            refused.append(error)
    if refused:
        raise refused[0]

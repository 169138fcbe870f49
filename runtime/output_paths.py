"""Output files are looked at before a job starts, not found unwritable when it has ended.

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


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


def check_files(inputs: Mapping[str, str | None], outputs: Mapping[str, str | None]) -> None:
    """`ValueError` if an output cannot be written, or is also an input or another output.

    Both map a flag to its path; None for a flag that was not given.
    """
    seen = {_real(path): flag for flag, path in inputs.items() if path is not None}
    given = {flag: path for flag, path in outputs.items() if path is not None}
    for flag, path in given.items():
        if _real(path) in seen:
            raise ValueError(
                f"{flag} and {seen[_real(path)]} are the same file, '{path}': it would be "
                "overwritten; give another path"
            )
        seen[_real(path)] = flag
    for flag, path in given.items():
        require_writable(flag, path)


def refusal(error: OSError) -> str:
    """Say what the system refused, and about which file."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"'{error.filename}': {reason}"


def _real(path: str) -> tuple[int, int] | str:
    """Return what tells a file from others: its inode, or its path while it does not exist."""
    try:
        found = Path(path).stat()
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino

"""Text files that a command is given."""

from __future__ import annotations

from pathlib import Path


def text_of(flag: str, path: str | Path) -> str:
    """Return a file's text; `ValueError` names the flag, the file and why it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or str(error)
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text: byte {error.start} fits no character"
    raise ValueError(f"{flag} '{path}' cannot be read: {why}")

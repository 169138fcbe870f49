"""RequestNames: which prompts are under way, by their names. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Sequence

Named = tuple[str, tuple[int, ...]]
"""A prompt's name and the ids of its requests."""


class RequestNames:
    """Names of prompts under way and the ids of their requests; callers may be any threads."""

    def __init__(self) -> None:
        self._ids: dict[str, tuple[int, ...]] = {}
        self._lock = threading.RLock()  # a stream that is freed in here ends its own name

    def begin(self, prompts: Sequence[Named]) -> None:
        """Take the names of prompts, all or none; `ValueError` for one that is under way."""
        names = [name for name, _ in prompts]
        with self._lock:
            for place, name in enumerate(names):
                if name in self._ids:
                    raise ValueError(f"request_id '{name}' is under way; take another one")
                if name in names[:place]:
                    raise ValueError(
                        f"request_id '{name}' is that of prompts {names.index(name)} and {place}; "
                        "prepare each with a request_id of its own, or with none"
                    )
            self._ids |= dict(prompts)

    def end(self, prompt: Named) -> None:
        """Give up a prompt's name; again, or once another has taken it, does nothing."""
        with self._lock:
            name, ids = prompt
            if self._ids.get(name) == ids:
                del self._ids[name]

    def ids_of(self, name: str) -> tuple[int, ...]:
        """Return the ids of a prompt's requests, none if it is not under way."""
        return self._ids.get(name, ())

    def under_way(self) -> list[str]:
        """Return all names, the oldest first."""
        with self._lock:
            return list(self._ids)

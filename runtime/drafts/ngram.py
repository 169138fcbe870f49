"""Prompt lookup: drafts copied from where the newest tokens stood before. No model, no bytes.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 2
"""Lengths of the suffix that is looked up, longest first: one token alone is rarely telling."""
LOOK_BACK = 1024
"""Tokens that are searched."""


def propose(history: Sequence[int], gamma: int) -> list[int]:
    """Return up to `gamma` tokens that followed the latest earlier copy of the history's end."""
    recent = list(history[-LOOK_BACK:])
    if gamma <= 0 or not recent:
        return []
    # Newest first: the search for the newest token runs in C, and most places fail at it.
    backwards = recent[::-1]
    shorter: int | None = None
    place = 0
    while True:
        try:
            place = backwards.index(backwards[0], place + 1)
        except ValueError:
            return [] if shorter is None else recent[shorter : shorter + gamma]
        end = len(recent) - place  # where the copy's continuation starts
        length = _agreement(backwards, place)
        if length >= LONGEST:
            return recent[end : end + gamma]
        if length >= SHORTEST and shorter is None:
            shorter = end


def _agreement(backwards: Sequence[int], place: int) -> int:
    """Return how many tokens from `place` on equal those from the start on, up to `LONGEST`."""
    length = 1
    most = min(LONGEST, len(backwards) - place)
    while length < most and backwards[place + length] == backwards[length]:
        length += 1
    return length

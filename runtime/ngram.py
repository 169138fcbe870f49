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
    if gamma <= 0:
        return []
    recent = list(history[-LOOK_BACK:])
    shorter: int | None = None
    newest = recent[-1]
    for end in range(len(recent) - 1, SHORTEST - 1, -1):
        # `end` is where the copy's continuation starts; most places fail at their newest token.
        if recent[end - 1] != newest:
            continue
        length = _agreement(recent, end)
        if length >= LONGEST:
            return recent[end : end + gamma]
        if length >= SHORTEST and shorter is None:
            shorter = end
    return [] if shorter is None else recent[shorter : shorter + gamma]


def _agreement(tokens: Sequence[int], end: int) -> int:
    """Return how many tokens before `end` equal those at the very end, up to `LONGEST`."""
    length = 1
    while length < min(LONGEST, end) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length

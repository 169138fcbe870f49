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
    for length in range(LONGEST, SHORTEST - 1, -1):
        if len(recent) <= length:
            continue
        end = recent[-length:]
        for start in range(len(recent) - length - 1, -1, -1):
            if recent[start : start + length] == end:
                return recent[start + length : start + length + gamma]
    return []

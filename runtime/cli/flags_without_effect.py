"""Flags that are given where nothing would heed them are refused: their wish would be dropped."""

from __future__ import annotations

from collections.abc import Mapping


def refuse_idle(given: Mapping[str, bool], why: str, remedy: str) -> None:
    """`ValueError` for the flags that were given though they have no effect.

    `given`: flag -> whether it was; `why`: when that is so; `remedy`: what gives them one.
    """
    idle = [flag for flag, was in given.items() if was]
    if idle:
        verb, them = ("has", "it") if len(idle) == 1 else ("have", "them")
        raise ValueError(f"{', '.join(idle)} {verb} no effect {why}: {remedy}, or leave {them} out")

"""The numbers a flag may have: those that mean something, and that the search can bear.

Knows neither models nor devices. Every refusal says the flag, the range and what was given.
"""

from __future__ import annotations

import math

MAX_BATCH = 10_000
"""Requests of a job: a search prices two pairs of micro-batch sizes for each, at 1 ms a pair."""
IN_FLIGHT = "; it counts the requests in flight, and a plan runs any number of them"
MAX_TOKENS = 1_000_000
"""Tokens of a prompt, or to generate: a decode time is a mean over as many steps."""
MAX_DEVICES = 1_000
"""Devices of one name."""
MAX_THETA = 1e15
"""Seconds per unit of omega: beyond it a plan's time is lost in rounding."""
MAX_BUDGET = 1e9
"""Sum of omega: beyond it as well."""


def check_job(batch: int, prompt_len: int, gen_len: int) -> None:
    """Check the sizes of a job; `ValueError` names the flag."""
    whole("--batch", batch, MAX_BATCH, why=IN_FLIGHT)
    whole("--prompt-len", prompt_len, MAX_TOKENS)
    whole("--gen-len", gen_len, MAX_TOKENS)


def whole(flag: str, value: int, most: int, *, least: int = 1, why: str = "") -> int:
    """Return a flag's whole number; `ValueError` outside of its range."""
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{flag} must be between {least:,} and {most:,}, got {value}{why}")
    return value


def positive(flag: str, value: int) -> int:
    """Return a flag's number; `ValueError` when it is not above zero."""
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{flag} must be a positive number, got {value}")
    return value


def positive_if_given(flag: str, value: int | None) -> int | None:
    """Return a flag's number, None where it was left out."""
    return None if value is None else positive(flag, value)


def within(flag: str, value: float, most: float, unit: str = "") -> float:
    """Return a flag's number; `ValueError` below zero, above `most`, or not a number."""
    if not isinstance(value, (int, float)) or not 0 <= value <= most:
        wanted = "a number >= 0" if math.isinf(most) else f"between 0 and {most:g}"
        shown = f"{value:g}" if isinstance(value, (int, float)) else repr(value)
        raise ValueError(f"{flag} must be {wanted}{unit}, got {shown}")
    return value

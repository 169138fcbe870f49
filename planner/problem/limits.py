"""Ranges of flags, and of a job's length against the positions that its model was trained on.

Every refusal says the flag, the range and what was given.
"""

from __future__ import annotations

import math

from llmpq.models.model_spec import ModelSpec
from llmpq.workload import Workload

MAX_BATCH = 10_000
"""Requests of a job: a search prices two pairs of micro-batch sizes for each, at 1 ms a pair."""
IN_FLIGHT = "; it counts the requests in flight, and a plan runs any number of them"
MAX_TOKENS = 1 << 20
"""Tokens of a prompt, or to generate: a decode time is a mean over as many steps."""
MOST_WAVES = 4
"""Waves in which an engine of a plan may run its rows, one after the other."""
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
    if type(value) is not int:
        raise ValueError(
            f"{flag} must be a whole number, {least:,} to {most:,}, got {value!r}{why}"
        )
    if not least <= value <= most:
        raise ValueError(f"{flag} must be between {least:,} and {most:,}, got {value}{why}")
    return value


def positive(flag: str, value: int) -> int:
    """Return a flag's number; `ValueError` when it is not above zero."""
    if type(value) is not int or value <= 0:
        raise ValueError(f"{flag} must be a positive number, got {value!r}")
    return value


def positive_if_given(flag: str, value: int | None) -> int | None:
    """Return a flag's number, None where it was left out."""
    return None if value is None else positive(flag, value)


def within(flag: str, value: float, most: float, unit: str = "") -> float:
    """Return a flag's number; `ValueError` below zero, above `most`, or not a number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:
        wanted = "a number >= 0" if math.isinf(most) else f"between 0 and {most:g}"
        shown = f"{value:g}" if is_number else repr(value)
        raise ValueError(f"{flag} must be {wanted}{unit}, got {shown}")
    return value


def positions_note(spec: ModelSpec, work: Workload, *, names_context: bool = False) -> str:
    """Return a warning where a job goes beyond the model's positions, or an empty string.

    `names_context`: the length was given as `--context`. `ValueError` for learned positions: there
    is no row in the table to look up.
    """
    if work.max_len <= spec.max_positions:
        return ""
    beyond = (
        f"prompts of {work.prompt_len} and answers of {work.gen_len} tokens are beyond the "
        f"{spec.max_positions} positions of {spec.name}"
    )
    if spec.positions == "learned":
        smaller = "--context" if names_context else "--prompt-len or --gen-len"
        raise ValueError(f"{beyond}; give a smaller {smaller}")
    if spec.positions == "alibi":
        return f"{beyond}; ALiBi extrapolates, but check the text's quality"
    return f"warning: {beyond}; text past what rotary positions were trained for is often unusable"

"""Sizes as people write them ("14.8 GiB") and as tables show them."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from llmpq.errors import short_repr

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "mi": 2**20,  # Kubernetes' spellings
    "gi": 2**30,
    "ti": 2**40,
}


MAX_SIZE = 2**60
"""Bytes: more than any device has, and what a plan may hold."""
LEAST_BARE = 2**20
"""Bytes below which a number without a unit is asked back: `memory: 24` means 24 GB."""


def parse_size(value: object) -> int:
    """Return bytes from an integer or a text such as `14.8 GiB`, `40MiB`, `80 GB`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(
            f"expected a size such as '14.8 GiB' or a number of bytes, got {short_repr(value)}"
        )
    shown = short_repr(value)
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(-?[0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"expected a size such as '14.8 GiB', got {shown}")
        number, unit = float(match[1]), match[2].lower()
    else:
        # An integer may be too large for a float.
        number, unit = float(max(-1, min(value, 2 * MAX_SIZE))), ""
    size = number * _UNITS[unit]
    if not size <= MAX_SIZE:  # not a number, too
        raise ValueError(f"a size is at most {format_size(MAX_SIZE)}, got {shown}")
    if size < 0:
        raise ValueError(f"a size cannot be negative, got {shown}")
    if not unit and 0 < size < LEAST_BARE:
        meant = f"{number:g} GB" if number < 1000 else f"{number:.15g} MiB"
        plural = "" if number == 1 else "s"
        raise ValueError(f"{number:.15g} byte{plural}? write {meant}, or {number:.15g} B if so")
    return int(size)


def format_size(num_bytes: float) -> str:
    """Return bytes in the largest binary unit below the value: `1.3 GiB`, `40.0 MiB`."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return f"{sign}{size:.1f} TiB"


def short_size(num_bytes: float) -> str:
    """Return bytes as `format_size` does, in eight characters: `512 MiB`, `23.6 GiB`."""
    number, unit = format_size(num_bytes).split()
    whole = number.endswith(".0") or len(number) > 4
    return f"{float(number):.0f} {unit}" if whole else f"{number} {unit}"


def shown(number: float, digits: int = 3) -> str:
    """Return a number of seconds or tokens/s: three digits, and none before the point dropped."""
    whole = len(str(int(number))) if number >= 1 else 0
    if whole:
        return f"{number:,.{max(0, digits - whole)}f}"
    return f"{number:.{digits}g}"


def shown_loss(loss: float) -> str:
    """Return a quality loss in four digits, rounded up: as a `--quality-budget` it is kept."""
    if loss <= 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(loss)) - 3)
    return f"{math.ceil(loss / step * (1 - 1e-10)) * step:.4g}"


def _written(num_bytes: int) -> int | str:
    """Return a size as a file holds it: few bytes with their unit, or they would be asked back."""
    return num_bytes if num_bytes == 0 or num_bytes >= LEAST_BARE else f"{num_bytes} B"


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(_written)]
"""A number of bytes in a file form; texts with units are accepted."""

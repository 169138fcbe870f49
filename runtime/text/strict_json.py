"""JSON as its standard has it, of calls that models write and clients send back.

Python's own reader takes NaN and Infinity, which readers of other languages refuse.
"""

from __future__ import annotations

import json
import sys
from typing import NoReturn


def _refused(word: str) -> NoReturn:
    raise ValueError(f"{word} is no value of JSON")


def _finite(digits: str) -> float:
    """Return a number; one beyond a float's range is the last one in it, not infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(digits)))


DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)
"""`ValueError` for what is no JSON."""

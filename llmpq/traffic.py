"""Traffic: when requests come and how long they are, from a trace of a service or from a rate.

A trace is a file of one request a line: CSV with a header, or JSON lines. The columns are those of
our own traces, of Azure's, of Mooncake's, of BurstGPT's or of LLMServingSim's; other columns are
left alone. Arrivals are counted from the first one on.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

BLOCK_OF_TRACE = 512
"""Tokens that a block number of a trace stands for (Mooncake's)."""
MOST_TOKENS = 2**24

ARRIVAL_S: Mapping[str, float] = {
    "at_s": 1.0,
    "arrival_ms": 1e-3,
    "timestamp": 1e-3,
    "arrival_time_ns": 1e-9,
    "arrival_time": 1.0,
    "Timestamp": 1.0,
    "TIMESTAMP": 1.0,
}
"""Column of arrivals -> seconds of one unit, where it is a number; else it is a date and time."""
PROMPT_TOKENS = ("prompt_tokens", "ContextTokens", "input_length", "input_toks", "Request tokens")
OUTPUT_TOKENS = (
    "output_tokens",
    "GeneratedTokens",
    "output_length",
    "output_toks",
    "Response tokens",
)
BLOCKS = ("blocks", "hash_ids")


@dataclass(frozen=True)
class Arrival:
    """One request of a traffic."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Equal numbers: equal tokens. Empty where the trace does not say."""

    def prompt(self, vocab: int, number: int) -> list[int]:
        """Return tokens of the prompt's length that begin as the trace says."""
        if not self.blocks:
            return block_tokens(-1 - number, self.prompt_tokens, vocab)
        tokens: list[int] = []
        for block in self.blocks:
            tokens += block_tokens(block, BLOCK_OF_TRACE, vocab)
        return tokens[: self.prompt_tokens]


def block_tokens(number: int, count: int, vocab: int) -> list[int]:
    """Return tokens that differ for every number: an arithmetic sequence, begun by the number."""
    low = min(3, vocab - 1)
    room = vocab - low
    digits = []
    left = abs(number) * 2 + (number < 0)
    for _ in range(min(count, 8)):
        digits.append(low + left % room)
        left //= room
    step = 1 + abs(number) % (room - 1) if room > 1 else 0
    rest = [low + (number + index * step) % room for index in range(count - len(digits))]
    return digits + rest


def read_traffic(path: str | Path) -> tuple[Arrival, ...]:
    """Read a trace, in the order of arrival, the first at 0 s; `ValueError` names a bad line."""
    text = _text(path)
    rows = _json_lines(path, text) if text.lstrip().startswith("{") else _csv_rows(text)
    found = []
    for line, row in rows:
        try:
            found.append(_arrival(row))
        except ValueError as error:
            raise ValueError(f"'{path}', line {line}: {error}") from None
    if not found:
        raise ValueError(f"'{path}' has no requests; expected one a line, as CSV or JSON lines")
    found.sort(key=lambda one: one.at_s)
    first = found[0].at_s
    return tuple(replace(one, at_s=one.at_s - first) for one in found)


def poisson_traffic(
    prompts: Sequence[int],
    outputs: Sequence[int],
    *,
    requests: int,
    rate_per_s: float = 1.0,
    seed: int = 0,
) -> tuple[Arrival, ...]:
    """Return requests that come independently of one another, at a mean rate.

    Prompt and answer of each are drawn from the listed lengths, one independently of the other.
    """
    draw = random.Random(seed)
    found, now = [], 0.0
    for _ in range(requests):
        found.append(Arrival(now, draw.choice(prompts), draw.choice(outputs)))
        now += draw.expovariate(rate_per_s)
    return tuple(found)


def rate_of(traffic: Sequence[Arrival]) -> float:
    """Return the mean arrivals a second; infinite where all come at once."""
    spread = traffic[-1].at_s - traffic[0].at_s
    return (len(traffic) - 1) / spread if spread > 0 else math.inf


def at_rate(traffic: Sequence[Arrival], rate_per_s: float) -> tuple[Arrival, ...]:
    """Return the same requests, arrivals closer or further apart; infinite: all come at once.

    Requests that all come at once have no distances to stretch: they come evenly.
    """
    if math.isinf(rate_per_s):
        return tuple(replace(one, at_s=0.0) for one in traffic)
    own = rate_of(traffic)
    if math.isinf(own):
        return tuple(replace(one, at_s=n / rate_per_s) for n, one in enumerate(traffic))
    return tuple(replace(one, at_s=one.at_s * own / rate_per_s) for one in traffic)


def repeated(traffic: Sequence[Arrival], requests: int) -> tuple[Arrival, ...]:
    """Return a traffic of so many requests at least: the same ones again, at the same mean rate.

    Blocks of a repetition are its own: no prompt is found in the cache that the trace does not
    repeat itself.
    """
    own = rate_of(traffic)
    span = len(traffic) / own if math.isfinite(own) else 0.0
    numbers = [block for one in traffic for block in one.blocks]
    apart = max(numbers) - min(numbers) + 1 if numbers else 0
    return tuple(
        replace(
            one,
            at_s=one.at_s + again * span,
            blocks=tuple(block + again * apart for block in one.blocks),
        )
        for again in range(max(1, -(-requests // len(traffic))))
        for one in traffic
    )


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read the trace '{path}': {why}") from None


def _json_lines(path: str | Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"'{path}', line {number}: expected a JSON object, got {line[:60]!r}")
        yield number, row


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    return enumerate(csv.DictReader(text.splitlines()), start=2)


def _arrival(row: Mapping[str, Any]) -> Arrival:
    blocks = next((row[name] for name in BLOCKS if row.get(name)), ())
    return Arrival(
        at_s=_seconds(row),
        prompt_tokens=_tokens(row, "prompt", PROMPT_TOKENS),
        output_tokens=_tokens(row, "answer", OUTPUT_TOKENS),
        blocks=_ranges(blocks) if isinstance(blocks, str) else tuple(int(b) for b in blocks),
    )


def _column(row: Mapping[str, Any], what: str, names: Iterable[str]) -> str:
    found = next((name for name in names if row.get(name) not in (None, "")), None)
    if found is None:
        raise ValueError(
            f"no column of {what}: got {', '.join(map(str, row)) or 'nothing'}, expected one of "
            f"{', '.join(names)}"
        )
    return found


def _tokens(row: Mapping[str, Any], what: str, names: Sequence[str]) -> int:
    name = _column(row, f"the {what}'s tokens", names)
    try:
        number = float(row[name])
    except (TypeError, ValueError):
        number = math.nan
    if not (number.is_integer() and 1 <= number <= MOST_TOKENS):
        most = f"of 1 to {MOST_TOKENS:,}" if number > MOST_TOKENS else "of at least 1"
        raise ValueError(f"{name} must be a whole number {most}, got {row[name]!r}")
    return int(number)


def _seconds(row: Mapping[str, Any]) -> float:
    name = _column(row, "arrivals", tuple(ARRIVAL_S))
    value = row[name]
    try:
        seconds = float(value) * ARRIVAL_S[name]
    except (TypeError, ValueError):
        seconds = _date_s(str(value))
    if not math.isfinite(seconds):
        raise ValueError(f"{name} must be a number or a date and time, got {value!r}")
    return seconds


def _date_s(text: str) -> float:
    """Return the seconds of a date and time; zones that are not given are UTC."""
    parts = re.fullmatch(r"(.*?)(\.\d+)?(Z|[+-]\d\d:?\d\d)?", text.strip())
    if parts is None:
        return math.nan
    whole, fraction, zone = parts.groups()
    try:
        moment = datetime.fromisoformat(whole + (zone or "+00:00"))
    except ValueError:
        return math.nan
    return moment.timestamp() + float(fraction or 0.0)


def _ranges(text: str) -> tuple[int, ...]:
    """Read `3 5-7` as 3, 5, 6, 7."""
    found: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)

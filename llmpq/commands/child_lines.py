"""How a process talks to its children: JSON objects, one a line, on the child's standard streams.

What libraries print in a child would stand between the answers, so a child takes its standard
output for them (`take_answers`) before it does anything else. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any, TextIO


def take_answers() -> TextIO:
    """Return a child's stream of answers; what is printed from here on goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def write_line(stream: IO[str], message: Mapping[str, Any]) -> None:
    """Send one message at once; `BrokenPipeError` if nobody reads."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def read_lines(stream: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield messages until the pipe closes."""
    for line in stream:
        yield json.loads(line)

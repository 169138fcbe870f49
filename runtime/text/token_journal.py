"""The tokens of answers that a batch run has begun, in a file beside its output.

A driver that is killed, or whose host is lost, leaves there what `--resume` goes on from, on this
host or on another one that sees the file. A line is what has come of a row since the line before;
it says what the tokens are made with, as the output's lines do.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmpq.file_form import replace_text
from llmpq.runtime.text.batch_io import require_alike, side_file
from llmpq.runtime.text.batch_rows import MADE_WITH, PROMPT_HASH, BatchRow, prompt_hash

EVERY_S = 2.0
"""How often what has come is written: so much of an answer is computed again at most."""
LEAST_BYTES, TOKEN_BYTES = 1 << 20, 8
"""A file of more bytes, and of twice what answers under way have, is written anew without those
that have ended. Of a token with its comma and space."""
_log = logging.getLogger("llmpq.output")

Answers = Iterable[tuple[int, int, Sequence[int]]]
"""Of rows that have not ended: index, the engine that answers, tokens so far."""


class TokenJournal:
    """Appends what has come of answers to the file beside an output."""

    def __init__(
        self,
        output: str | Path,
        rows: Sequence[BatchRow],
        made_with: Callable[[BatchRow, int], Mapping[str, Any]],
        begun: Mapping[int, Sequence[int]],
    ) -> None:
        """`made_with`: of a row that an engine answers. `begun`: tokens that answers go on from."""
        self._path = side_file(output, "begun")
        self._rows, self._made_with = rows, made_with
        self._begun = begun
        self._written = {index: len(tokens) for index, tokens in begun.items()}
        self._engine = dict.fromkeys(begun, 0)
        self._num_bytes = 0
        self._said: dict[int, Mapping[str, Any]] = {}
        """What the file says that a row is made with."""
        self._next_s = time.monotonic() + EVERY_S
        self._works = Path(output).is_file()  # not a pipe or a device

    def begin(self) -> None:
        """Replace what is in the file by the tokens that answers go on from."""
        if not self._works:
            return
        with self._trying():
            self._replace([(index, 0, tokens) for index, tokens in self._begun.items()])

    def take(self, answers: Callable[[], Answers]) -> None:
        """Write what has come since the last time, every few seconds."""
        if not self._works or time.monotonic() < self._next_s:
            return
        # What no engine has yet goes on from where it was.
        known = [(i, engine, own or self._begun.get(i, ())) for i, engine, own in answers()]
        with self._trying():
            live_bytes = TOKEN_BYTES * sum(len(tokens) for _, _, tokens in known)
            if self._num_bytes > max(LEAST_BYTES, 2 * live_bytes):
                self._replace(known)
            else:
                self._append("".join(self._news(known)))
        self._next_s = time.monotonic() + EVERY_S

    def end(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _news(self, known: Answers) -> Iterator[str]:
        for index, engine, tokens in known:
            at = self._written.get(index, 0)
            if self._engine.get(index, engine) != engine:
                at = 0  # another one may have begun it anew
            if len(tokens) > at:
                yield self._line(index, engine, at, tokens[at:])

    def _line(self, index: int, engine: int, at: int, tokens: Sequence[int]) -> str:
        row, made = self._rows[index], self._made_with(self._rows[index], engine)
        line: dict[str, Any] = {"index": index, "at": at, "tokens": list(tokens)}
        if self._said.get(index) != made:
            self._said[index] = made
            line |= {PROMPT_HASH: prompt_hash(row), MADE_WITH: made}
        self._written[index], self._engine[index] = at + len(tokens), engine
        return json.dumps(line) + "\n"

    def _replace(self, known: Answers) -> None:
        self._said.clear()
        lines = [self._line(index, engine, 0, tokens) for index, engine, tokens in known if tokens]
        if lines:
            replace_text(self._path, "".join(lines))
        else:
            self.end()
        self._num_bytes = sum(map(len, lines))

    def _append(self, text: str) -> None:
        if text:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # a host may lose its power
        self._num_bytes += len(text)

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Go on without the file where it cannot be written: the finished rows are in another."""
        try:
            yield
        except OSError as error:
            _log.warning("'%s' is not written any more: %s", self._path, error.strerror)
            self._works = False


def begun_answers(
    output: str | Path,
    rows: Sequence[BatchRow],
    made: Callable[[BatchRow], Sequence[Mapping[str, Any]]],
    done: Mapping[int, object],
) -> dict[int, list[int]]:
    """Return the tokens that an earlier run left of rows that had not ended, by row index.

    `made` returns what a row's answer is made with now, by any of the engines. `ValueError` if
    tokens are of another input, or made with another model, precision or sampling.
    """
    path = side_file(output, "begun")
    found: dict[int, list[int]] = {}
    if not path.is_file():
        return found
    for raw in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(raw)
            index, at, tokens = line["index"], line["at"], [int(token) for token in line["tokens"]]
        except (ValueError, KeyError, TypeError):
            continue  # torn by a crash
        if not 0 <= index < len(rows):
            raise ValueError(
                f"'{path}' has a row that is not from this input file: {index}; give the same -i "
                "as before, or another -o"
            )
        if line.get(PROMPT_HASH, prompt_hash(rows[index])) != prompt_hash(rows[index]):
            raise ValueError(
                f"'{path}' has another input: its row {index} has another prompt; give the same "
                "-i as before, or another -o"
            )
        if MADE_WITH in line and index not in done:
            require_alike(path, index, line[MADE_WITH], made(rows[index]))
        known = found.setdefault(index, [])
        if at <= len(known):
            known[at:] = tokens
    return {index: tokens for index, tokens in found.items() if tokens and index not in done}

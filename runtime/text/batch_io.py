"""Batch files: rows in, answers out, in input order and as soon as the order allows.

The output is a JSON line per row. It is appended to while the job runs and never holds half a
row that counts: what an interrupted job has written is what `--resume` starts from. Rows that end
before one ahead of them wait in a file beside it, so that a driver that is killed loses none.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from llmpq.commands.output_paths import cannot_write
from llmpq.runtime.text.batch_rows import (
    MADE_WITH,
    PROMPT_HASH,
    BatchRow,
    Defaults,
    json_row,
    prompt_hash,
    text_row,
)
from llmpq.runtime.text.made_with import differences

_log = logging.getLogger("llmpq.output")

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_TABLES = (".csv", ".tsv")


def read_rows(path: str | Path, defaults: Defaults) -> list[BatchRow]:
    """Read a batch file: JSON lines, or one prompt a line in any other file, without blank lines.

    A pipe has no name that says which: its first line does.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"no such input file: '{path}'") from None
    except IsADirectoryError:
        raise ValueError(f"'{path}' is a directory, expected a file of prompts") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}") from None
    suffix = Path(path).suffix or Path(path).resolve().suffix  # /dev/stdin < rows.jsonl
    if suffix.lower() in _TABLES:
        raise ValueError(
            f"'{path}' is a table ({suffix}), of which no column is known to be the prompts: write "
            'JSON lines, {"prompt": "..."} each (.jsonl), or one prompt a line (.txt)'
        )
    is_json = suffix.lower() in _JSON_SUFFIXES or (
        not Path(path).is_file() and text.lstrip().startswith('{"')
    )
    # Messages name lines as an editor counts them, blank ones included.
    numbered = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rows = []
    for index, (number, line) in enumerate(numbered):
        line = line.rstrip("\r")
        rows.append(
            json_row(index, line, defaults, number=number)
            if is_json
            else text_row(index, line, defaults)
        )
    if not rows:
        raise ValueError(f"'{path}' has no rows; expected one prompt a line")
    return _refuse_duplicates(rows, [number for number, _ in numbered])


def _refuse_duplicates(rows: Sequence[BatchRow], numbers: Sequence[int]) -> list[BatchRow]:
    """Give every row whose id was seen before an error; `numbers` are the rows' lines."""
    seen: dict[str, int] = {}
    checked = []
    for row, number in zip(rows, numbers, strict=True):
        if row.row_id is not None and row.row_id in seen and row.error is None:
            first = seen[row.row_id]
            row = replace(row, error=f"line {number}: id '{row.row_id}' was used in line {first}")
        elif row.row_id is not None:
            seen.setdefault(row.row_id, number)
        checked.append(row)
    return checked


def require_no_answers(path: str | Path) -> None:
    """`ValueError` for an output file with anything but failed rows: it would be lost."""
    num_lines = 0
    for file in (Path(path), side_file(path)):
        if file.is_file():
            with file.open("rb") as lines:
                num_lines += sum(bool(line.strip()) and not _has_failed(line) for line in lines)
    if num_lines:
        rows = "1 line" if num_lines == 1 else f"{num_lines} lines"
        raise ValueError(
            f"'{path}' has {rows} already: go on from its rows with --resume, replace them with "
            "--overwrite, or give another -o"
        )


def side_file(path: str | Path, what: Literal["held", "begun"] = "held") -> Path:
    """Return the file of the rows that wait for one ahead of them, or of answers begun."""
    resolved = Path(path).resolve()
    return resolved.with_name(f"{resolved.name}.{what}")


def _lines_of(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the number of each line of a file, its bytes, and whether it may be torn."""
    if path.exists():
        raws = path.read_bytes().split(b"\n")
        for number, raw in enumerate(raws, start=1):
            if raw.strip():
                yield number, raw, number == len(raws)


def _has_failed(line: bytes) -> bool:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("error") is not None


def finished_lines(
    path: str | Path,
    rows: Sequence[BatchRow],
    made: Callable[[BatchRow], Sequence[Mapping[str, Any]]] | None = None,
) -> dict[int, dict[str, Any]]:
    """Return the answers an earlier run left, by row index, without failed rows and torn lines.

    `made` returns what a row's answer is made with now, by any of the engines. `ValueError` if the
    file was made from another input, or its answers with another model, precision or sampling.
    """
    done: dict[int, dict[str, Any]] = {}
    by_id = {
        row.row_id: row.index
        for row in rows
        if row.form in ("completion", "chat") and row.error is None
    }
    for number, raw, may_be_torn in (*_lines_of(Path(path)), *_lines_of(side_file(path))):
        try:
            line = raw.decode("utf-8")
            data = json.loads(line)
        except (ValueError, RecursionError):
            if not may_be_torn:
                raise ValueError(
                    f"'{path}' line {number} is no answer of an earlier run; remove the line, or "
                    "give another -o"
                ) from None
            continue  # a line torn by a crash: its row runs again
        if not isinstance(data, dict) or data.get("error") is not None:
            continue
        index = by_id.get(str(data["custom_id"])) if "custom_id" in data else data.get("index")
        if not isinstance(index, int) or not 0 <= index < len(rows):
            raise ValueError(
                f"'{path}' has a row that is not from this input file: {line[:80]}; give the same "
                "-i as before, or another -o"
            )
        row = rows[index]
        if not _answers(data, row):
            raise ValueError(
                f"'{path}' answers another input: its row {index} has another prompt; give the "
                "same -i as before, or another -o"
            )
        if made is not None and MADE_WITH in data:
            require_alike(path, index, data[MADE_WITH], made(row))
        done[index] = data
    return done


def require_alike(
    path: str | Path, index: int, found: Mapping[str, Any], wanted: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse an answer that none of this run's engines would have made so."""
    if unlike := min((differences(found, one) for one in wanted), key=len):
        raise ValueError(
            f"'{path}' was made otherwise, its row {index}: {'; '.join(unlike)}: run it with what "
            "was given before, or give another -o"
        )


def _answers(data: Mapping[str, Any], row: BatchRow) -> bool:
    """Whether an answer is to this row's prompt, as far as the answer says what was asked."""
    shown = list(row.prompt) if isinstance(row.prompt, tuple) else row.prompt
    return (
        data.get("prompt", shown) == shown
        and data.get("messages", list(row.messages)) == list(row.messages)
        and data.get(PROMPT_HASH, prompt_hash(row)) == prompt_hash(row)
    )


class OrderedWriter:
    """Writes rows in input order as soon as all before them are there.

    Leaving the block early (a failure, an interrupt) writes the finished rows beyond the gap too;
    who is killed has left them in a file beside.
    """

    def __init__(
        self,
        path: str | Path,
        num_rows: int,
        *,
        done: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self._path, self._num_rows = Path(path), num_rows
        # A link stays one: what it points to is replaced. A pipe's link leads to no path.
        if self._path.is_file() or not self._path.exists():
            self._path = self._path.resolve()
        self._done: dict[int, Mapping[str, Any]] = dict(done or {})
        self._name, self._num_put = str(path), len(self._done)
        self._held: dict[int, Mapping[str, Any]] = dict(self._done)
        self._next = 0
        self._begun = False
        self._beside = side_file(self._path)

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        return self

    def begin(self) -> None:
        """Replace what is in the file by the rows that are done; the first `write` does so, too.

        What another run left is lost only to one that has got as far as this.
        """
        if self._begun:
            return
        self._begun = True
        with self._naming():
            if self._done:
                # Rows of an earlier run stay on disk beyond the ordered part until the job is over.
                self._file.close()
                try:
                    self._replace(self._done)
                finally:
                    self._file = self._path.open("ab", buffering=0)
            elif self._path.is_file():
                self._file.truncate(0)
            if self._path.is_file():
                self._beside.unlink(missing_ok=True)

    def write(self, index: int, line: Mapping[str, Any]) -> None:
        """Take the answer of a row."""
        assert index not in self._held and 0 <= index < self._num_rows
        self.begin()
        self._held[index] = line
        with self._naming():
            if self._done:
                self._put(line)
            elif index == self._next:
                self._advance()
            elif self._path.is_file():
                with self._beside.open("a", encoding="utf-8") as waiting:
                    waiting.write(_text(line))

    @property
    def num_finished(self) -> int:
        """Rows that have an answer or an error."""
        return len(self._held)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end()
        except ValueError as failed:
            if error is None:
                raise
            if str(failed) != str(error):
                _log.warning("%s", failed)  # what ended the run matters more

    def _end(self) -> None:
        """Put all lines in order."""
        with self._naming():
            with self._file:
                # Beyond the gap, too: a full disk may have no room for the copy in order.
                if self._begun and not (self._done and self._path.is_file()):
                    for index in sorted(i for i in self._held if i >= self._next):
                        self._put(self._held[index])
            if self._begun and (self._done or self._next < len(self._held)):
                self._replace(self._held)
            if self._begun and self._path.is_file():
                self._beside.unlink(missing_ok=True)

    def _advance(self) -> None:
        while self._next in self._held:
            self._put(self._held[self._next])
            self._next += 1

    def _put(self, line: Mapping[str, Any]) -> None:
        """Append a line, or nothing of it."""
        data = memoryview(_text(line).encode())
        size = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            if self._path.is_file():
                self._file.truncate(size)
            raise
        self._num_put += 1

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Name the file in what the system refuses, and say what it holds."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"{cannot_write(self._name, error)}; {self._num_put} finished rows are kept in it: "
                "free some space and continue with: llmpq-dist run --resume and the same arguments"
            ) from None

    def _replace(self, lines: Mapping[int, Mapping[str, Any]]) -> None:
        """Write all lines in order to a new file and put it in place of the old one.

        A device or a pipe is no file that could be replaced.
        """
        if not self._path.is_file():
            return
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            with temporary.open("w", encoding="utf-8") as out:
                for index in sorted(lines):
                    out.write(_text(lines[index]))
            os.replace(temporary, self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _text(line: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON, escaped where it holds what UTF-8 cannot."""
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(line)
    return text + "\n"

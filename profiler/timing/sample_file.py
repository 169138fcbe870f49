"""`samples.jsonl`: one line a sample, appended as it is taken, so that a stopped run resumes.

A line cut short by a kill is dropped when the file is opened again; any other bad line is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from llmpq.commands.output_paths import naming
from llmpq.profiler.timing.cases import Conditions, Sample, TimedCase


class SampleLog:
    """The samples already on disk, and a file to append more to.

    Only samples of the same model, machine and number of copies count as done: times of another
    machine stay in the file and are not used.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._samples = _read(self._path)
        self._file = self._path.open("a")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # every line was flushed: only a refused one is tried again
            self._file.close()

    def append(self, sample: Sample) -> None:
        """Write one sample through to the file."""
        self._samples.append(sample)
        line = json.dumps(sample.model_dump(mode="json")) + "\n"
        with naming(self._path, kept="the samples before stay, run it again to continue"):
            self._file.write(line)
            self._file.flush()

    def taken(self, wanted: Iterable[TimedCase], conditions: Conditions) -> dict[TimedCase, Sample]:
        """Return the newest sample of each wanted case taken under these conditions.

        How tokens are sampled is a condition of the head's times only.
        """
        cases = set(wanted)
        other = conditions.model_copy(update={"sampling": None})
        return {
            s.case: s
            for s in self._samples
            if s.case in cases
            and s.conditions.model_copy(update={"sampling": None}) == other
            and (s.case.target.part != "head" or s.conditions.sampling == conditions.sampling)
        }


_BEGINNING = b'{"conditions"'
"""Of a line, also of a torn one."""


def _read(path: Path) -> list[Sample]:
    """Return the samples of a file; a last line without its newline is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    samples = []
    for number, line in enumerate(data[:whole].decode(errors="replace").splitlines(), start=1):
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not a sample ({error}); expected one JSON object a line. "
                "Remove the line, or give another file with --samples"
            ) from None
        samples.append(Sample.parse_data(content, where=f"{path}:{number}"))
    torn = data[whole:]
    if torn and not torn.startswith(_BEGINNING[: len(torn)]):
        raise ValueError(f"{path}: it does not end like a log of samples; give another --samples")
    if torn:
        with path.open("r+b") as file:
            file.truncate(whole)
    return samples

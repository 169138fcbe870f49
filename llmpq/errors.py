"""Outcomes a command can end with, and how a bad name is explained.

Every command ends with one of `ExitCode`; an `LlmpqError` carries the code of its outcome.
A plain `ValueError` is the user's input (exit code 2).
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, the same for every command (docs/how-to/when-something-breaks.md)."""

    DONE = 0
    USAGE = 2
    BAD_PLAN = 3
    MISMATCH = 4
    DOES_NOT_FIT = 5
    STAGE_LOST = 6
    DEADLINE = 7
    SOME_ROWS_FAILED = 8
    INTERRUPTED = 130


EXIT_CODES: Mapping[ExitCode, str] = {
    ExitCode.DONE: "done",
    ExitCode.USAGE: "usage or bad input",
    ExitCode.BAD_PLAN: "bad plan",
    ExitCode.MISMATCH: "plan for another model or cluster",
    ExitCode.DOES_NOT_FIT: "does not fit",
    ExitCode.STAGE_LOST: "a stage was lost",
    ExitCode.DEADLINE: "a deadline passed",
    ExitCode.SOME_ROWS_FAILED: "some rows failed",
    ExitCode.INTERRUPTED: "interrupted",
}
"""What each says, in the words of every command's --help."""


class LlmpqError(Exception):
    """An outcome with an exit code; the message is one sentence and what to do next."""

    exit_code = ExitCode.USAGE


class BadPlanError(LlmpqError):
    """The plan file breaks its schema or is not a complete, ordered partition."""

    exit_code = ExitCode.BAD_PLAN


class PlanMismatchError(LlmpqError):
    """The plan was made for another model, cluster or device."""

    exit_code = ExitCode.MISMATCH


class DoesNotFitError(LlmpqError):
    """No plan fits the devices, or a device ran out of memory."""

    exit_code = ExitCode.DOES_NOT_FIT


CONTINUE = "; finished rows are kept, continue with: llmpq-dist run --resume and the same arguments"
"""What `run` says behind the loss of a stage; its output file has the rows that ended."""


class StageLostError(LlmpqError):
    """A stage died, could not be placed or could not start."""

    exit_code = ExitCode.STAGE_LOST


class DeadlineError(LlmpqError):
    """Something did not answer before its deadline."""

    exit_code = ExitCode.DEADLINE

    def __init__(self, message: str, *, deadline: str | None = None) -> None:
        """`deadline`: which of `Deadlines` passed, such as `step`."""
        super().__init__(message)
        self.deadline = deadline


class ContextLengthError(ValueError):
    """A prompt, or a prompt and its answer, for which there is no room."""


class GuideError(ValueError):
    """A guide (`structured_outputs`) that cannot be followed."""


class RequestFailedError(RuntimeError):
    """A request that no stage can go on with; the others go on without it."""


def open_files_hint(text: str) -> str:
    """Return what to do where no more files could be opened; empty for any other failure."""
    if os.strerror(errno.EMFILE) not in text:
        return ""
    import resource  # not on Windows, which plans

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"; {most} may be open here, allow more: ulimit -n 1024"


def nearest(name: str, options: Iterable[str], most: int = 1) -> str:
    """Return `did you mean 'x'? ` for the options closest to `name`, `most` at most, or nothing."""
    by_lower = {option.lower(): option for option in options}
    found = [f"'{by_lower[one]}'" for one in _most_alike(name.lower(), list(by_lower))[:most]]
    *others, last = found or [""]
    return f"did you mean {' or '.join(filter(None, (', '.join(others), last)))}? " if found else ""


def _most_alike(name: str, options: list[str]) -> list[str]:
    """Return the options like a name, the closest first: those that share the most words, two at
    least (`qwen3-30b-a3b` of `qwen3-coder-30b`), that begin with it, that are the number in it
    (`4` of `q4_k_m`), or by their letters."""
    words = {option: len(_words(name) & _words(option)) for option in options}
    most, begun = max(words.values(), default=0), [one for one in options if one.startswith(name)]
    number = re.search(r"\d+", name)
    if most >= 2:
        options = [option for option in options if words[option] == most]
    elif begun and name:
        options, most = begun, 2
    elif number is not None and number[0] in options:
        return [number[0]]
    like = difflib.get_close_matches(name, options, n=3, cutoff=0.2 if most >= 2 else 0.5)
    return sorted(like, key=lambda one: not name.startswith(one))


def _words(name: str) -> set[str]:
    return {word for word in name.split("-") if word}


def shortened(text: str, most: int = 80) -> str:
    """Return a text as an error shows it: what is too long to read ends in dots."""
    return text if len(text) <= most else f"{text[: most - 20]}..."


def short_repr(value: object) -> str:
    """Return a value as an error shows it, however many digits it has."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not write out integers of thousands of digits
        return "a number of thousands of digits"


MOST_NAMES = 12
"""Names that an error lists; of more it has the nearest, and says where all are."""


def unknown_name(what: str, name: str, options: Iterable[str], see: str = "") -> ValueError:
    """Build the error for a name that is not among `options`; `see`: where all are listed."""
    known, got = sorted(options), f"unknown {what} '{shortened(name)}': "
    if see and len(known) > MOST_NAMES:
        return ValueError(f"{got}{nearest(name, known, most=3)}{see}")
    return ValueError(f"{got}{nearest(name, known)}known: {', '.join(known)}")

"""Turns what Ray says about a lost stage into one sentence: which stage, when, why, what to do."""

from __future__ import annotations

import re

import ray

from llmpq.errors import DoesNotFitError, LlmpqError, StageLostError
from llmpq.plan import Plan

GRACE_S = 5.0
"""How long to look for the stage whose death broke another one's connection."""

_BROKEN_LINK = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|store|timed out waiting", re.IGNORECASE
)


def is_consequence(error: Exception) -> bool:
    """Whether a stage failed because a neighbour did: its link broke, it did not die itself."""
    cause = getattr(error, "cause", None)
    if not isinstance(error, ray.exceptions.RayTaskError) or cause is None:
        return False
    return isinstance(cause, (RuntimeError, ConnectionError)) and bool(
        _BROKEN_LINK.search(str(cause))
    )


def lost_stage(error: Exception, plan: Plan, index: int, *, phase: str, pid: int) -> Exception:
    """Return the outcome of a stage's failure; `pid` 0 where it is not known."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, (LlmpqError, ValueError)):
        return cause
    stage = plan.stages[index]
    process = f", pid {pid}" if pid else ""
    who = f"stage {index} ({stage.device} on {stage.node}{process})"
    if cause is not None and type(cause).__name__ == "OutOfMemoryError":
        return DoesNotFitError(
            f"{who} ran out of GPU memory during {phase}: {_first_line(str(cause))}; re-plan with "
            "a larger reserve for this device"
        )
    return StageLostError(
        f"{who} was lost during {phase}: {_why(error, cause)}; finished rows are kept, continue "
        "with: llmpq-dist run --resume and the same arguments"
    )


def _why(error: Exception, cause: Exception | None) -> str:
    if cause is not None:
        return f"{type(cause).__name__}: {_first_line(str(cause))}"
    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"the host ran out of memory ({_first_line(text)})"
    exit_type = re.search(r"Worker exit type: (\w+)", text)
    detail = re.search(r"Worker exit detail: (.*?)(?:\. |\n|$)", text)
    if exit_type is None:
        return _first_line(text)
    return (
        f"its process died ({exit_type[1]}: {detail[1] if detail else 'no detail'}; killed by a "
        "signal such as SIGKILL from the kernel's out-of-memory killer, or crashed)"
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"

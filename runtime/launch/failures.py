"""Turns what Ray says about a lost stage into one sentence: which stage, when, why, what to do."""

from __future__ import annotations

import re

import ray

from llmpq.errors import DoesNotFitError, LlmpqError, StageLostError
from llmpq.out_of_memory import first_line, out_of_memory
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
    if cause is not None and out_of_memory(cause):
        return DoesNotFitError(
            f"{who} ran out of memory during {phase}: {first_line(cause)}; re-plan with "
            "a larger reserve for this device"
        )
    return StageLostError(
        f"{who} was lost during {phase}: {why(error)}; finished rows are kept, continue "
        "with: llmpq-dist run --resume and the same arguments"
    )


def why(error: Exception) -> str:
    """Return the reason of a Ray error in a few words."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {first_line(cause)}"
    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"the host ran out of memory ({first_line(error)})"
    exit_type = re.search(r"Worker exit type: (\w+)", text)
    detail = re.search(r"Worker exit detail: (.*?)(?:\. |\n|$)", text)
    if exit_type is None:
        return first_line(error)
    return (
        f"its process died ({exit_type[1]}: {detail[1] if detail else 'no detail'}; killed by a "
        "signal such as SIGKILL from the kernel's out-of-memory killer, or crashed)"
    )

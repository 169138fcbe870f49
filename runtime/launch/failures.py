"""Turns what is known of a lost stage into one sentence: which stage, when, why, what to do."""

from __future__ import annotations

import re

from llmpq.child import CallFailed
from llmpq.errors import DoesNotFitError, LlmpqError, StageLostError, open_files_hint
from llmpq.out_of_memory import first_line, out_of_memory
from llmpq.plans.plan import Plan
from llmpq.runtime.launch.device_errors import LossKind, device_error

GRACE_S = 5.0
"""How long to look for the stage whose death broke another one's connection."""

_BROKEN_LINK = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|store|timed out waiting|another stage",
    re.IGNORECASE,
)

_SOURCE_LINE = re.compile(r"\[[^\]]*\.(cc|cpp|h):\d+\] ")
"""Where in gloo's sources an error was raised."""


def is_consequence(failure: CallFailed) -> bool:
    """Whether a stage failed because a neighbour did: its link broke, it did not die itself."""
    return loss_kind(failure) == "connection"


def loss_kind(failure: CallFailed) -> LossKind:
    """Return why a stage failed."""
    cause = failure.cause
    if cause is not None and (out_of_memory(cause) or isinstance(cause, DoesNotFitError)):
        return "memory"
    if isinstance(cause, (LlmpqError, ValueError)):
        return "error"
    known = device_error(str(failure))
    if known is not None:
        return known.kind
    if isinstance(cause, (RuntimeError, ConnectionError)) and _BROKEN_LINK.search(str(cause)):
        return "connection"
    return "process" if cause is None else "error"


def named_stage(plan: Plan, index: int, pid: int) -> str:
    """Return what sentences call a stage, or one of its devices; `pid` 0 where it is not known.

    `index`: of `plan.workers`.
    """
    worker = plan.workers[index]
    stage = worker.place
    process = f", pid {pid}" if pid else ""
    of = f"device {worker.member} of stage" if worker.shares else "stage"
    return f"{of} {worker.stage} ({stage.device} on {stage.node}{process})"


def when(phase: str) -> str:
    """Return a phase of `PipelineClient` as part of a sentence."""
    return "while idle" if phase == "idle" else f"during {phase}"


def lost_stage(
    failure: CallFailed, plan: Plan, index: int, *, phase: str, pid: int, card: str | None = None
) -> Exception:
    """Return the outcome of a stage's failure.

    `pid`: 0 where it is not known; `card`: the UUID of its GPU, where that is known.
    """
    cause = failure.cause
    if isinstance(cause, (LlmpqError, ValueError)):
        return cause
    who = named_stage(plan, index, pid)
    if cause is not None and out_of_memory(cause):
        return DoesNotFitError(
            f"{who} ran out of memory {when(phase)}: {first_line(cause)}; re-plan with "
            "a larger reserve for this device"
        )
    known = device_error(str(failure))
    if known is not None:
        advice = known.advice.format(card=f" -i {card}" if card else "")
        what = str(failure) if cause is None else first_line(cause)
        return StageLostError(f"{who} was lost {when(phase)}: {what}: {advice}")
    if cause is not None and is_consequence(failure):
        how = _SOURCE_LINE.sub("", first_line(cause)).partition(". This is typically")[0]
        return StageLostError(
            f"{who} was lost {when(phase)}: its connection to another stage broke ({how})"
            f"{open_files_hint(how)}"
        )
    return StageLostError(f"{who} was lost {when(phase)}: {failure}{open_files_hint(str(failure))}")

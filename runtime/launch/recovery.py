"""A recovery from the loss of a stage, or a move to other devices: why, what was done, how long."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from llmpq.runtime.launch.device_errors import LossKind


@dataclass(kw_only=True)
class Recovery:
    """One recovery, under way or over; reports and `LLM.recoveries` show it."""

    reason: str
    """What was lost, and how, or why layers are moved: a sentence."""
    phase: str
    """What the engine did then: start-up, loading, idle, prefill, decode, ..."""
    stage: int | None = None
    """The stage that was lost first, None where it is not known."""
    loss: LossKind | None = None
    """Why the stage was lost; None where none was."""
    action: str = "restart"
    """`restart`: the same plan on fresh stages; `replan`: another plan on the devices left.

    Without a loss, `add`: another plan for more devices; `drain`: for fewer; `slow`: as one takes
    longer than planned.
    """
    undone: str | None = None
    """Why the plan of before goes on: the new one could not be started."""
    began_s: float = field(default_factory=time.time)
    """Since 1970."""
    predicted_s: float | None = None
    """How long it was expected to take, from the loss until stages serve again."""
    measured_s: float | None = None
    """How long it took; None while it is under way."""
    pause_s: float | None = None
    """From the loss to the next token of a request; None where none was under way."""
    num_requests: int = 0
    """Requests that went on."""
    num_kept: int = 0
    """Tokens that those requests had, whose KV is recomputed."""
    num_held: int = 0
    """Layers that stayed on their devices."""
    num_loaded: int = 0
    """Layers that were loaded, by the start that served."""
    num_attempts: int = 0
    """How often stages were started: they may be lost again before they serve."""
    plan: Mapping[str, Any] | None = None
    """What another plan changes; None under the same plan."""
    clock_s: float = field(default_factory=time.perf_counter)
    """When it began, by `time.perf_counter`."""

    @property
    def since(self) -> str:
        """When it began, as ISO 8601."""
        return datetime.fromtimestamp(self.began_s, UTC).isoformat(timespec="milliseconds")

    @property
    def left_s(self) -> float:
        """How much longer it is expected to take; 0 where it takes longer than predicted."""
        return max(0.0, (self.predicted_s or 0.0) - (time.perf_counter() - self.clock_s))

    def as_report(self) -> dict[str, Any]:
        """Return the recovery as JSON data."""
        return {
            "reason": self.reason,
            "phase": self.phase,
            "stage": self.stage,
            "loss": self.loss,
            "action": self.action,
            "began": self.since,
            "attempts": self.num_attempts,
            "requests": self.num_requests,
            "tokens_kept": self.num_kept,
            "layers_held": self.num_held,
            "layers_loaded": self.num_loaded,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "pause_s": self.pause_s,
            "undone": self.undone,
            "plan": self.plan,
        }

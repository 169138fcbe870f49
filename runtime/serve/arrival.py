"""Context variables of the HTTP request that is being answered."""

from __future__ import annotations

from contextvars import ContextVar

ARRIVED = "llmpq.arrived_s"
"""Under which a request's scope tells when its head was read; clocks of one host's processes agree.
"""
ARRIVED_S: ContextVar[float | None] = ContextVar("ARRIVED_S", default=None)
"""When the head of the request was read from its connection, by `time.perf_counter`."""
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
"""Its `X-Request-Id`: in the answer's head, the access log and the stages' trace."""
TALLY: ContextVar[dict[str, float] | None] = ContextVar("TALLY", default=None)
"""What the access log says of its answers: tokens, and the seconds to the first one."""
TALLIED = "llmpq.tally"
"""Type of the message in which a replica says its `TALLY` to the process that logs."""

"""Messages over each link of a plan: bytes of a step's message and the time it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmpq.plans.plan import Plan


TOKEN_BYTES = 8
"""Bytes of a sampled token on its way back to the first stage."""


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """One step's message from a stage to the next; the last one's tokens to the first."""

    source: str
    target: str
    prefill_bytes: int
    prefill_s: float
    prefill_busy_s: float
    """How long it occupies the link; the rest of its time is latency."""
    decode_bytes: int
    decode_s: float
    decode_busy_s: float


def link_loads(plan: Plan) -> list[LinkLoad]:
    """Return the links in the order of the stages; none where the plan carries no entries."""
    if plan.inputs is None or len(plan.stages) < 2 or not plan.inputs.links:
        return []
    row = plan.inputs.model.hidden * plan.workload.dtype_bytes
    names = [stage.device for stage in plan.stages]
    loads = []
    for index, source in enumerate(names):
        back = index + 1 == len(names)
        link = plan.inputs.link(source, names[0] if back else names[index + 1])
        prefill = plan.prefill_microbatch * TOKEN_BYTES if back else plan.prefill_step_tokens * row
        decode = plan.decode_microbatch * (TOKEN_BYTES if back else row)
        loads.append(
            LinkLoad(
                source=source,
                target=link.target,
                prefill_bytes=prefill,
                prefill_s=link.seconds(prefill),
                prefill_busy_s=link.busy_s(prefill),
                decode_bytes=decode,
                decode_s=link.seconds(decode),
                decode_busy_s=link.busy_s(decode),
            )
        )
    return loads

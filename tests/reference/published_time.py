"""The predicted time of the paper's published code, to reproduce its predictions beside ours."""

from __future__ import annotations

from llmpq.planner.evaluate.objective import PhaseTimes, StageTimes


def published_code_time(t: StageTimes, *, mp: int, md: int, n: int) -> PhaseTimes:
    """Return eq. (4) as its authors' code computes it: sum td counted for one token only.

    Degenerate as an objective (it always picks md = 1).
    """
    prefill = (mp - 1) * max(t.prefill_s) + sum(t.prefill_s)
    decode = (n - 1) * (md - 1) * max(t.decode_s) + sum(t.decode_s)
    return PhaseTimes(prefill_s=prefill, decode_s=decode)

"""A plan's speed in words that people compare: time to the first token and tokens/s.

One request at a time is a chat: what counts is how long its first token takes, and its rate from
then on. Of several at once it is the tokens/s of all of them, prompts included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from llmpq.plan import Plan
from llmpq.planner.evaluate.objective import PhaseTimes
from llmpq.workload import Workload

SAME = 1e-3
"""Relative difference below which two numbers may round alike."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a plan does its job."""

    batch: int
    total_s: float
    first_token_s: float
    """Until the last request has its first token."""
    request_per_s: float | None
    """Tokens/s of one request while it decodes; None where the first token is the only one."""
    job_per_s: float
    """Tokens/s of the whole job, prompts included."""

    @classmethod
    def of(cls, work: Workload, times: PhaseTimes) -> Self:
        """Return the speed of a job that takes these times."""
        steps = work.gen_len - 1
        return cls(
            batch=work.batch,
            total_s=times.total_s,
            first_token_s=times.prefill_s,
            request_per_s=steps / times.decode_s if steps and times.decode_s else None,
            job_per_s=work.batch * work.gen_len / times.total_s,
        )

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        """Return what a plan predicts."""
        assert plan.predicted is not None, "the planner always predicts"
        found = plan.predicted
        times = PhaseTimes(prefill_s=found.prefill_s, decode_s=found.decode_s)
        return cls.of(plan.workload, times)

    def beside(self, other: Speed) -> str:
        """Return the speed and the other one: `22.4 instead of 17.1 tokens/s`."""
        if self.batch > 1 or self.request_per_s is None or other.request_per_s is None:
            return f"{_pair(self.job_per_s, other.job_per_s)} tokens/s"
        first = _pair(self.first_token_s, other.first_token_s)
        rate = _pair(self.request_per_s, other.request_per_s)
        return f"first token after {first} s, then {rate} tokens/s"

    @property
    def text(self) -> str:
        """Return the speed alone."""
        if self.batch > 1 or self.request_per_s is None:
            return f"{shown(self.job_per_s)} tokens/s"
        first, rate = shown(self.first_token_s), shown(self.request_per_s)
        return f"first token after {first} s, then {rate} tokens/s"


def shown(number: float, digits: int = 3) -> str:
    """Return a number of seconds or tokens/s: three digits, and none before the point dropped."""
    whole = len(str(int(number))) if number >= 1 else 0
    if whole:
        return f"{number:,.{max(0, digits - whole)}f}"
    return f"{number:.{digits}g}"


def _pair(new: float, old: float) -> str:
    """Return `new instead of old`, with more digits where they differ and round alike."""
    digits = 3
    while digits < 6 and shown(new, digits) == shown(old, digits) and abs(new - old) > SAME * old:
        digits += 1
    return f"{shown(new, digits)} instead of {shown(old, digits)}"

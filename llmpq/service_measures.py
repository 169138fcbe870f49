"""How requests of a traffic are served: TTFT, TPOT and latency, their quantiles, goodput."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import Field

from llmpq.file_form import FileForm

ATTAINMENT = 0.9
"""Share of the requests that has to be within the limits of TTFT and TPOT at a rate that is kept
(DistServe, OSDI 2024)."""


@dataclass(frozen=True)
class ServedRequest:
    """When a request's tokens were known."""

    number: int
    at_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token."""
        return self.first_token_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token behind the first; None of an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def latency_s(self) -> float:
        """Seconds until the last token."""
        return self.end_s - self.at_s


class Quantiles(FileForm):
    """Mean and quantiles, in seconds; straight between the two values beside a quantile."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return those of values; zeros of none."""
        ordered = sorted(values)
        if not ordered:
            return cls(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
        p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(mean=math.fsum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ascending values, straight between two of them."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


class ServiceLimits(FileForm):
    """What a request has to keep to count as good; none: anything is good enough."""

    ttft_s: float | None = Field(default=None, gt=0)
    tpot_s: float | None = Field(default=None, gt=0)

    def keeps(self, served: ServedRequest) -> bool:
        """Whether a request is within the limits."""
        late = self.ttft_s is not None and served.ttft_s > self.ttft_s
        slow = served.tpot_s is not None and self.tpot_s is not None and served.tpot_s > self.tpot_s
        return not (late or slow)


class ServiceMeasures(FileForm):
    """How a traffic was served."""

    requests: int
    seconds: float
    """From the first arrival to the last token."""
    ttft_s: Quantiles
    """Until the first token."""
    tpot_s: Quantiles
    """A token behind the first, of answers of two and more."""
    latency_s: Quantiles
    """Until the last token."""
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    """Requests within the limits, a second."""
    attained: float
    """Share of the requests within the limits."""
    preemptions: int = 0

    @classmethod
    def of(cls, served: Sequence[ServedRequest], limits: ServiceLimits) -> Self:
        """Return the measures of requests that were served."""
        first = min(one.at_s for one in served)
        seconds = max(one.end_s for one in served) - first
        good = sum(map(limits.keeps, served))
        per_s: Callable[[float], float] = lambda n: n / seconds if seconds > 0 else 0.0  # noqa: E731
        return cls(
            requests=len(served),
            seconds=seconds,
            ttft_s=Quantiles.of(one.ttft_s for one in served),
            tpot_s=Quantiles.of(one.tpot_s for one in served if one.tpot_s is not None),
            latency_s=Quantiles.of(one.latency_s for one in served),
            output_tokens_per_s=per_s(sum(one.output_tokens for one in served)),
            requests_per_s=per_s(len(served)),
            goodput_per_s=per_s(good),
            attained=good / len(served),
            preemptions=sum(one.preemptions for one in served),
        )

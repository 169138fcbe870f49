"""Reads what flags say of a traffic: a trace or lists of lengths, a rate, limits."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from llmpq.commands.command_line import token_count
from llmpq.planner.problem.requests import TrafficFlags
from llmpq.service_measures import ServiceLimits
from llmpq.traffic import Arrival, at_rate, poisson_traffic, rate_of, read_traffic

MOST_REQUESTS = 100_000
REQUESTS = 200
"""Requests that are simulated, unless `--requests` says; of a trace its first ones."""


@dataclass(frozen=True, kw_only=True)
class NamedTraffic:
    """A traffic, its limits, and its rate."""

    arrivals: tuple[Arrival, ...]
    """At the rate, or where that is to be found as they come."""
    limits: ServiceLimits
    rate_per_s: float | None
    """None: the highest within the limits is to be found."""
    of_requests: int = 0
    """Requests of the trace that these are the first of; 0 where they are drawn."""

    @property
    def prompt_tokens(self) -> list[int]:
        """Lengths of the prompts, ascending."""
        return sorted(one.prompt_tokens for one in self.arrivals)

    @property
    def output_tokens(self) -> list[int]:
        """Lengths of the answers, ascending."""
        return sorted(one.output_tokens for one in self.arrivals)


def named_traffic(flags: TrafficFlags) -> NamedTraffic:
    """Return the traffic that flags name; `ValueError` for what is wrong."""
    limits = ServiceLimits(
        ttft_s=_positive("--ttft", flags.ttft), tpot_s=_positive("--tpot", flags.tpot)
    )
    count = REQUESTS if flags.requests is None else flags.requests
    if not 2 <= count <= MOST_REQUESTS:
        raise ValueError(f"--requests must be 2 to {MOST_REQUESTS}, got {count}")
    rate, of_requests = _rate(flags.rate), 0
    if flags.trace is not None:
        if flags.prompt is not None or flags.gen is not None:
            raise ValueError(
                "--trace has the requests' lengths: leave --prompt and --gen out, or --trace"
            )
        every = read_traffic(flags.trace)
        arrivals, of_requests = every[:count], len(every)
        if len(arrivals) < 2:
            raise ValueError(f"'{flags.trace}' has one request, expected two at least")
    else:
        arrivals = _drawn(flags, count)
        if flags.rate is None:
            raise ValueError(
                "--prompt and --gen do not say how often requests come: give --rate, in requests "
                "a second, or --rate max for the highest within the limits"
            )
    if rate is None:
        return NamedTraffic(
            arrivals=arrivals, limits=limits, rate_per_s=None, of_requests=of_requests
        )
    if flags.rate is not None:
        arrivals = at_rate(arrivals, rate)
    own = rate_of(arrivals) if flags.rate is None else rate
    return NamedTraffic(arrivals=arrivals, limits=limits, rate_per_s=own, of_requests=of_requests)


def _drawn(flags: TrafficFlags, count: int) -> tuple[Arrival, ...]:
    lists = {"--prompt": flags.prompt, "--gen": flags.gen}
    missing = [name for name, text in lists.items() if text is None]
    if missing:
        there = next(name for name in lists if name not in missing)
        raise ValueError(f"{there} needs {missing[0]} beside it: tokens, such as 129,424,601")
    prompts, outputs = (_lengths(name, text or "") for name, text in lists.items())
    return poisson_traffic(prompts, outputs, requests=count)


def _lengths(name: str, text: str) -> list[int]:
    try:
        lengths = [token_count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{name} must be numbers of tokens, such as 1020,2735,4k, got '{text}'")
    return lengths


def _rate(text: str | None) -> float | None:
    """Return requests a second; None for `max`."""
    if text == "max":
        return None
    if text is None:
        return math.nan
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"--rate must be requests a second, above 0, or max, got '{text}'")
    return rate


def _positive(name: str, seconds: float | None) -> float | None:
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"{name} must be seconds above 0, got {seconds:g}")
    return seconds

"""Prints `llmpq-algo simulate`: how a plan's engines serve a traffic, as predicted."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from llmpq.planner.cli.long_search import line_if_long
from llmpq.planner.cli.show_plan import open_console, say
from llmpq.planner.evaluate.engine_simulation import EngineModel
from llmpq.planner.problem.requests import SimulateRequest
from llmpq.planner.traffic.named_traffic import NamedTraffic, named_traffic
from llmpq.planner.traffic.rates import highest_rate, measured_at
from llmpq.plans.topology import read_plan
from llmpq.service_measures import ATTAINMENT, ServiceLimits, ServiceMeasures

if TYPE_CHECKING:
    from rich.console import Console


def show_simulation(request: SimulateRequest) -> None:
    """Simulate a plan under a traffic; the answer on stdout."""
    if not request.has_traffic:
        raise ValueError("nothing to simulate: give --trace FILE, or --prompt, --gen and --rate")
    traffic = named_traffic(request)
    plan = read_plan(request.plan)
    budget = request.max_num_batched_tokens
    models = [EngineModel.of_plan(one, max_num_batched_tokens=budget) for one in plan.plans]
    doing = f"simulating {len(traffic.arrivals)} requests"
    if traffic.rate_per_s is None:
        with line_if_long(f"{doing} at several rates"):
            found = highest_rate(models, traffic.arrivals, traffic.limits)
        rate, measures = found.rate_per_s, found.measures
    else:
        rate = traffic.rate_per_s
        with line_if_long(doing):
            measures = measured_at(models, traffic.arrivals, traffic.limits)
    if request.json:
        data = {"schema": 1, "rate_per_s": rate, **measures.model_dump(mode="json")}
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
        return
    console = open_console()
    if traffic.of_requests > len(traffic.arrivals):
        say(console, f"traffic: {requests_in_words(traffic)}")
    if traffic.rate_per_s is None:
        say(console, highest_line(rate, traffic))
    print_measures(console, measures, traffic.limits, rate)


def requests_in_words(traffic: NamedTraffic) -> str:
    """Return how many requests are simulated, and of how many of a longer trace."""
    count = len(traffic.arrivals)
    if traffic.of_requests <= count:
        return f"{count} requests"
    return f"the first {count} of {traffic.of_requests:,} requests (--requests N: more of them)"


def highest_line(rate: float, traffic: NamedTraffic, *, cut: bool = False) -> str:
    """Return the highest rate in words. `cut`: higher ones were not tried, for want of time."""
    if not limits_in_words(traffic.limits):
        return f"highest rate: {rate:.3g} requests/s (as many as are done where all come at once)"
    kept = f"{ATTAINMENT:.0%} of the requests within {limits_in_words(traffic.limits)}"
    if rate == 0:
        return f"no rate keeps {kept}"
    if cut:
        return (
            f"highest rate: at least {rate:.3g} requests/s, with {kept} (--time-limit ended the "
            "search before higher ones were tried)"
        )
    return f"highest rate: {rate:.3g} requests/s, with {kept}"


def limits_in_words(limits: ServiceLimits) -> str:
    """Return the limits, `TTFT 2 s and TPOT 0.1 s`; empty without any."""
    named = (("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s))
    return " and ".join(f"{name} {seconds:g} s" for name, seconds in named if seconds is not None)


def print_measures(
    console: Console, measures: ServiceMeasures, limits: ServiceLimits, rate: float
) -> None:
    """Print how a traffic is served."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("seconds")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    rows = (
        ("first token (TTFT)", measures.ttft_s),
        ("each further token (TPOT)", measures.tpot_s),
        ("whole answer", measures.latency_s),
    )
    for name, of in rows:
        table.add_row(name, *(f"{value:.4g}" for value in (of.mean, of.p50, of.p90, of.p99)))
    comes = f" at {rate:.3g}/s" if rate > 0 else ""
    say(console, f"{measures.requests} requests{comes}, predicted:")
    console.print(table)
    say(
        console,
        f"{measures.output_tokens_per_s:.4g} output tokens/s, {measures.requests_per_s:.3g} "
        f"requests/s; preempted {measures.preemptions} times",
    )
    if limits_in_words(limits):
        say(
            console,
            f"within {limits_in_words(limits)}: {measures.attained:.1%} of the requests, "
            f"{measures.goodput_per_s:.3g} a second",
        )

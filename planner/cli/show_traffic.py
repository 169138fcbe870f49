"""What `llmpq-algo` does with live traffic: plans for it, writes the plan, says what it gives."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from llmpq.planner.cli.certificates import save_plan
from llmpq.planner.cli.long_search import line_if_long
from llmpq.planner.cli.own_dtype import in_dtype, instead_of_float32, where_unused
from llmpq.planner.cli.report import print_plan, remarks_of
from llmpq.planner.cli.show_plan import (
    PlanJob,
    check_outputs,
    num_engines,
    open_console,
    read_job,
    say,
    write_report,
)
from llmpq.planner.cli.show_simulation import (
    highest_line,
    limits_in_words,
    print_measures,
    requests_in_words,
)
from llmpq.planner.cli.show_topology import print_topology
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.answer import solve_options
from llmpq.planner.traffic.engine_plans import EnginePlan
from llmpq.planner.traffic.named_traffic import NamedTraffic, named_traffic
from llmpq.planner.traffic.steady_state import MeanLengths
from llmpq.planner.traffic.traffic_search import (
    TrafficAnswer,
    TrafficObjective,
    Valued,
    search_traffic,
)
from llmpq.plans.plan import Plan, StagePlan
from llmpq.plans.topology import Topology
from llmpq.service_measures import ATTAINMENT
from llmpq.units import shown_loss

OF_A_BATCH = {
    "pareto": False,
    "pin": (),
    "what_if": (),
    "max_devices": None,
    "prefill_microbatch": None,
    "decode_microbatch": None,
    "speculate": None,
    "explain": False,
}
"""Fields that are of a batch job, and what they are where they are not given."""


def traffic_job(request: PlanRequest) -> tuple[PlanJob, NamedTraffic, TrafficObjective]:
    """Return what to plan, for which traffic, and what is best of it."""
    _check(request)
    traffic = named_traffic(request)
    objective = _objective(request, traffic)
    check_outputs(request)
    lengths = MeanLengths.of(traffic)
    of_means = _of_means(request, lengths)
    job = read_job(of_means)
    problem, notes = instead_of_float32(of_means, job.problem, job.notes)
    options = solve_options(of_means, problem)
    job = replace(job, problem=problem, notes=notes, options=options)
    most = job.problem.spec.max_positions
    if lengths.longest > most:
        raise ValueError(
            f"the traffic has requests of {lengths.longest:,} tokens, prompt and answer together, "
            f"and {job.problem.spec.name} has {most:,} positions: leave those out of it"
        )
    return job, traffic, objective


def _of_means(request: PlanRequest, lengths: MeanLengths) -> PlanRequest:
    """Return the batch job of which an engine's plan is made."""
    return replace(
        request,
        objective="makespan",
        prompt_len=min(512, math.ceil(lengths.prompt)),
        gen_len=min(100, math.ceil(lengths.output)),
    )


def show_traffic(request: PlanRequest) -> None:
    """Plan for live traffic, check, write `-o`, and print."""
    job, traffic, objective = traffic_job(request)
    doing = f"planning engines and simulating them under {len(traffic.arrivals)} requests"
    with line_if_long(doing, job.options.asked_s):
        exactly = num_engines(request.engines)
        found = search_traffic(
            job.problem, job.options, job.path, traffic, objective, exactly=exactly
        )
    of_means = _of_means(request, MeanLengths.of(traffic))
    dtype, notes = where_unused(of_means, job.problem, found.plan, job.notes)
    plan = in_dtype(found.plan, dtype)
    if request.output:
        save_plan(request.output, plan)
    lines = traffic_lines(found, traffic, objective)
    if request.report:
        from llmpq.pictures.plan_page import Beside, plan_page, topology_page

        page = (
            topology_page(plan, [*lines, *notes])
            if isinstance(plan, Topology)
            else plan_page(plan, Beside(why=[], changes=lines, notes=notes, methods=[]))
        )
        write_report(request.report, page)
    if request.json:
        sys.stdout.write(plan.dump_json())
        return
    console = open_console()
    if isinstance(plan, Topology):
        print_topology(console, plan, lines, notes, seconds=found.seconds)
    else:
        print_plan(console, plan, seconds=found.seconds, alternatives=lines, notes=notes)
    rate = found.best.rate.rate_per_s if traffic.rate_per_s is None else traffic.rate_per_s
    print_measures(console, found.best.served, traffic.limits, rate)
    for line in remarks_of(notes):
        say(console, line)
    for path_written in filter(None, (request.output, request.report)):
        say(console, f"wrote {path_written}")


def _check(request: PlanRequest) -> None:
    """`ValueError` for flags that have no meaning for live traffic."""
    for name, usual in OF_A_BATCH.items():
        given = getattr(request, name)
        if (tuple(given) if usual == () else given) != usual:
            instead = "; plan for the changed devices beside it" if name == "what_if" else ""
            raise ValueError(
                f"--{name.replace('_', '-')} is of a batch job, not of live traffic (--trace, "
                f"--prompt): leave one of them out{instead}"
            )
    if (request.method or "exact") != "exact" or request.objective == "paper":
        raise ValueError(
            "live traffic (--trace, --prompt) is planned by --method exact, and not for "
            "--objective paper: leave these out"
        )
    num_engines(request.engines)


def _objective(request: PlanRequest, traffic: NamedTraffic) -> TrafficObjective:
    limited = bool(limits_in_words(traffic.limits))
    if request.objective == "makespan":
        return "rate" if limited else "throughput"
    if request.objective == "rate" and not limited:
        raise ValueError(
            "--objective rate is the highest rate within limits: give --ttft, --tpot or both"
        )
    if request.objective == "latency" and traffic.rate_per_s is None:
        raise ValueError("--objective latency is of requests at a rate: give --rate R, not max")
    found: TrafficObjective = request.objective
    return found


def traffic_lines(
    found: TrafficAnswer, traffic: NamedTraffic, objective: TrafficObjective
) -> list[str]:
    """Return what the plan gives, and what simpler ways would."""
    best, rows = found.best, len(traffic.arrivals)
    prompts, outputs = traffic.prompt_tokens, traffic.output_tokens
    comes = "" if traffic.rate_per_s is None else f", {traffic.rate_per_s:.3g} a second"
    lines = [
        f"traffic: {requests_in_words(traffic)}{comes}, prompts of {sum(prompts) / rows:,.0f} "
        f"tokens on average (longest {prompts[-1]:,}), answers of {sum(outputs) / rows:,.0f} "
        f"(longest {outputs[-1]:,})",
        f"engines: {engines_in_words(best.engines)}",
        highest_line(best.rate.rate_per_s, traffic, cut=best.rate.cut)
        if found.simulated
        else _of_a_steady_state(best, traffic),
    ]
    rate, limited = traffic.rate_per_s, limits_in_words(traffic.limits)
    if rate is not None and limited and best.served.attained < ATTAINMENT:
        lines.append(
            f"{rate:.3g} requests/s are not kept: {best.served.attained:.1%} of the "
            f"requests are within the limits, not {ATTAINMENT:.0%}"
        )
    lines.append(f"this plan: {_gives(best, objective)}")
    quick = found.quickest
    if quick.loss > best.loss and objective == "rate":
        lines.append(
            f"more requests at less quality (--prefer speed looks for it): "
            f"{_gives(quick, objective)}, quality loss {shown_loss(quick.loss)} instead of "
            f"{shown_loss(best.loss)}"
        )
    names = {
        "card": "best single card",
        "pipeline": "one pipeline",
        "shared": "even tensor parallel",
        "replicas": "replicas",
    }
    for key, name in names.items():
        one = found.beside.get(key)
        if one is None and key in found.beside:
            lines.append(f"{name}: not simulated before --time-limit ended the search")
        elif one is None:
            if key == "card" or len(found.beside) > 1:
                lines.append(f"{name}: none fits and keeps the limits")
        elif one.engines == best.engines:
            lines.append(f"{name}: the same")
        else:
            lines.append(
                f"{name}: {_gives(one, objective)}{_loss(one, best)} "
                f"({engines_in_words(one.engines)})"
            )
    plans = "plan of engines was" if found.tried == 1 else "plans of engines were"
    searched = f"{found.tried} {plans} compared by their steady state"
    if found.left_out:
        searched += f"; {found.left_out} joins of devices that promise less were not planned"
    lines.append(searched if found.complete else f"{searched}; --time-limit ended the search")
    return lines


def _loss(one: Valued, best: Valued) -> str:
    """Return the quality loss of a simpler way where it is not about that of the plan."""
    if shown_loss(one.loss) == shown_loss(best.loss):
        return ""
    return f", quality loss {shown_loss(one.loss)}"


def _of_a_steady_state(best: Valued, traffic: NamedTraffic) -> str:
    """Return what is known of the highest rate where the time was too short for a simulation."""
    served, limits = best.rate.measures, limits_in_words(traffic.limits)
    kept = f", with {served.attained:.0%} of {served.requests} requests within {limits}"
    return (
        "highest rate: not found before --time-limit ended the search; in a steady state "
        f"{best.rate.rate_per_s:.3g} requests/s{kept if limits else ''}"
    )


def engines_in_words(engines: Sequence[EnginePlan]) -> str:
    """Return engines in words: devices, requests at once, tokens of a step, KV bits."""
    words: list[str] = []
    for one in engines:
        plan, batch = one.plan, one.plan.workload.batch
        devices = " + ".join(_counted([_stage(stage, plan) for stage in plan.stages]))
        words.append(
            f"{devices} ({batch} request{'s' * (batch > 1)} at once, steps of {one.step_tokens} "
            f"tokens, {plan.workload.kv.typed}-bit KV)"
        )
    return "; ".join(_counted(words))


def _stage(stage: StagePlan, plan: Plan) -> str:
    """Return a stage's devices in words; of several stages, those that share one in brackets."""
    if not stage.shares:
        return stage.kind
    shared = " + ".join(_counted([place.kind for place in stage.members]))
    shared = f"{shared} in tensor parallel"
    return shared if len(plan.stages) == 1 else f"({shared})"


def _counted(words: Sequence[str]) -> list[str]:
    counts = {word: words.count(word) for word in words}
    return [word if n == 1 else f"{n} x {word}" for word, n in counts.items()]


def _gives(valued: Valued, objective: TrafficObjective) -> str:
    if objective == "latency":
        return f"{valued.served.latency_s.mean:.3g} s an answer"
    if objective == "throughput":
        return f"{valued.rate.measures.output_tokens_per_s:.4g} tokens/s"
    own = valued.at_own_rate
    answers = "" if own is None else f"; at the traffic's rate {own.latency_s.mean:.3g} s an answer"
    return f"{valued.rate.rate_per_s:.3g} requests/s{answers}"

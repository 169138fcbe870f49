"""Is the best topology ever beaten by a simple one? Thirty mixed clusters, batches and traces.

    python benchmarks/mixed_clusters.py aiconfigurator_core-0.12.0-....whl
    python benchmarks/mixed_clusters.py WHEEL --cases 0,7 --jobs 16,azure_2023_conv

Costs of A100, H100, H200 and L40S are AIConfigurator's tables (pip download --no-deps
aiconfigurator-core), other cards' the roofline. Jobs: 1, 16 or 256 requests of 512 + 128 tokens for
most tokens/s, or the first 100 requests of a trace for the highest rate within limits; at a loss of
0, 0.1 or 1 at most. Mooncake's requests have up to 121,213 tokens: for it Qwen models have 131,072
positions (YaRN, as their cards say), and Qwen3-30B-A3B stands for Mixtral, which has 32,768. Beside
`llmpq-algo`'s answer stand, valued by the same model, of traces by the simulator: the best card, an
engine on every card, one pipeline by the whole search of one, the best even tensor parallel, and
water-filling (layers in proportion to cards' rates, as far as they have room, one precision, the
best micro-batches).

Rows of `results/mixed_clusters.jsonl`: value = the best of these over the answer, in tokens/s or
requests/s: above 1 the answer was beaten; 0 where no way gives anything, and of no engines where
nothing fits. A job that has its row at this commit is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lib.rows import RESULTS, commit, write_row

from llmpq.costs.cost_model import CostModel
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import builtin_configs
from llmpq.planner.baselines.water_filling import water_filled
from llmpq.planner.cli.show_plan import best_answer, read_job
from llmpq.planner.cli.show_traffic import traffic_job
from llmpq.planner.costs.aiconfigurator import SystemTables, read_tables
from llmpq.planner.evaluate.objective import job_time
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.named_inputs import read_model
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.answer import answer
from llmpq.planner.solving.methods import SolveOptions
from llmpq.planner.solving.plan_search import variants_with_room
from llmpq.planner.traffic.engine_plans import EnginePlan, EnginePlanner
from llmpq.planner.traffic.named_traffic import NamedTraffic
from llmpq.planner.traffic.rates import highest_rate
from llmpq.planner.traffic.steady_state import MeanLengths
from llmpq.planner.traffic.traffic_search import (
    REQUESTS_AT_ONCE,
    STEP_TOKENS,
    alike,
    search_traffic,
)

FILE = "mixed_clusters.jsonl"
TRACES = Path(__file__).parent / "data" / "traces"
SYSTEMS = {"a100-80gb": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s"}
HALF_ONLY = ("t4", "v100")
"""Cards without bfloat16."""
BUDGETS = (0.0, 0.1, 1.0)
BATCHES = ("1", "16", "256")
LIMITS = {
    "azure_2023_conv": (2.0, 0.1),
    "azure_2023_code": (4.0, 0.2),
    "mooncake_conversation": (30.0, 0.2),
}
"""Seconds of the first token and of each further one."""
REQUESTS = 100
LONG_TRACE, LONG = "mooncake_conversation", 131_072
"""The trace of long requests, and positions that hold them."""
INSTEAD = {"mixtral-8x7b": "qwen3-30b-a3b"}
"""Of models that cannot be given so many positions."""
CLUSTERS: tuple[tuple[str, str], ...] = (
    ("4090, 3060", "llama-3.1-8b"),
    ("3090:2, 3060", "qwen3-14b"),
    ("5090, 3090", "qwen3-14b"),
    ("5090, 4090, 3090, 3060", "qwen3-32b"),
    ("4090:2, 3090:2", "gemma-3-27b"),
    ("t4:4", "llama-3.1-8b"),
    ("v100:2, t4:2", "qwen3-14b"),
    ("l40s, 4090", "qwen3-30b-a3b"),
    ("l40s:2, 3090:2", "qwen3-32b"),
    ("a100-80gb, 3090:2", "qwen3-32b"),
    ("a100-80gb:2 | 4090:4", "llama-3.1-70b"),
    ("h100, a100-80gb", "qwen3-32b"),
    ("h100:2, l40s:2", "llama-3.1-70b"),
    ("h100 | l40s:4", "mixtral-8x7b"),
    ("h200, h100", "llama-3.1-70b"),
    ("h200 | 4090:2", "qwen3-30b-a3b"),
    ("h200:2, a100-80gb:2", "qwen2.5-72b"),
    ("3090:4", "qwen3-30b-a3b"),
    ("3090:8", "mixtral-8x7b"),
    ("5090:2, 3090:4", "qwen3-32b"),
    ("4090:4 | 3090:4", "llama-3.1-70b"),
    ("v100:4 | t4:4", "qwen3-32b"),
    ("a100-80gb:4, l40s:4", "mixtral-8x7b"),
    ("h100:4 | a100-80gb:4", "llama-3.1-70b"),
    ("l40s:8", "qwen2.5-72b"),
    ("h200:2 | h100:4 | a100-80gb:4", "qwen2.5-72b"),
    ("3060:4, t4:2", "llama-3.1-8b"),
    ("5090:4 | 4090:4 | 3090:4", "gemma-3-27b"),
    ("a100-80gb:4 | v100:8 | t4:4", "qwen3-32b"),
    ("h100:8 | l40s:8", "qwen3-30b-a3b"),
)
"""Cards of each node (nodes are parted by |), and a model."""


@dataclass(frozen=True, kw_only=True)
class MixedCase:
    """A cluster, a model and a job."""

    number: int
    job: str
    model: str
    """A name, or a directory of a config with more positions."""
    costs: str | None
    cluster: str

    @property
    def request(self) -> PlanRequest:
        """What `llmpq-algo` is asked."""
        cards, _ = CLUSTERS[self.number]
        common: dict[str, Any] = {
            "model": self.model,
            "cluster": self.cluster,
            "costs": self.costs,
            "dtype": dtype_of(cards),
            "quality_budget": self.budget,
        }
        if self.job in BATCHES:
            return PlanRequest(batch=int(self.job), prompt_len=512, gen_len=128, **common)
        ttft, tpot = LIMITS[self.job]
        trace = str(TRACES / f"{self.job}.csv")
        limits: dict[str, Any] = {"rate": "max", "ttft": ttft, "tpot": tpot}
        return PlanRequest(trace=trace, requests=REQUESTS, **limits, **common)

    @property
    def budget(self) -> float:
        """The loss allowed."""
        jobs = (*BATCHES, *LIMITS)
        return BUDGETS[(self.number + jobs.index(self.job)) % len(BUDGETS)]


def dtype_of(cards: str) -> str:
    """Return the 16-bit floats that all cards have."""
    return "float16" if any(name in HALF_ONLY for name, _ in listed(cards)) else "bfloat16"


def listed(cards: str) -> Iterator[tuple[str, int]]:
    """Yield the cards of a cluster and how many there are."""
    for part in cards.replace("|", ",").split(","):
        name, _, count = part.strip().partition(":")
        yield name, int(count or 1)


def write_cluster(cards: str, path: Path) -> None:
    """Write a cluster's file: PCIe within a node, 25 Gb/s between nodes."""
    nodes = [
        {
            "name": f"n{k}",
            "devices": [{"kind": kind, "count": count} for kind, count in listed(node)],
        }
        for k, node in enumerate(cards.split("|"))
    ]
    links = {
        "within_node": {"gbps": 128, "latency_us": 15},
        "between_nodes": {"gbps": 25, "latency_us": 50},
    }
    path.write_text(yaml.safe_dump({"schema": 1, "name": cards, "nodes": nodes, "links": links}))


def write_costs(cards: str, model: str, wheel: Path, path: Path) -> bool:
    """Write the tables of the cards that have some; whether there are any."""
    dtype, found = dtype_of(cards), list[CostModel]()
    spec = read_model(PlanRequest(model=model)).spec
    for name, _ in listed(cards):
        if name in SYSTEMS:
            kinds = {"a100-80gb": "A100-80GB", "h100": "H100-SXM", "h200": "H200", "l40s": "L40S"}
            tables = SystemTables(wheel, SYSTEMS[name], None)
            found.append(read_tables(tables, spec, kinds[name], dtype))  # type: ignore[arg-type]
    for more in found[1:]:
        found[0] = found[0].merged(more)
    if found:
        found[0].save_json(path)
    return bool(found)


def model_of(model: str, job: str, folder: Path) -> str:
    """Return the model that a job is of: one of as many positions as its requests need."""
    config = dict(builtin_configs()[model])
    if job != LONG_TRACE or config["max_position_embeddings"] >= LONG:
        return model
    name = INSTEAD.get(model, model)
    path = folder / f"{name}-{LONG}"
    path.mkdir(exist_ok=True)
    config = dict(builtin_configs()[name])
    own = 32_768  # YaRN's, of the cards of Qwen2.5 and Qwen3
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": LONG / own,
        "original_max_position_embeddings": own,
    }
    config["max_position_embeddings"] = LONG
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the answer gives, what the simple ways give, and what it took to find."""

    ours: float
    others: dict[str, float]
    seconds: float
    cpu_s: float
    engines: int


def of_batch(case: MixedCase) -> Compared:
    """Plan a batch job; speeds are tokens/s."""
    request = case.request
    start, used = time.perf_counter(), cpu_seconds()
    job = read_job(request)
    best, found = best_answer(request, job.problem, job.options, job.path)
    seconds, cpu_s = time.perf_counter() - start, cpu_seconds() - used
    p, options = job.problem, job.options
    tokens = p.workload.batch * p.workload.gen_len
    times: dict[str, float] = {}
    own_s = job_time(best.problem, best.outcome.assignment).total_s
    engines = 1
    if found is not None and found.topology is not None:
        engines = len(found.topology.engines)
        own_s = found.found.value
    if found is not None:
        for name, key in (("card", "card"), ("even TP", "shared"), ("each", "each")):
            one = found.found.simple[key]
            times |= {} if one is None else {name: one[1]}
    elif best.problem.max_stages > 1:
        times |= pipeline_time(p.with_changes(max_devices=1), options, "card")
    times |= pipeline_time(p, options, "pipeline")
    filled = water_filled(variants_with_room(p, options), options.budget)
    if filled is not None:
        times["water-filling"] = job_time(filled[0], filled[1].assignment).total_s
    return Compared(
        ours=tokens / own_s,
        others={name: tokens / one_s for name, one_s in times.items()},
        seconds=seconds,
        cpu_s=cpu_s,
        engines=engines,
    )


def pipeline_time(p: Problem, options: SolveOptions, name: str) -> dict[str, float]:
    """Return the best pipeline's seconds under a name; nothing where none fits."""
    try:
        one = answer(p, options, None)
    except DoesNotFitError:
        return {}
    return {name: job_time(one.problem, one.outcome.assignment).total_s}


def of_trace(case: MixedCase) -> Compared:
    """Plan for a trace; speeds are requests/s within the limits, of all engines together."""
    start, used = time.perf_counter(), cpu_seconds()
    job, traffic, objective = traffic_job(case.request)
    try:
        engines = search_traffic(
            job.problem, job.options, job.path, traffic, objective
        ).best.engines
    except DoesNotFitError:
        engines = ()
    seconds, cpu_s = time.perf_counter() - start, cpu_seconds() - used
    simple = SimpleRates(job.problem, job.options, traffic)
    cards = [[cls.first.name] for cls in job.problem.classes]
    others = {
        "card": max(simple.of(card)[1] for card in cards),
        "each": simple.of_each([(cls.first.name, cls.count) for cls in job.problem.classes]),
        "pipeline": simple.of([device.name for device in job.problem.cluster.devices])[1],
        "water-filling": simple.water_filled(),
        "even TP": simple.shared(case.request),
    }
    ours = simple.together(engines)
    others = {name: rate for name, rate in others.items() if rate > 0}
    return Compared(ours=ours, others=others, seconds=seconds, cpu_s=cpu_s, engines=len(engines))


@dataclass(frozen=True)
class SimpleRates:
    """Rates of engines, by the simulator."""

    problem: Problem
    options: SolveOptions
    traffic: NamedTraffic
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    @cached_property
    def planner(self) -> EnginePlanner:
        """Plans of engines for the traffic's mean lengths."""
        lengths = MeanLengths.of(self.traffic)
        return EnginePlanner(self.problem, self.options, None, lengths, self.traffic.limits)

    def of(self, names: Sequence[str]) -> tuple[EnginePlan | None, float]:
        """Return one engine and its rate: the best of each step's best by its steady state."""
        best, most = None, 0.0
        for tokens in STEP_TOKENS:
            tried = (
                self.planner.plan(names, requests, tokens, solved_for=STEP_TOKENS[0])
                for requests in REQUESTS_AT_ONCE
            )
            found = [one for one in tried if one is not None]
            if found:
                engine = max(found, key=lambda one: one.steady.rate_per_s)
                rate = self.rate(engine, most)
                best, most = (engine, rate) if rate > most else (best, most)
        return best, most

    def rate(self, engine: EnginePlan, above: float = 0.0) -> float:
        """Return the highest rate of an engine by simulation; once of engines that are alike.

        0 where it is not above a rate.
        """
        every, limits, key = self.traffic.arrivals, self.traffic.limits, alike(engine)
        if key in self._known:
            return self._known[key]
        found = highest_rate(
            [engine.model],
            every,
            limits,
            guess_per_s=engine.steady.rate_per_s,
            above_per_s=above,
        ).rate_per_s
        if found or not above:
            self._known[key] = found
        return found

    def together(self, engines: Sequence[EnginePlan]) -> float:
        """Return the highest rate of engines to which requests are routed."""
        rates = [self.rate(one) for one in engines]
        if len(engines) < 2:
            return sum(rates)
        models = [one.model for one in engines]
        every, limits = self.traffic.arrivals, self.traffic.limits
        return highest_rate(models, every, limits, guess_per_s=sum(rates) or None).rate_per_s

    def of_each(self, cards: Sequence[tuple[str, int]]) -> float:
        """Return the rate of an engine on every card; or on those of the fastest classes alone."""
        found = [(*self.of([name]), count) for name, count in cards]
        found.sort(key=lambda one: -one[1])
        engines, best = list[EnginePlan](), 0.0
        for engine, rate, count in found:
            if engine is not None and rate > 0:
                engines += [engine] * count
                best = max(best, self.together(engines))
        return best

    def water_filled(self) -> float:
        """Return the rate of water-filling with the steps and requests that suit it best."""
        plans = (self.planner.filled(requests, STEP_TOKENS[0]) for requests in REQUESTS_AT_ONCE)
        found = [self.planner.engine_of(one, STEP_TOKENS[0]) for one in plans if one is not None]
        able = [one for one in found if one is not None]
        return self.rate(max(able, key=lambda one: one.steady.rate_per_s)) if able else 0.0

    def shared(self, request: PlanRequest) -> float:
        """Return the rate of even tensor parallel over all cards of the one node."""
        number = len(self.problem.cluster.devices)
        try:
            p, _, _ = make_problem(
                replace(
                    request,
                    objective="makespan",
                    trace=None,
                    prompt_len=512,
                    gen_len=100,
                    tensor_parallel=str(number),
                )
            )
        except (ValueError, DoesNotFitError):
            return 0.0
        names = [device.name for device in p.cluster.devices]
        return SimpleRates(p, self.options, self.traffic).of(names)[1] if len(names) == 1 else 0.0


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))


def run(case: MixedCase) -> None:
    """Compare one job and write its row."""
    cards, model = CLUSTERS[case.number][0], Path(case.model).name
    batch = case.job in BATCHES
    try:
        found = of_batch(case) if batch else of_trace(case)
    except DoesNotFitError:
        print(f"{case.number} {cards}, {model}, {case.job}: nothing fits", flush=True)
        found = Compared(ours=0.0, others={}, seconds=0.0, cpu_s=0.0, engines=0)
    best = max(found.others, key=lambda name: found.others[name], default="")
    ratio = found.others[best] / found.ours if best and found.ours else math.inf if best else 0.0
    write_row(
        FILE,
        bench="mixed_clusters",
        case={
            "number": case.number,
            "cards": cards,
            "model": model,
            "job": case.job,
            "budget": case.budget,
            "engines": found.engines,
        },
        unit="x",
        samples=[ratio if math.isfinite(ratio) else 1e9],
        noisy=os.getloadavg()[0] > (os.cpu_count() or 1),
        baselines={
            "ours": found.ours,
            **found.others,
            "seconds": found.seconds,
            "cpu_s": found.cpu_s,
        },
    )
    speeds = ", ".join(f"{name} {speed:.4g}" for name, speed in found.others.items())
    print(
        f"{case.number} {cards}, {model}, {case.job}, loss {case.budget:g}: {ratio:.4f} "
        f"({found.engines} engines {found.ours:.4g}; {speeds}), {found.seconds:.1f} s, "
        f"{found.cpu_s:.1f} CPU{'  WORSE' if ratio > 1 + 1e-6 else ''}",
        flush=True,
    )


def done() -> set[tuple[int, str]]:
    """Return the jobs that have their row at this commit."""
    path, now = RESULTS / FILE, commit()
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(r["case"]["number"], r["case"]["job"]) for r in rows if r["commit"] == now}


def main() -> None:
    """Run what the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="AIConfigurator's tables")
    parser.add_argument("--cases", help="numbers of clusters, such as 0,7 (default: all)")
    parser.add_argument("--jobs", default=",".join((*BATCHES, *LIMITS)), help="%(default)s")
    args = parser.parse_args()
    numbers = range(len(CLUSTERS)) if args.cases is None else map(int, args.cases.split(","))
    known = done()
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            jobs = [job for job in args.jobs.split(",") if (number, job) not in known]
            if not jobs:
                continue
            cards, usual = CLUSTERS[number]
            cluster = Path(folder) / f"{number}.yaml"
            write_cluster(cards, cluster)
            for job in jobs:
                model = model_of(usual, job, Path(folder))
                costs = Path(folder) / f"{number}-{Path(model).name}.json"
                measured = costs.exists() or write_costs(cards, model, args.wheel, costs)
                run(
                    MixedCase(
                        number=number,
                        job=job,
                        model=model,
                        costs=str(costs) if measured else None,
                        cluster=str(cluster),
                    )
                )


if __name__ == "__main__":
    main()

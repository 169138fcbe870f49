"""Plans the paper's clusters again with one device removed, as a recovery does.

    python benchmarks/elastic.py replan [--rows]

One line for every kind of device of every cluster; rows go to results/replan.jsonl: seconds, and
seconds that one CPU was busy, which other work does not change.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

from lib.paper_clusters import MODELS
from lib.rows import write_row

from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.elastic.replan import Replanner
from llmpq.runtime.launch.plans.auto_plan import plan_job
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.workload import Workload

CLUSTERS = Path(__file__).parents[2] / "clusters" / "paper"
JOB = Workload(batch=32, prompt_len=512, gen_len=100)


def main(words: list[str], program: str) -> None:
    """Plan, remove, plan again."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="add rows to the results")
    given = parser.parse_args(words)
    for number, model in MODELS.items():
        spec = ModelSpec.by_name(model.replace(" ", "-"))
        cluster = Cluster.load(CLUSTERS / f"{number:02d}.yaml")
        options = EngineOptions(cluster=cluster, load_format="dummy")
        plan = plan_job(spec.name, cluster, JOB, options, spec=spec).plan
        samples: list[float] = []
        busy: list[float] = []
        for kind in dict.fromkeys(stage.kind for stage in plan.stages):
            index = next(i for i, stage in enumerate(plan.stages) if stage.kind == kind)
            began_s, was_busy_s = time.perf_counter(), busy_s()
            try:
                made = Replanner(Path(spec.name), spec, plan, options)(
                    plan, index, whole_node=False
                )
                said = f"{made.change['now']['weights']}, {made.change['now']['kv']}"
            except DoesNotFitError as error:
                said = f"refused: {error}"[:100]
            samples.append(time.perf_counter() - began_s)
            busy.append(busy_s() - was_busy_s)
            print(f"{number:2d} {model} without a {kind}: {samples[-1]:.2f} s, {busy[-1]:.2f} s of "
                  f"CPU; {said}", flush=True)  # fmt: skip
        if given.rows:
            for unit, values in (("s", samples), ("s of CPU", busy)):
                write_row(
                    "replan.jsonl", bench="replan", case={"cluster": number, "model": model},
                    unit=unit, samples=values,
                    noisy=unit == "s" and os.getloadavg()[0] > (os.cpu_count() or 1),
                )  # fmt: skip


def busy_s() -> float:
    """Return the processor time of this process and of those that it started."""
    own, others = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime

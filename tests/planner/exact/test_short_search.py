"""A search that has no time gives a plan its best micro-batches all the same."""

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.evaluate.objective import job_time
from llmpq.planner.exact.search import solve_exact
from llmpq.planner.problem.make_problem import ProblemInputs, build_problem
from llmpq.workload import Workload

pytestmark = pytest.mark.pure


def test_micro_batches_suit_the_plan():
    """Where quality counts a million times as much as time no search would look for them."""
    nodes = [{"name": "a", "devices": [{"kind": "T4", "count": 2}, {"kind": "V100-32GB"}]}]
    inputs = ProblemInputs(
        spec=ModelSpec.by_name("opt-13b"),
        cluster=Cluster.parse_data({"name": "c", "nodes": nodes}, where="test"),
        workload=Workload(batch=32, prompt_len=512, gen_len=100),
        theta=1e7,
    )
    problem = build_problem(inputs).problem
    found = solve_exact(problem, time_limit_s=0.0).assignment
    best = min(
        job_time(problem, type(found)(prefill_microbatch=eta, decode_microbatch=xi,
                                      stages=found.stages)).total_s
        for eta, xi in problem.pairs
    )  # fmt: skip
    assert job_time(problem, found).total_s <= 1.01 * best

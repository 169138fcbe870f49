"""A report's prediction is of as many requests and tokens as ran."""

from __future__ import annotations

import pytest

from llmpq.plan import Plan
from llmpq.planner.make import make_plan
from llmpq.runtime.report.job_report import JobResult, predicted_of_run
from llmpq.runtime.request import Finished

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("llama-3.1-8b", devices="4090,3090", batch=8, prompt_len=512, gen_len=50)


@pytest.mark.parametrize(
    ("count", "tokens", "prefill", "decode"),
    [(8, 50, 1, 1), (20, 50, 2.5, 2.5), (2, 50, 0.25, 1), (16, 25, 2, 1), (1, 100, 0.125, 2)],
)
def test_a_report_predicts_what_ran(
    plan: Plan, count: int, tokens: int, prefill: float, decode: float
) -> None:
    rows = [
        Finished(id=k, tokens=[1] * tokens, finish_reason="length", first_token_s=0.1, total_s=1.0)
        for k in range(count)
    ]
    job = JobResult(
        plan=plan, loads=(), records=(), finished=rows, num_failed=0, prompt_tokens=count * 512,
        startup_s=0.0,
    )  # fmt: skip
    found, promised = predicted_of_run(plan, job), plan.predicted
    assert found is not None and promised is not None
    assert found["prefill_s"] == pytest.approx(prefill * promised.prefill_s)
    assert found["decode_s"] == pytest.approx(decode * promised.decode_s)
    assert found["total_s"] == found["prefill_s"] + found["decode_s"]

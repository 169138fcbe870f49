"""A report's prediction is of as many requests and tokens as ran."""

from __future__ import annotations

import pytest

from llmpq.planner.make import make_plan
from llmpq.plans.plan import Plan
from llmpq.runtime.report.job_report import JobResult, predicted_of_run
from llmpq.runtime.requests.request_output import CompletionOutput, RequestOutput

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
    answer = CompletionOutput(
        index=0, text="", token_ids=[1] * tokens, finish_reason="length", first_token_s=0.1,
        total_s=1.0,
    )  # fmt: skip
    row = RequestOutput(request_id="", prompt=None, prompt_token_ids=[5] * 512, outputs=[answer])
    job = JobResult(
        plan=plan, loads=(), records=(), outputs=[row] * count, num_failed=0, startup_s=0.0
    )
    found, promised = predicted_of_run(plan, job), plan.predicted
    assert found is not None and promised is not None
    assert found["prefill_s"] == pytest.approx(prefill * promised.prefill_s)
    assert found["decode_s"] == pytest.approx(decode * promised.decode_s)
    assert found["total_s"] == found["prefill_s"] + found["decode_s"]

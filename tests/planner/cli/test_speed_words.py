"""The speeds that people compare: first token, tokens/s of a request and of the job, busy times."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llmpq.planner.cli.alternatives import Speed
from llmpq.planner.cli.report import speed_line, stage_table
from llmpq.planner.make import make_plan
from llmpq.plans.plan import Plan
from llmpq.units import shown

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("llama-3.1-8b", devices="4090,3090", batch=8, prompt_len=512, gen_len=50)


def test_a_request_s_rate_times_the_batch_is_the_rate_of_decoding(plan: Plan) -> None:
    predicted = plan.predicted
    assert predicted is not None
    found = re.fullmatch(
        r"first token of the last request after ([\d.]+) s \(all 8 sent at once\), then ([\d.]+) "
        r"tokens/s a request; the job ([\d.]+) tokens/s",
        speed_line(plan),
    )
    assert found is not None
    first_s, rate, job = map(float, found.groups())
    assert first_s + 49 / rate == pytest.approx(predicted.total_s, rel=2e-3)
    assert job == pytest.approx(8 * 50 / predicted.total_s, rel=1e-3)
    alone = make_plan("llama-3.1-8b", devices="4090", batch=1, gen_len=1)
    assert re.fullmatch(r"first token after [\d.]+ s", speed_line(alone))


def test_a_chat_is_compared_by_its_first_token_and_its_own_rate() -> None:
    new = Speed(batch=1, total_s=60, first_token_s=46, request_per_s=9.731, job_per_s=1.78)
    old = replace(new, first_token_s=11.26, request_per_s=9.669)
    assert (
        new.beside(old)
        == "first token after 46.0 instead of 11.3 s, then 9.73 instead of 9.67 tokens/s"
    )
    slow, slower = replace(new, batch=2, job_per_s=0.03125), replace(new, batch=2, job_per_s=0.0312)
    assert slow.beside(slower) == "0.03125 instead of 0.0312 tokens/s"
    assert shown(0.02) == "0.02" and shown(1234.5) == "1,234" and shown(17.66) == "17.7"
    plan = make_plan("llama-3.1-8b", devices="4090", batch=1, prompt_len=8000, gen_len=20)
    found = re.fullmatch(
        r"first token after ([\d.]+) s, then ([\d.]+) tokens/s \(with its prompt ([\d.]+)\)",
        speed_line(plan),
    )
    assert found is not None and plan.predicted is not None
    first_s, rate, whole = map(float, found.groups())
    assert first_s + 19 / rate == pytest.approx(20 / whole, rel=1e-2)


def test_both_phases_are_of_the_same_requests(plan: Plan) -> None:
    """The slowest stage is busy for nearly all of a phase: with its time for the whole batch."""
    table, predicted = stage_table(plan), plan.predicted
    assert predicted is not None
    names = [str(column.header) for column in table.columns]
    assert names[-3:-1] == ["prompts of 8", "a token of 8"]
    prompts, token = ([*table.columns[k].cells] for k in (-3, -2))
    busiest = max(float(str(cell).split()[0]) for cell in prompts) / 1e3
    assert 0.5 * predicted.prefill_s < busiest <= predicted.prefill_s
    slowest = max(float(str(cell).split()[0]) for cell in token) / 1e3
    assert slowest * 49 <= predicted.decode_s * 1.01

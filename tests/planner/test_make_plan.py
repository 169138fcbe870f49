"""`make_plan` makes a request of values, as the command line makes one of flags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import llmpq
from llmpq.errors import DoesNotFitError
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.problem.make_problem import make_problem

pytestmark = pytest.mark.pure


def test_values_and_flags_state_the_same_job() -> None:
    plan = llmpq.make_plan(
        "llama-3.1-8b", devices="4090", batch=4, context=2048, gen_len=48, bits="4,8"
    )
    words = "--model llama-3.1-8b --devices 4090 --global_bz 4 --context 2k --n 48 --bits 4,8"
    problem, _, _ = make_problem(plan_request(words.split()))
    assert plan.workload == problem.workload and plan.workload.prompt_len == 2000


@pytest.mark.parametrize("shares", [2, "3:1"])
def test_devices_may_share_a_stage(shares: int | str) -> None:
    plan = llmpq.make_plan("llama-3.1-8b", devices="4090:2", batch=4, tensor_parallel=shares)
    assert [len(stage.devices) for stage in plan.stages] == [2]


def test_devices_share_a_stage_where_one_engine_gains_by_it() -> None:
    job = {"devices": "5090,3080:2", "batch": 1, "gen_len": 64}
    shared = llmpq.make_plan("gemma-3-27b", **job)
    assert [stage.shares for stage in shared.stages] == [(7, 2, 2)]
    alone = llmpq.make_plan("gemma-3-27b", **job, tensor_parallel=1)
    assert shared.predicted is not None and alone.predicted is not None
    assert shared.predicted.sum_omega <= alone.predicted.sum_omega
    assert shared.predicted.total_s < alone.predicted.total_s


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"batch": 0}, "batch must be between 1 and 10,000, got 0"),
        ({"batch": "8"}, "batch must be a whole number, 1 to 10,000, got '8'"),
        ({"batch": True}, "batch must be a whole number, 1 to 10,000, got True"),
        ({"prompt_len": "8kb"}, "prompt_len must be a whole number, 1 to 1,048,576, got '8kb'"),
        ({"bits": {4}}, 'bits must be text, such as "4,8", got {4}'),
        ({"context": 64, "prompt_len": 8}, "context is prompt and answer together"),
        ({"context": 64, "gen_len": 64}, "context=64 has no room for a prompt"),
        ({"theta": 1.0, "prefer": "speed"}, "prefer and theta both say which plan is best"),
        ({"tensor_parallel": 0}, "tensor_parallel must be a number of devices"),
        ({"method": "all"}, "unknown method 'all'"),
        ({"theta": "x"}, "theta must be between 0 and 1e+15 seconds per unit of omega, got 'x'"),
        ({"theta": [1]}, "theta must be between 0 and 1e+15 seconds per unit of omega, got [1]"),
        ({"quality_budget": True}, "quality_budget must be between 0 and 1e+09, got True"),
        ({"dtype": None}, "unknown dtype 'None': known: auto,"),
        ({"prefer": 5}, "unknown prefer '5': known: balanced,"),
        ({"kv": None}, 'kv must be text, such as "16,8", got None'),
    ],
)
def test_errors_name_arguments(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        llmpq.make_plan("llama-3.1-8b", devices="4090", **asked)
    assert said in str(caught.value) and "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"devices": ["4090", "3090"]}, {"devices": "4090,3090"}),
        ({"bits": 4}, {"bits": "4"}),
        ({"bits": [4, np.int64(8)]}, {"bits": "4,8"}),
        ({"kv": 8}, {"kv": "8"}),
        ({"kv": (16, "kv8")}, {"kv": "16,8"}),
        ({"reserve": 0}, {"reserve": "0"}),
        ({"prompt_len": "1k"}, {"prompt_len": 1024}),
        ({"context": "1.5k"}, {"context": 1536}),
        ({"batch": np.int32(3)}, {"batch": 3}),
    ],
)
def test_values_of_python_say_what_texts_do(given: dict[str, Any], same: dict[str, Any]) -> None:
    job = {"devices": "4090", "batch": 4, "gen_len": 16, "tensor_parallel": 1}
    plan = llmpq.make_plan("llama-3.1-8b", **{**job, **given})
    wanted = llmpq.make_plan("llama-3.1-8b", **{**job, **same})
    assert plan.workload == wanted.workload and plan.stages == wanted.stages


def test_what_the_command_warns_of_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    llmpq.make_plan("llama-3.1-8b", devices="4090", batch=1)
    assert not caplog.records
    llmpq.make_plan("llama-3.1-8b", devices="4090", batch=1, kv=8, gen_len=140_000)
    [record] = caplog.records
    assert record.name == "llmpq.planner" and record.levelname == "WARNING"
    assert record.message.startswith("prompts of 512 and answers of 140000 tokens are beyond the ")


def test_a_name_that_is_none_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="make_plan has no argument 'batchs': did you mean 'batch'"):
        llmpq.make_plan("llama-3.1-8b", devices="4090", batchs=3)


def test_what_would_fit_is_said_in_arguments() -> None:
    with pytest.raises(DoesNotFitError, match="what fits: bits=8,16") as caught:
        llmpq.make_plan("llama-3.1-8b", devices="3060", bits="16")
    assert "--" not in str(caught.value)

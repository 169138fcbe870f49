"""The engine with threads for stages: failures, and what travels between stages."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import fields

import numpy as np
import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.stages.stage_wire import read_request, write_request
from llmpq.runtime.links.message import pack_header, unpack_header
from llmpq.runtime.requests.request import Request, RowSampling, StepKind, StepMessage
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from reference.open_stages import OpenStages

pytestmark = [pytest.mark.cpu, pytest.mark.quick]
POOL = PoolSize(num_blocks=8, slots=4, max_len=100)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def engine(make_plan, model, splits, **workload) -> OpenStages:
    spec = ModelSpec.from_directory(model)
    plan = make_plan(model, splits, **workload)
    return OpenStages(plan, spec, CheckpointSource(model, spec), pool=POOL)


def serve(runner: OpenStages, requests: list[Request]) -> None:
    limits = PoolLimits(
        num_blocks=POOL.num_blocks,
        max_rows=POOL.slots,
        max_len=POOL.max_len,
        step_tokens=64,
        decode_rows=POOL.slots,
        num_stages=len(runner.computes),
    )
    runner.run(Scheduler(limits), requests)


def test_a_failing_stage_ends_the_run(tiny_models, make_plan):
    runner = engine(make_plan, tiny_models.directory("llama"), (1,), prompt_len=8, gen_len=4)
    runner.computes[1].kv = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        serve(runner, [Request(id=0, prompt=(5, 6), max_new=4)])


def test_a_failing_first_stage_ends_the_others(tiny_models, make_plan, monkeypatch):
    runner = engine(make_plan, tiny_models.directory("opt"), (1,))
    before = threading.active_count()

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(runner.computes[0], "run", fail)
    with pytest.raises(RuntimeError, match="planted"):
        serve(runner, [Request(id=0, prompt=(1, 2, 3), max_new=4)])
    end_s = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_headers_carry_every_field():
    rng = random.Random(0)
    for rows in (1, 3, 8):

        def numbers(first: int, end: int, rows: int = rows) -> np.ndarray:
            return np.array([rng.randrange(first, end) for _ in range(rows)])

        message = StepMessage(
            kind=StepKind.DRAFT,
            seq=rng.randrange(10**6),
            slots_B=numbers(0, 64),
            starts_B=numbers(0, 4096),
            num_new_B=numbers(1, 5),
            sample_steps_B=numbers(0, 512),
            sampling=RowSampling(
                SamplerConfig(
                    temperature=0.7 * i, top_k=i or None, top_p=0.95, min_p=0.01 * i, seed=2**62 + i
                )
                for i in range(rows)
            ),
            rules_B=numbers(-1, 10**9),
        )
        got = unpack_header(pack_header(message, max_rows=8))
        for field in fields(StepMessage):
            assert np.array_equal(getattr(got, field.name), getattr(message, field.name)), field


def test_draft_steps_sample_at_their_own_index():
    scheduler = Scheduler(
        PoolLimits(num_blocks=4, max_rows=2, max_len=99, step_tokens=9, decode_rows=2),
        drafter=FixedDrafter("w4kv4", 2),
    )
    scheduler.submit(Request(id=0, prompt=(1, 2), max_new=9))
    steps = []
    for token in (7, 8, 9):
        step = scheduler.next_micro_batch()
        assert step is not None
        scheduler.update_from_output(step, [[token]])
        values = (step.starts_B, step.num_new_B, step.sample_steps_B, step.tokens_T)
        steps.append((step.kind, *(of_rows.tolist() for of_rows in values)))
    assert steps == [
        (StepKind.PREFILL, [0], [2], [0], [1, 2]),
        (StepKind.DRAFT, [2], [1], [1], [7]),
        (StepKind.DRAFT, [3], [1], [2], [8]),
    ]


def test_requests_survive_the_way_to_the_first_stage():
    request = Request(
        id=4,
        prompt=(1, 2, 3),
        max_new=9,
        stop_ids=frozenset({2, 5}),
        stop_texts=("\n\n",),
        sampling=SamplerConfig(temperature=0.5, top_k=4, top_p=0.9, seed=11),
    )
    copy = read_request(write_request(request))
    assert write_request(copy) == write_request(request)
    assert (copy.sampling, copy.stop_ids) == (request.sampling, request.stop_ids)


def test_plans_of_the_fixture_are_complete(make_plan, demo_model):
    plan = make_plan(demo_model, (3,))
    assert isinstance(plan, Plan) and [s.layers for s in plan.stages] == [(0, 3), (3, 8)]

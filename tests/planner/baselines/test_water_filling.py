"""Layers by cards' rates, as people deal them out by hand."""

from __future__ import annotations

import pytest

from llmpq.planner.baselines.water_filling import water_filled
from llmpq.planner.cli.show_plan import read_job
from llmpq.planner.evaluate.fits import fits
from llmpq.planner.problem.outcome import Assignment
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.solving.plan_search import variants_with_room

pytestmark = [pytest.mark.pure]


def filled(devices: str) -> tuple[Problem, Assignment]:
    job = read_job(PlanRequest(model="qwen3-14b", devices=devices, batch=4, bits="16"))
    found = water_filled(variants_with_room(job.problem, job.options))
    assert found is not None and found[1].assignment is not None
    return found[0], found[1].assignment


def test_layers_follow_rates_and_move_for_room_alone() -> None:
    _, by_rates = filled("5090,3090:2")
    layers = [stage.end - stage.start for stage in by_rates.stages]
    assert layers == [24, 8, 8]  # 210 and 71 TFLOPS, quicker than [20, 10, 10] by memory rates
    problem, moved = filled("5090=12GB+1792GB/s+210TFLOPS,3090:2")
    assert fits(problem, moved)
    assert moved.stages[0].end < 24 and sum(s.end - s.start for s in moved.stages) == 40

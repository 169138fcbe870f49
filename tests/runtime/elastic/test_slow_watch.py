"""A device that has become slow is noticed, load on all or for a moment is not."""

from __future__ import annotations

import logging
import time

import pytest

from llmpq import LLM, SamplingParams
from llmpq.devices.cluster import Cluster
from llmpq.runtime.elastic import slow_watch
from llmpq.runtime.elastic.slow_watch import LEARNT, SLOW, SlowStages


class Stages:
    """Three stages that compute 100 steps between two looks."""

    def __init__(self) -> None:
        self.watch, self.busy_s, self.steps = SlowStages(), [0.0, 0.0, 0.0], 0
        self.look([1, 1, 1])

    def look(self, factors, *, steps: int = 100):
        self.steps += steps
        for index, (usual_s, factor) in enumerate(zip((0.01, 0.03, 0.02), factors, strict=True)):
            self.busy_s[index] += steps * usual_s * factor
        kinds = {"decode": {"steps": self.steps}}
        return self.watch.found([{"busy_s": own, "kinds": kinds} for own in self.busy_s])

    def looks(self, count, factors, **more):
        return [self.look(factors, **more) for _ in range(count)]


@pytest.mark.pure
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_stage_is_found_after_a_minute_and_said_once(slow):
    stages = Stages()
    assert not any(stages.looks(LEARNT + 20, [1, 1, 1]))
    factors = [2.0 if index == slow else 1.0 for index in range(3)]
    assert not any(stages.looks(SLOW - 1, factors))
    index, factor = stages.look(factors)
    assert index == slow and factor == pytest.approx(2.0, rel=0.01)
    assert not any(stages.looks(3 * SLOW, factors)), "it is usual now"


@pytest.mark.pure
def test_what_is_no_slow_device_is_not_taken_for_one():
    stages = Stages()
    stages.looks(LEARNT, [1, 1, 1])
    assert not any(stages.looks(3 * SLOW, [3, 3, 3])), "all alike"
    for _ in range(5):
        assert not any(stages.looks(SLOW // 2, [1, 4, 1])), "a moment"
        assert stages.look([1, 1, 1]) is None
    assert not any(stages.looks(3 * SLOW, [1, 1.25, 1])), "within the band"
    assert not any(stages.looks(3 * SLOW, [1, 9, 1], steps=2)), "hardly a step"
    for turn in range(3 * SLOW):
        assert stages.look([1, 4, 1] if turn % 2 else [1, 1, 4]) is None, "in turn"


@pytest.mark.pure
def test_other_stages_begin_anew():
    stages = Stages()
    stages.looks(LEARNT, [1, 1, 1])
    stages.looks(SLOW - 1, [1, 2, 1])
    kinds = {"decode": {"steps": 0}}
    assert stages.watch.found([{"busy_s": 0.0, "kinds": kinds}] * 2) is None
    assert stages.look([1, 2, 1]) is None


@pytest.mark.cluster
def test_layers_move_away_from_a_stage_made_slow(demo_model, monkeypatch, caplog):
    """What is slow is said here; how it is found from stages' times is tested above."""
    monkeypatch.setattr(slow_watch, "EVERY_S", 0.4)
    answers = iter([None, None, (1, 6.0)])
    monkeypatch.setattr(SlowStages, "found", lambda self, work: next(answers, None))
    device = {"kind": "CPU", "threads": 1, "memory": "48 MiB", "reserve": 0}
    nodes = [{"name": "here", "devices": [device, device]}]
    two = Cluster.parse_data({"name": "two", "nodes": nodes}, where="test")
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    how = {"max_model_len": 160, "max_num_seqs": 4, "dtype": "float32", "use_tqdm": False}
    with (
        caplog.at_level(logging.WARNING),
        LLM(demo_model, cluster=two, backend="processes", **how) as llm,
    ):
        if len(llm.plan.stages) < 2:
            pytest.skip("one device is the better plan here")
        expected = None
        until_s = time.monotonic() + 400
        while not llm.recoveries and time.monotonic() < until_s:
            again = [list(o.outputs[0].token_ids) for o in llm.generate(["def f("] * 4, params)]
            expected = expected or again
            assert again == expected
        assert [one.action for one in llm.recoveries] == ["slow"]
        assert "stage 1 (CPU-1" in caplog.text and "times as long as before" in caplog.text
        again = [list(o.outputs[0].token_ids) for o in llm.generate(["def f("] * 4, params)]
        assert expected is None or again == expected

"""A plan in a terminal: bars to scale within 100 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.pictures.memory_parts import device_bytes, memory_parts
from llmpq.pictures.text_pictures import NAME, WIDE, memory_bars, pipeline_lines
from llmpq.plans.plan import Plan

pytestmark = pytest.mark.pure
PLAN = Plan.load(Path(__file__).resolve().parents[3] / "docs/plan.json")


def test_bars_are_as_long_as_what_they_show() -> None:
    lines = [line.plain for line in memory_bars(PLAN)]
    bars, legend = lines[: len(PLAN.stages)], " ".join(lines[len(PLAN.stages) :])
    assert all(len(line) <= 100 for line in lines)
    most = max(map(device_bytes, PLAN.stages))
    assert "8 8-bit layers, 4 4-bit layers" in legend and "16-bit" not in legend
    for index, bar in enumerate(bars):
        assert len(bar) <= 100 and bar.startswith(PLAN.stages[index].device)
        drawn = bar[NAME + 1 :]
        assert len(drawn) == pytest.approx(WIDE * device_bytes(PLAN.stages[index]) / most, abs=1)
        sizes = {part.name: part.nbytes for part in memory_parts(PLAN, index)}
        for letters, name in (("84", "weights"), ("K", "KV cache"), (".", "free")):
            wide = sum(drawn.count(letter) for letter in letters)
            assert wide == pytest.approx(WIDE * sizes[name] / most, abs=1)


def test_the_pipeline_has_prefill_first_and_the_bottleneck_busy() -> None:
    *lines, legend = (line.plain for line in pipeline_lines(PLAN))
    assert all(len(line) <= 100 for line in (*lines, legend))
    for stage, line in zip(PLAN.stages, lines, strict=True):
        drawn = line[NAME + 1 :].lower().strip()
        assert drawn.rfind("p") < drawn.rfind("d") and drawn.startswith("p")
        if stage.device == PLAN.predicted.bottleneck:
            assert line.count("D") > 40


def test_a_plan_by_hand_has_none() -> None:
    stages = tuple(
        stage.model_copy(update={"memory": None, "decode_s": None}) for stage in PLAN.stages
    )
    bare = PLAN.model_copy(update={"stages": stages})
    assert memory_bars(bare) == [] and pipeline_lines(bare) == []

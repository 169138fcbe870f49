"""The driver that holds topologies against simple ones values what it says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from llmpq.planner.problem.named_inputs import read_model
from llmpq.planner.problem.requests import PlanRequest

pytestmark = [pytest.mark.pure]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setenv("LLMPQ_ROWS", str(tmp_path))
    yield importlib.import_module("mixed_clusters")
    for name in ("mixed_clusters", "lib.rows"):
        sys.modules.pop(name, None)


def test_the_thirty_clusters_are_what_was_wanted(driver: ModuleType) -> None:
    counts = [sum(n for _, n in driver.listed(cards)) for cards, _ in driver.CLUSTERS]
    kinds = {name for cards, _ in driver.CLUSTERS for name, _ in driver.listed(cards)}
    assert len(counts) == 30 and min(counts) == 2 and max(counts) == 16
    assert kinds == {*driver.SYSTEMS, "3060", "3090", "4090", "5090", "t4", "v100"}


def test_models_have_positions_for_the_longest_request(driver: ModuleType, tmp_path: Path) -> None:
    """121,213 tokens of Mooncake's first hundred; Qwen models by YaRN, as their cards say."""
    for model, expected in (
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("qwen3-14b", "qwen3-14b-131072"),
        ("mixtral-8x7b", "qwen3-30b-a3b-131072"),
    ):
        assert driver.model_of(model, "azure_2023_code", tmp_path) == model
        named = driver.model_of(model, driver.LONG_TRACE, tmp_path)
        assert Path(named).name == expected
        assert read_model(PlanRequest(model=named)).spec.max_positions == 131_072


@pytest.mark.slow
def test_an_answer_is_beside_simple_ones_that_do_not_beat_it(
    driver: ModuleType, tmp_path: Path
) -> None:
    cluster = tmp_path / "c.yaml"
    driver.write_cluster(driver.CLUSTERS[0][0], cluster)
    case = driver.MixedCase(
        number=0, job="1", model="llama-3.1-8b", costs=None, cluster=str(cluster)
    )
    found = driver.of_batch(case)
    assert set(found.others) == {"card", "each", "pipeline", "even TP", "water-filling"}
    assert found.ours >= max(found.others.values())

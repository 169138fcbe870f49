"""Plans from values: layers keep their bits where they fit, and give up as little as they must."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.planner.__main__ import main
from llmpq.planner.make import plan_workload
from llmpq.planner.problem.known_plan import PlanSearch
from llmpq.precision import Precision
from llmpq.workload import Workload

pytestmark = pytest.mark.pure

MODEL = Path(__file__).parents[3] / "examples" / "demo-7m"
JOB = Workload(batch=8, prompt_len=32, gen_len=32, dtype="float32")


def cpus(*sizes: str) -> Cluster:
    devices = [{"kind": "CPU", "threads": 1, "memory": size} for size in sizes]
    return Cluster.parse_data(
        {"name": "test", "nodes": [{"name": "here", "devices": devices}]}, where="test"
    )


def test_layers_keep_16_bits_where_they_fit():
    made = plan_workload(MODEL, cpus("1 GiB"), JOB)
    assert set(made.plan.precisions) == {Precision.W16A16}
    assert made.plan.predicted is not None and made.plan.predicted.estimated
    assert "estimated" in made.text()


def test_two_devices_keep_what_one_cannot():
    assert len(plan_workload(MODEL, cpus("20 MiB"), JOB).plan.stages) == 1
    made = plan_workload(MODEL, cpus("28 MiB", "28 MiB"), JOB)
    assert len(made.plan.stages) == 2 and set(made.plan.precisions) == {Precision.W16A16}


def test_layers_give_up_no_more_than_they_must():
    tight = plan_workload(MODEL, cpus("23 MiB"), JOB).plan  # all at 8 bits take 21.8 MiB
    assert Precision.W3A16 not in tight.precisions and Precision.W4A16 not in tight.precisions
    assert Precision.W8A16 in tight.precisions


def test_the_window_shrinks_before_bits_do():
    size = "64 MiB"
    job = JOB.model_copy(update={"batch": 256})
    windows = (256, 128, 64, 32, 16, 8, 4, 2, 1)
    made = plan_workload(MODEL, cpus(size), job, search=PlanSearch(windows=windows))
    assert 8 <= made.plan.workload.batch < 256
    assert set(made.plan.precisions) == {Precision.W16A16}


def test_what_does_not_fit_at_all_is_refused():
    with pytest.raises(DoesNotFitError, match="short by"):
        plan_workload(MODEL, cpus("6 MiB"), JOB, search=PlanSearch(windows=(8, 4, 2, 1)))


def test_bits_that_are_asked_for_are_kept():
    made = plan_workload(MODEL, cpus("1 GiB"), JOB, search=PlanSearch(bits=[Precision.W4A16]))
    assert set(made.plan.precisions) == {Precision.W4A16}


def test_the_command_plans_for_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = ["--global-bz", "2", "--s", "16", "--n", "8"]
    assert main(["--model", str(MODEL), *job, "-o", str(tmp_path / "p.json")]) == 0
    out = capsys.readouterr().out
    assert "this-machine" in out and "estimated" in out

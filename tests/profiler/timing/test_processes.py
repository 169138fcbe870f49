"""The whole command with its timing processes: a tiny model, two copies, stop and resume."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq.costs.cost_model import CostModel, Phase
from llmpq.devices.cluster import Cluster
from llmpq.errors import DeadlineError, StageLostError
from llmpq.planner.__main__ import main as planner
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from llmpq.profiler.__main__ import main
from llmpq.profiler.timing import host_links, profile_host
from llmpq.profiler.timing import worker_processes as processes
from llmpq.profiler.timing.cases import Effort, LinkTimings, SetUp, Target, TimedCase
from llmpq.profiler.timing.worker_processes import (
    Group,
    JobFailedError,
    _name_of,
    time_link,
)

pytestmark = pytest.mark.cluster

CLUSTER = """
schema: 1
name: unequal
nodes:
  - name: here
    devices:
      - {kind: CPU, threads: 1, memory: 1 GiB}
      - {kind: CPU, threads: 1, memory: 2 GiB}
"""


def test_profile_stop_and_resume(
    tmp_path: Path, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_host, "SHARE_S", 0.01)
    cluster, out, samples = tmp_path / "c.yaml", tmp_path / "costs.json", tmp_path / "s.jsonl"
    cluster.write_text(CLUSTER)
    arguments = (
        f"--model {tiny_models.directory('qwen3')} --cluster {cluster} --quick --bits 16,4"
        f" --max-batch 4 --max-len 48 --copies 2 --samples {samples} -o {out}"
    ).split()
    assert main(arguments) == 0
    costs = CostModel.load_json(out)
    assert costs.device_kinds == ("CPU@1t",)
    assert len(costs.entries) == 2 * 2 + 2 * 2, "two precisions and two ends, two phases each"
    for phase in (Phase.PREFILL, Phase.DECODE):
        for precision in (Precision.W16A16, Precision.W4A16):
            entry = costs.find("CPU@1t", phase=phase, precision=precision, dtype="float32")
            assert entry is not None and entry.held_out_error is not None
            assert 1e-6 < entry.seconds(v=2, length=32) < 0.1
            assert entry.sampled_v == (1, 4) and entry.sampled_length[1] == 48
            assert 0.05 < entry.alone_share <= 1.0
    link = costs.link("CPU@1t", "CPU@1t", same_node=True)
    assert link is not None and 1e-6 < link.alpha_s < 0.1
    assert link.occupied_s is not None and 1e-6 < link.occupied_s < 0.1
    assert CostModel.parse_data(json.loads(costs.dump_json()), where="again") == costs

    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:-3]) + lines[-3][:40])
    assert main(arguments) == 0
    resumed = samples.read_text().splitlines(keepends=True)
    assert resumed[: len(lines) - 3] == lines[:-3], "what was there is not taken again"
    assert len(resumed) == len(lines)


def test_stages_that_devices_share_are_profiled_and_planned(
    tmp_path: Path, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of layers, and sums over two processes; the plan of the two has their times alone."""
    monkeypatch.setattr(profile_host, "SHARE_S", 0.01)
    cluster, out, plan = tmp_path / "c.yaml", tmp_path / "costs.json", tmp_path / "plan.json"
    cluster.write_text(CLUSTER)
    words = f"--model {tiny_models.directory('qwen3')} --cluster {cluster}"
    timed = f"{words} --quick --bits 16 --job 16/8 --max-batch 4 --tensor-parallel 2,3:1"
    assert main(f"{timed} -o {out}".split()) == 0
    costs = CostModel.load_json(out)
    for phase in (Phase.PREFILL, Phase.DECODE):
        for shares in ((), (1, 1), (3, 1)):
            entry = costs.find("CPU@1t", phase=phase, dtype="float32", shares=shares)
            assert entry is not None and 1e-6 < entry.seconds(v=2, length=16) < 0.1
    (sums,) = costs.sums
    assert sums.kinds == ("CPU@1t", "CPU@1t")
    assert all(1e-6 < seconds < 0.1 for _, seconds in sums.times)
    asked = f"{words} --costs {out} --bits 16 --batch 2 --prompt-len 16 --gen-len 8 --engines 1"
    assert planner(f"{asked} --tensor-parallel 2 -o {plan}".split()) == 0
    made = Plan.load(plan)
    assert [stage.shares for stage in made.stages] == [(1, 1)]
    assert made.predicted is not None and not made.predicted.estimated
    assert planner(["check", str(plan)]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2,x", "--tensor-parallel must be a number of devices, such as 2, or their shares"),
        ("2", "--tensor-parallel 2: the cluster has one device, which shares stages with no other"),
    ],
)
def test_shares_that_cannot_be_timed_are_refused(
    tmp_path: Path, tiny_models: Any, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "c.yaml"
    cluster.write_text("name: one\nnodes: [{name: here, devices: [{kind: CPU, memory: 1 GiB}]}]\n")
    words = f"--model {tiny_models.directory('qwen3')} --cluster {cluster} --tensor-parallel {text}"
    assert main([*words.split(), "-o", str(tmp_path / "costs.json")]) == 2
    assert re.search(said, capsys.readouterr().err)


def case(**changed: Any) -> TimedCase:
    target = Target(
        device_kind="CPU@1t", part="layer", phase=Phase.DECODE, dtype="float32", **changed
    )
    return TimedCase(target=target, v=1, length=16)


def test_a_failed_job_and_a_dead_child_are_told_apart(tiny_models: Any) -> None:
    set_up = SetUp(model=str(tiny_models.directory("opt")), effort=Effort(seconds=0.005))
    with Group(set_up, copies=1, gpus=[None]) as group:
        assert "torch" in group.ready.machine
        too_long = case().model_copy(update={"length": 4096})
        with pytest.raises(JobFailedError, match="ValueError: .*positions"):
            group.time(too_long)
        assert group.time(case()).repeats >= 5
        group.children[0]._child.kill()
        with pytest.raises(StageLostError, match="a profiling process was lost: .*SIGKILL"):
            group.time(case())


def test_a_stopped_child_is_not_waited_for_for_ever(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Group(SetUp(model=str(tiny_models.directory("opt"))), copies=1, gpus=[None]) as group:
        assert group.ready
        os.kill(group.children[0]._child.pid, signal.SIGSTOP)
        monkeypatch.setattr(processes, "ANSWER_LIMIT_S", 0.2)
        with pytest.raises(DeadlineError, match="gave no answer for 0 s .*again to resume"):
            group.time(case())


class Answering:
    """A child that answers a link job, or fails at it, and counts what was not fetched."""

    def __init__(self, error: str | None = None) -> None:
        self.error, self.waiting = error, 0

    def send(self, _: object) -> None:
        self.waiting += 1

    def receive(self, _: object) -> LinkTimings:
        self.waiting -= 1
        if self.error:
            raise JobFailedError(self.error)
        return LinkTimings(sizes=(1, 1000), seconds=(1e-5, 2e-5))


def test_a_failed_link_leaves_no_answer_behind() -> None:
    ends: Any = Answering("RuntimeError: no"), Answering()
    with pytest.raises(JobFailedError):
        time_link(*ends, hidden=8, seconds=0.1)
    assert [end.waiting for end in ends] == [0, 0]


def test_a_failed_link_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster.from_counts(["CPU"], [1])
    one = cluster.devices[0]
    two = replace(one, profile_kind="CPU@2t", threads=2)
    ends = {one.profile_kind: [Answering(), Answering()], "CPU@2t": [Answering("Run\ntime: no")]}
    groups: Any = {kind: SimpleNamespace(children=children) for kind, children in ends.items()}
    set_up: Any = None
    failed: list[str] = []
    found = list(
        host_links.measure_links((one, two), groups, set_up, hidden=8, seconds=0.1, failed=failed)
    )
    assert failed == ["CPU@1t - CPU@2t"]
    assert [(link.source_kind, link.target_kind) for link in found] == [("CPU@1t", "CPU@1t")]
    assert caplog.messages == ["left out the link CPU@1t - CPU@2t: Run time: no"]


@pytest.mark.parametrize(
    ("gpu", "visible", "name"),
    [(1, None, "1"), (1, "", "1"), (0, "3", "3"), (1, "2, 0", "0"), (1, "GPU-a,GPU-b", "GPU-b")],
)
def test_children_count_the_gpus_their_parent_sees(
    gpu: int, visible: str | None, name: str
) -> None:
    assert _name_of(gpu, visible) == name

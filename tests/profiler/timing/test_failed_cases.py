"""A case that cannot be measured is named and ends with a code; streams wait for each other."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq.costs.cost_model import CostModel, Phase
from llmpq.errors import StageLostError
from llmpq.profiler.__main__ import main
from llmpq.profiler.timing import profile_host, stopwatch, worker_processes
from llmpq.profiler.timing.cases import CaseTime, Effort, Ready, SetUp, TimedCase
from llmpq.profiler.timing.worker_processes import Group, JobFailedError

pytestmark = pytest.mark.cpu
CLUSTER = Path(__file__).parents[3] / "examples" / "cpu-two-stages.yaml"


class _Child:
    """A timing process that is none: it says that it is ready."""

    def __init__(self, set_up: SetUp, *, gpu: int | None) -> None:
        assert gpu is None and not set_up.cuda

    def receive(self, kind: type[Ready]) -> Ready:
        assert kind is Ready
        return Ready(machine="a CPU", device_name="CPU")

    def close(self) -> None:
        pass


def _profile(
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
    lost: bool,
    rows: int,
) -> tuple[int, Path, list[int]]:
    """Profile with batches of `rows` failing; return the code, the file and the restarts."""
    restarts = [0]

    def time(_: Group, case: TimedCase, **_how: object) -> CaseTime:
        if case.v == rows and case.target.part == "layer" and case.length < 40:
            raise JobFailedError("RuntimeError: bad address", lost=lost)
        seconds = 1e-4 * case.v * case.length
        return CaseTime(seconds=seconds, low_s=seconds, high_s=seconds, repeats=3)

    def restart(group: Group) -> None:
        restarts[0] += 1
        group.restarts += 1

    monkeypatch.setattr(worker_processes, "TimingProcess", _Child)
    monkeypatch.setattr(Group, "time", time)
    monkeypatch.setattr(Group, "restart", restart)
    monkeypatch.setattr(profile_host, "measure_links", lambda *_, **__: ())
    output = folder / "costs.json"
    words = ["--model", str(model), "--cluster", str(CLUSTER), "-o", str(output), "--quick"]
    words += ["--bits", "16", "--max-batch", "8", "--max-len", "96"]
    return main([*words, *more]), output, restarts


def test_a_case_that_fails_is_named_and_ends_with_a_code(
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    code, output, restarts = _profile(demo_model, tmp_path, monkeypatch, lost=False, rows=8)
    assert code == 8 and restarts == [0]
    named = [line for line in caplog.messages if line.startswith("not measured: ")]
    assert named and all("batch 8, " in line and "bad address" in line for line in named)
    parts = {entry.part for entry in CostModel.load_json(output).entries}
    assert parts == {"embedding", "head"}, "a layer's fit would lack its largest batches"
    lines = (tmp_path / "costs.samples.jsonl").read_text().splitlines()
    assert any('"layer"' in line for line in lines), "its other cases are kept for the next run"


def test_a_complete_profile_ends_with_zero(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvs = ("--kv", "kv8v4,8")
    code, output, _ = _profile(demo_model, tmp_path, monkeypatch, *kvs, lost=False, rows=999)
    assert code == 0
    decode = [e for e in CostModel.load_json(output).entries if e.phase is Phase.DECODE]
    assert {e.kv.value for e in decode if e.part == "layer"} == {"kv8v4", "kv8"}


def test_a_lost_gpu_is_taken_anew_a_few_times(
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(profile_host, "MOST_RESTARTS", 1)
    with pytest.MonkeyPatch.context() as patch:
        code, _, restarts = _profile(demo_model, tmp_path, patch, lost=True, rows=8)
    assert code == StageLostError.exit_code and restarts == [1]
    assert "refused further work after CPU" in capsys.readouterr().err


class _Stream:
    """Writes down who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Any) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_timing_begins_when_the_callers_stream_has_made_everything(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    timing, callers = _Stream("timing", log), _Stream("callers", log)
    monkeypatch.setattr(stopwatch, "_timing_stream", lambda: timing)
    monkeypatch.setattr(stopwatch, "_burst", lambda *_, **__: 1e-3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: callers)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def call() -> None:
        log.append("call")
        if fails:
            raise RuntimeError("no memory")

    effort = Effort(seconds=0.01, min_repeats=3)
    device = torch.device("cuda")
    with pytest.raises(RuntimeError) if fails else nullcontext():
        stopwatch.time_call(call, device=device, effort=effort, layers=1)
    assert log[0] == "timing waits for callers" and log[-1] == "callers waits for timing"
    assert set(log[1:-1]) == {"call"}


@pytest.mark.parametrize("follows", [True, False])
def test_a_burst_begins_behind_a_call_that_is_not_timed(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device waits for what the host does before its first kernel."""
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, _: Any) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, _: Any) -> float:
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream: Any = _Stream("timing", log)
    took = stopwatch._burst(lambda: log.append("call"), stream, 2, follows=follows)
    before = ["call"] if follows else []
    assert log == [*before, "record", "call", "call", "record", "wait"]
    assert took == pytest.approx(3e-3)

"""Compiling ahead calls every precision's cases in a process of its own, hastily."""

import pytest

from llmpq.costs.cost_model import Phase
from llmpq.errors import StageLostError
from llmpq.precision import Precision
from llmpq.profiler.timing import compile_ahead as module
from llmpq.profiler.timing.cases import CaseTime, Effort, Ready, SetUp, Target, TimedCase
from llmpq.profiler.timing.worker_processes import JobFailedError

pytestmark = pytest.mark.pure


class FakeProcess:
    """Answers every case, or fails those of three requests."""

    started: list["FakeProcess"] = []

    def __init__(self, set_up: SetUp, *, gpu: int | None) -> None:
        self.set_up, self.gpu, self.closed = set_up, gpu, False
        self.cases: list[TimedCase] = []
        FakeProcess.started.append(self)

    def send(self, case: TimedCase) -> None:
        self.cases.append(case)

    def receive(self, kind: type) -> object:
        if kind is Ready:
            return Ready(machine="m", device_name="d")
        if self.cases[-1].v == 3:
            raise JobFailedError("no memory")
        if self.cases[-1].v == 4:
            raise JobFailedError("bad address", lost=True)
        return CaseTime(seconds=1.0, low_s=1.0, high_s=1.0, repeats=1)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeProcess.started = []
    monkeypatch.setattr(module, "TimingProcess", FakeProcess)


def cases(*bits: str) -> list[TimedCase]:
    return [
        TimedCase(
            target=Target(
                device_kind="g",
                part="layer",
                phase=Phase.PREFILL,
                precision=Precision.parse(b),
                dtype="float16",
            ),
            v=v,
            length=length,
        )
        for b in bits
        for v, length in ((1, 16), (3, 64), (2, 128), (8, 4096))
    ]


def test_every_precision_has_its_process() -> None:
    module.compile_ahead(
        SetUp(model="m", cuda=True, effort=Effort(sustain_s=0.5)), cases("16", "4"), 1
    )
    assert len(FakeProcess.started) == 2
    for child in FakeProcess.started:
        assert child.closed and child.gpu == 1
        assert child.set_up.effort.sustain_s == 0 and child.set_up.effort.min_repeats == 1
        assert len({case.target.precision for case in child.cases}) == 1
        assert [case.v for case in child.cases] == [1, 3, 2], "the rest goes on after a failure"


def test_what_failed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    its = cases("16", "4")
    failed = module.compile_ahead(SetUp(model="m", cuda=True), its, 1)
    assert failed == {case: "no memory" for case in its if case.v == 3}
    assert caplog.messages == [
        "compiling ahead failed for g layer prefill w16a16, batch 3, 64 tokens; "
        "g layer prefill w4a16, batch 3, 64 tokens: no memory"
    ]


def test_a_lost_gpu_is_taken_by_another_process(caplog: pytest.LogCaptureFixture) -> None:
    first = cases("16")[0]
    bad = [first.model_copy(update={"v": 4, "length": n}) for n in range(1, 10)]
    failed = module.compile_ahead(SetUp(model="m", cuda=True), [*cases("16"), *bad, *cases("4")], 1)
    lost = [child for child in FakeProcess.started if child.cases and child.cases[-1].v == 4]
    assert len(lost) == module.RESTARTS + 1 and all(child.closed for child in FakeProcess.started)
    assert [case for case in failed if case.v == 4] == bad[: module.RESTARTS + 1]
    assert "bad address" in caplog.text


def test_more_processes_share_a_precisions_cases() -> None:
    module.compile_ahead(SetUp(model="m", cuda=True), cases("16", "4"), 0, processes=5)
    taken = sorted([case.v for case in child.cases] for child in FakeProcess.started)
    assert taken == [[1, 3], [1, 3], [2], [2]]


def test_one_precision_is_compiled_as_it_is_timed() -> None:
    module.compile_ahead(SetUp(model="m", cuda=True), cases("4"), 0)
    module.compile_ahead(SetUp(model="m", cuda=True), [], 0)
    assert FakeProcess.started == []


def test_a_process_that_dies_is_no_more_than_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = FakeProcess.receive

    def lost(self: FakeProcess, kind: type) -> object:
        if self.cases and self.cases[0].target.precision is Precision.W4A16:
            raise StageLostError("a profiling process ended with code -9")
        return answer(self, kind)

    monkeypatch.setattr(FakeProcess, "receive", lost)
    module.compile_ahead(SetUp(model="m", cuda=True), cases("16", "4"), 0)
    assert [len(child.cases) for child in FakeProcess.started] == [3, 1]
    assert all(child.closed for child in FakeProcess.started)
    assert "ended with code -9; its kernels are compiled as they are timed" in caplog.text


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise OSError("no memory for a thread")

    monkeypatch.setattr(FakeProcess, "receive", broken)
    with pytest.raises(OSError, match="no memory"):
        module.compile_ahead(SetUp(model="m", cuda=True), cases("16", "4"), 0)
    assert all(child.closed for child in FakeProcess.started)

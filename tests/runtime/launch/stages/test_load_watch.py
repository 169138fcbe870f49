"""A stage that stands still while it loads is named; one that computes or reads is not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from llmpq.errors import DeadlineError
from llmpq.kernels.native.file_lock import file_lock
from llmpq.runtime.launch import thread_launcher
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.stages.load_watch import LoadSigns, LoadWatch
from llmpq.runtime.launch.stages.stage_worker import StageWorker
from llmpq.runtime.options.engine_options import Deadlines, EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings

pytestmark = pytest.mark.cpu


class Stage:
    """A stage that answers with what it is given, or not at all."""

    def __init__(self, *signs: list[float] | None, silent: bool = False) -> None:
        self._signs, self._silent, self.asked = list(signs), silent, 0

    def call(self, method: str, *args: object) -> Future[dict[str, object]]:
        assert method == "health"
        answer: Future[dict[str, object]] = Future()
        if not self._silent:
            signs = self._signs[min(self.asked, len(self._signs) - 1)]
            answer.set_result({"loading": signs and [*signs, 0][:3]})
        self.asked += 1
        return answer

    def kill(self, pid: int) -> None:
        raise AssertionError


def stalled_after(monkeypatch: pytest.MonkeyPatch, *stages: Stage, seconds: int) -> dict[int, int]:
    """Return which stage stands still, by the second in which it is named."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch, found = LoadWatch(stages, limit_s=5.0, num_layers=[4] * len(stages)), {}
    for second in range(seconds):
        now[0] = second + 0.01
        still = watch.still(range(len(stages)))
        if still is not None:
            found.setdefault(still, second)
    return found


def test_only_who_does_nothing_is_named(monkeypatch):
    busy = Stage(*([0.1 * i, 0.0] for i in range(40)))
    reading = Stage(*([0.0, 1e6 * i] for i in range(40)))
    assert stalled_after(monkeypatch, busy, reading, seconds=40) == {}
    busy, idle = Stage(*([0.1 * i, 0.0] for i in range(40))), Stage([3.0, 7e6])
    found = stalled_after(monkeypatch, busy, idle, seconds=40)
    assert list(found) == [1] and 5 <= found[1] <= 8


def test_answering_is_no_progress(monkeypatch):
    polled = Stage(*([0.001 * i, 100.0 * i] for i in range(40)))
    assert list(stalled_after(monkeypatch, polled, seconds=40)) == [0]


def test_a_stage_that_does_not_answer_stands_still(monkeypatch):
    stage = Stage(silent=True)
    assert list(stalled_after(monkeypatch, stage, seconds=40)) == [0]
    assert stage.asked == 1, "no second question before the first is answered"


def test_what_is_loaded_is_told_where_a_bar_shows_it(monkeypatch):
    now, heard = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stages = [Stage(*([float(i), 0.0, float(min(i, 4))] for i in range(9))) for _ in range(2)]
    watch = LoadWatch(stages, 5.0, [4, 6], on_load=lambda *news: heard.append(news))
    for now[0] in range(1, 9):
        watch.still([0, 1] if now[0] < 6 else [1])
    assert heard[0] == (0, 10, "stage 0: 0 of 4 layers, stage 1: 0 of 6 layers")
    assert heard[-1] == (8, 10, "stage 1: 4 of 6 layers"), "one that is loaded has all of its own"
    assert [done for done, _, _ in heard] == sorted(done for done, _, _ in heard)


def test_signs_grow_with_work_of_this_thread_and_of_compilers():
    signs = LoadSigns()

    def cpu_s() -> float:
        return signs.read()[0]

    before = cpu_s()
    time.sleep(0.2)
    other = threading.Thread(target=lambda: sum(range(3_000_000)))
    other.start()
    other.join()
    assert cpu_s() - before < 0.05, "another thread's work is not its own"
    end_s = time.thread_time() + 0.1
    while time.thread_time() < end_s:
        pass
    assert cpu_s() - before >= 0.1
    before = cpu_s()
    busy = f'"{sys.executable}" -c "while True: pass"; true'  # a compiler's driver starts others
    child = subprocess.Popen(["sh", "-c", busy], start_new_session=True)
    try:
        deadline_s = time.monotonic() + 30
        while cpu_s() - before < 0.1 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert cpu_s() - before >= 0.1
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_waiting_for_another_process_that_compiles_is_getting_on(tmp_path):
    path = tmp_path / "mark.lock"
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"held\n"
    signs, entered = LoadSigns(), threading.Event()

    def wait() -> None:
        with file_lock(path):
            entered.set()

    waiting = threading.Thread(target=wait)
    before = signs.read()[0]
    waiting.start()
    end_s = time.monotonic() + 60
    while signs.read()[0] - before < 0.3 and time.monotonic() < end_s:
        time.sleep(0.05)
    assert signs.read()[0] - before >= 0.3 and not entered.is_set()
    other.stdin.close()
    other.wait()
    waiting.join(60)
    assert entered.is_set(), "its turn comes when the other one has ended"


def test_a_stage_that_hangs_in_its_load_is_named(demo_model, make_plan, monkeypatch):
    over = threading.Event()

    class Hanging(StageWorker):
        def load(self):
            if self._index == 1:
                self._signs = LoadSigns()
                over.wait(60)
            return super().load()

    monkeypatch.setattr(thread_launcher, "StageWorker", Hanging)
    monkeypatch.setattr(thread_launcher, "_LOAD_END_S", 0.1)
    plan, options = (
        make_plan(demo_model, (4,)),
        EngineOptions(backend="threads", deadlines=Deadlines(stall_s=2)),
    )
    settings = StageSettings(model_dir=str(demo_model), options=options)
    started_s = time.monotonic()
    try:
        with (
            pytest.raises(DeadlineError, match=r"stage 1 \(CPU-1 .*no progress for 2 s .*loads"),
            PipelineClient.start(plan, settings),
        ):
            pass
    finally:
        over.set()
    assert time.monotonic() - started_s < 40


@pytest.mark.cluster
def test_a_process_whose_disk_does_not_answer_is_named(demo_model, make_plan, tmp_path):
    """The weights are a pipe that nobody writes into."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model, folder)
    path = next(folder.glob("*.safetensors"))
    path.unlink()
    os.mkfifo(path)
    options = EngineOptions(backend="processes", deadlines=Deadlines(stall_s=3, load_s=100))
    settings = StageSettings(model_dir=str(folder), options=options)
    with (
        pytest.raises(DeadlineError, match=r"pid \d+\) has made no progress for 3 s"),
        PipelineClient.start(make_plan(folder, (4,)), settings),
    ):
        pass


def test_layers_count_as_progress_and_are_said(monkeypatch, caplog):
    caplog.set_level("INFO", logger="llmpq.run")
    slow = Stage(*([0.0, 0.0, i // 4] for i in range(40)))
    done = Stage(*([0.1 * i, 0.0, 4] for i in range(40)))
    assert stalled_after(monkeypatch, slow, done, seconds=12) == {}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "stage 0: 1 of 4 layers, stage 1: warming up" in lines[1]

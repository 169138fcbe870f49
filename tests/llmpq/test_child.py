"""Child processes that answer calls: values, errors, parts, their death."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmpq.child import CallFailed, Child, _log_once
from llmpq.errors import DoesNotFitError

pytestmark = pytest.mark.pure
SYNC = """
import logging, os, time
from llmpq.child import serve_calls
from llmpq.errors import DoesNotFitError

class Served:
    def __init__(self, start): self.start = start
    def add(self, a, b): print("noise"); return self.start + a + b
    def refuse(self): raise ValueError("no")
    def too_big(self): raise DoesNotFitError("too big")
    def odd(self): raise KeyError("odd")
    def hang(self): time.sleep(60)
    def warn(self): logging.getLogger("llmpq.part").warning("%d%% are slow", self.start)
    def leave(self): os.write(2, b"last words\\n"); os._exit(3)
    def abort(self): os.write(2, b"what(): Too many open files\\n"); os.abort()

calls = ["add", "refuse", "too_big", "odd", "hang", "warn", "leave", "abort"]
serve_calls(lambda first: Served(first["start"]), calls)
"""
STREAM = """
import asyncio
from llmpq.child import serve_calls

class Served:
    asynchronous = True
    ended = 0
    async def count(self, upto):
        try:
            for i in range(upto): yield i; await asyncio.sleep(0)
            if upto > 2: await asyncio.sleep(60)
        finally:
            self.ended += 1
    async def num_ended(self): return self.ended

serve_calls(lambda first: Served(), ["count", "num_ended"])
"""
Start = Callable[[str], Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Child] = []

    def run(source: str) -> Child:
        (tmp_path / "served.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        root = str(Path(__file__).resolve().parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([path, root])}
        started.append(Child("served", {"start": 1}, environment=environment))
        return started[-1]

    yield run
    for child in started:
        child.kill()
        child.wait()


def test_a_supervisors_sigterm_is_the_parents_to_answer(start: Start) -> None:
    """systemd and `timeout` send it to all processes: requests under way end first."""
    child = start(SYNC)
    assert child.call("add", 1, 2).result(60) is not None
    os.kill(child.pid, signal.SIGTERM)
    assert child.call("add", 1, 2).result(60) is not None
    assert child.gone is None


def test_a_call_that_nobody_waits_for_any_more_fails_in_silence(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start(SYNC)
    assert child.call("add", 1, 2).result(60) is not None
    waiting = child.call("hang")
    assert waiting.cancel()
    child.kill()
    child.wait()
    assert "Exception" not in capfd.readouterr().err


def test_calls_are_answered_and_errors_keep_their_kind(start: Start) -> None:
    child = start(SYNC)
    hanging = child.call("hang")
    assert child.call("add", 2, 3).result(30) == 6, "what it prints is no answer"
    for method, kind in (("refuse", ValueError), ("too_big", DoesNotFitError)):
        with pytest.raises(CallFailed) as caught:
            child.call(method).result(30)
        assert type(caught.value.cause) is kind
    with pytest.raises(CallFailed, match="KeyError: 'odd'"):
        child.call("odd").result(30)
    assert child.gone is None
    child.kill()
    with pytest.raises(CallFailed, match="killed by SIGKILL; the kernel's out-of-memory"):
        hanging.result(30)
    with pytest.raises(CallFailed, match="SIGKILL"):
        child.call("add", 1, 1).result(30)


def test_a_child_that_leaves_says_its_last_line(start: Start) -> None:
    with pytest.raises(CallFailed, match="ended with code 3: last words"):
        start(SYNC).call("leave").result(30)


def test_an_exception_of_c_is_said_where_it_ends_a_child(start: Start) -> None:
    said = r"killed by SIGABRT\): what\(\): Too many open files"
    with pytest.raises(CallFailed, match=said):
        start(SYNC).call("abort").result(30)


def test_what_children_log_is_logged_by_the_parent_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    _log_once.cache_clear()
    for _ in range(2):
        assert start(SYNC).call("warn").result(30) is None
    assert caplog.record_tuples == [("llmpq.part", logging.WARNING, "1% are slow")]


def test_ctrl_c_of_the_group_is_the_parents(start: Start) -> None:
    child = start(SYNC)
    assert child.call("add", 0, 0).result(30) == 1
    os.kill(child.pid, signal.SIGINT)
    assert child.call("add", 1, 0).result(30) == 2


def test_parts_come_in_order_and_a_cancelled_stream_ends(start: Start) -> None:
    child, parts, third = start(STREAM), list[int](), threading.Event()

    def take(part: int) -> None:
        parts.append(part)
        if len(parts) == 3:
            third.set()

    assert child.call("count", 2, on_part=parts.append).result(30) is None and parts == [0, 1]
    parts.clear()
    endless = child.call("count", 3, on_part=take)
    assert third.wait(30) and child.call("num_ended").result(30) == 1
    child.cancel(endless)
    with pytest.raises(CallFailed):
        endless.result(30)
    assert child.call("num_ended").result(30) == 2 and parts == [0, 1, 2]

"""The picture of a running job: its numbers are those between two counts, its lines fit."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest
from rich.console import Console

from llmpq.errors import StageLostError
from llmpq.runtime.report import progress as shown
from llmpq.runtime.report.live_numbers import LiveCounts, TokensLeft
from llmpq.runtime.report.progress import ProgressReporter
from llmpq.runtime.requests.request import Progress
from llmpq.runtime.requests.request_output import CompletionOutput, RequestOutput

pytestmark = pytest.mark.cpu


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_stage(name: str, busy_s: float, steps: int) -> dict[str, Any]:
    kinds = {
        "prefill": {"steps": 2, "rows": 2, "busy_s": 0.5},
        "decode": {"steps": steps, "rows": steps, "busy_s": busy_s - 0.5},
    }
    return {"device": name, "layers": [0, 3], "busy_s": busy_s, "kinds": kinds,
            "predicted": {"decode": {"seconds": 0.011, "rows": 4}}}  # fmt: skip


def counted(tokens: int, stages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    gauges = {"blocks": 1200, "blocks_held": 300}
    return {"generated_tokens": tokens, "running": 3, "waiting": 5, "gauges": gauges,
            "stages": stages, "recoveries": [], **more}  # fmt: skip


def ended(tokens: int) -> RequestOutput:
    one = CompletionOutput(index=0, text="", token_ids=(7,) * tokens, finish_reason="stop",
                           first_token_s=0.1, total_s=0.2)  # fmt: skip
    return RequestOutput(request_id="0", prompt=None, prompt_token_ids=(1,), outputs=[one])


def test_shares_and_steps_are_those_between_two_counts() -> None:
    counts = LiveCounts()
    first = counts.add(counted(100, [a_stage("A", 1.0, 10), a_stage("B", 0.5, 0)]), 50.0)
    assert first.tokens_per_s is None
    assert [stage.busy_share for stage in first.stages] == [None, None]
    now = counts.add(counted(340, [a_stage("A", 2.5, 40), a_stage("B", 0.5, 0)]), 52.0)
    assert now.tokens_per_s == 120 and (now.blocks_held, now.blocks) == (300, 1200)
    busy, idle = now.stages
    assert (busy.busy_share, busy.kind, busy.planned_s) == (0.75, "decode", 0.011)
    assert busy.step_s == pytest.approx(1.5 / 30)
    assert (idle.busy_share, idle.kind, idle.step_s) == (0.0, None, None)


def test_stages_that_replace_lost_ones_begin_anew() -> None:
    counts = LiveCounts()
    counts.add(counted(100, [a_stage("A", 9.0, 90)]), 1.0)
    away = counts.add(counted(100, []), 2.0)
    assert away.stages == []
    again = counts.add(counted(110, [a_stage("A", 0.6, 1)]), 3.0)
    assert again.stages[0].busy_share is None, "it has been counted once"
    fresh = counts.add(counted(120, [a_stage("A", 0.55, 1)]), 4.0)
    assert fresh.stages[0].busy_share is None, "another process: it has done less"


def test_the_end_is_that_of_the_tokens_still_wanted() -> None:
    left = TokensLeft(most=1000)
    assert left.left_s(0, 10.0) is None
    assert left.left_s(100, 12.0) is None, "the first tokens begin the rate"
    assert left.left_s(200, 14.0) == pytest.approx(800 / 50)
    left.end(50, 100)  # half of what it might have: so do the others
    assert left.left_s(200, 14.0) == pytest.approx(300 / 50)
    left.end(900, 900)
    assert left.left_s(950, 20.0) == 0.0


def a_reporter(stats: Any, rows: int = 40, **more: Any) -> ProgressReporter:
    return ProgressReporter(rows, most_tokens=4000, stats=stats, **more)


def text_of(picture: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture)
    return console.file.getvalue()


def test_a_terminal_has_a_line_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    lost = {"reason": "stage 1 was lost: killed", "measured_s": 3.25}
    given = [
        counted(0, [a_stage("A-0", 1.0, 10), a_stage("B-1", 0.6, 1)]),
        counted(300, [a_stage("A-0", 2.0, 60), a_stage("B-1", 0.85, 2)], recoveries=[lost]),
    ]
    moments = iter((0.0, 2.0))
    reporter = a_reporter(lambda: given[0], planned_tokens_per_s=163.0)
    for stats in given:
        reporter._now = reporter._counts.add(stats, next(moments))
    reporter.update(Progress(generated_tokens=300, phase="decode"), 12)
    picture = text_of(reporter.drawn(30))
    lines = picture.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert "12/40 rows" in lines[0] and "150 tokens/s (planned 163)" in lines[0]
    assert "A-0" in lines[1] and "50% busy" in lines[1] and "(planned 11.0)" in lines[1]
    assert "decode 20.0 ms" in lines[1] and "layers 0-2" in lines[1]
    assert "B-1" in lines[2] and "12% busy" in lines[2]
    assert "3 running, 5 waiting" in lines[3] and "25% of 1,200 blocks" in lines[3]
    assert "recovered once, last in 3.2 s: stage 1 was lost: killed" in lines[4]


def test_a_stage_that_is_lost_is_said_while_others_are_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    lost = {"reason": "stage 1 was lost: killed", "measured_s": None}
    reporter = a_reporter(lambda: counted(0, [], recoveries=[lost]))
    reporter._now = reporter._counts.add(counted(0, [], recoveries=[lost]), 1.0)
    assert "recovering: stage 1 was lost: killed" in text_of(reporter.drawn(30))


def test_more_stages_than_lines_show_the_busiest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    reporter = a_reporter(lambda: counted(0, []))
    for busy, now_s in ((1.0, 0.0), (1.5, 1.0)):
        stages = [a_stage(f"D-{i}", busy + i * now_s / 200, 10) for i in range(64)]
        reporter._now = reporter._counts.add(counted(0, stages), now_s)
    picture = text_of(reporter.drawn(24))
    assert len(picture.splitlines()) <= 24
    assert "D-63" in picture and "D-0 " not in picture and "stages less busy" in picture


def test_elsewhere_there_are_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(shown, "LINE_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "llmpq.run")
    reporter = a_reporter(lambda: counted(0, []))
    for busy, now_s in ((1.0, 0.0), (1.5, 1.0)):
        reporter._now = reporter._counts.add(counted(0, [a_stage("A", busy, 10)]), now_s)
    reporter.end(ended(10), 100)
    reporter.update(Progress(running=8, waiting=2, generated_tokens=50, phase="decode"), 12)
    reporter.update(Progress(running=8, waiting=2, generated_tokens=90, phase="decode"), 12)
    line = caplog.records[-1].getMessage()
    assert line.startswith("12/40 rows, 8 running, 2 waiting, ") and "stages busy 50%" in line
    assert "left" in line and sys.stderr.getvalue() == ""


def test_what_is_logged_stands_above_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with a_reporter(lambda: counted(0, [])):
        assert handler.stream is sys.stderr is not terminal
        logging.getLogger("llmpq.runtime").error("stage 1 was lost")
    assert handler.stream is terminal is sys.stderr
    said = terminal.getvalue()
    assert "stage 1 was lost\n" in said
    assert said.rindex("0/40 rows") > said.index("stage 1 was lost"), "drawn again below it"


def test_an_engine_that_cannot_say_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())

    def lost() -> dict[str, Any]:
        raise StageLostError("gone")

    with a_reporter(lost) as reporter:
        reporter.update(Progress(generated_tokens=5), 1)
    assert "1/40 rows" in text_of(reporter.drawn(30))
    with a_reporter(lost, quiet=True) as silent:
        silent.update(Progress(generated_tokens=5), 1)
    assert silent._now is None

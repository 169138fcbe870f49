"""Progress of a running job on stderr: a live picture on a terminal, a line now and then elsewhere.

The picture has a line a stage: its layers, its share of work, what its steps take beside what the
plan says of them; above it rows, tokens/s and when the job will end, below it the KV cache and
stages that were lost. Who asks the stages for that is a thread of its own: one that hangs holds
nothing else up.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmpq.errors import LlmpqError
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.runtime.report.live_numbers import LiveCounts, RunNow, StageNow, TokensLeft
from llmpq.runtime.requests import request
from llmpq.runtime.requests.request_output import RequestOutput

LINE_EVERY_S = 5.0
COUNT_EVERY_S = 1.0
"""How often stages are asked on a terminal."""
_DRAWN_A_SECOND = 4
_OTHER_LINES = 7
"""Of the picture beside its stages, and a few of the terminal's own."""

_log = logging.getLogger("llmpq.run")


class ProgressReporter:
    """Shows how far a job is and what its stages do."""

    def __init__(
        self,
        num_rows: int,
        *,
        most_tokens: int,
        stats: Callable[[], Mapping[str, Any]],
        planned_tokens_per_s: float | None = None,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        """`most_tokens`: that all requests may generate; `stats`: `LLM.live_stats`."""
        self._num_rows, self._num_done = num_rows, 0
        self._began_s = self._last_line_s = time.monotonic()
        self._left = TokensLeft(most_tokens)
        self._left_s: float | None = None
        self._planned, self._quiet = planned_tokens_per_s, quiet
        self._stats, self._counts = stats, LiveCounts()
        self._now: RunNow | None = None
        self._tokens, self._tokens_before = 0, None if quiet else _generated(stats)
        self._phase = "starting"
        self._ended = threading.Event()
        self._live: Live | None = None
        self._stderr = sys.stderr
        self._logs: list[logging.StreamHandler[Any]] = []
        if not quiet and sys.stderr.isatty():
            console = console or Console(stderr=True)
            self._live = Live(
                console=console,
                refresh_per_second=_DRAWN_A_SECOND,
                get_renderable=lambda: self.drawn(console.height),
            )

    @classmethod
    def of_plan(
        cls,
        plan: Plan | Topology,
        num_rows: int,
        *,
        most_tokens: int,
        stats: Callable[[], Mapping[str, Any]],
        quiet: bool = False,
    ) -> Self:
        """Return one that shows what comes beside what a plan predicts."""
        predicted = plan.predicted
        return cls(
            num_rows,
            most_tokens=most_tokens,
            stats=stats,
            planned_tokens_per_s=None if predicted is None else predicted.output_tokens_per_s,
            quiet=quiet,
        )

    def __enter__(self) -> Self:
        if not self._quiet:
            every_s = LINE_EVERY_S if self._live is None else COUNT_EVERY_S
            counting = threading.Thread(target=self._count, args=(every_s,), daemon=True)
            counting.name = "llmpq progress"
            counting.start()
        if self._live is not None:
            self._live.start()
            self._logs = _log_above_it(self._stderr)
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
            for handler in self._logs:
                handler.setStream(self._stderr)

    def _count(self, every_s: float) -> None:
        """Ask the stages what they did, until the job has ended."""
        while True:
            try:
                self._now = self._counts.add(self._stats(), time.monotonic())
            except (LlmpqError, RuntimeError, OSError):  # the job says what it is, if it must end
                self._now = None
            if self._ended.wait(every_s):
                return

    def end(self, output: RequestOutput, most_tokens: int) -> None:
        """Note a prompt whose answers have ended, and the tokens that they might have had."""
        self._left.end(sum(len(one.token_ids) for one in output.outputs), most_tokens)

    def update(self, progress: request.Progress, num_done: int) -> None:
        """Take the counters of the job; `num_done` counts failed and earlier rows too."""
        if self._quiet:
            return
        now_s = time.monotonic()
        if self._tokens_before is None:
            self._tokens_before = progress.generated_tokens
        self._tokens = progress.generated_tokens - self._tokens_before
        self._num_done, self._phase = num_done, progress.phase
        self._left_s = self._left.left_s(self._tokens, now_s)
        if self._live is None and now_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now_s
            _log.info("%s", self.line(progress))

    @property
    def _rate(self) -> float:
        return self._tokens / max(time.monotonic() - self._began_s, 1e-3)

    def line(self, progress: request.Progress) -> str:
        """Return how far the job is, as a line of a log."""
        parts = [
            f"{self._num_done}/{self._num_rows} rows",
            f"{progress.running} running",
            f"{progress.waiting} waiting",
            f"{self._rate:.0f} tokens/s",
        ]
        shares = [stage.busy_share for stage in self._now.stages] if self._now else []
        known = [share for share in shares if share is not None]
        if known:
            parts.append("stages busy " + ", ".join(f"{share:.0%}" for share in known))
        if self._left_s is not None:
            parts.append(f"about {_clock(self._left_s)} left")
        return ", ".join(parts)

    def drawn(self, height: int) -> RenderableType:
        """Return the picture, of no more lines than a terminal has."""
        now = self._now
        parts: list[RenderableType] = [self._head()]
        if now is not None and now.stages:
            parts.append(_stages(now.stages, max(1, height - _OTHER_LINES)))
        if now is not None:
            parts.append(_requests(now))
            parts.extend(Text(said, style="yellow") for said in recovery_lines(now.recoveries))
        return Group(*parts)

    def _head(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        for _ in range(5):
            head.add_column(no_wrap=True)
        recent = self._rate if self._now is None else (self._now.tokens_per_s or self._rate)
        planned = "" if self._planned is None else f" (planned {self._planned:.0f})"
        passed = _clock(time.monotonic() - self._began_s)
        end = "" if self._left_s is None else f", about {_clock(self._left_s)} left"
        head.add_row(
            self._phase,
            ProgressBar(total=max(1, self._num_rows), completed=self._num_done, width=24),
            f"{self._num_done}/{self._num_rows} rows",
            f"{recent:.0f} tokens/s{planned}",
            f"{passed}{end}",
        )
        return head


def _log_above_it(stderr: Any) -> list[logging.StreamHandler[Any]]:
    """Let what is logged to a terminal be written above the picture; return whose stream changed.

    `sys.stderr` does so while there is one; handlers hold the one of before.
    """
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is stderr
    ]
    for handler in handlers:
        handler.setStream(sys.stderr)
    return handlers


def _generated(stats: Callable[[], Mapping[str, Any]]) -> int | None:
    """Return the tokens that were generated before; None where the engine cannot say."""
    try:
        return int(stats()["generated_tokens"])
    except (LlmpqError, RuntimeError, OSError):
        return None


def _stages(stages: Sequence[StageNow], most: int) -> RenderableType:
    """Return a line a stage, the busiest where there is no room for all."""
    shown = list(range(len(stages)))
    if len(stages) > most:
        shares = [stage.busy_share or 0.0 for stage in stages]
        shown = sorted(sorted(shown, key=lambda place: -shares[place])[:most])
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    for place in shown:
        stage = stages[place]
        share = stage.busy_share
        busy = Table.grid(padding=(0, 1))
        busy.add_row(
            ProgressBar(total=1.0, completed=share or 0.0, width=20),
            "" if share is None else f"{share:4.0%} busy",
        )
        first, end = stage.layers
        table.add_row(f"  {stage.device}", f"layers {first}-{end - 1}", busy, _step(stage))
    if len(shown) == len(stages):
        return table
    return Group(table, Text(f"  and {len(stages) - len(shown)} stages less busy", style="dim"))


def _step(stage: StageNow) -> str:
    if stage.step_s is None:
        return ""
    planned = "" if stage.planned_s is None else f" (planned {1e3 * stage.planned_s:.1f})"
    return f"{stage.kind} {1e3 * stage.step_s:.1f} ms{planned}"


def _requests(now: RunNow) -> RenderableType:
    said = Table.grid(padding=(0, 1))
    said.add_column()
    counts = f"  {now.running} running, {now.waiting} waiting"
    if not now.blocks:
        said.add_row(counts)
        return said
    share = now.blocks_held / now.blocks
    said.add_row(
        f"{counts}, KV cache",
        ProgressBar(total=1.0, completed=share, width=20),
        f"{share:.0%} of {now.blocks:,} blocks",
    )
    return said


def recovery_lines(recoveries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what became of stages that were lost, the last one, in words."""
    if not recoveries:
        return []
    last = recoveries[-1]
    if last["measured_s"] is None:
        return [f"  recovering: {last['reason']}"]
    times = "once" if len(recoveries) == 1 else f"{len(recoveries)} times"
    return [f"  recovered {times}, last in {last['measured_s']:.1f} s: {last['reason']}"]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LoadBar:
    """Shows how many layers the stages of a plan have loaded, where stderr is a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("loading"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("layers"),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", total=None)

    @property
    def on_load(self) -> Callable[[int, int, str], None] | None:
        """What is called while stages load; None where there is no bar."""
        return None if self._bar is None else self._update

    def _update(self, done: int, total: int, said: str) -> None:
        assert self._bar is not None
        self._bar.update(self._task, completed=done, total=total, description=said)

    def stop(self) -> None:
        """Leave the bar as it is; again does nothing."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

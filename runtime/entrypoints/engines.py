"""Several engines that share a job: rows are dealt as engines have room, and end together.

    with Engines("DIR", "plan.json") as engines:
        engines.generate(["A prompt", "Another"], SamplingParams(max_tokens=32))

Each engine is an `LLM` with the plan of its own. A row goes to an engine that has room; at the end,
one that has nothing left takes over rows of others that it would end sooner, with their tokens so
far. The rows of an engine that is lost for good are done by the others.
"""

from __future__ import annotations

import logging
import queue
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmpq.errors import BadPlanError, LlmpqError
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.entrypoints.prompt_answerer import PromptAnswerer, all_answers
from llmpq.runtime.launch.choose_launcher import choose_backend
from llmpq.runtime.launch.stages.stage_place import StagePlace
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.report.job_report import EngineResult, JobReport, engines_report
from llmpq.runtime.report.live_numbers import JobSamples
from llmpq.runtime.requests.request import Progress, RequestOutputDelta
from llmpq.runtime.requests.request_output import RequestOutput
from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.steps.trace import write_chrome_trace
from llmpq.runtime.text.request_factory import PreparedPrompt, Prompt, listed

_log = logging.getLogger("llmpq.run")
_PROGRESS_S = 0.25
_AHEAD = 8
"""Rows at once, of which one more waits in an engine, so that its steps stay full."""
_LATEST = 32
"""Answers by which an engine's pace is known."""
SOONER = 0.9
"""Share of the time that is left of a row, below which another engine takes it over."""


@dataclass
class _Pace:
    """How fast an engine's rows are, by those that ended last."""

    first_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    """From the engine's queue to the first token."""
    token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    """Of each further token."""

    def note(self, delta: RequestOutputDelta) -> None:
        """Take the times of a row that ended where it began."""
        ended = delta.finished
        assert ended is not None
        waited_s = ended.first_token_s - ended.queue_s
        self.first_s.append(max(0.0, waited_s))
        if len(ended.tokens) > 1:
            each = (ended.total_s - ended.first_token_s) / (len(ended.tokens) - 1)
            self.token_s.append(each)

    def seconds(self, tokens: int, *, begun: bool) -> float | None:
        """Return the time of so many tokens, None where it is not known."""
        if not self.token_s or not self.first_s:
            return None
        first = 0.0 if begun else statistics.fmean(self.first_s)
        return first + tokens * statistics.fmean(self.token_s)


@dataclass
class _Row:
    """A prompt under way."""

    index: int
    prompt: PreparedPrompt
    engine: int
    left: int
    """Requests that have not ended."""
    was_taken: bool = False
    """Whether another engine had begun it."""


class Engines(PromptAnswerer):
    """The LLMs of a topology, one an engine."""

    def __init__(
        self,
        model: str | Path,
        plan: Topology | str | Path,
        options: EngineOptions | None = None,
        *,
        start: bool = True,
        use_tqdm: bool = True,
    ) -> None:
        """`plan`: of several engines, or its file; `BadPlanError` if it is none.

        `start=False`: prompts can be prepared, and `start` loads the model.
        """
        if isinstance(plan, Plan):
            raise BadPlanError("the plan is of one engine, which LLM(plan=...) runs")
        topology = plan if isinstance(plan, Topology) else Topology.load(plan)
        options = options or EngineOptions()
        self._plan = topology
        self.options = options
        self._trace = options.trace
        self.llms = [
            LLM(
                model,
                plan=engine.plan,
                options=_options_of(options, topology, number),
                start=False,
                use_tqdm=use_tqdm and number == 0,
            )
            for number, engine in enumerate(topology.engines)
        ]
        self.startup_s = 0.0
        self._widest = max(self.llms, key=lambda llm: llm.max_model_len)
        self._samples = JobSamples()
        self._names: dict[int, str] = {}
        self._ended_s = [0.0] * len(self.llms)
        self._num_taken = Counter[int]()
        self._lost: dict[int, str] = {}
        self._state = "not started"
        if start:
            self.start()

    def start(self) -> None:
        """Start all engines, one behind the other: the first reads the weights from the disk."""
        began_s = time.perf_counter()
        with ExitStack() as stack:
            for llm in self.llms:
                llm.start()
                stack.callback(llm.close)
            stack.pop_all()
        self._state = "running"
        self.startup_s = time.perf_counter() - began_s

    def close(self) -> None:
        """Take all engines down."""
        self._state = "closed"
        for llm in self.llms:
            llm.close()

    @property
    def plan(self) -> Topology:
        """Which engines there are, and the plan of each."""
        return self._plan

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have: on the widest engine."""
        return self._widest.max_model_len

    @property
    def stage_places(self) -> Sequence[StagePlace]:
        """Where each stage runs, one engine behind the other."""
        return [place for llm in self.llms for place in llm.stage_places]

    @property
    def progress(self) -> Progress:
        """The counters of all engines."""
        each = [llm.engine.progress for llm in self._able]
        busiest = max(each, key=lambda one: one.running, default=Progress())
        return Progress(
            waiting=sum(one.waiting for one in each),
            running=sum(one.running for one in each),
            finished=sum(one.finished for one in each),
            prompt_tokens=sum(one.prompt_tokens for one in each),
            generated_tokens=sum(one.generated_tokens for one in each),
            phase=busiest.phase,
            gauges={name: sum(one.gauges.get(name, 0) for one in each) for name in busiest.gauges},
        )

    def live_stats(self) -> dict[str, Any]:
        """Return what `LLM.live_stats` does, of all engines together; asks the stages."""
        each = [llm.live_stats() for llm in self._able]
        return {
            **asdict(self.progress),
            "stages": [stage for one in each for stage in one["stages"]],
            "recoveries": [recovery for one in each for recovery in one["recoveries"]],
        }

    def plan_of(self, output: RequestOutput) -> Plan:
        """Return the plan of the engine that answered."""
        assert output.engine is not None
        return self.llms[output.engine].plan

    def begun(self, prompt: PreparedPrompt) -> tuple[int, Sequence[int]]:
        """Return which engine answers a prompt, and the tokens of its first answer so far."""
        for number, llm in enumerate(self.llms):
            if number not in self._lost and (tokens := llm.begun(prompt)[1]):
                return number, tokens
        return 0, ()

    def _require_running(self) -> None:
        if self._state == "closed":
            raise RuntimeError("these Engines are closed; make others")
        if self._state == "not started":
            raise RuntimeError("these Engines have not been started; call start()")

    @property
    def _able(self) -> list[LLM]:
        return [llm for number, llm in enumerate(self.llms) if number not in self._lost]

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> PreparedPrompt:
        """Return a prompt as tokens and requests, as `LLM.prepare`: the widest engine's."""
        return self._widest.prepare(
            prompt, sampling_params, request_id=request_id, priority=priority
        )

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the answers to prompts, in their order, as `LLM.generate`."""
        self._require_running()
        prepared = [self.prepare(prompt, sampling_params) for prompt in listed(prompts)]
        return all_answers(self, prepared, use_tqdm=use_tqdm)

    def as_completed(
        self,
        prompts: Sequence[PreparedPrompt],
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield index and answers of prepared prompts as each has ended, on whichever engine.

        `RequestOutput.engine` says on which. Leaving the loop early aborts what has not ended.
        """
        self._require_running()
        self._names |= {r.id: prompt.name for prompt in prompts for r in prompt.requests}
        self._samples = samples = JobSamples()
        records = self.options.on_loss != "stop"
        dealer = _Dealer(self.llms, self.plan, prompts, self._lost, records=records)
        try:
            while dealer.num_left:
                heard = dealer.hear(_PROGRESS_S)
                if heard is not None:
                    index, output = heard
                    self._ended_s = dealer.ended_s
                    yield index, output
                samples.add(self.progress, last=not dealer.num_left)
                if on_progress is not None:
                    on_progress(self.progress)
        finally:
            self._num_taken += dealer.num_taken
            dealer.abort()

    def job_report(self, outputs: Sequence[RequestOutput], *, num_failed: int = 0) -> JobReport:
        """Return what a job came to, of all engines and of each; as `LLM.job_report`."""
        results = [
            EngineResult(
                report=None
                if number in self._lost
                else llm.job_report(
                    [output for output in outputs if output.engine == number],
                    took_s=self._ended_s[number],
                ),
                ended_s=self._ended_s[number],
                taken_over=self._num_taken[number],
                lost=self._lost.get(number),
            )
            for number, llm in enumerate(self.llms)
        ]
        return engines_report(
            self.plan,
            results,
            outputs,
            num_failed=num_failed,
            startup_s=self.startup_s,
            samples=self._samples.as_report(),
        )

    def write_trace(self) -> None:
        """Write the file of the option `trace`: a track for each stage of each engine."""
        if self._trace is None:
            return
        names, records = [], []
        for number, llm in enumerate(self.llms):
            if number in self._lost:
                continue
            own, recorded = llm.trace.parts(llm.engine.client)
            names += [f"engine {number} {name}" for name in own]
            records += recorded
        write_chrome_trace(self._trace, names, records, self._names)


def _options_of(options: EngineOptions, topology: Topology, number: int) -> EngineOptions:
    """Return an engine's options: its stages are processes, so that engines compute side by side.

    Those of a plan of several nodes, or at a Ray's address, are Ray's.
    """
    backend, plan = options.backend, topology.engines[number].plan
    if backend == "auto" and len({stage.node for stage in topology.stages}) > 1:
        backend = "ray"
    elif backend == "auto" and choose_backend(plan, options) == "threads":
        backend = "processes"
    return replace(options, backend=backend, trace=_trace_of(options, number))


def _trace_of(options: EngineOptions, number: int) -> str | None:
    """Return the trace of an engine that ends before all of them are written as one."""
    if options.trace is None:
        return None
    path = Path(options.trace)
    return str(path.with_name(f"{path.stem}.engine-{number}{path.suffix}"))


class _Dealer:
    """Deals the rows of one job to engines, and hears of them."""

    def __init__(
        self,
        llms: Sequence[LLM],
        topology: Topology,
        prompts: Sequence[PreparedPrompt],
        lost: dict[int, str],
        *,
        records: bool = True,
    ) -> None:
        """`lost`: engines that are gone, with the reason; it is added to.

        `records`: whether the tokens of rows are known here before they end.
        """
        self._llms = llms
        self._lost = lost
        self._records = records
        self._at_once = [
            min(llm.request_factory.limits.max_rows, engine.plan.workload.batch)
            for llm, engine in zip(llms, topology.engines, strict=True)
        ]
        self._waiting = deque(
            _Row(index=index, prompt=prompt, engine=-1, left=len(prompt.requests))
            for index, prompt in enumerate(prompts)
        )
        self._under_way: dict[int, _Row] = {}
        """By index."""
        self._row_of: dict[int, _Row] = {}
        """By the id of a request that has not ended."""
        self._ended: dict[int, RequestOutputDelta] = {}
        self._heard: queue.SimpleQueue[tuple[int, RequestOutputDelta]] = queue.SimpleQueue()
        self._pace = [_Pace() for _ in llms]
        self._began_s = time.perf_counter()
        self.num_taken = Counter[int]()
        """Rows that each engine took over from others."""
        self.ended_s = [0.0] * len(llms)
        """When the last row of each engine ended, or was taken over, since the job began."""
        self._deal()

    @property
    def num_left(self) -> int:
        """Rows that have not ended."""
        return len(self._waiting) + len(self._under_way)

    @property
    def now_s(self) -> float:
        """Seconds since the job began."""
        return time.perf_counter() - self._began_s

    def hear(self, timeout_s: float) -> tuple[int, RequestOutput] | None:
        """Wait for an answer; return its index and itself, None if there was none."""
        try:
            number, delta = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            self._deal()
            return None
        if delta.error is not None and delta.finished is None:
            self._lose(number, delta.error)
            self._deal()
            return None
        row = self._row_of.get(delta.id)
        if delta.finished is None or row is None or row.engine != number:
            return None
        del self._row_of[delta.id]
        self._ended[delta.id] = delta
        row.left -= 1
        if not row.was_taken:
            self._pace[number].note(delta)
        if row.left:
            return None
        del self._under_way[row.index]
        self.ended_s[number] = self.now_s
        self._deal()
        ended = {r.id: self._ended.pop(r.id) for r in row.prompt.requests}
        output = self._llms[number].request_factory.output_of(row.prompt, ended)
        return row.index, replace(output, engine=number)

    def abort(self) -> None:
        """End what is under way."""
        for number, llm in enumerate(self._llms):
            left = [i for i, row in self._row_of.items() if row.engine == number]
            if left and number not in self._lost:
                llm.engine.abort(left)

    def _deal(self) -> None:
        """Give rows to engines that have room, the one with the most room for its size first."""
        while True:
            room = [number for number in self._able if self._room(number) > 0]
            if not any(self._give(number) for number in sorted(room, key=self._load)):
                return

    @property
    def _able(self) -> list[int]:
        return [number for number in range(len(self._llms)) if number not in self._lost]

    def _load(self, number: int) -> float:
        return self._num_at(number) / self._at_once[number]

    def _num_at(self, number: int) -> int:
        return sum(row.engine == number for row in self._under_way.values())

    def _room(self, number: int) -> int:
        """Return how many more rows an engine may have: those of the end are not kept ahead."""
        ahead = 1 + self._at_once[number] // _AHEAD if self._waiting else 0
        return self._at_once[number] + ahead - self._num_at(number)

    def _give(self, number: int) -> bool:
        """Give an engine a row; False where there is none for it."""
        llm = self._llms[number]
        row = next((row for row in self._waiting if llm.request_factory.has_room(row.prompt)), None)
        if row is None:
            return not self._waiting and self._take_over(number)
        if not self._may_move(row) and self._ends_earlier_elsewhere(row, number):
            return False
        self._waiting.remove(row)
        row.engine = number
        self._begin(row)
        return True

    def _begin(self, row: _Row) -> None:
        self._under_way[row.index] = row
        self._row_of |= {request.id: row for request in row.prompt.requests}
        number = row.engine
        try:
            self._llms[number].engine.submit(
                row.prompt.requests, partial(_put, self._heard, number)
            )
        except (LlmpqError, RuntimeError) as error:
            self._lose(number, error)

    def _may_move(self, row: _Row) -> bool:
        """Whether a row that has begun can go on elsewhere: its tokens are known here then."""
        return self._records and len(row.prompt.requests) == 1

    def _ends_earlier_elsewhere(self, row: _Row, number: int) -> bool:
        """Whether the rows that wait leave the row to be begun, and ended, sooner by others."""
        tokens = max(request.max_new for request in row.prompt.requests)
        here_s = self._pace[number].seconds(tokens, begun=False)
        others = [
            other
            for other in self._able
            if other != number and self._llms[other].request_factory.has_room(row.prompt)
        ]
        paces = {other: self._pace[other].seconds(tokens, begun=False) for other in others}
        if here_s is None or not others or any(pace is None for pace in paces.values()):
            return False
        known = {other: pace for other, pace in paces.items() if pace is not None}
        rate = sum(self._at_once[other] / max(pace, 1e-9) for other, pace in known.items())
        return len(self._waiting) / rate + min(known.values()) < here_s * SOONER

    def _take_over(self, number: int) -> bool:
        """Take over the row of another engine that would end last, if it ends sooner here."""
        llm, best = self._llms[number], None
        for row in self._under_way.values():
            if row.engine == number or row.was_taken or not self._may_move(row):
                continue
            if row.engine in self._lost or not llm.request_factory.has_room(row.prompt):
                continue
            left = self._tokens_left(row)
            there_s = self._pace[row.engine].seconds(left, begun=True)
            here_s = self._pace[number].seconds(left, begun=False)
            if there_s is None or here_s is None or here_s > there_s * SOONER:
                continue
            if best is None or there_s > best[0]:
                best = there_s, row
        if best is None:
            return False
        row = best[1]
        record = self._llms[row.engine].engine.take_back(row.prompt.requests[0].id)
        if record is None:
            row.was_taken = True  # it has just ended, or cannot be
            return False
        self.ended_s[row.engine] = self.now_s
        row.engine, row.was_taken = number, True
        record.listener = partial(_put, self._heard, number)
        self.num_taken[number] += 1
        try:
            llm.engine.adopt(record)
        except (LlmpqError, RuntimeError) as error:
            self._lose(number, error)
        return True

    def _tokens_left(self, row: _Row) -> int:
        request = row.prompt.requests[0]
        known = self._llms[row.engine].engine.tokens_of(request.id)
        return max(1, request.max_new - len(known))

    def _lose(self, number: int, error: BaseException) -> None:
        """Give up an engine: what it had is begun anew by others; the last one's loss is raised."""
        if number not in self._lost:
            self._lost[number] = str(error)
            own = [row for row in self._under_way.values() if row.engine == number]
            if len(self._lost) < len(self._llms):
                _log.warning(
                    "engine %d is lost (%s); its %d rows go to the others", number, error, len(own)
                )
            for row in own:
                del self._under_way[row.index]
                for request in row.prompt.requests:
                    self._row_of.pop(request.id, None)
                    self._ended.pop(request.id, None)
                row.engine, row.left = -1, len(row.prompt.requests)
                self._waiting.appendleft(row)
        stuck = [
            row
            for row in self._waiting
            if not any(self._llms[able].request_factory.has_room(row.prompt) for able in self._able)
        ]
        if stuck:
            raise error


def _put(
    heard: queue.SimpleQueue[tuple[int, RequestOutputDelta]],
    number: int,
    delta: RequestOutputDelta,
) -> None:
    heard.put((number, delta))

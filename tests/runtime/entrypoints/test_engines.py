"""Rows dealt to engines of unequal speed: all end together, none is lost with an engine."""

from __future__ import annotations

import heapq
import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq.errors import BadPlanError, StageLostError
from llmpq.plans.topology import EngineShare, Topology
from llmpq.runtime.cli.main import main
from llmpq.runtime.entrypoints.engines import Engines, _Dealer, _options_of
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.entrypoints.prompt_answerer import all_answers
from llmpq.runtime.launch.request_record import RequestRecord
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.requests.request import Finished, Request, RequestOutputDelta
from llmpq.runtime.requests.request_output import RequestOutput
from llmpq.runtime.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.quick


def test_answers_are_in_order_and_every_end_is_counted() -> None:
    """Of an `LLM` and of `Engines` alike: by rows that have ended it is said how long is left."""
    ended: list[tuple[str, int]] = []

    class Shown:
        def __enter__(self) -> Shown:
            return self

        def __exit__(self, *_: object) -> None: ...

        def end(self, output: str, most_tokens: int) -> None:
            ended.append((output, most_tokens))

    class Answerer:
        def as_completed(self, prompts: Any, *, on_progress: Any) -> Any:
            yield from ((1, "second"), (0, "first"))

        def progress_of(self, prompts: Any, num_rows: int, *, quiet: bool) -> Shown:
            assert num_rows == 2 and quiet
            return Shown()

    prompts: Any = [SimpleNamespace(most_tokens=3), SimpleNamespace(most_tokens=4)]
    found = all_answers(Answerer(), prompts, use_tqdm=False)  # type: ignore[arg-type]
    assert found == ["first", "second"] and ended == [("second", 4), ("first", 3)]


@dataclass
class _Engine:
    """An engine in virtual time: every step brings a token of each running row."""

    clock: list[float]
    step_s: float
    batch: int
    waiting: list[RequestRecord] = field(default_factory=list)
    running: list[RequestRecord] = field(default_factory=list)
    free_s: float = 0.0
    ended_s: float = 0.0
    lost: bool = False

    max_rows = 256

    @property
    def engine(self) -> _Engine:
        """As an `LLM` has it; so are the next two."""
        return self

    request_factory = limits = engine

    def has_room(self, prompt: Any) -> bool:
        return True

    def submit(self, requests: Sequence[Request], listener: Any) -> None:
        for request in requests:
            self.adopt(RequestRecord(request=request, listener=listener, submitted_s=self.clock[0]))

    def adopt(self, record: RequestRecord) -> None:
        if self.lost:
            raise StageLostError("lost")
        record.begun_s = self.clock[0]
        self.waiting.append(record)

    def take_back(self, number: int) -> RequestRecord | None:
        for held in (self.waiting, self.running):
            for record in held:
                if record.request.id == number:
                    held.remove(record)
                    self.ended_s = self.clock[0]
                    return record
        return None

    def tokens_of(self, number: int) -> Sequence[int]:
        known = [*self.waiting, *self.running]
        return next((r.tokens for r in known if r.request.id == number), ())

    def abort(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.take_back(number)

    def output_of(self, prompt: Any, finished: Any) -> RequestOutput:
        return RequestOutput(request_id=prompt.name, prompt=None, prompt_token_ids=[], outputs=[])

    def step(self) -> float:
        """Compute a step, and return when it ends."""
        while self.waiting and len(self.running) < self.batch:
            self.running.append(self.waiting.pop(0))
        return max(self.free_s, self.clock[0]) + self.step_s * (1 + 0.02 * len(self.running))

    def end_step(self) -> None:
        self.free_s = self.clock[0]
        for record in list(self.running):
            now_s = self.clock[0]
            record.take([1], None, now_s)
            if len(record.tokens) < record.request.max_new:
                continue
            self.running.remove(record)
            self.ended_s = now_s
            first_s = record.first_token_s or now_s
            ended = Finished(
                id=record.request.id,
                tokens=list(record.tokens),
                finish_reason="length",
                first_token_s=first_s - record.submitted_s,
                total_s=now_s - record.submitted_s,
            )
            record.listener(RequestOutputDelta(id=record.request.id, finished=ended))


def _prompts(lengths: Sequence[int]) -> list[Any]:
    return [
        SimpleNamespace(name=str(i), requests=(Request(id=i, prompt=[1], max_new=n),))
        for i, n in enumerate(lengths)
    ]


def _run(
    speeds: Sequence[float], batches: Sequence[int], lengths: Sequence[int], *, lose_s: float = 1e9
) -> tuple[list[_Engine], list[int], Any]:
    """Run a job; the first engine is lost after `lose_s`. Return engines, answered rows, dealer."""
    clock = [0.0]
    engines = [_Engine(clock, s, b) for s, b in zip(speeds, batches, strict=True)]
    shares = [SimpleNamespace(plan=SimpleNamespace(workload=SimpleNamespace(batch=b)))
              for b in batches]  # fmt: skip
    topology: Any = SimpleNamespace(engines=shares)
    lost: dict[int, str] = {}
    dealer = _Dealer(engines, topology, _prompts(lengths), lost)  # type: ignore[arg-type]
    steps = [(0.0, number) for number in range(len(engines))]
    busy = [False] * len(engines)
    answered = []
    while dealer.num_left:
        clock[0], number = heapq.heappop(steps)
        engine = engines[number]
        if number == 0 and clock[0] > lose_s and not engine.lost:
            engine.lost = True
            dealer._heard.put((0, RequestOutputDelta(id=-1, error=StageLostError("gone"))))
        if engine.lost:
            dealer.hear(0.0)
            continue
        if busy[number]:
            engine.end_step()
            busy[number] = False
        while not dealer._heard.empty():
            heard = dealer.hear(0.0)
            if heard is not None:
                answered.append(heard[0])
        if engine.running or engine.waiting:
            busy[number] = True
            heapq.heappush(steps, (engine.step(), number))
        else:
            heapq.heappush(steps, (clock[0] + 1e-3, number))
    return engines, answered, dealer


@pytest.mark.parametrize("ratio", [1.0, 1.7, 2.5, 4.0])
@pytest.mark.parametrize("equal", [True, False])
def test_two_engines_end_within_three_percent(ratio: float, equal: bool) -> None:
    rng = random.Random(int(10 * ratio))
    lengths = [32 if equal else rng.randint(4, 60) for _ in range(500)]
    engines, answered, _ = _run([0.02 * ratio, 0.02], [8, 8], lengths)
    assert sorted(answered) == list(range(500))
    slow_s, fast_s = (engine.ended_s for engine in engines)
    assert abs(slow_s - fast_s) <= 0.03 * max(slow_s, fast_s)


def test_rows_go_by_speed() -> None:
    engines, _, dealer = _run([0.06, 0.02], [8, 8], [32] * 400)
    assert max(e.ended_s for e in engines) < 1.08 * 400 * 32 / 8 * 1.16 / (1 / 0.06 + 1 / 0.02)


def test_rows_of_a_lost_engine_are_done_by_the_others() -> None:
    engines, answered, dealer = _run([0.02, 0.02, 0.03], [8, 8, 4], [16] * 120, lose_s=0.9)
    assert engines[0].lost and sorted(answered) == list(range(120))


def test_the_loss_of_the_last_engine_is_raised() -> None:
    with pytest.raises(StageLostError, match="gone"):
        _run([0.02], [8], [16] * 120, lose_s=0.9)


@pytest.mark.cpu
def test_a_batch_file_is_run_by_two_engines(
    demo_model: Path, make_plan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their greedy tokens are one engine's; what is interrupted goes on; all say which engine."""
    model = demo_model
    whole, pair = make_plan(model), make_plan(model, (1,))
    renamed = tuple(
        stage.model_copy(update={"device": f"{stage.device}-b", "device_index": 5 + i})
        for i, stage in enumerate(pair.stages)
    )
    shares = [
        EngineShare(rows=8, plan=whole),
        EngineShare(rows=4, plan=pair.model_copy(update={"stages": renamed})),
    ]
    work = whole.workload.model_copy(update={"batch": 12})
    topology = Topology(engines=tuple(shares), workload=work)
    plan, alone = tmp_path / "plan.json", tmp_path / "alone.json"
    topology.save_json(plan)
    whole.save_json(alone)
    rows = [
        {"prompt": [5 + i, 7, 9], "max_tokens": 4 + i % 9, "ignore_eos": True} for i in range(24)
    ]
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    several, one = tmp_path / "several.jsonl", tmp_path / "one.jsonl"
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    words = ["run", "--model", str(model), "-i", str(given)]
    more = ["--plan", str(plan), "--report", str(report), "--trace", str(trace)]
    assert main([*words, *more, "-o", str(several), "--json"]) == 0
    assert main([*words, "--plan", str(alone), "-o", str(one), "--json"]) == 0
    found, expected = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (several, one)
    )
    assert [row["tokens"] for row in found] == [row["tokens"] for row in expected]
    assert {row["engine"] for row in found} == {0, 1}
    content = json.loads(report.read_text())
    assert sum(one["rows"] for one in content["engines"]) == 24 == content["completed"]
    assert [stage["engine"] for stage in content["stages"]] == [0, 1, 1]
    ended = [one["report"]["measured"]["total_s"] for one in content["engines"]]
    assert ended == [one["ended_s"] for one in content["engines"]]
    assert all(stage["busy_share"] <= 1 for stage in content["stages"])
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {track.split(" stage")[0] for track in tracks} == {"engine 0", "engine 1"}
    several.write_text("".join(json.dumps(row) + "\n" for row in found[:10]))
    capsys.readouterr()
    assert main([*words, "--plan", str(plan), "-o", str(several), "--resume", "--json"]) == 0
    again = [json.loads(line) for line in several.read_text().splitlines()]
    assert [row["tokens"] for row in again] == [row["tokens"] for row in expected]
    assert main([*words, "--plan", str(plan), "-o", "x", "--report", "x.html", "--json"]) == 2
    assert "a page is of one engine and the plan has several" in capsys.readouterr().err


@pytest.mark.cpu
def test_rows_of_an_engine_that_is_killed_are_answered_by_the_other(
    demo_model: Path, make_plan: Any, tmp_path: Path
) -> None:
    plans = [make_plan(demo_model, gen_len=64), make_plan(demo_model, gen_len=64)]
    stage = plans[1].stages[0].model_copy(update={"device": "other"})
    plans[1] = plans[1].model_copy(update={"stages": (stage,)})
    topology = Topology(
        engines=tuple(EngineShare(rows=8, plan=plan) for plan in plans),
        workload=plans[0].workload.model_copy(update={"batch": 16}),
    )
    greedy = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    options = EngineOptions(on_loss="stop", offline=True)
    topology.save_json(tmp_path / "several.json")
    plans[0].save_json(tmp_path / "one.json")
    with pytest.raises(BadPlanError, match="is a plan of a single engine, expected one of several"):
        Engines(demo_model, tmp_path / "one.json")
    with Engines(demo_model, tmp_path / "several.json", options, use_tqdm=False) as engines:
        prompts = [engines.prepare([5 + i, 7, 9], greedy) for i in range(16)]
        found: dict[int, RequestOutput] = {}
        for index, output in engines.as_completed(prompts):
            if not found:
                os.kill(engines.llms[1].stage_places[0].pid, signal.SIGKILL)
            found[index] = output
        again = engines.generate([[5, 7, 9], [6, 7, 9]], greedy, use_tqdm=False)
        report = engines.job_report(list(found.values()))
    assert sorted(found) == list(range(16))
    assert all(len(output.outputs[0].token_ids) == 48 for output in found.values())
    tokens = [found[index].outputs[0].token_ids for index in (0, 1)]
    assert [output.outputs[0].token_ids for output in again] == tokens
    with pytest.raises(RuntimeError, match="these Engines are closed; make others"):
        engines.generate([[5, 7, 9]], greedy)
    with pytest.raises(ValueError, match="an LLM is one engine and the plan has 2"):
        LLM(demo_model, plan=topology)  # type: ignore[arg-type]
    lost = [one["lost"] for one in report["engines"]]
    assert lost[0] is None and lost[1] is not None
    rows = [one["rows"] for one in report["engines"]]
    assert sum(rows) == 16 > rows[1]


def test_engines_on_several_nodes_are_rays(make_plan: Any, demo_model: Path) -> None:
    """One whose devices are all on another node would else be started on this one."""
    plans = [make_plan(demo_model), make_plan(demo_model)]
    stage = plans[1].stages[0].model_copy(update={"device": "other", "node": "elsewhere"})
    plans[1] = plans[1].model_copy(update={"stages": (stage,)})
    shares = tuple(EngineShare(rows=4, plan=plan) for plan in plans)
    work = plans[0].workload.model_copy(update={"batch": 8})
    both = Topology(engines=shares, workload=work)
    assert [_options_of(EngineOptions(), both, n).backend for n in (0, 1)] == ["ray", "ray"]
    work = work.model_copy(update={"batch": 4})
    here = Topology(engines=shares[:1], workload=work)
    assert _options_of(EngineOptions(), here, 0).backend == "processes"
    assert _options_of(EngineOptions(backend="threads"), here, 0).backend == "threads"

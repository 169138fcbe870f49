"""Calls of a `StageWorker` as JSON data, for stages that are other processes or Ray actors.

Stages of the driver's own process are called with values. Elsewhere `RemoteStage` stands at the
driver's end of a call, `RemoteStageWorker` at the stage's. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from llmpq.plans.plan import Plan
from llmpq.runtime.launch.stages.stage_place import StagePlace
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import EngineOutputs, Finished, Progress, Request
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.requests.token_rules import LogitsConstraints, LogprobOutput
from llmpq.runtime.steps.trace import LoadReport, StageRecord


def write_args(method: str, args: Sequence[Any]) -> list[Any]:
    """Return a call's arguments as JSON data."""
    if method == "submit":
        return [[write_request(request) for request in args[0]]]
    if method == "take_rules":
        return [[[number, rules.to_data()] for number, rules in args[0]]]
    if method == "move":
        index, plan, settings = args
        return [index, plan_data(plan), settings.to_data()]
    return list(args)


def read_args(method: str, data: Sequence[Any]) -> list[Any]:
    """Return the arguments that `write_args` wrote."""
    if method == "submit":
        return [[read_request(fields) for fields in data[0]]]
    if method == "take_rules":
        return [[(number, LogitsConstraints.from_data(rules)) for number, rules in data[0]]]
    return list(data)


def write_answer(method: str, answer: Any) -> Any:
    """Return what a call returned as JSON data."""
    if method == "noted":
        return [[number, noted.to_data()] for number, noted in answer.items()]
    if method == "poll":
        finished = [vars(ended) for ended in answer.finished]
        return {"finished": finished, "tokens": answer.tokens, "progress": vars(answer.progress)}
    return asdict(answer) if method in _VALUES else answer


def read_answer(method: str, data: Any) -> Any:
    """Return the value that `write_answer` wrote."""
    read = _VALUES.get(method)
    return data if read is None else read(data)


def _read_outputs(data: Mapping[str, Any]) -> EngineOutputs:
    return EngineOutputs(
        finished=[Finished(**row) for row in data["finished"]],
        tokens={int(key): tokens for key, tokens in data["tokens"].items()},
        progress=Progress(**data["progress"]),
    )


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "identity": lambda data: StagePlace(**data),
    "load": lambda data: LoadReport(**data),
    "noted": lambda data: {number: LogprobOutput.from_data(noted) for number, noted in data},
    "poll": _read_outputs,
    "record": StageRecord.from_data,
}
"""Method -> what reads its answer; the others answer with plain data."""


class RemoteStage:
    """The driver's end of a stage elsewhere: called with values, which go as JSON data."""

    def __init__(
        self,
        send: Callable[..., Future[Any]],
        failure_of: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:
        """`send(method, *data)` returns an answer to come; `failure_of`: what its error means."""
        self._send, self._failure_of = send, failure_of

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the stage's worker; the future raises `CallFailed`."""
        answer: Future[Any] = Future()

        def arrived(sent: Future[Any]) -> None:
            error = sent.exception()
            if error is None:
                answer.set_result(read_answer(method, sent.result()))
            else:
                answer.set_exception(self._failure_of(error))

        self._send(method, *write_args(method, args)).add_done_callback(arrived)
        return answer


class RemoteStageWorker:
    """A `StageWorker` whose calls are JSON data."""

    def __init__(
        self, index: int, plan: Mapping[str, Any], settings: Mapping[str, Any], **more: Any
    ) -> None:
        """`plan`, `settings`: as data; `more`: the worker's own."""
        from llmpq.runtime.launch.stages.stage_worker import StageWorker

        self._worker = StageWorker(
            index, Plan.parse_data(plan, where="plan"), StageSettings.from_data(settings), **more
        )

    def move(self, index: int, plan: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Let another stage, of another plan perhaps, take the place of this one, which left."""
        self._worker = self._worker.successor(
            index, Plan.parse_data(plan, where="plan"), StageSettings.from_data(settings)
        )

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method of the worker that takes and returns data."""
        call = getattr(self._worker, method)

        def over_wire(*data: Any) -> Any:
            return write_answer(method, call(*read_args(method, data)))

        return over_wire


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON data."""
    data: dict[str, Any] = json.loads(plan.dump_json())
    return data


_AS_THEY_ARE = (
    *("id", "max_new", "min_new", "priority", "cache_salt", "timeout_s"),
    *("may_draft", "stream", "recorded"),
)
"""Fields of a request that JSON has, too; what a request has become while it ran is not sent."""


def write_request(request: Request) -> dict[str, Any]:
    """Return a request's fields as JSON data."""
    return {
        **{name: getattr(request, name) for name in _AS_THEY_ARE},
        "prompt": list(request.prompt),
        "stop_ids": sorted(request.stop_ids),
        "stop_texts": list(request.stop_texts),
        "sampling": asdict(request.sampling),
        "rules": None if request.rules is None else request.rules.to_data(),
        "output": list(request.output),
    }


def read_request(fields: Mapping[str, Any]) -> Request:
    """Return the request `write_request` wrote."""
    return Request(
        **{name: fields[name] for name in _AS_THEY_ARE},
        prompt=tuple(fields["prompt"]),
        stop_ids=frozenset(fields["stop_ids"]),
        stop_texts=tuple(fields["stop_texts"]),
        sampling=SamplerConfig(**fields["sampling"]),
        rules=None if fields["rules"] is None else LogitsConstraints.from_data(fields["rules"]),
        output=list(fields["output"]),
    )

"""The stages of a plan as processes of this host, without Ray: benchmarks of many plans.

The processes of the next plan may be started while one is measured: what they import is ready then.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

from llmpq.errors import DeadlineError, StageLostError
from llmpq.plan import Plan
from llmpq.runtime.engine.mailbox import Finished
from llmpq.runtime.launch.stage_host import LOCAL_HOST
from llmpq.runtime.launch.stage_settings import StageSettings, write_request
from llmpq.runtime.request import Request
from llmpq.runtime.trace import StageRecord

POLL_S = 0.25


class ProcessEngine:
    """Stages on the GPUs 0, 1, ... of this host, or on those given."""

    def __init__(
        self,
        plan: Plan,
        settings: StageSettings,
        *,
        gpus: Sequence[int] | None = None,
        limit_s: float = 60.0,
    ) -> None:
        """Start the processes; they import and wait. An answer or a job may take `limit_s`."""
        self.plan, self._limit_s = plan, limit_s
        chosen = gpus or range(len(plan.stages))
        self._stages = [
            subprocess.Popen(
                [sys.executable, "-m", "llmpq.runtime.launch.stage_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
            )
            for gpu in chosen
        ]
        for index, stage in enumerate(self._stages):
            first = {"index": index, "plan": json.loads(plan.dump_json())}
            self._write(stage, first | {"settings": asdict(settings)})
        self._known = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stage in self._stages:
            stage.kill()
        for stage in self._stages:
            stage.wait()

    def start(self) -> None:
        """Load the stages, connect them, start their loops."""
        if not self._known:
            for index in range(len(self._stages)):
                self._read(index)
            self._known = True
        self._all("load")
        if len(self._stages) > 1:
            port = self._call(0, "open_rendezvous", LOCAL_HOST, 0)
            self._all("join", LOCAL_HOST, port)
        self._all("run")

    def serve(self, requests: Sequence[Request]) -> list[Finished]:
        """Serve requests to their end."""
        self._call(0, "submit", json.dumps([write_request(request) for request in requests]))
        finished: list[Finished] = []
        end_s = time.monotonic() + self._limit_s
        while len(finished) < len(requests):
            news = json.loads(self._call(0, "poll", POLL_S))
            finished += [Finished(**row) for row in news["finished"]]
            if len(finished) < len(requests) and time.monotonic() > end_s:
                raise DeadlineError(
                    f"{len(finished)} of {len(requests)} requests ended in {self._limit_s:.0f} s"
                )
        return finished

    def records(self) -> list[StageRecord]:
        """Return what every stage recorded since the last call."""
        return [StageRecord.from_json(text) for text in self._all("record")]

    def end(self) -> None:
        """Let the loops end."""
        self._call(0, "finish_submitting")
        self._all("ended")

    def _all(self, call: str, *args: object) -> list[Any]:
        for stage in self._stages:
            self._write(stage, {"call": call, "args": args})
        return [self._read(index) for index in range(len(self._stages))]

    def _call(self, index: int, call: str, *args: object) -> Any:
        self._write(self._stages[index], {"call": call, "args": args})
        return self._read(index)

    def _write(self, stage: subprocess.Popen[str], message: dict[str, Any]) -> None:
        assert stage.stdin is not None
        try:
            stage.stdin.write(json.dumps(message) + "\n")
            stage.stdin.flush()
        except BrokenPipeError:
            raise StageLostError("a stage's process ended; its message stands above") from None

    def _read(self, index: int) -> Any:
        stage = self._stages[index]
        assert stage.stdout is not None
        if not select.select([stage.stdout], [], [], self._limit_s)[0]:
            name = self.plan.stages[index].device
            raise DeadlineError(f"stage {name} has not answered for {self._limit_s:.0f} s")
        line = stage.stdout.readline()
        if not line:
            raise StageLostError(
                f"the process of stage {index} ended with code {stage.wait()}; its message stands "
                "above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise StageLostError(f"stage {self.plan.stages[index].device}: {answer['error']}")
        return answer["value"]

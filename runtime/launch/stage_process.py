"""One stage as a plain process: `StageActor` behind JSON lines, for benchmarks without Ray.

First line: {"index": 0, "plan": {...}, "settings": {...}}. Then one call a line, such as
{"call": "load", "args": []}, each answered with {"value": ...} or {"error": "..."}. `run` is
answered at once and goes on in a thread; whether it ended is the answer to `ended`.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any, TextIO

from llmpq.runtime.launch.stage_actor import StageActor

CALLS = ("load", "open_rendezvous", "join", "submit", "finish_submitting", "poll", "record")
_END_S = 30.0


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer calls until the pipe closes."""
    first = json.loads(requests.readline())
    actor = StageActor(first["index"], json.dumps(first["plan"]), first["settings"])
    _answer(answers, {"value": actor.identity()})
    running: threading.Thread | None = None
    failures: list[str] = []

    def run() -> None:
        try:
            actor.run()
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    for line in requests:
        request = json.loads(line)
        call, args = request["call"], request.get("args", [])
        try:
            if failures:
                raise RuntimeError(failures[0])
            value: Any = None
            if call == "run":
                running = threading.Thread(target=run, daemon=True)
                running.start()
            elif call == "ended":
                assert running is not None
                running.join(_END_S)
                value = not running.is_alive()
            else:
                assert call in CALLS, call
                value = getattr(actor, call)(*args)
            _answer(answers, {"value": value})
        except Exception as error:
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)

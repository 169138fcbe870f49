"""One stage, or one survey of a node, as a plain process: its calls as JSON lines.

First line: {"index": 0, "plan": {...}, "settings": {...}, "lowest_priority": false}, or {"survey":
{...}}. Then one call a line, such as {"number": 3, "call": "load", "args": []}, each in a thread of
its own and answered, in any order, with {"number": 3, "value": ...} or {"number": 3, "error":
"ValueError", "text": "..."}. The process ends with its standard input, so that it never outlives
who started it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, TextIO

from llmpq.commands.child_lines import read_lines, take_answers, write_line
from llmpq.out_of_memory import first_line, out_of_memory
from llmpq.runtime.gc_freeze import gc_freeze

_LOWEST = 19
"""The nice value of a stage that computes on a server's own CPUs: what is computed is sent before
more is. With the same priority a token waits for a core while the stages have them."""
_SWITCH_S = 0.0005
"""How long the loop that feeds a device may wait for a thread that answers a call."""
CALLS = (
    *("identity", "load", "open_rendezvous", "join", "run", "submit", "abort"),
    *(
        "take_rules",
        "guide_is_ready",
        "noted",
        "work",
        "finish_submitting",
        "poll",
        "health",
        "record",
    ),
    *("speculation", "peak_memory", "look", "try_gpus", "try_copies", "try_links"),
)


class _Server:
    """Answers the calls of one actor."""

    def __init__(self, first: dict[str, Any], answers: TextIO) -> None:
        self._actor = _actor(first)
        self._answers, self._lock = answers, threading.Lock()

    def answer(self, request: dict[str, Any]) -> None:
        """Make one call."""
        message: dict[str, Any] = {"number": request["number"]}
        try:
            assert request["call"] in CALLS, request["call"]
            message["value"] = getattr(self._actor, request["call"])(*request["args"])
            if request["call"] == "load":
                gc_freeze()
        except BaseException as error:  # the caller's to judge
            name = "MemoryError" if out_of_memory(error) else _public_name(error)
            message |= {"error": name, "text": _told(error)}
        with self._lock:
            write_line(self._answers, message)


def _actor(first: dict[str, Any]) -> Any:
    if first.get("lowest_priority"):  # before threads are started: they inherit it
        os.nice(_LOWEST)
    # Imported here: what cannot be imported is the answer to the first call.
    if "survey" in first:
        from llmpq.runtime.launch.nodes.node_survey import NodeSurvey

        return NodeSurvey(**first["survey"])
    from llmpq.runtime.launch.stages.stage_wire import RemoteStageWorker

    return RemoteStageWorker(first["index"], first["plan"], first["settings"])


def _public_name(error: BaseException) -> str:
    """Return the name of the error's kind, or of the kind of outcome it stands for."""
    for kind in (ValueError, ConnectionError):
        if isinstance(error, kind):
            return kind.__name__
    return type(error).__name__


def _told(error: BaseException) -> str:
    """Return an error's text; of those that a native stack may follow, the first line."""
    return first_line(error) if isinstance(error, (RuntimeError, MemoryError)) else str(error)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer calls until the pipe closes."""
    messages = read_lines(requests)
    server = _Server(next(messages), answers)
    for message in messages:
        threading.Thread(target=server.answer, args=(message,), daemon=True).start()


def main() -> None:
    """Serve on the standard streams; what libraries print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to answer
    sys.setswitchinterval(_SWITCH_S)
    serve(sys.stdin, take_answers())
    os._exit(0)  # threads may be waiting for stages that are gone


if __name__ == "__main__":
    main()

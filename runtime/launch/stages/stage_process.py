"""One stage, or one look at a node, as a child process: what `ProcessLauncher` starts.

The first line is {"index": 0, "plan": {...}, "settings": {...}, "lowest_priority": false}, or
{"survey": {...}}, or {"probe": {...}}; calls are those of the object that it makes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import Any

from llmpq.child import serve_calls

_LOWEST = 19
"""The nice value of a stage that computes on a server's own CPUs: what is computed is sent before
more is. With the same priority a token waits for a core while the stages have them. It loads as
others do: nothing is sent until it has."""
SWITCH_S = 0.0005
"""How long the loop that feeds a device may wait for a thread that answers a call."""
STAGE_CALLS = (
    "identity",
    "load",
    "open_rendezvous",
    "join",
    "run",
    "halt",
    "leave",
    "move",
    "submit",
    "abort",
    "reset_prefix_cache",
    "take_rules",
    "guide_is_ready",
    "noted",
    "work",
    "finish_submitting",
    "poll",
    "health",
    "record",
    "speculation",
    "peak_memory",
)
"""Methods of `StageWorker` that are called from other processes."""
CALLS = (*STAGE_CALLS, "look", "try_gpus", "try_copies", "try_links")
"""What such a process answers: besides, methods of a survey and of a probe."""


def make(first: dict[str, Any]) -> Any:
    """Return the stage, survey or probe of a first line."""
    # Imported here: what cannot be imported is the answer to the first call.
    if "survey" in first:
        from llmpq.runtime.launch.stages.node_survey import NodeSurvey

        return NodeSurvey(**first["survey"])
    if "probe" in first:
        from llmpq.runtime.launch.stages.stage_probe import StageProbe

        return StageProbe(**first["probe"])
    from llmpq.runtime.launch.stages.gc_freeze import gc_freeze
    from llmpq.runtime.launch.stages.stage_wire import RemoteStageWorker

    is_frozen = gc.get_freeze_count() > 0
    """Whether this was forked with all modules frozen: a model alone is looked through quickly."""

    class ProcessWorker(RemoteStageWorker):
        def load(self) -> Any:
            report = self.__getattr__("load")()
            if not is_frozen:
                gc_freeze()  # the process has nothing else
            return report

        def move(self, *data: Any) -> None:
            if not is_frozen:
                gc.unfreeze()  # the model, of which another one may need the room
            super().move(*data)

        def run(self) -> Any:
            if first.get("lowest_priority"):
                lower_priority()
            return self.__getattr__("run")()

    return ProcessWorker(first["index"], first["plan"], first["settings"])


def lower_priority() -> None:
    """Give every thread of this process the lowest priority; those that they start inherit it."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), _LOWEST)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_S)
    serve_calls(make, CALLS)

"""`llmpq-dist devices`: gives devices to a command that runs, or takes them from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llmpq.devices.cluster import Cluster
from llmpq.errors import ExitCode
from llmpq.runtime.cli.tool_flags import DevicesOptions
from llmpq.runtime.elastic import control_socket
from llmpq.runtime.elastic.elastic import HORIZON_S


def main(options: DevicesOptions) -> int:
    """Ask the command and say what came of it."""
    _check(options)
    pid, path = _chosen(options.pid)
    question: dict[str, Any] = {"devices": options.action}
    if options.action != "list":
        question["name"] = options.name
    if options.action == "add":
        cluster = None if options.cluster is None else Cluster.load(options.cluster)
        question["cluster"] = (
            None if cluster is None else cluster.model_dump(mode="json", by_alias=True)
        )
        question["horizon_s"] = HORIZON_S if options.horizon is None else options.horizon
    found = control_socket.ask(path, question)
    if options.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    elif options.action == "list":
        sys.stdout.write(f"process {pid} runs {found['model']}\n")
        for number, stage in enumerate(found["stages"]):
            first, end = stage["layers"]
            device, node = stage["device"], stage["node"]
            sys.stdout.write(f"stage {number}: {device} on {node}, layers {first}-{end - 1}\n")
    else:
        sys.stdout.write(found["text"] + "\n")
    return ExitCode.DONE


def _check(options: DevicesOptions) -> None:
    """Refuse flags and words that do not go together."""
    action = options.action
    if (options.name is None) != (action == "list"):
        needs = "takes no name" if action == "list" else "needs the name of a node or a device"
        raise ValueError(f"devices {action} {needs}: llmpq-dist devices drain NODE")
    if action != "add" and (options.cluster is not None or options.horizon is not None):
        raise ValueError(f"--cluster and --horizon are of devices add, not of devices {action}")


def _chosen(pid: int | None) -> tuple[int, Path]:
    """Return the command of a process, or the only one there is."""
    found = control_socket.sockets()
    listed = ", ".join(map(str, sorted(found))) or "none"
    if pid is not None:
        if pid not in found:
            raise ValueError(
                f"--pid {pid} is no llmpq-dist run or serve of this user on this host that takes "
                f"commands; those are: {listed}"
            )
        return pid, found[pid]
    if len(found) != 1:
        why = "none runs" if not found else f"several run ({listed}): choose one with --pid"
        raise ValueError(
            f"devices is for a llmpq-dist run or serve of this user on this host, and {why}"
        )
    return next(iter(found.items()))

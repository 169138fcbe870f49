"""Commands to an engine that runs: a Unix socket that only its user can open.

    /tmp/llmpq-UID/PID.sock     one a process, in a folder of mode 700

A connection is one question and one answer, each a JSON object on a line:
{"devices": "add", "name": "b", "cluster": {...} or null, "horizon_s": 3600.0}, "drain" with "name",
or "list"; then {"value": ...} or {"error": "ValueError", "text": "..."}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.child import described_error, failure_of
from llmpq.devices.cluster import Cluster

if TYPE_CHECKING:
    from llmpq.runtime.entrypoints.llm import LLM

_MOST_BYTES = 1 << 22
_CONNECT_S = 5.0
_END_S = 5.0
"""How long an answer under way may take once no more are wanted: a plan is searched for 3 s at
most, by a library that must not compute when the interpreter ends."""
_log = logging.getLogger("llmpq.run")


def folder() -> Path:
    """Return the folder of this user's sockets, made if need be.

    `ValueError` where it is another user's, or open to others.
    """
    path = Path(tempfile.gettempdir()) / f"llmpq-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if path.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(
            f"'{path}' must be a folder of this user that no other can open (chmod 700): remove it"
        )
    return path


@contextmanager
def answering(llm: LLM) -> Iterator[None]:
    """Answer commands to an engine until the block ends; without a folder for it, none."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        path = folder() / f"{os.getpid()}.sock"
        path.unlink(missing_ok=True)  # of a process that had this number before
        listener.bind(str(path))
        listener.listen()
    except (OSError, ValueError) as error:
        listener.close()
        _log.warning("llmpq-dist devices cannot reach this command: %s", error)
        yield
        return
    answers: list[threading.Thread] = []
    thread = threading.Thread(
        target=_serve, args=(listener, llm, answers), daemon=True, name="llmpq control"
    )
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        path.unlink(missing_ok=True)
        end_s = time.monotonic() + _END_S
        for answer in list(answers):
            answer.join(max(0.0, end_s - time.monotonic()))


def sockets() -> dict[int, Path]:
    """Return the sockets of this user's engines by process; those left behind are removed."""
    found = {}
    for path in folder().glob("*.sock"):
        with contextlib.suppress(ValueError):
            number = int(path.stem)
            if _lives(number):
                found[number] = path
            else:
                path.unlink(missing_ok=True)
    return found


def ask(path: Path, question: Mapping[str, Any]) -> Any:
    """Return the answer of an engine; raise what it raised."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_S)
        connection.connect(str(path))
        connection.settimeout(None)  # a move takes as long as loading what moves
        connection.sendall(json.dumps(question).encode() + b"\n")
        with connection.makefile("rb") as lines:
            line = lines.readline(_MOST_BYTES)
    if not line:
        raise ConnectionError("the command ended before it answered")
    answer = json.loads(line)
    if "error" in answer:
        failed = failure_of(answer["error"], answer["text"])
        raise failed.cause or failed
    return answer["value"]


def _serve(listener: socket.socket, llm: LLM, answers: list[threading.Thread]) -> None:
    """Answer each connection in a thread; `answers` gets those under way."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        answer = threading.Thread(target=_answer, args=(connection, llm), daemon=True)
        answer.start()
        answers[:] = [answer, *(one for one in answers if one.is_alive())]


def _answer(connection: socket.socket, llm: LLM) -> None:
    with connection, contextlib.suppress(OSError):
        with connection.makefile("rb") as lines:
            line = lines.readline(_MOST_BYTES)
        try:
            answer: dict[str, Any] = {"value": _done(llm, json.loads(line))}
        except Exception as error:  # the asker's to judge
            answer = dict(described_error(error))
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _done(llm: LLM, question: Mapping[str, Any]) -> Any:
    """Do what a question says."""
    what = question.get("devices")
    if what == "list":
        return {
            "model": llm.model_spec.name,
            "stages": [
                {"device": s.device, "node": s.node, "layers": list(s.layers)}
                for s in llm.plan.places
            ],
        }
    if what == "drain":
        return llm.drain_devices(question["name"]).as_data()
    if what == "add":
        data = question["cluster"]
        cluster = None if data is None else Cluster.parse_data(data, where="the cluster")
        change = llm.add_devices(question["name"], cluster=cluster, horizon_s=question["horizon_s"])
        return change.as_data()
    raise ValueError(f"expected add, drain or list of devices, got {what!r}")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""Forks stage processes that need not import anything: the torch that they share is there already.

    python -m llmpq.runtime.launch.stages.fork_server 00000007

Importing torch takes seconds of a core; a fork takes milliseconds, and shares the memory of what
was imported. So a stage that was lost is there again at once, and several stages of one host start
in the time of one. It talks over the socket whose number it is given, a message a packet:
{"environment": {...}} and three pipes (standard input, output and error) come, {"pid": 5} goes
back, and {"pid": 5, "code": -9} when that process has ended. It ends with its socket; the stages
end, as ever, with their standard inputs.

For stages on CPUs only. It starts no thread before it forks, and no CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from llmpq.child import leave_signals_to_parent, serve_calls
from llmpq.runtime.launch.stages.stage_process import CALLS, SWITCH_S, make

PACKET_BYTES = 1 << 17
"""More than an environment has, and no more than the system lets a packet have."""
FORK_SERVER = "llmpq.runtime.launch.stages.fork_server"
STAGE_PROCESS = "llmpq.runtime.launch.stages.stage_process"
"""The module of a child process that holds a stage, a survey or a probe."""


def main(number: int) -> None:
    """Fork a process for every request until the socket closes."""
    leave_signals_to_parent()
    control = socket.socket(fileno=number)
    import llmpq.runtime.launch.stages.stage_worker  # noqa: F401 (what all stages need)
    from llmpq.runtime.launch.stages.gc_freeze import gc_freeze

    gc_freeze()
    ended_read, ended_write = os.pipe()
    os.set_blocking(ended_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended_write, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([control.fileno(), ended_read], [], [])
        if ended_read in ready:
            os.read(ended_read, 4096)
            _report_ends(control)
        if control.fileno() in ready:
            packet, pipes, _, _ = socket.recv_fds(control, PACKET_BYTES, 3)
            if not packet:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                os.close(ended_read)
                os.close(ended_write)
                _be_stage(json.loads(packet)["environment"], pipes)
            for pipe in pipes:
                os.close(pipe)
            control.send(json.dumps({"pid": pid}).encode())


def _report_ends(control: socket.socket) -> None:
    """Say which processes have ended, and how."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        control.send(json.dumps({"pid": pid, "code": code}).encode())


def _be_stage(environment: dict[str, str], pipes: list[int]) -> None:
    """Become a stage's process, which answers calls; does not return."""
    for stream, pipe in enumerate(pipes):
        os.dup2(pipe, stream)
        os.close(pipe)
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(OSError, ValueError, IndexError):
        _be_called(f"{sys.executable} -m {STAGE_PROCESS}".split(" "))
    sys.setswitchinterval(SWITCH_S)
    serve_calls(make, CALLS)


def _be_called(command: list[str]) -> None:
    """Have the system list this process by another command, as far as there is room for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    text = b"".join(word.encode() + b"\0" for word in command)
    if 0 < start < end and len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main(int(sys.argv[1]))

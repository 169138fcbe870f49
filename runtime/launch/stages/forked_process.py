"""The driver's side of the fork server: it is started once, and asked for a process a stage."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import IO

from llmpq.runtime.launch.stages.fork_server import FORK_SERVER, PACKET_BYTES

_UNKNOWN_CODE = 1
"""Exit code of a process whose server was lost before it reported the end."""
_START_S = 60.0
"""How long the server may take to import what stages need, and to fork."""
_REPORT_S = 2.0
"""How long it may take to tell of the end of a process whose pipes are closed."""


class ForkServer:
    """The driver's hold on the process of fork_server.py, which forks stages' processes.

    It is started when the first stage is asked for, and again once it has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._answers: list[int] = []
        self._changed = threading.Condition()
        self._codes: dict[int, int] = {}
        self._lives = False

    def start(self) -> None:
        """Start the server, unless it runs: it imports while others go on."""
        with self._lock, contextlib.suppress(OSError):
            self._require()

    def fork(self, environment: Mapping[str, str]) -> ForkedProcess:
        """Return a new process that answers a stage's calls; `OSError` where there is none."""
        inner, outer = [], []
        for reads in (True, False, False):
            read, write = os.pipe()
            inner.append(read if reads else write)
            outer.append(write if reads else read)
        with self._lock:
            try:
                control = self._require()
                packet = json.dumps({"environment": dict(environment)}).encode()
                socket.send_fds(control, [packet], inner)
                with self._changed:
                    self._changed.wait_for(lambda: self._answers or not self._lives, _START_S)
                    if not self._answers:
                        self._lives = False
                        raise OSError("the fork server does not answer")
                    pid = self._answers.pop()
            except OSError:
                for pipe in outer:
                    os.close(pipe)
                raise
            finally:
                for pipe in inner:
                    os.close(pipe)
        return ForkedProcess(self, pid, outer)

    def wait(self, pid: int) -> int:
        """Wait until a process that has closed its pipes has ended; return how it did."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes or not self._lives, _REPORT_S)
            return self._codes.get(pid, _UNKNOWN_CODE)

    def kill(self, pid: int) -> None:
        """End a process that has not ended."""
        with self._changed:
            if pid not in self._codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the server."""
        with self._lock:
            if self._server is not None:
                self._server.kill()
                self._server.wait()
            if self._control is not None:
                self._control.close()
            self._server = self._control = None

    def _require(self) -> socket.socket:
        """Return the socket of a server that runs."""
        gone = self._server is None or self._server.poll() is not None
        if self._control is not None and self._lives and not gone:
            return self._control
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = subprocess.Popen(
            [sys.executable, "-m", FORK_SERVER, f"{theirs.fileno():08}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a stage started without it says what is wrong
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        weakref.finalize(self, self._server.kill)  # also at exit: it may still import
        self._control = ours
        self._lives = True
        self._answers = []
        reader = threading.Thread(target=self._read, args=(ours,), daemon=True, name="llmpq forks")
        reader.start()
        return ours

    def _read(self, control: socket.socket) -> None:
        """Take the server's messages until it ends."""
        while True:
            try:
                packet = control.recv(PACKET_BYTES)
            except OSError:
                packet = b""
            with self._changed:
                if not packet:
                    self._lives = self._lives and control is not self._control
                    self._changed.notify_all()
                    return
                message = json.loads(packet)
                if "code" in message:
                    self._codes[message["pid"]] = message["code"]
                else:
                    self._codes.pop(message["pid"], None)  # a number that is used again
                    self._answers.append(message["pid"])
                self._changed.notify_all()


class ForkedProcess:
    """A process of the fork server, as `subprocess.Popen` has one."""

    def __init__(self, server: ForkServer, pid: int, pipes: list[int]) -> None:
        """`pipes`: to its standard input, from its output and its standard error."""
        self._server, self.pid = server, pid
        self.stdin: IO[str] | None = os.fdopen(pipes[0], "w", encoding="utf-8")
        self.stdout: IO[str] | None = os.fdopen(pipes[1], encoding="utf-8")
        self.stderr: IO[str] | None = os.fdopen(pipes[2], encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End it."""
        self._server.kill(self.pid)

    def wait(self) -> int:
        """Wait for its end; return its exit code, or the negative number of a signal."""
        return self._server.wait(self.pid)

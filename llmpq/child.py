"""A child process that answers calls: JSON objects, one a line, on its standard streams.

The parent starts a module (`Child`) and writes one line that says what the child is, then a line
for each call: {"number": 3, "call": "load", "args": []}. The child (`serve_calls`) answers in any
order, with {"number": 3, "value": ...} or {"number": 3, "error": "ValueError", "text": "..."}; a
call that streams has {"number": 3, "part": ...} before, and ends at {"number": 3, "cancel": true}.
What it logs comes as {"logger": "llmpq", "level": 30, "text": "..."} and is logged by the parent.

A child ends with its standard input, so that it never outlives its parent. Its death fails every
open call with an obituary: the signal or the exit code, and the last line it wrote to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import IO, Any, Protocol, TextIO

from llmpq import errors
from llmpq.out_of_memory import first_line, out_of_memory

_STDERR_LINES = 20
"""How many of the last lines of a child's stderr are held for its obituary."""
_LEFT_S = 2.0
"""How long its pipes may stay open behind it: a process that it has left may hold them."""
_RAISED = {
    kind.__name__: kind for kind in (ValueError, ConnectionError, MemoryError, RuntimeError)
} | {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.LlmpqError)
}
"""What a call may raise by name; anything else becomes a RuntimeError that names it."""


class CallFailed(Exception):
    """A call failed: in the child, or because the child is gone."""

    def __init__(self, reason: str, cause: BaseException | None = None) -> None:
        """`cause`: what was raised there; None if the process is gone, for this reason."""
        super().__init__(reason)
        self.cause = cause


class ChildProcess(Protocol):
    """A process and its pipes, as `subprocess.Popen` has them."""

    stdin: IO[str] | None
    stdout: IO[str] | None
    stderr: IO[str] | None

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def kill(self) -> None:
        """End it."""
        ...

    def wait(self) -> int:
        """Wait for its end; return its exit code, or the negative number of a signal."""
        ...


class Child:
    """A process of this host that answers calls."""

    def __init__(
        self,
        module: str,
        first: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        capture_stderr: bool = True,
        process: ChildProcess | None = None,
    ) -> None:
        """`first`: what the child is made of; what it writes to stderr is shown if not captured.

        `process`: one that runs the module already, with pipes for all three streams.
        """
        self._process: ChildProcess = process or subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if capture_stderr else None,
            text=True,
            env=None if environment is None else dict(environment),
        )
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Future[Any], Callable[[Any], None] | None]] = {}
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._gone: CallFailed | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._thrown = ""
        """What an exception of C++ that ends the process says; dozens of frames follow it."""
        self._threads = [threading.Thread(target=self._read_answers, daemon=True)]
        if capture_stderr:
            self._threads.append(threading.Thread(target=self._read_stderr, daemon=True))
        for thread in self._threads:
            thread.start()
        self._write(first)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def gone(self) -> CallFailed | None:
        """Why the process has ended, None while it runs."""
        return self._gone

    def call(
        self, method: str, *args: object, on_part: Callable[[Any], None] | None = None
    ) -> Future[Any]:
        """Call a method; the future raises `CallFailed`. `on_part` takes parts, in a thread."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._gone is not None:
                answer.set_exception(self._gone)
                return answer
            number = next(self._numbers)
            self._open[number] = answer, on_part
        self._write({"number": number, "call": method, "args": args})
        return answer

    def cancel(self, answer: Future[Any]) -> None:
        """End an open call that streams parts; its future fails."""
        with self._lock:
            found = [number for number, (one, _) in self._open.items() if one is answer]
        for number in found:
            self._write({"number": number, "cancel": True})

    def kill(self, pid: int = 0) -> None:
        """End the process, a stopped one too."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def wait(self) -> None:
        """Wait for its end and close its pipes, but those that are read still."""
        self._process.wait()
        for thread in self._threads:
            thread.join(2 * _LEFT_S)
        if any(thread.is_alive() for thread in self._threads):
            return
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):  # what was written and never read
                if pipe is not None:
                    pipe.close()

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # A broken pipe is the child's death, which fails the call.
        with contextlib.suppress(OSError, ValueError), self._writing:
            write_line(self._process.stdin, message)

    def _read_answers(self) -> None:
        """Complete calls until the process ends, then fail the others."""
        assert self._process.stdout is not None
        for message in read_lines(self._process.stdout):
            if "logger" in message:
                _log_once(message["logger"], message["level"], message["text"])
                continue
            number = message["number"]
            with self._lock:
                answer, on_part = self._open[number]
                if "part" not in message:
                    del self._open[number]
            if "part" in message:
                assert on_part is not None, "a part of a call that streams none"
                on_part(message["part"])
            elif "error" in message:
                _settle(answer, failure_of(message["error"], message["text"]))
            else:
                with contextlib.suppress(InvalidStateError):  # who waited has gone
                    answer.set_result(message["value"])
        code = self._process.wait()
        for thread in self._threads[1:]:
            thread.join(_LEFT_S)
        with self._lock:
            self._gone = CallFailed(self._obituary(code))
            waiting, self._open = [answer for answer, _ in self._open.values()], {}
        for answer in waiting:
            _settle(answer, self._gone)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.strip()
            if text.startswith("what():"):
                self._thrown = text
            elif text:
                self._stderr.append(text)

    def _obituary(self, code: int) -> str:
        last = f": {self._stderr[-1][:300]}" if self._stderr else ""
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            hint = "; the kernel's out-of-memory killer sends it, too" if name == "SIGKILL" else ""
            thrown = f": {self._thrown[:300]}" if self._thrown else last
            why = thrown if name == "SIGABRT" else ""
            return f"its process died (killed by {name}{hint}){why}"
        return f"its process ended with code {code}{last}"


@functools.lru_cache
def _log_once(logger: str, level: int, text: str) -> None:
    """Log what a child has logged; children that are alike say the same."""
    logging.getLogger(logger).log(level, "%s", text)


def _settle(answer: Future[Any], error: Exception) -> None:
    """Fail a call that somebody may still wait for."""
    with contextlib.suppress(InvalidStateError):  # who waited has gone
        answer.set_exception(error)


def failure_of(name: str, text: str) -> CallFailed:
    """Return the failure that an error's name and text (`described_error`) stand for."""
    kind = _RAISED.get(name)
    cause = kind(text) if kind is not None else RuntimeError(f"{name}: {text}")
    return CallFailed(f"{name}: {text}", cause)


def serve_calls(
    make: Callable[[dict[str, Any]], Any], calls: Collection[str], *, threads: bool = True
) -> None:
    """Answer calls of what `make` returns for the first line, then end the process.

    `threads`: each call in a thread of its own, else one after the other in this one. Coroutines
    and asynchronous generators, whose items are parts, run in a loop of this thread. What libraries
    print goes to stderr.
    """
    leave_signals_to_parent()
    messages, answers = read_lines(sys.stdin), take_answers()
    server = _Server(make, next(messages), calls, answers)
    logging.getLogger("llmpq").addHandler(_LogOf(server))
    if server.asynchronous:
        import asyncio  # of one kind of child only

        asyncio.run(server.answer_in_loop(messages))
    else:
        for message in messages:
            if threads:
                threading.Thread(target=server.answer, args=(message,), daemon=True).start()
            else:
                server.answer(message)
    os._exit(0)  # threads may be waiting for what is gone


def leave_signals_to_parent() -> None:
    """Ignore Ctrl-C, a terminal that closes, and a supervisor's SIGTERM to all processes.

    The parent ends this process when requests have ended; so does its own end, which closes the
    pipe.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class _Server:
    """Answers the calls of one object."""

    def __init__(
        self,
        make: Callable[[dict[str, Any]], Any],
        first: dict[str, Any],
        calls: Collection[str],
        answers: TextIO,
    ) -> None:
        self._object = make(first)
        self._calls = calls
        self._answers = answers
        self._lock = threading.Lock()
        self._tasks: dict[int, Any] = {}
        self._start: Callable[[Any], Any]
        """Starts a task of the loop."""

    @property
    def asynchronous(self) -> bool:
        """Whether its calls are coroutines and asynchronous generators."""
        return bool(getattr(self._object, "asynchronous", False))

    def answer(self, message: dict[str, Any]) -> None:
        """Make one call."""
        number = message["number"]
        try:
            self._send({"number": number, "value": self._made(message)})
        except BaseException as error:  # the caller's to judge
            self._send({"number": number, **described_error(error)})

    async def answer_in_loop(self, messages: Iterator[dict[str, Any]]) -> None:
        """Make each call in a task until the pipe closes."""
        import asyncio

        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        self._start = loop.create_task

        def read() -> None:
            for message in messages:
                loop.call_soon_threadsafe(self._begin, message)
            loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=read, daemon=True).start()
        await closed.wait()
        os._exit(0)

    def _begin(self, message: dict[str, Any]) -> None:
        number = message["number"]
        if "cancel" in message:
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        self._tasks[number] = self._start(self._answer_task(message))
        self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer_task(self, message: dict[str, Any]) -> None:
        number = message["number"]
        try:
            made = self._made(message)
            if isinstance(made, AsyncGenerator):
                async with contextlib.aclosing(made) as parts:
                    async for part in parts:
                        self._send({"number": number, "part": part})
                value = None
            else:
                value = await made
            self._send({"number": number, "value": value})
        except BaseException as error:
            self._send({"number": number, **described_error(error)})

    def _made(self, message: dict[str, Any]) -> Any:
        assert message["call"] in self._calls, message["call"]
        return getattr(self._object, message["call"])(*message["args"])

    def log(self, logger: str, level: int, text: str) -> None:
        """Have the parent log a text."""
        self._send({"logger": logger, "level": level, "text": text})

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            write_line(self._answers, message)


class _LogOf(logging.Handler):
    """Has the parent log what this process logs: its stderr is read for an obituary only."""

    def __init__(self, server: _Server) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the parent has gone
            self._server.log(record.name, record.levelno, record.getMessage())


def described_error(error: BaseException) -> dict[str, str]:
    """Return an error's kind, or the kind of outcome it stands for, and its text.

    Of an error that a native stack may follow, the text is the first line.
    """
    name = type(error).__name__
    for kind in (ValueError, ConnectionError):
        if isinstance(error, kind):
            name = kind.__name__
    if out_of_memory(error):
        name = "MemoryError"
    native = isinstance(error, (RuntimeError, MemoryError))
    return {"error": name, "text": first_line(error) if native else str(error)}


def take_answers() -> TextIO:
    """Return a child's stream of answers; what is printed from here on goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def write_line(stream: IO[str], message: Mapping[str, Any]) -> None:
    """Send one message at once; `BrokenPipeError` if nothing reads."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def read_lines(stream: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield messages until the pipe closes."""
    for line in stream:
        yield json.loads(line)

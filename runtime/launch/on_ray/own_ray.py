"""A Ray that llmpq starts itself: on loopback only, with a token of its own, ended without a trace.

Every stage of a job without `--ray-address` is on this machine, so nothing of Ray has to be
reachable from elsewhere. Ray takes seconds to start. It does so in a thread, so that a signal, a
process of Ray that dies, or a deadline ends the wait at once. What the block leaves behind is
nothing: orphans of Ray's processes are adopted by this one (`PR_SET_CHILD_SUBREAPER`) and ended
with it, and the folder of Ray's sockets and logs goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import psutil

from llmpq.commands.ray_address import environment, named_ray, on_loopback, signals_kept
from llmpq.errors import DeadlineError, StageLostError
from llmpq.out_of_memory import first_line
from llmpq.runtime.launch.stages.stage_host import LOCAL_HOST

START_S = 90.0
"""How long Ray may take to start or to be joined: 3 to 7 s on two busy cores."""
_LOOK_S = 0.05
_THREAD = "ray.init"
_ABANDON_S = 3.0
"""How long to wait for a thread that was told to stop starting Ray."""
_GONE_S = 5.0
_ESSENTIAL = ("gcs_server", "raylet")
"""Processes without which Ray cannot go on starting; it would wait 30 s for them to come back."""
_NEWS = signal.SIGUSR1
"""How the watching thread interrupts the main one."""
_WATCH_S = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOT_NEEDED = ("start_monitor", "start_api_server", "start_log_monitor")
"""What Ray's head starts for an autoscaler, for its dashboard, for printing what workers print."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""
_SOCKET_FOLDER_LIMIT = 24
"""Characters of a folder whose sockets have names the system takes (107 with Ray's own part)."""


@contextmanager
def own_ray() -> Iterator[None]:
    """Start a Ray for the block; `StageLostError` or `DeadlineError` says why it did not start."""
    import ray

    before = {child.pid for child in psutil.Process().children()}
    folder, over = _new_folder(), threading.Event()
    try:
        with _adopting_orphans(), _no_autoscaler(), environment(_private()):
            try:
                what, died = "start Ray on this machine", _look(before)
                with signals_kept():
                    _in_thread(lambda: _start(folder), what, over=over, died=died)
                with _watched(died):
                    yield
            finally:
                with signals_kept(), _undisturbed():
                    _end(before, folder)
                    over.set()
    finally:
        _read_settings_again(ray)


@contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Join the Ray at an address for the block; it is left running."""
    import ray

    address, local = named_ray(address)
    try:
        with environment(_common()), on_loopback(local), signals_kept():
            _in_thread(lambda: ray.init(address=address, **_options()), f"join Ray at '{address}'")
        yield
    finally:
        with signals_kept():
            ray.shutdown()


def _start(folder: Path) -> None:
    import ray

    with on_loopback(True), _without_helpers():
        _read_settings_again(ray)
        ray.init(
            address="local",  # whatever RAY_ADDRESS says
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            _node_ip_address=LOCAL_HOST,
            _temp_dir=str(folder),
            # Ray starts workers at nice +15, where stages lose to everything else.
            _system_config={"worker_niceness": 0},
            **_options(),
        )


def _options() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "llmpq"}


def _common() -> dict[str, str]:
    return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def _private() -> dict[str, str]:
    """Settings of a Ray that nobody else shall reach; its processes inherit them."""
    return _common() | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Where cores are busy its agents take longer to start than Ray's 15 s.
        "RAY_agent_register_timeout_ms": "60000",
    }


def _read_settings_again(ray: ModuleType) -> None:
    """Let a Ray that was imported before see the token of the environment, or that it is gone."""
    with contextlib.suppress(AttributeError):
        raylet: Any = ray._raylet
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _without_helpers() -> Iterator[None]:
    """Let Ray start no process that the job of one machine has no use for.

    They are three programs of Python, 1.5 s of a core together; Ray waits for the dashboard's even
    where it is to show nothing.
    """
    from ray._private.node import Node

    kept = {name: vars(Node)[name] for name in _NOT_NEEDED if name in vars(Node)}
    for name in kept:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, start in kept.items():
            setattr(Node, name, start)


@contextmanager
def _no_autoscaler() -> Iterator[None]:
    """Let the driver not ask a Ray without an autoscaler for that one's errors.

    A thread of the driver's asks once, some time after the start, and for 60 s when the server has
    died by then; `ray.shutdown` waits for that thread.
    """
    import ray._private.worker as worker

    ask: Any = getattr(worker, "_internal_kv_get", None)
    if ask is not None:
        worker._internal_kv_get = lambda key: None
    try:
        yield
    finally:
        if ask is not None:
            worker._internal_kv_get = ask


def _in_thread(
    start: Callable[[], object],
    doing: str,
    *,
    over: threading.Event | None = None,
    died: Callable[[], str | None] = lambda: None,
) -> None:
    """Run `start` in a thread; a signal, a part that died or the deadline ends the wait at once.

    The thread lives until `over`: the processes that Ray starts end with the thread they are of.
    """
    failures: list[Exception] = []
    started = threading.Event()

    def run() -> None:
        try:
            start()
        except Exception as error:
            failures.append(error)
        finally:
            started.set()
            threading.current_thread().name = "ray"
        if over is not None:
            over.wait()

    # Ray warns that a thread cannot handle signals; this process does.
    logging.getLogger("ray").setLevel(logging.ERROR)
    thread = threading.Thread(target=run, name=_THREAD, daemon=True)
    thread.start()
    try:
        _wait(started, doing, died)
    except BaseException:
        _abandon(thread)
        raise
    if failures:
        raise StageLostError(
            f"could not {doing}: {first_line(failures[0])}; check it with: ray status (where it "
            "wants a token: RAY_AUTH_MODE=token and ~/.ray/auth_token)"
        ) from None


def _wait(started: threading.Event, doing: str, died: Callable[[], str | None]) -> None:
    end_s = time.monotonic() + START_S
    while not started.wait(_LOOK_S):
        part = died()
        if part is not None:
            raise StageLostError(
                f"could not {doing}: its process {part} died while it started (killed, or out of "
                "memory); look at the machine's free memory and run it again"
            )
        if time.monotonic() > end_s:
            raise DeadlineError(
                f"could not {doing} within {START_S:.0f} s; look at the load of its machine and "
                "run it again"
            )


def _abandon(thread: threading.Thread) -> None:
    """Tell a thread to stop what it does; it may take until its current wait is over."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )


def _look(before: set[int]) -> Callable[[], str | None]:
    """Return a look at the essential processes: the name of one that has died, or None."""
    me, known = psutil.Process(), dict[str, psutil.Process]()

    def look() -> str | None:
        if len(known) < len(_ESSENTIAL):
            for child in me.children():
                with contextlib.suppress(psutil.Error):
                    if child.pid not in before and child.name() in _ESSENTIAL:
                        known[child.name()] = child
        for name, process in known.items():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    return name
            except psutil.NoSuchProcess:
                return name
        return None

    return look


@contextmanager
def _watched(died: Callable[[], str | None]) -> Iterator[None]:
    """Raise in the main thread when a part of Ray dies: Ray ends this process for it, in 60 s."""
    main = threading.main_thread()
    used = signal.getsignal(_NEWS) is not signal.SIG_DFL
    if threading.current_thread() is not main or used or main.ident is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_S):
            if died() is not None:
                signal.pthread_kill(main.ident or 0, _NEWS)
                return

    def tell(number: int, frame: FrameType | None) -> None:
        raise StageLostError(
            f"Ray's process {died()} on this machine died (killed, or out of memory)"
        )

    signal.signal(_NEWS, tell)
    watcher = threading.Thread(target=watch, name="ray.watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.signal(_NEWS, signal.SIG_IGN)
        over.set()
        watcher.join()
        signal.signal(_NEWS, signal.SIG_DFL)


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of grandchildren whose parent ends, where the system has that."""
    set_to = _prctl(1)
    try:
        yield
    finally:
        if set_to:
            _prctl(0)


def _prctl(value: int) -> bool:
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_SUBREAPER, value, 0, 0, 0) == 0)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no second signal end the clearing up, which takes a few seconds at most."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _end(before: set[int], folder: Path) -> None:
    """Shut Ray down and end every process of it, also those it has forgotten."""
    import ray

    mine = _processes(before, folder)
    if ray.is_initialized():  # else half started: nothing to shut down in an orderly way
        with contextlib.suppress(Exception):
            ray.shutdown()
    now_s = time.monotonic()
    while time.monotonic() < now_s + _GONE_S:
        mine |= _processes(before, folder)
        alive = [process for process in mine.values() if _kill(process)]
        if not alive and (not _starting() or time.monotonic() > now_s + _ABANDON_S):
            break
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)


def _starting() -> bool:
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _processes(before: set[int], folder: Path) -> dict[int, psutil.Process]:
    """Return Ray's processes by number: its own children's trees, and adopted orphans."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.pid in before or not _is_ray(child, folder):
                continue
            found[child.pid] = child
            found.update({process.pid: process for process in child.children(recursive=True)})
    return found


def _is_ray(process: psutil.Process, folder: Path) -> bool:
    words = process.cmdline()
    return any(word.startswith("ray::") or str(folder) in word for word in words) or (
        not words and process.name() in _ESSENTIAL
    )


def _kill(process: psutil.Process) -> bool:
    """End a process for good; return whether it is still there."""
    with contextlib.suppress(psutil.Error, ChildProcessError):
        if process.status() == psutil.STATUS_ZOMBIE:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
            return False
        process.kill()
        return True
    return False


def _new_folder() -> Path:
    """Return a folder for Ray's sockets and logs, short enough for the names of sockets."""
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= _SOCKET_FOLDER_LIMIT else "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="llmpq-ray-", dir=parent))
    except OSError as error:
        raise StageLostError(
            f"Ray could not start on this machine: no folder for its sockets in '{parent}' "
            f"({error.strerror}); free some space there, or set TMPDIR to a short path"
        ) from None

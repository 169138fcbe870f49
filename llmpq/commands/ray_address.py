"""Where a Ray is, and how it is joined there.

Ray itself retries for ever where there is none, and takes 127.0.0.1 for the address that this
machine has in its network, where a Ray that listens on loopback only is not found.

Ray's servers speak gRPC, which is HTTP/2: such a server greets with a SETTINGS frame (RFC 9113,
section 3.4). Whatever else listens there does not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from llmpq.errors import StageLostError

PROBE_S = 5.0
"""How long an address may take to accept a connection, and then to greet."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_ABORT_S = 3.0
"""What Ray's handler of SIGTERM gives a process."""
_SIGNALS = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGACTION_BYTES = 512
"""Room for a `struct sigaction`: 152 bytes with glibc on x86-64."""
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""The question that every Ray answers, to those whose token it knows."""
_HEADER_BYTES, _TYPE_AT, _SETTINGS = 9, 3, 4


def require_ray(address: str, *, token: bool = True) -> None:
    """Raise ValueError where no Ray can be: nothing listens, or something that is not gRPC.

    `auto` stands for what RAY_ADDRESS says; what names no port is left to Ray. `token`: also where
    it wants another token than the one sent from here, which takes a call of gRPC.
    """
    address, _ = named_ray(address)
    place = _place_of(address)
    if place is None:
        return
    host, port = place
    try:
        greeting = _greeting(host.strip("[]"), int(port))
    except TimeoutError:
        reason = f"no answer within {PROBE_S:.0f} s"
    except (OSError, OverflowError) as error:
        reason = str(error)
    else:
        if greeting is None:
            return
        if greeting[_TYPE_AT : _TYPE_AT + 1] == bytes((_SETTINGS,)):
            if token:
                _require_token(address, f"{host}:{port}")
            return
        reason = "something listens there that is not Ray"
    raise ValueError(
        f"no Ray cluster at '{address}' ({reason}); start one with: ray start --head, or give "
        "its address"
    )


def require_ray_of_stages(address: str) -> None:
    """As `require_ray`, where stages are to run there: `StageLostError`, whose exit code is 6.

    A Ray without tokens answers questions that come with one, but its workers, which send none,
    are hung up on by a process that expects them.
    """
    address, _ = named_ray(address)
    try:
        require_ray(address)
        place = _place_of(address)
        if place is None or _own_token() is None or _answer(":".join(place), None) != "yes":
            return
    except ValueError as error:
        raise StageLostError(str(error)) from None
    raise StageLostError(
        f"the Ray at '{address}' runs without tokens, and this process has one, which it wants "
        "from all: set RAY_AUTH_MODE=disabled, or start that Ray with RAY_AUTH_MODE=token"
    )


def _place_of(address: str) -> tuple[str, str] | None:
    """Return host and port of an address, None for a form that only Ray understands."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    return (host, port) if colon and port.isdigit() and "/" not in host else None


def _require_token(address: str, target: str) -> None:
    """Raise ValueError where a Ray wants another token than the one that is sent from here.

    Ray itself tries for half a minute, with a page of warnings; where a token is asked for here and
    there is none, with a traceback.
    """
    token = _own_token()
    if token is None and os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        raise ValueError(
            "RAY_AUTH_MODE=token is set here, and there is no token: put that of the Ray at "
            f"'{address}' into RAY_AUTH_TOKEN or ~/.ray/auth_token, or leave RAY_AUTH_MODE out"
        )
    if _answer(target, token) == "no token":
        mine = "none is sent from here" if token is None else "the one sent from here is another"
        raise ValueError(
            f"the Ray at '{address}' wants a token, and {mine}: set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token as on its machines"
        )


def _answer(target: str, token: str | None) -> Literal["yes", "no token", "unknown"]:
    """Return what a Ray says to a question that comes with a token, or with none."""
    try:
        import grpc  # comes with ray[default]
    except ModuleNotFoundError:
        return "unknown"
    sent = None if token is None else (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(target) as channel:
        try:
            channel.unary_unary(_ALIVE)(b"", metadata=sent, timeout=PROBE_S)
        except grpc.RpcError as error:  # Ray says better what else is wrong
            wants = error.code() is grpc.StatusCode.UNAUTHENTICATED
            return "no token" if wants else "unknown"
    return "yes"


def _sends_tokens_unasked() -> bool:
    """Whether this Ray sends a token that it finds where RAY_AUTH_MODE is not set, as 2.60 does.

    Its file is read, for Ray is imported later, with settings of the address.
    """
    found = find_spec("ray")
    if found is None or found.origin is None:
        return False
    setup = Path(found.origin).parent / "_private/authentication/authentication_token_setup.py"
    return setup.is_file() and "maybe_enable_token_auth_if_token_available" in setup.read_text()


def _own_token() -> str | None:
    """Return the token that Ray would send from here, None where it sends none."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if not (_sends_tokens_unasked() if mode is None else mode.lower() == "token"):
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _greeting(host: str, port: int) -> bytes | None:
    """Return what a server says first, b"" if it hangs up; None where Ray encrypts all it says."""
    with socket.create_connection((host, port), timeout=PROBE_S) as link:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return None
        link.sendall(_PREFACE)
        return link.recv(_HEADER_BYTES, socket.MSG_WAITALL)


def named_ray(address: str) -> tuple[str, bool]:
    """Return the address (`auto`: what RAY_ADDRESS says), and whether it is on loopback."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    return address, address.startswith(("127.", "localhost"))


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the block and what it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def on_loopback(wanted: bool) -> Iterator[None]:
    """Let what Ray starts in the block take 127.0.0.1 for this machine's address.

    The variable is Ray's own for "this machine only". Ray reads it when it is imported, so this
    process takes it from `import_ray`.
    """
    with environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if wanted else {}):
        yield


def import_ray(address: str | None) -> None:
    """Import Ray with the settings that it reads then, for an address or (None) one to start.

    A Ray that was imported before keeps the environment that it found.
    """
    with on_loopback(address is None or named_ray(address)[1]):
        import ray  # noqa: F401


@contextmanager
def signals_kept() -> Iterator[None]:
    """Undo what Ray's core does to signals in the block, where it starts or ends; any thread.

    Its handler of SIGTERM aborts the process three seconds later, whatever the process does in
    them; when it goes it leaves the system's default. Python's own calls set signals in the main
    thread only and know nothing of Ray's, so the system is asked. Ray's alarm differs from a
    caller's in its time: it has no interval and three seconds at most.
    """
    libc = ctypes.CDLL(None)
    before = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in _SIGNALS}
    for number, action in before.items():
        libc.sigaction(number, None, action)
    try:
        yield
    finally:
        left_s, every_s = signal.getitimer(signal.ITIMER_REAL)
        if 0 < left_s <= _ABORT_S and not every_s:
            signal.alarm(0)
        for number, action in before.items():
            libc.sigaction(number, action, None)

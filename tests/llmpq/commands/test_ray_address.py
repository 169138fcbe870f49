"""What is no Ray is refused before Ray waits for it for ever."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmpq.commands import ray_address
from llmpq.commands.ray_address import require_ray, require_ray_of_stages
from llmpq.errors import StageLostError

pytestmark = pytest.mark.cpu

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@contextmanager
def served(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a server that answers one caller."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            link, _ = server.accept()
            with link:
                link.recv(1024)
                answer(link)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(5)


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR\r\n", b""])
def test_what_greets_in_another_way_is_not_ray(said: bytes) -> None:
    with served(lambda link: link.sendall(said)) as address, pytest.raises(ValueError) as caught:
        require_ray(address)
    assert str(caught.value) == (
        f"no Ray cluster at '{address}' (something listens there that is not Ray); start one with: "
        "ray start --head, or give its address"
    )


def test_what_never_greets_is_not_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_address, "PROBE_S", 0.2)
    asked = threading.Event()

    def say_nothing(_: socket.socket) -> None:
        asked.wait(5)

    with served(say_nothing) as address:
        with pytest.raises(ValueError, match="no answer within"):
            require_ray(address)
        asked.set()


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_a_settings_frame_passes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_address, "PROBE_S", 0.5)  # nothing here answers what is asked by gRPC
    with served(lambda link: link.sendall(SETTINGS)) as address:
        require_ray(form.format(address))


def test_an_encrypted_ray_is_only_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        require_ray(f"127.0.0.1:{server.getsockname()[1]}")


def test_auto_is_the_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match="no Ray cluster at '127.0.0.1:1'"):
        require_ray("auto")
    require_ray("local")
    monkeypatch.delenv("RAY_ADDRESS")
    require_ray("auto")


@pytest.mark.parametrize(
    ("mode", "token", "said"),
    [
        (None, "right", None),
        ("token", "right", None),
        ("disabled", "right", "none is sent from here"),
        ("token", "", "RAY_AUTH_MODE=token is set here, and there is no token"),
        ("token", "wrong", "is another"),
    ],
)
def test_another_ways_to_authenticate_is_named_at_once(monkeypatch, tmp_path, mode, token, said):
    with ray_that_wants("right", monkeypatch, tmp_path, mode, token) as address:
        if said is None:
            require_ray_of_stages(address)
            return
        with pytest.raises(
            ValueError, match=said if "RAY_AUTH" in said else f"token, and .*{said}"
        ):
            require_ray(address)
        with pytest.raises(StageLostError, match=said):
            require_ray_of_stages(address)


@pytest.mark.parametrize(
    ("mode", "token", "said"),
    [
        (None, "", None),
        ("disabled", "mine", None),
        (None, "mine", "runs without tokens, and this process has one"),
        ("token", "mine", "runs without tokens, and this process has one"),
        ("token", "", "RAY_AUTH_MODE=token is set here, and there is no token"),
    ],
)
def test_a_ray_without_tokens_runs_no_stages_of_a_process_with_one(
    monkeypatch, tmp_path, mode, token, said
):
    """Its workers, which send none, die one after the other; planning for its devices works."""
    with ray_that_wants(None, monkeypatch, tmp_path, mode, token) as address:
        if token or mode != "token":
            require_ray(address)
        if said is None:
            require_ray_of_stages(address)
            return
        with pytest.raises(StageLostError, match=said):
            require_ray_of_stages(address)


def test_an_older_ray_sends_no_token_unless_it_is_asked_to(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_address, "find_spec", lambda name: None)
    with ray_that_wants(None, monkeypatch, tmp_path, None, "mine") as address:
        require_ray_of_stages(address)
    with ray_that_wants("mine", monkeypatch, tmp_path, None, "mine") as address:
        with pytest.raises(StageLostError, match="none is sent from here"):
            require_ray_of_stages(address)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        require_ray_of_stages(address)


@contextmanager
def ray_that_wants(
    wanted: str | None, monkeypatch: Any, home: Path, mode: str | None, token: str
) -> Iterator[str]:
    """Serve as a Ray does that wants a token, or none; this process has another mode and token."""
    grpc = pytest.importorskip("grpc")

    def answer(request: bytes, context: Any) -> bytes:
        sent = ("authorization", f"Bearer {wanted}") in context.invocation_metadata()
        if wanted is not None and not sent:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    class Ray(grpc.GenericRpcHandler):
        def service(self, details: object) -> object:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=(Ray(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setenv("HOME", str(home))
    for name, value in (("RAY_AUTH_MODE", mode), ("RAY_AUTH_TOKEN", token or None)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    try:
        yield address
    finally:
        server.stop(0)

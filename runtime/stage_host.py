"""What a stage asks of its host, with Ray or without: its device's sort, sockets, loopback."""

from __future__ import annotations

import socket

from llmpq.device_spec import device_specs
from llmpq.errors import StageLostError
from llmpq.plan import StagePlan

LOCAL_HOST = "127.0.0.1"


def is_cpu(stage: StagePlan) -> bool:
    """Whether a stage runs on the host's cores."""
    spec = device_specs().get(stage.kind)
    return stage.threads is not None or (spec is not None and spec.is_cpu)


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a listening socket on this host only; port 0 lets the system choose."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StageLostError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --master_port"
        ) from None
    listener.listen()
    return listener


def loopback_interface() -> str:
    """Return the name of the loopback network interface."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            return name
    return "lo"

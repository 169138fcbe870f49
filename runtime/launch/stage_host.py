"""What a stage asks of its host, with Ray or without: its device's sort, sockets, loopback."""

from __future__ import annotations

import socket
from pathlib import Path

from llmpq.cluster import Cluster
from llmpq.errors import StageLostError
from llmpq.plan import Plan

LOCAL_HOST = "127.0.0.1"


def meeting_host(asked: str | None, plan: Plan, cluster: Cluster | None) -> str:
    """Return the address at which the stages meet.

    What was asked for, else this host, or the first stage's where the cluster puts stages on
    several nodes.
    """
    if asked is not None:
        return asked
    first = plan.stages[0].node
    if cluster is None or all(stage.node == first for stage in plan.stages):
        return LOCAL_HOST
    return next(node.host for node in cluster.nodes if node.name == first)


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a listening socket on this host only; port 0 lets the system choose."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # two may bind a port, one may listen
    except OSError as error:
        listener.close()
        raise StageLostError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --master_port, "
            "or an address of this host as --master_addr"
        ) from None
    return listener


def process_space() -> str:
    """Return what processes that can name each other by number share: a boot, a PID namespace.

    Copied machines have one host name, containers one boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"


def loopback_interface() -> str:
    """Return the name of the loopback network interface."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            return name
    return "lo"

"""A stage's host, with Ray or without: addresses, interfaces, sockets, loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from llmpq.errors import StageLostError

LOCAL_HOST = "127.0.0.1"
_INTERFACE_OF = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables by which gloo and NCCL choose a network."""


def meeting_host(asked: str | None, addresses: Sequence[str | None]) -> str:
    """Return the address of the stages' rendezvous.

    What was asked for, else loopback if all stages are on one host, or the first one's address.
    """
    if asked is not None:
        return asked
    first = addresses[0]
    if first is None or all(address == first for address in addresses):
        return LOCAL_HOST
    return first


def own_addresses() -> dict[str, list[str]]:
    """Return the addresses of every network interface of this host, IPv4 ones first."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        usable = [e for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        usable.sort(key=lambda entry: entry.family != socket.AF_INET)
        found[name] = [entry.address.partition("%")[0] for entry in usable]
    return found


def addresses_of(host: str) -> frozenset[str]:
    """Return what a host's name stands for on this machine; nothing where it is not known."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)


def address_on(interface: str | None, own: str | None) -> str | None:
    """Return the address of a named interface, else a host's own; `ValueError` for no such one."""
    if interface is None:
        return own
    known = own_addresses()
    if not known.get(interface):
        there = ", ".join(f"{name} ({found[0]})" for name, found in known.items() if found)
        raise ValueError(
            f"--network-interface {interface}: host {socket.gethostname()} has no such interface "
            f"with an address; it has {there}"
        )
    return known[interface][0]


def talk_over(meeting: str, own: str | None) -> None:
    """Let the libraries of this process use the network of the rendezvous.

    Without it they take whatever the host's name resolves to, on Debian 127.0.1.1. `own` is this
    host's address for the other ones.
    """
    if is_loopback(meeting):
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
        return
    for interface, addresses in own_addresses().items():
        if own in addresses:
            for name in _INTERFACE_OF:
                os.environ[name] = interface
            return


def is_loopback(address: str) -> bool:
    """Whether an address is one that only this host reaches."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a listening socket on this host only; port 0 lets the system choose."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
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

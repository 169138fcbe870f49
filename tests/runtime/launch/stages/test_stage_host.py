"""Where stages meet, and which processes can name each other by number."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from llmpq.errors import StageLostError
from llmpq.runtime.launch.stages.stage_host import (
    LOCAL_HOST,
    address_on,
    listening_socket,
    meeting_host,
    process_space,
    talk_over,
)
from llmpq.runtime.launch.stages.stage_place import interfaces

pytestmark = pytest.mark.cpu


def test_stages_on_several_hosts_meet_at_the_first_ones_address() -> None:
    assert meeting_host(None, ["10.0.0.1", "10.0.0.2"]) == "10.0.0.1"
    assert meeting_host("10.9.9.9", ["10.0.0.1", "10.0.0.2"]) == "10.9.9.9"
    assert meeting_host(None, ["10.0.0.1", "10.0.0.1"]) == LOCAL_HOST
    assert meeting_host(None, [None, None]) == LOCAL_HOST


def test_libraries_are_told_the_interface_of_the_own_address(monkeypatch) -> None:
    there = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1", "fd00::1"], "wg0": ["10.9.0.1"]}
    monkeypatch.setattr("llmpq.runtime.launch.stages.stage_host.own_addresses", lambda: there)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    talk_over("127.0.0.1", "10.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "before"
    for own, interface in (("10.9.0.1", "wg0"), ("fd00::1", "eth0")):
        talk_over("10.0.0.2", own)
        assert os.environ["GLOO_SOCKET_IFNAME"] == interface
        assert os.environ["NCCL_SOCKET_IFNAME"] == interface
    assert address_on(None, "10.0.0.1") == "10.0.0.1"
    assert address_on("wg0", "10.0.0.1") == "10.9.0.1"
    with pytest.raises(ValueError, match=r"wg1: host .* it has lo \(127.0.0.1\), eth0"):
        address_on("wg1", "10.0.0.1")


def test_a_listener_takes_an_ipv6_address() -> None:
    with listening_socket("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_interfaces_are_one_for_all_or_one_for_each_node() -> None:
    assert interfaces(None, ["a", "b"]) == {"a": None, "b": None}
    assert interfaces("wg0", ["a", "b"]) == {"a": "wg0", "b": "wg0"}
    assert interfaces("a=wg0,b=eth1", ["a", "b"]) == {"a": "wg0", "b": "eth1"}
    assert interfaces("b=eth1", ["a", "b"]) == {"a": None, "b": "eth1"}
    with pytest.raises(ValueError, match=r"unknown node of --network-interface 'c'"):
        interfaces("c=eth1", ["a", "b"])
    with pytest.raises(ValueError, match=r"expected NAME, or NODE=NAME"):
        interfaces("a=", ["a", "b"])


def test_a_port_that_somebody_else_took_is_a_sentence() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((LOCAL_HOST, 0))
        port = other.getsockname()[1]
        # Bound, not listening yet: a second bind succeeds, as between two runs that start together.
        mine = listening_socket(LOCAL_HOST, port)
        with pytest.raises(StageLostError, match=f"cannot listen on {LOCAL_HOST}:{port}"):
            listening_socket(LOCAL_HOST, port)
        mine.close()


def test_two_that_bind_one_port_at_once_both_get_an_answer(monkeypatch) -> None:
    taken = socket.socket()

    class Raced(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            super().bind(address)
            if not taken.getsockname()[1]:  # the other run's bind and listen, in between
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(self.getsockname())
                taken.listen()

    monkeypatch.setattr("llmpq.runtime.launch.stages.stage_host.socket.socket", Raced)
    with taken, pytest.raises(StageLostError, match="Address already in use"):
        listening_socket(LOCAL_HOST, 0)


def test_a_child_shares_its_parents_process_space() -> None:
    code = (
        "from llmpq.runtime.launch.stages.stage_host import process_space; print(process_space())"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == process_space()

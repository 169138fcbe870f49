"""Two network namespaces of this machine whose packets arrive later: hosts far from each other.

Linux, root, `ip` of iproute2 and /dev/net/tun. Every packet that leaves one end is read by a thread
here and written to the other end when its time has come, so both directions have the delay. A
packet takes its bytes' time at the bandwidth, one after the other in each direction; without one,
bandwidth is whatever this thread can carry.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

DEVICE = "llmpq0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 65_000


class DelayedNetwork:
    """The two ends while the context is open; `command(end, ...)` runs something at one of them."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, delay_us: float, *, mbps: float | None = None, mtu: int = _MTU) -> None:
        """Delay every packet by this, one way; `mbps`: 1e6 bits per second, each way."""
        self._delay_s, self._mtu = delay_us / 1e6, mtu
        self._s_per_byte = 0.0 if mbps is None else 8e-6 / mbps
        self._names = tuple(f"llmpq-{os.getpid()}-{end}" for end in range(2))
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._problem: OSError | None = None
        self._relay = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> DelayedNetwork:
        """Make the namespaces and begin to carry."""
        for name in self._names:
            _ip("netns", "add", name)
        self._relay.start()
        self._ready.wait()
        if self._problem is not None:
            self.__exit__(None, None, None)
            raise self._problem
        for end, name in enumerate(self._names):
            inside = ("-n", name)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "addr", "add", f"{self.addresses[end]}/24", "dev", DEVICE)
            _ip(*inside, "link", "set", DEVICE, "mtu", str(self._mtu), "txqueuelen", "10000", "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove them."""
        self._stop.set()
        if self._relay.ident is not None:
            self._relay.join()
        for name in self._names:
            _ip("netns", "del", name)

    def command(self, end: int, arguments: Sequence[str]) -> list[str]:
        """Return a command line that runs `arguments` at one end."""
        return ["ip", "netns", "exec", self._names[end], *arguments]

    def _carry(self) -> None:
        """Relay packets until told to stop; namespaces are a thread's, so this one may move."""
        try:
            ends = [_open_device(name) for name in self._names]
        except OSError as error:
            self._problem = error
            return
        finally:
            self._ready.set()
        waiting: deque[tuple[float, int, bytes]] = deque()
        free_s = dict.fromkeys(ends, 0.0)
        while not self._stop.is_set():
            pause = 0.05 if not waiting else max(0.0, waiting[0][0] - time.perf_counter())
            for fd in select.select(ends, (), (), min(pause, 0.05))[0]:
                packet = os.read(fd, _MTU + 100)
                other = ends[1 - ends.index(fd)]
                sent_s = max(time.perf_counter(), free_s[fd]) + len(packet) * self._s_per_byte
                free_s[fd] = sent_s
                insort(waiting, (sent_s + self._delay_s, other, packet), key=_when)
            while waiting and waiting[0][0] <= time.perf_counter():
                _, target, packet = waiting.popleft()
                with contextlib.suppress(OSError):  # An end that is not up loses packets.
                    os.write(target, packet)
        for fd in ends:
            os.close(fd)


def _when(packet: tuple[float, int, bytes]) -> float:
    return packet[0]


def _open_device(namespace: str) -> int:
    """Open a new tun device inside a namespace; this thread stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR)
    request = struct.pack("16sH22s", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI, b"")
    fcntl.ioctl(fd, _TUNSETIFF, request)
    return fd


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)

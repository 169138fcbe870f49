"""Hosts of their own on one machine: network namespaces, each with a Ray node.

A host has a network, a name, an /etc/hosts, processes, /dev/shm and Ray's folder of its own; files
are shared. Its hosts file is Debian's: its own name is 127.0.1.1; a name that is not in it is
unknown at once. Hosts are joined by veth pairs
and a switch. A host ends with everything in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest

from llmpq.kernels.native import library

LIMIT_S = 400
PORT = 6379
NETWORK, NETWORK_V6 = "10.77.0", "fd00::"
HOSTS = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
ENTER = """
set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
mkdir -p /tmp/ray && mount -t tmpfs -o size=200m tmpfs /tmp/ray
mount -t tmpfs -o size=300m tmpfs /dev/shm
ip link set lo up
touch {folder}/ready
exec sleep infinity
"""


def why_not() -> str | None:
    """Return why namespaces cannot be made here, None if they can."""
    missing = [
        tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None
    ]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2, util-linux)"
    trial = (
        "ip link add v0 type veth peer name v1; ip link add s0 type bridge; mount -t tmpfs t /mnt"
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", trial],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return f"needs root and network namespaces ({(done.stderr or 'unshare').strip()})"
    return None


class Space:
    """A process that holds namespaces; everything in them ends with it."""

    def __init__(self, script: str, *kinds: str) -> None:
        hold = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--pid", "--fork"]
        hold += ["--mount-proc", "--kill-child=KILL", "bash", "-c", script]
        self._unshare = subprocess.Popen(hold)
        end_s = time.monotonic() + 20
        children: list[psutil.Process] = []
        while not children and time.monotonic() < end_s:
            time.sleep(0.02)
            children = psutil.Process(self._unshare.pid).children()
        self.pid = children[0].pid

    def close(self) -> None:
        self._unshare.kill()
        self._unshare.wait()


class Host:
    """One machine of the bed, `index` from 1."""

    def __init__(self, name: str, index: int, folder: Path) -> None:
        self.name, self.address = name, f"{NETWORK}.{index}"
        self.home = folder / name
        (self.home / ".ray").mkdir(parents=True)
        (self.home / "hosts").write_text(HOSTS.format(name=name))
        # This machine's name server is out of reach from here: each look-up would wait six seconds.
        (self.home / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        # What the machine's user has compiled before: C++ takes a minute and is not of a host.
        (self.home / ".cache/llmpq").mkdir(parents=True)
        (self.home / ".cache/llmpq/native").symlink_to(library.cache_folder())
        script = ENTER.format(name=name, folder=self.home)
        self._space = Space(script, "--net", "--mount", "--uts", "--ipc")
        end_s = time.monotonic() + 20
        while not (self.home / "ready").exists():
            assert time.monotonic() < end_s, f"{name} has not come up"
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        """The process that holds its namespaces."""
        return self._space.pid

    def command(self, *words: object) -> list[str]:
        """Return a command that runs words on this host."""
        return ["nsenter", "-t", str(self.pid), "-a", *map(str, words)]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        without = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        return without | {
            "HOME": str(self.home),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_agent_register_timeout_ms": "60000",
            # Ray starts workers at nice +15, where stages lose to everything else.
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
            **(more or {}),
        }

    def start(self, *words: object, folder: Path | None = None) -> subprocess.Popen[str]:
        """Start a command; its streams are read by `communicate`."""
        return subprocess.Popen(
            ["env", "-C", str(folder or self.home), *self.command("env", "-C", folder or self.home),
             *map(str, words)],
            env=self.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, *words: object, folder: Path | None = None, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        process = self.start(*words, folder=folder)
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{words} did not end: {out}\n{err}") from None
        if check:
            assert process.returncode == 0, f"{words}: {out}\n{err}"
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def dist(self, *words: object, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run llmpq-dist on this host."""
        return self.run(sys.executable, "-m", "llmpq.runtime", *words, folder=folder)

    def ray(self, *words: object) -> None:
        """Run Ray's command on this host; one that a busy machine let down is tried again."""
        for tries_left in (2, 1, 0):
            done = self.run(
                sys.executable, "-m", "ray.scripts.scripts", *words, check=not tries_left
            )
            if done.returncode == 0:
                return
            self.end_all()

    def processes(self) -> list[psutil.Process]:
        """Return what runs on this host."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter(["cmdline", "name"]):
            try:
                if os.readlink(f"/proc/{process.pid}/ns/pid") == mine:
                    found.append(process)
            except OSError:
                continue
        return found

    def end_all(self) -> None:
        """End all its processes at once, as a power cut does; the host stays."""
        for process in self.processes():
            if process.pid != self.pid:
                with suppress(psutil.Error):
                    process.kill()

    def close(self) -> None:
        self._space.close()


class Bed:
    """Hosts a, b, ... on one switch; `start_ray` gives each a Ray node."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._stack = ExitStack()
        self._switch = Space("ip link add s type bridge; ip link set s up; exec sleep infinity",
                             "--net", "--mount")  # fmt: skip
        self._stack.callback(self._switch.close)
        self.hosts: list[Host] = []
        for index, name in enumerate(names, 1):
            host = Host(name, index, folder)
            self._stack.callback(host.close)
            self.hosts.append(host)
            self._plug(host, index)
        self.head = self.hosts[0]
        """Whose Ray node the others join."""

    @property
    def address(self) -> str:
        """Where Ray is."""
        return f"{self.head.address}:{PORT}"

    def switch(self, *words: object) -> None:
        """Run `ip` in the switch's network."""
        subprocess.run(
            ["nsenter", "-t", str(self._switch.pid), "-n", "ip", *map(str, words)], check=True
        )

    def _plug(self, host: Host, index: int) -> None:
        port = f"p{index}"
        self.switch("link", "add", port, "type", "veth", "peer", "name", "eth0",
                    "netns", host.pid)  # fmt: skip
        self.switch("link", "set", port, "master", "s", "up")
        for words in (
            f"addr add {host.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {NETWORK}.254",
            f"-6 addr add {NETWORK_V6}{index}/64 dev eth0 nodad",
        ):
            host.run("ip", *words.split(), check=True)

    def pull(self, host: Host) -> None:
        """Pull a host's cable."""
        self.switch("link", "set", f"p{self.hosts.index(host) + 1}", "down")

    def plug_in(self, host: Host) -> None:
        """Put a host's cable back."""
        self.switch("link", "set", f"p{self.hosts.index(host) + 1}", "up")

    def small(self, host: Host) -> list[str]:
        """Return how `ray start` leaves the machine to others: no programs that nobody asks."""
        small = ["--num-cpus=1", "--object-store-memory=80000000", "--include-log-monitor=false"]
        head = ["--include-dashboard=false", "--no-monitor"]
        return small + (head if host is self.head else [])

    def start_ray(self, host: Host, *words: object) -> None:
        """Start a Ray node; the head's comes first, and its token goes to the others."""
        common = (*self.small(host), *words)
        head, token = self.head, Path(".ray/auth_token")
        if host is head:
            if not (head.home / token).exists():
                host.ray("get-auth-token", "--generate")
            host.ray("start", "--head", f"--port={PORT}", *common)
        else:
            shutil.copy(head.home / token, host.home / token)
            host.ray("start", f"--address={self.address}", *common)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def make_bed(tmp_path_factory) -> Callable[[Sequence[str]], AbstractContextManager[Bed]]:
    """Return a maker of hosts; skips with the reason where there can be none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)

    def make(names: Sequence[str]) -> AbstractContextManager[Bed]:
        return closing(Bed(names, tmp_path_factory.mktemp("bed")))

    return make

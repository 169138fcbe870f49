"""A server that a benchmark starts: a port for it, and when it is ready."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait for the server's first 200; exit if it ends before, or after ten minutes."""
    end_s = time.monotonic() + 600
    while time.monotonic() < end_s and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    sys.exit("the server did not become ready")

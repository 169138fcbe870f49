"""The rendezvous of the processes of several stages or nodes: a store on the first one's host."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from llmpq.runtime.launch.stages.stage_host import listening_socket


class Rendezvous:
    """A process's view of the store: the first process opens it, the others find it by address."""

    def __init__(self, limit: timedelta) -> None:
        """`limit`: how long finding it, and a question to it, may take."""
        self._limit = limit
        self._store: dist.Store | None = None

    def open(self, host: str, port: int = 0) -> int:
        """Open the store on this host and return its port; 0 lets the system choose one."""
        listener = listening_socket(host, port)
        port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._limit,
            master_listen_fd=listener.detach(),
        )
        return port

    def store(self, host: str, port: int) -> dist.Store:
        """Return the store: the one opened here, or the one at an address."""
        if self._store is None:
            self._store = dist.TCPStore(host, port, is_master=False, timeout=self._limit)
        return self._store

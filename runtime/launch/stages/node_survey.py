"""A node's means for stages: its GPUs, what torch can do with them, versions, memory, links.

Runs on the node itself, in a process of its own, and returns plain values; what to think of them
is tools/doctor.py's part.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmpq.devices.default_dtype import quick_dtypes
from llmpq.devices.this_machine import SMI_S, read_gpus, read_host, visible
from llmpq.kernels.native.library import expected_level
from llmpq.out_of_memory import first_line
from llmpq.runtime.launch.stages.rendezvous import Rendezvous
from llmpq.runtime.launch.stages.stage_host import process_space, talk_over
from llmpq.runtime.launch.stages.stage_probe import LIMIT, nccl_version, package_versions
from llmpq.runtime.links.transport import join_gloo

_SMALL, _LARGE = 1 << 10, 4 << 20
_ROUNDS = {_SMALL: 30, _LARGE: 4}
_COPY_BYTES = 64 << 20
_SIDE = 64
"""Rows and columns of the matrices whose product is tried."""


class NodeSurvey:
    """Looks at the node it runs on, and at its links to others."""

    def __init__(self, index: int, num_nodes: int, *, see_all: bool = False) -> None:
        """`see_all`: also the GPUs that Ray hides from actors that reserve none."""
        if see_all and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # torch counts GPUs as nvidia-smi does
        self._index, self._num_nodes = index, num_nodes
        self._rendezvous = Rendezvous(LIMIT)

    def look(self) -> dict[str, Any]:
        """Return what the node has."""
        host = read_host()
        gpus = visible(read_gpus())
        return {
            "host": socket.gethostname(),
            "machine": process_space(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "packages": package_versions(),
            "nccl": nccl_version(),
            "cpu": asdict(host)
            | {"compiled_for": expected_level(), "quick_dtypes": sorted(quick_dtypes())},
            "gpus": [{**asdict(gpu), "kind": gpu.kind} for gpu in gpus],
            "driver_cuda": _driver_cuda(),
            "torch_cuda": torch.version.cuda,
            "torch_arches": list(torch.cuda.get_arch_list()),
            "torch_sees": _num_seen(),
            "shm_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        }

    def try_gpus(self) -> list[dict[str, Any]]:
        """Return per GPU what is wrong with products on it, None if nothing is."""
        return [{"gpu": i, "problem": _try_gpu(i)} for i in range(_num_seen())]

    def try_copies(self) -> list[dict[str, Any]]:
        """Return GB/s from each GPU of this node to each other, and whether it is direct."""
        found = []
        for source in range(_num_seen()):
            for target in range(_num_seen()):
                if source != target:
                    found.append(_copy(source, target))
        return found

    def open_rendezvous(self, host: str) -> int:
        """Open the meeting point (first node only); return its port."""
        return self._rendezvous.open(host)

    def try_links(self, host: str, port: int, own: str | None) -> list[dict[str, Any]]:
        """Time messages over gloo from this node to every later one, pair by pair.

        `own`: its address, at which the others reach it.
        """
        talk_over(host, own)
        store = self._rendezvous.store(host, port)
        join_gloo(dist.PrefixStore("doctor", store), self._index, self._num_nodes, limit=LIMIT)
        found = []
        for first in range(self._num_nodes):
            for second in range(first + 1, self._num_nodes):
                dist.barrier()
                if self._index in (first, second):
                    small_s, large_s = (self._ping(first, second, n) for n in (_SMALL, _LARGE))
                    if self._index == first:
                        rate = (_LARGE - _SMALL) / max(large_s - small_s, 1e-9)
                        found.append(
                            {
                                "from": first,
                                "to": second,
                                "latency_us": 1e6 * small_s,
                                "gbps": 8e-9 * rate,
                            }
                        )
        return found

    def _ping(self, first: int, second: int, num_bytes: int) -> float:
        """Return the seconds of one message of a size, one way; the best of several."""
        message = torch.zeros(num_bytes, dtype=torch.uint8)
        best_s = float("inf")
        for _ in range(_ROUNDS[num_bytes]):
            started_s = time.perf_counter()
            if self._index == first:
                dist.send(message, second)
                dist.recv(message, second)
            else:
                dist.recv(message, first)
                dist.send(message, first)
            best_s = min(best_s, (time.perf_counter() - started_s) / 2)
        return best_s


def _num_seen() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _driver_cuda() -> str | None:
    """Return the newest CUDA that the driver serves, as nvidia-smi says; None without a driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"CUDA(?: UMD)? Version:\s*(\d+\.\d+)", done.stdout)
    return match[1] if match else None


def _try_gpu(index: int) -> str | None:
    try:
        return try_products(torch.device("cuda", index), _gpu_dtypes(index))
    except RuntimeError as error:  # the driver does not even say what the card is
        return first_line(error)


def try_products(device: torch.device, dtypes: Sequence[torch.dtype]) -> str | None:
    """Return what is wrong with products on a device, None if those of every dtype are exact.

    The factors are -1, 0 and 1: every sum is a whole number that each dtype holds exactly.
    """
    entries = torch.arange(_SIDE * _SIDE).reshape(_SIDE, _SIDE)
    left, right = (entries * 7 + entries // 5) % 3 - 1, (entries * 5 + entries // 11) % 3 - 1
    expected = left @ right
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        try:
            product = left.to(device, dtype) @ right.to(device, dtype)
            found = product.cpu().double()
        except RuntimeError as error:
            return f"{name}: {first_line(error)}"
        wrong = found != expected
        if wrong.any():
            row, column = (int(index) for index in wrong.nonzero()[0])
            return (
                f"{name}: {int(wrong.sum())} of {wrong.numel()} sums of a product are wrong, "
                f"the first is {found[row, column]:g}, expected {expected[row, column]}"
            )
    return None


def _gpu_dtypes(index: int) -> list[torch.dtype]:
    """Return the dtypes that a GPU multiplies by instructions of its own."""
    newer = torch.cuda.get_device_capability(index) >= (8, 0)
    return [torch.float32, torch.float16, *([torch.bfloat16] if newer else [])]


def _copy(source: int, target: int) -> dict[str, Any]:
    data = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    best_s = float("inf")
    for _ in range(4):
        torch.cuda.synchronize(source)
        started_s = time.perf_counter()
        data.to(f"cuda:{target}")
        torch.cuda.synchronize(target)
        best_s = min(best_s, time.perf_counter() - started_s)
    return {
        "from": source,
        "to": target,
        "direct": torch.cuda.can_device_access_peer(source, target),
        "gbps": 8e-9 * _COPY_BYTES / best_s,
    }

"""Looks at a stage's place before anything is loaded: versions, device, files, links.

One actor per stage of a plan, placed where the stage would be. Everything it finds is returned as
plain values; judging them is runtime/tools/check.py's part.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmpq.devices.device_spec import canonical_kind
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.launch.stages.rendezvous import Rendezvous
from llmpq.runtime.launch.stages.stage_host import talk_over
from llmpq.runtime.links.device_links import connect_devices
from llmpq.runtime.links.peer_links import BufferSizes
from llmpq.runtime.links.transport import join_gloo
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint

PACKAGES = ("llmpq", "torch", "triton", "ray", "safetensors", "transformers")
LIMIT = datetime.timedelta(seconds=30)
_ROUNDS = 20
_MESSAGE = 1 << 16
_PROBE_SIZES = BufferSizes(hidden_bytes=_MESSAGE, max_rows=1, tickets=2)


@dataclass(frozen=True, kw_only=True)
class PlaceReport:
    """What a stage would find on its host."""

    host: str
    python: str
    packages: dict[str, str]
    nccl: str | None
    gpu: str | None
    """The driver's name of the GPU, None on a CPU."""
    kind: str
    """The table's name of it, or the driver's where the table has none."""
    free_bytes: int
    total_bytes: int
    model_problem: str | None
    model_fingerprint: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """The link to the next stage (from the last stage: to the first)."""

    gloo_us: float | None
    problem: str | None = None
    device: str | None = None
    """The kind of link between the GPUs, `none` if all failed; None between CPUs."""


class StageProbe:
    """Looks at one stage's place."""

    def __init__(self, index: int, num_stages: int, on_gpu: bool) -> None:
        self._index = index
        self._num_stages = num_stages
        self._on_gpu = on_gpu
        self._rendezvous = Rendezvous(LIMIT)

    def look(self, model_dir: str | None) -> dict[str, Any]:
        """Return this place as a dictionary of `PlaceReport`'s fields."""
        gpu, kind, free, total = self._device()
        problem, fingerprint = look_at_model(model_dir)
        return PlaceReport(
            host=socket.gethostname(),
            python=platform.python_version(),
            packages=package_versions(),
            nccl=nccl_version(),
            gpu=gpu,
            kind=kind,
            free_bytes=free,
            total_bytes=total,
            model_problem=problem,
            model_fingerprint=fingerprint,
        ).as_dict()

    def open_rendezvous(self, host: str) -> int:
        """Open the meeting point (first stage only); return its port."""
        return self._rendezvous.open(host)

    def try_links(self, host: str, port: int, own: str | None) -> dict[str, Any]:
        """Join the other probes and exchange messages around the ring; `own`: its address."""
        talk_over(host, own)
        try:
            store = self._rendezvous.store(host, port)
            join_gloo(dist.PrefixStore("check", store), self._index, self._num_stages)
            gloo_us = self._ping()
            device = None
            if self._on_gpu:
                links = connect_devices(torch.device("cuda", 0), _PROBE_SIZES)
                device = links.name if links is not None else "none"
        except RuntimeError as error:
            return asdict(LinkReport(gloo_us=None, problem=str(error).splitlines()[0]))
        return asdict(LinkReport(gloo_us=gloo_us, device=device))

    def _ping(self) -> float:
        """Time 64 KiB messages from every stage to its next, all stages in turn."""
        following = (self._index + 1) % self._num_stages
        before = (self._index - 1) % self._num_stages
        message = torch.zeros(_MESSAGE, dtype=torch.uint8)
        mine_us = 0.0
        for sender in range(self._num_stages):
            receiver = (sender + 1) % self._num_stages
            dist.barrier()
            started_s = time.perf_counter()
            for _ in range(_ROUNDS):
                if self._index == sender:
                    dist.send(message, following)
                    dist.recv(message, following)
                elif self._index == receiver:
                    dist.recv(message, before)
                    dist.send(message, before)
            if self._index == sender:
                mine_us = 1e6 * (time.perf_counter() - started_s) / (2 * _ROUNDS)
        return mine_us

    def _device(self) -> tuple[str | None, str, int, int]:
        """Return the GPU's name, its kind, and free and total memory of the device."""
        if not self._on_gpu:
            return None, "CPU", *host_memory()
        if not torch.cuda.is_available():
            return None, "no GPU", 0, 0
        name = torch.cuda.get_device_name(0)
        try:
            kind = canonical_kind(name, torch.cuda.get_device_properties(0).total_memory)
        except ValueError:
            kind = name
        return name, kind, *torch.cuda.mem_get_info(0)


def look_at_model(model_dir: str | None) -> tuple[str | None, str | None]:
    """Return what is wrong with the model here, and its fingerprint; no tensor is read."""
    if model_dir is None:
        return "the plan names no model directory; give one with --model DIR", None
    try:
        spec = ModelSpec.from_directory(model_dir)
        open_checkpoint(model_dir, spec)
    except ValueError as error:
        return str(error), None
    return None, spec.fingerprint()


def package_versions() -> dict[str, str]:
    """Return the versions of the packages stages must share."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def nccl_version() -> str | None:
    """Return NCCL's version, None where torch has none."""
    if not dist.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def host_memory() -> tuple[int, int]:
    """Return available and total memory of this host, 0 where the system does not say."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return 0, 0
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    free, total = (int(fields[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    return free, total

"""What an engine asks of whoever starts its stages: threads, processes or Ray.

A launcher starts one stage per stage of the plan and gives each a handle; everything else (loading,
connecting, watching, blaming) is the engine's and the same for all. A call that fails raises
`StageFailure`, whatever the launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from llmpq.cluster import Cluster
from llmpq.errors import unknown_name
from llmpq.plan import Plan
from llmpq.runtime.launch.stages.stage_settings import StageSettings

Backend = Literal["auto", "threads", "processes", "ray"]
BACKENDS: tuple[Backend, ...] = ("auto", "threads", "processes", "ray")
BACKEND_HELP = (
    "how stages run; auto: one in this process, several of one node as processes, else through Ray"
)
MAX_TIMEOUT_S = 10**7
"""The longest deadline that can be asked for: four months."""


class StageFailure(Exception):
    """A call to a stage failed."""

    def __init__(self, reason: str, cause: BaseException | None = None) -> None:
        """`cause`: what the stage raised; None if its process is gone, for this reason."""
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long things may take before the job is given up."""

    wait_nodes_s: float = 30.0
    """For nodes of the plan that have not joined the Ray yet; 0: they must be there."""
    placement_s: float = 25.0
    load_s: float = 600.0
    stall_s: float = 30.0
    """Without progress while a stage loads."""
    step_s: float = 30.0
    """One micro-batch on one stage, or a stage's silence."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the stages are started and where they meet."""

    backend: Backend = "auto"
    stages_apart: bool = False
    """Whether a single stage is kept out of this process, too, where nothing else is asked for."""
    ray_address: str | None = None
    """An existing Ray; None starts one on this machine where Ray is asked for."""
    master_addr: str | None = None
    """None: loopback, or the first stage's address where the stages are on several hosts."""
    master_port: int = 0
    """0 lets the system choose."""
    network_interface: str | None = None
    """Over which hosts talk: one name for all, or NODE=NAME,... ; None: Ray's own."""
    on_load: Callable[[int, int, str], None] | None = None
    """Called while stages load: layers loaded, of how many, and in words. None: log lines."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise unknown_name("backend", self.backend, BACKENDS)


class StageHandle(Protocol):
    """One stage that was started."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of its `StageWorker`; the future raises `StageFailure`."""
        ...

    def kill(self, pid: int) -> None:
        """End it; `pid` is its process's number where that is known on this host, else 0."""
        ...


class Launcher(Protocol):
    """Starts stages; as a context manager, its end takes down whatever it started."""

    meets_by_address: bool
    """Whether the stages find each other at a host and a port."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def lost(self) -> Exception | None:
        """Return what to raise once whoever keeps the stages is gone; None while it is there."""
        ...

    def start(
        self, plan: Plan, settings: Sequence[StageSettings], cluster: Cluster | None
    ) -> Sequence[StageHandle]:
        """Start every stage of a plan, each with its settings."""
        ...

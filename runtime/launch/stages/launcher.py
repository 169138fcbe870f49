"""How an engine's stages are started: as threads, processes or Ray actors.

A launcher starts one stage per stage of the plan and gives each a handle; everything else (loading,
connecting, watching, blaming) is the engine's and the same for all. A call that fails raises
`llmpq.child.CallFailed`, whatever the launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

from llmpq.devices.cluster import Cluster
from llmpq.plans.plan import Plan
from llmpq.runtime.options.stage_settings import StageSettings

OnLoad = Callable[[int, int, str], None]
"""Called while stages load: layers loaded, of how many, and in words; without it, log lines."""


class StageHandle(Protocol):
    """One stage that was started."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of its `StageWorker`; the future raises `CallFailed`."""
        ...

    def kill(self, pid: int) -> None:
        """End it; `pid` is its process's number where that is known on this host, else 0."""
        ...


class Launcher(Protocol):
    """Starts stages; as a context manager, its end takes down all that it started."""

    needs_rendezvous: bool
    """Whether the stages find each other at a host and a port."""
    moves_stages: bool
    """Whether a stage's process may go on as a stage of another plan."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def lost(self) -> Exception | None:
        """Return what to raise once Ray, which holds the stages, is gone; else None."""
        return None

    def stop(self, *, but: Collection[StageHandle] = ()) -> None:
        """Take down the stages that were started, so that others may be; `but` some of them."""
        ...

    def start(
        self,
        plan: Plan,
        settings: Sequence[StageSettings],
        cluster: Cluster | None,
        left: Mapping[int, StageHandle] = MappingProxyType({}),
    ) -> Sequence[StageHandle]:
        """Start every stage of a plan, each with its settings.

        `left`: by their numbers in the plan, stages that have left another one, whose processes
        and layers go on.
        """
        ...

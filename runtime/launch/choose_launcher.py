"""Which launcher starts the stages of a plan, where nothing else is asked for."""

from __future__ import annotations

from llmpq.plan import Plan
from llmpq.runtime.launch.launcher import Backend, Deadlines, Launch, Launcher


def choose_backend(plan: Plan, launch: Launch) -> Backend:
    """Return how the stages of a plan are started where nothing else is asked for.

    One stage runs in this process unless it is to be apart, several of one node as processes of
    this host, those of several nodes, or at a Ray's address, through Ray.
    """
    if launch.backend != "auto":
        if launch.ray_address is not None and launch.backend != "ray":
            raise ValueError(
                f"the address of a Ray has no effect with --backend {launch.backend}: leave one out"
            )
        return launch.backend
    if launch.ray_address is not None or len({stage.node for stage in plan.stages}) > 1:
        return "ray"
    return "threads" if len(plan.stages) == 1 and not launch.stages_apart else "processes"


def make_launcher(plan: Plan, launch: Launch, deadlines: Deadlines) -> Launcher:
    """Return the launcher; only what it needs is imported."""
    backend = choose_backend(plan, launch)
    if backend == "ray":
        from llmpq.runtime.launch.on_ray.ray_launcher import RayLauncher

        return RayLauncher(launch, deadlines)
    if backend == "processes":
        from llmpq.runtime.launch.process_launcher import ProcessLauncher

        return ProcessLauncher(behind_server=launch.stages_apart)
    from llmpq.runtime.launch.thread_launcher import ThreadLauncher

    return ThreadLauncher()

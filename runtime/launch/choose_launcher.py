"""Which launcher starts the stages of a plan: threads, processes of this host, or Ray."""

from __future__ import annotations

from llmpq.commands.ray_address import import_ray
from llmpq.plans.plan import Plan
from llmpq.runtime.launch.stages.launcher import Launcher
from llmpq.runtime.options.engine_options import Backend, EngineOptions


def choose_backend(plan: Plan, options: EngineOptions) -> Backend:
    """Return how the stages of a plan are started: `options.backend`, unless it is "auto".

    Then a single device is a thread of this process (a process with `stages_apart`), several
    devices of one node are processes of this host, and devices of several nodes, or of the Ray at
    `ray_address`, are Ray actors.
    """
    if options.backend != "auto":
        return options.backend
    if options.ray_address is not None or len({stage.node for stage in plan.stages}) > 1:
        return "ray"
    alone = len(plan.workers) == 1 and not options.stages_apart
    return "threads" if alone else "processes"


def make_launcher(plan: Plan, options: EngineOptions) -> Launcher:
    """Return the launcher; only what it needs is imported."""
    backend = choose_backend(plan, options)
    if backend == "ray":
        import_ray(options.ray_address)
        from llmpq.runtime.launch.on_ray.ray_launcher import RayLauncher

        return RayLauncher(options)
    if backend == "processes":
        from llmpq.runtime.launch.process_launcher import ProcessLauncher

        return ProcessLauncher(behind_server=options.stages_apart)
    from llmpq.runtime.launch.thread_launcher import ThreadLauncher

    return ThreadLauncher()

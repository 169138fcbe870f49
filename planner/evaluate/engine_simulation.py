"""The planner's way to the simulator of the runtime, whose scheduler it runs (no torch)."""

from llmpq.runtime.simulate.simulation import (
    EngineModel,
    simulate,
    simulate_batch,
    simulate_plan,
)
from llmpq.runtime.simulate.step_times import StepRows

__all__ = ["EngineModel", "StepRows", "simulate", "simulate_batch", "simulate_plan"]

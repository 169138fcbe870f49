"""The planner's way to the simulator of the runtime, whose scheduler it runs (no torch)."""

from llmpq.runtime.simulate.measures import ATTAINMENT, Quantiles, ServiceLimits, ServiceMeasures
from llmpq.runtime.simulate.simulation import EngineModel, simulate, simulate_plan

__all__ = [
    "ATTAINMENT",
    "EngineModel",
    "Quantiles",
    "ServiceLimits",
    "ServiceMeasures",
    "simulate",
    "simulate_plan",
]

"""What each command of `llmpq-algo` is asked for: its flags as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # --help opens without what sizes need
    from llmpq.memory import CpuActivations


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """The ways to name a model."""

    model: str | None
    model_name: str | None
    model_size: str | None


@dataclass(frozen=True, kw_only=True)
class DevicesRequest(ModelRequest):
    """A model, and the ways to describe devices."""

    devices: str | None
    cluster: str | None
    device_names: list[str] | None
    device_numbers: list[int] | None
    from_ray: str | None


@dataclass(frozen=True, kw_only=True)
class PlanRequest(DevicesRequest):
    """What to plan, how to choose, how to solve, what to print."""

    global_bz: int
    s: int
    n: int
    context: int | None
    dtype: Any
    """A name of `DTYPES`."""
    costs: str | None
    probe_cpu: bool
    omega_file: str | None
    prefer: Any
    """A name of `PREFERENCES`."""
    theta: float | None
    quality_budget: float | None
    pareto: bool
    pareto_points: int | None
    bits: str | None
    kv: str
    reserve: str | None
    gpu_memory_utilization: float | None
    pin: list[str]
    max_devices: int | None
    group: int
    prefill_microbatch: int | None
    decode_microbatch: int | None
    symmetric: bool
    weight_group_size: int | None
    head_bits: Literal[8, 16] | None
    cpu_activations: CpuActivations
    outliers: int | None
    method: str | None
    shaq_efficient: bool
    objective: Literal["makespan", "paper"]
    solver: Any
    """A name of `ilp_backends.Backend`."""
    gap: float
    time_limit: float
    speculate: str | None
    output: str | None
    json: bool
    explain: bool
    what_if: list[str]
    debug: bool


@dataclass(frozen=True, kw_only=True)
class CheckRequest(DevicesRequest):
    """Which plan to check, against what."""

    plan: str


@dataclass(frozen=True, kw_only=True)
class ExportRequest(ModelRequest):
    """Which plan to write, for which engine, where to."""

    plan: str
    to: str
    output: str | None


@dataclass(frozen=True, kw_only=True)
class ModelsRequest:
    """How to list what models run where."""

    json: bool


@dataclass(frozen=True, kw_only=True)
class ListRequest:
    """Which devices to list, and how."""

    known: bool
    json: bool
    from_ray: str | None
    yaml: bool

"""What each command of `llmpq-algo` is asked for, as values: read from flags, or made in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # --help opens without what sizes need
    from llmpq.sizes.memory import CpuActivations


DTYPES = ("auto", "float16", "bfloat16", "float32")
PREFERENCES = ("quality", "balanced", "speed")
TRAFFIC_OBJECTIVES = ("throughput", "rate", "latency")
METHODS = ("exact", "ilp", "heuristic", "adabits", "uniform", "pipeedge", "flexgen", "all")
"""`flexgen` is an estimate, `all` compares the others: neither makes a plan."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """The ways to name a model."""

    model: str | None = None
    model_name: str | None = None
    model_size: str | None = None


@dataclass(frozen=True, kw_only=True)
class DevicesRequest(ModelRequest):
    """A model, and the ways to describe devices."""

    devices: str | None = None
    cluster: str | None = None
    device_names: list[str] | None = None
    device_numbers: list[int] | None = None
    from_ray: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrafficFlags:
    """Which requests come, how often, and what they are to be served within."""

    trace: str | None = None
    """A file of arrivals and lengths."""
    prompt: str | None = None
    """Lengths of prompts, such as `1020,2735,4142`."""
    gen: str | None = None
    """Lengths of answers."""
    rate: str | None = None
    """Requests a second, or `max`."""
    requests: int | None = None
    ttft: float | None = None
    tpot: float | None = None

    @property
    def has_traffic(self) -> bool:
        """Whether requests are named; `ValueError` where a rate or a limit is, and they are not."""
        others = ("rate", "ttft", "tpot", "requests")
        given = [f"--{name}" for name in others if getattr(self, name) is not None]
        if self.trace is None and self.prompt is None and self.gen is None:
            if given:
                need = "needs" if len(given) == 1 else "need"
                raise ValueError(
                    f"{' and '.join(given)} {need} requests: give --trace FILE, or --prompt and "
                    "--gen, such as --prompt 1020,2735 --gen 129,424"
                )
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class PlanRequest(DevicesRequest, TrafficFlags):
    """What to plan, how to choose, how to solve, what to print."""

    batch: int = 16
    prompt_len: int = 512
    gen_len: int = 100
    context: int | None = None
    dtype: Any = "auto"
    """A name of `DTYPES`."""
    costs: str | None = None
    probe_cpu: bool = False
    omega_file: str | None = None
    prefer: Any = None
    """A name of `PREFERENCES`."""
    theta: float | None = None
    quality_budget: float | None = None
    pareto: bool = False
    pareto_points: int | None = None
    bits: str | None = None
    kv: str = "16"
    reserve: str | None = None
    gpu_memory_utilization: float | None = None
    pin: Sequence[str] = ()
    max_devices: int | None = None
    tensor_parallel: str | None = None
    """Devices of a node that share each stage: their number, or shares such as `3:1`."""
    engines: str = "auto"
    """How many pipelines share the job: `auto`, or a number."""
    group: int = 1
    prefill_microbatch: int | None = None
    decode_microbatch: int | None = None
    symmetric: bool = False
    weight_group_size: int | None = None
    head_bits: Literal[8, 16] | None = None
    cpu_activations: CpuActivations = "exact"
    outliers: int | None = None
    method: str | None = None
    objective: Any = "makespan"
    """`makespan` or `paper` of a batch job, a name of `TRAFFIC_OBJECTIVES` of live traffic."""
    solver: Any = None
    """A name of `milp.Backend`."""
    gap: float = 1e-6
    time_limit: float = 60.0
    speculate: str | None = None
    output: str | None = None
    report: str | None = None
    json: bool = False
    explain: bool = False
    what_if: Sequence[str] = ()
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class FitsRequest(DevicesRequest):
    """Which model to fit on which devices, for which requests."""

    batch: int = 1
    context: int | None = None
    """Tokens of prompt and answer; None: those of `prompt_len`, or `FITS_CONTEXT` at most."""
    prompt_len: int | None = None
    gen_len: int = 100
    dtype: Any = "auto"
    bits: str | None = None
    kv: str | None = None
    symmetric: bool = False
    weight_group_size: int | None = None
    head_bits: Literal[8, 16] | None = None
    reserve: str | None = None
    gpu_memory_utilization: float | None = None
    costs: str | None = None
    probe_cpu: bool = False
    omega_file: str | None = None
    json: bool = False


FITS_CONTEXT = 8192
"""Tokens of a request, where `fits` is not asked for others; a model of fewer has its own."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest(DevicesRequest):
    """Which plan to check, against what."""

    plan: str


@dataclass(frozen=True, kw_only=True)
class CostsRequest(ModelRequest):
    """Which tables of others to import as costs of a model."""

    action: str
    source: str
    system: str | None = None
    engine: str | None = None
    kind: str | None = None
    dtype: str = "auto"
    merge: bool = False
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class SimulateRequest(TrafficFlags):
    """Which plan to simulate, under which traffic."""

    plan: str
    max_num_batched_tokens: int | None = None
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """Which plan to check against which certificate."""

    plan: str
    certificate: str | None


@dataclass(frozen=True, kw_only=True)
class ExportRequest(ModelRequest):
    """Which plan to write, for which engine, where to."""

    plan: str
    to: str
    output: str | None


@dataclass(frozen=True, kw_only=True)
class ModelsRequest:
    """Which models to list, and how."""

    word: str | None
    json: bool


@dataclass(frozen=True, kw_only=True)
class ListRequest:
    """Which devices to list, and how."""

    word: str | None = None
    known: bool
    json: bool
    from_ray: str | None
    yaml: bool

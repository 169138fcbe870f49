"""The plan: which device runs which layers at which precision, in which micro-batches.

A plan is a file (`plan.json`, `schema: 1`). It can be written by hand: what the planner predicts
(times, memory, solver) is optional, what the runtime needs is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from llmpq.devices.device_spec import device_specs
from llmpq.errors import BadPlanError, PlanMismatchError, short_repr
from llmpq.file_form import FileForm, read_json
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.plans.plan_inputs import PlanInputs
from llmpq.precision import Precision, bits_of
from llmpq.service_measures import Quantiles, ServiceLimits, ServiceMeasures
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.sizes.memory import (
    CodesName,
    CpuActivations,
    Quantization,
    StoredBytes,
    default_head_bits,
)
from llmpq.sizes.pool_size import PoolSize, held_specs, planned_pool
from llmpq.sizes.state_size import state_bytes
from llmpq.workload import Workload, prompt_chunks

if TYPE_CHECKING:
    from llmpq.pictures.html_page import Picture

Prefer = Literal["quality", "balanced", "speed"]
"""Which plan of the front of time and quality loss to take."""
MAX_GAMMA = 7
"""Most tokens that may be drafted for one verify."""
MAX_COUNT, MAX_BYTES, MAX_FLOAT = 2**24, 2**60, 1e15
"""Most a plan may say of anything it counts; of bytes; of seconds, rates and shares."""
SIGNED = ("value", "bound", "gap", "sum_omega")
"""What may be below zero: a solver's objective and what it is made of."""

SIZES = ("memory", "context", "reserve")
"""Bytes, as cluster files name them."""


class ModelRef(FileForm):
    """The model a plan was made for."""

    name: str
    num_layers: int = Field(gt=0)
    fingerprint: str
    """Hash of the architecture: a plan runs with no other."""
    path: str | None = None
    """Directory the planner read it from; the runtime uses it unless another is given."""


class ClusterRef(FileForm):
    """The cluster a plan was made for."""

    name: str
    fingerprint: str
    """Hash of devices and links."""


class StoredForm(FileForm):
    """What linears take whose codes are the checkpoint's own, where the grid says other bytes."""

    layers: tuple[int, int]
    """The first layer, and the one behind the last."""
    precision: Precision
    bytes: dict[str, int]
    """Linear (of one expert of a mixture) -> bytes."""

    @classmethod
    def of(cls, stored: StoredBytes) -> StoredForm:
        """Return the file form of a value."""
        return cls(layers=stored.layers, precision=stored.precision, bytes=dict(stored.linears))

    def value(self) -> StoredBytes:
        """Return the value the byte formulas take."""
        linears = tuple(self.bytes.items())
        return StoredBytes(layers=self.layers, precision=self.precision, linears=linears)


class QuantizationForm(FileForm):
    """File form of `Quantization`."""

    group_size: int | None = Field(default=128, gt=0, multiple_of=32)
    """Weights that share a scale; none: a whole channel."""
    symmetric: bool = False
    """Whether groups have no zero point."""
    outliers: int = 0
    """Input channels that w4a4 layers keep in 8 bits."""
    head_bits: Literal[8, 16] | None = None
    """Of the output matrix; none: 8 where a CPU has it and layers of 8 bits or fewer, else 16."""
    cpu_activations: CpuActivations = "exact"
    """What weights of few bits meet on CPUs; the loss of `int8` is not part of omega."""
    codes: CodesName | None = None
    """What most of the checkpoint's own codes are that layers keep; none: integers."""
    stored: tuple[StoredForm, ...] = ()
    """Bytes of the checkpoint's own codes, where layers keep them."""

    def settings(self) -> Quantization:
        """Return the value the byte formulas take."""
        return Quantization(
            group_size=self.group_size,
            symmetric=self.symmetric,
            outliers=self.outliers,
            head_bits=self.head_bits,
            cpu_activations=self.cpu_activations,
            codes=self.codes,
            stored=tuple(one.value() for one in self.stored),
        )


class MemoryForm(FileForm):
    """Predicted memory of a stage, in bytes, and the device's limit, its reserve taken off."""

    weights_bytes: int
    embedding_bytes: int
    """Embedding on the first stage, norm and head on the last."""
    kv_bytes: int
    workspace_bytes: int
    """The largest temporary of either phase."""
    context_bytes: int
    """What the framework takes for itself."""
    prefix_bytes: int = Field(default=0, ge=0)
    """States of recurrent layers that are kept of prefixes; 0 where not every stage has room."""
    total_bytes: int
    limit_bytes: int
    reserve_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """What a run cannot do without: all but what only found prefixes need."""
        return self.total_bytes - self.prefix_bytes

    def with_prefix_bytes(self, prefix_bytes: int) -> MemoryForm:
        """Return the form with another number of bytes of kept states."""
        change = {"prefix_bytes": prefix_bytes, "total_bytes": self.least_bytes + prefix_bytes}
        return self.model_copy(update=change)


class PoolForm(FileForm):
    """The pool of KV blocks that each stage keeps, for requests of any lengths."""

    num_blocks: int = Field(ge=1, le=MAX_COUNT)
    """Blocks of 128 tokens, as many on every stage."""
    tokens: int = Field(ge=1, le=MAX_COUNT)
    """Tokens of all requests under way that the blocks hold together."""
    window_blocks: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Blocks of layers with a window, where those take fewer; 0: all layers have as many."""
    stage_bytes: tuple[int, ...]
    """Of each stage, in their order."""
    state_bytes: int = Field(default=0, ge=0)
    """Of these, what every request takes for recurrent layers, all stages, whatever its length."""

    @classmethod
    def of(
        cls, size: PoolSize, spec: ModelSpec, workload: Workload, stages: Sequence[StagePlan]
    ) -> PoolForm:
        """Return a pool as a plan states it."""
        width = workload.dtype_bytes
        return cls(
            num_blocks=size.num_blocks,
            tokens=size.num_blocks * BLOCK_TOKENS,
            window_blocks=size.window_blocks,
            state_bytes=state_bytes(spec, range(spec.num_layers), slots=1, dtype_bytes=width),
            stage_bytes=tuple(
                sum(
                    size.nbytes(own, workload.kv, layers=range(*place.layers), dtype_bytes=width)
                    for place, own in held_specs([stage], spec)
                )
                for stage in stages
            ),
        )

    @classmethod
    def planned(
        cls,
        spec: ModelSpec,
        workload: Workload,
        stages: Sequence[StagePlan],
        *,
        chunk: int | None,
        prefill_microbatch: int,
    ) -> PoolForm:
        """Return the pool that a plan counts for its stages: all requests at their longest."""
        size = planned_pool(spec, workload, chunk, prefill_microbatch=prefill_microbatch)
        return cls.of(size, spec, workload, stages)


class MemberPlan(FileForm):
    """A device of a stage in tensor parallel; what is left out is as of the stage."""

    device: str
    """Name in the cluster."""
    device_index: int | None = None
    """Number of the device on its node; left out: as far behind the stage's as in its list."""
    kind: str | None = None
    profile_kind: str | None = None
    threads: int | None = Field(default=None, ge=1, le=65536)
    sms: int | None = Field(default=None, gt=0)
    memory: MemoryForm | None = None
    """Predicted, of its part."""


class StagePlan(FileForm):
    """One stage: a device, or several of a node, and the half-open range of layers it runs."""

    device: str
    """Name in the cluster, such as T4-1."""
    node: str
    device_index: int = 0
    """Number of the device on its node."""
    kind: str
    """The card, as the device table names it."""
    profile_kind: str
    """Under which its measured times are stored: the card and what changes its speed."""
    threads: int | None = Field(default=None, ge=1, le=65536)
    """Threads of a CPU stage."""
    sms: int | None = Field(default=None, gt=0)
    """SMs of an emulated GPU."""
    layers: tuple[int, int]
    """`[start, end)`."""
    precisions: tuple[Precision, ...]
    """One for each layer of the stage."""
    memory: MemoryForm | None = None
    prefill_s: float | None = None
    """Predicted mean time of one step of prefill, a chunk of every prompt of a micro-batch; the hop
    to the next stage is not included."""
    decode_s: float | None = None
    """Predicted mean time of one decode micro-batch, hops not included."""
    devices: tuple[MemberPlan, ...] = ()
    """Devices of the node that share every layer in tensor parallel, which `device` and `memory`
    then stand for together; none: a device of its own. A name is enough for devices that are
    alike."""
    shares: tuple[Annotated[int, Field(ge=1, le=MAX_COUNT)], ...] = ()
    """What each of `devices` has of heads and MLP channels, in parts of their sum."""

    @field_validator("devices", mode="before")
    @classmethod
    def _names_are_devices(cls, given: object) -> object:
        if not isinstance(given, (list, tuple)):
            return given
        return [{"device": one} if isinstance(one, str) else one for one in given]

    @model_validator(mode="after")
    def _shares_belong_to_devices(self) -> Self:
        if not self.devices and not self.shares:
            return self
        if len(self.devices) < 2 or len(self.devices) != len(self.shares):
            raise ValueError(
                f"stage {self.device}: got {len(self.devices)} devices and {len(self.shares)} "
                "shares; expected two devices or more, and a share of each"
            )
        return self

    @property
    def members(self) -> tuple[StagePlan, ...]:
        """Its devices, each as a stage that has the layers alone."""
        if not self.devices:
            return (self,)
        alone: dict[str, object] = {"devices": (), "shares": ()}
        found = []
        for number, one in enumerate(self.devices):
            given = {
                name: value
                for name in ("kind", "profile_kind", "threads", "sms", "device_index")
                if (value := getattr(one, name)) is not None
            }
            place = {"device_index": self.device_index + number, "device": one.device}
            found.append(self.model_copy(update={**alone, **place, **given, "memory": one.memory}))
        return tuple(found)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of its devices."""
        return tuple(one.device for one in self.devices) or (self.device,)

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        return self.layers[1] - self.layers[0]

    @property
    def is_cpu(self) -> bool:
        """Whether the stage runs on its host's cores: it names threads, or a CPU of the table."""
        spec = device_specs().get(self.kind)
        return self.threads is not None or (spec is not None and spec.is_cpu)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One device of a plan and what it has to do."""

    stage: int
    """Number of its stage."""
    member: int
    """Its number among the stage's devices; the first leads the others."""
    shares: tuple[int, ...]
    """Of the stage's devices; empty of a stage of one."""
    place: StagePlan
    """Its device, as a stage that has the layers alone."""

    @property
    def leads(self) -> bool:
        """Whether it is the first of its stage, which receives and sends."""
        return self.member == 0

    def member_of(self, spec: ModelSpec) -> Member | None:
        """Return what it holds of a model's layers; None: all of each."""
        if not self.shares:
            return None
        return Member(spec=spec, shares=self.shares, index=self.member)


class NodePlan(FileForm):
    """What tells one machine of a plan from the others, as its cluster file said it."""

    name: str
    """As the stages call it."""
    host: str | None = None
    """Name or address of its Ray node."""
    labels: Mapping[str, str] = {}
    """Labels that its Ray node was started with."""
    model_dir: str | None = None
    """Where it keeps the model, if not where the command says."""


class Predicted(FileForm):
    """What the planner expects of the whole job."""

    prefill_s: float
    """Until every request has its first token."""
    decode_s: float
    """The other tokens."""
    total_s: float
    output_tokens_per_s: float
    sum_omega: float
    """The quality loss of all layers together."""
    all_8bit_omega: float | None = None
    """Sum of omega with every layer at w8a16 and a 16-bit cache; None where it is not known."""
    all_4bit_omega: float | None = None
    """The same at w4a16: what the plan's own is to be compared with."""
    bottleneck: str
    """Device of the stage that bounds the longer phase."""
    estimated: bool = False
    """Whether any cost came from the roofline estimate instead of a profile."""


class Robustness(FileForm):
    """By what share costs may be wrong, each by a factor of its own, with a plan near the best.

    A cost is a device kind's time of a layer at some bits, of the embedding or the head, of prompts
    or of tokens, or a link's: the same in all plans that have it.
    """

    near: float
    """The plan's value is at most this share above that of the best pipeline."""
    proven: float = Field(ge=0)
    """With every cost off by up to this share it is."""
    refuted: float | None = Field(default=None, ge=0)
    """With every cost off by up to this share it may not be; none: no such share was found."""
    better: str = ""
    """The pipeline that then is better by more."""


class SolverReport(FileForm):
    """Who made the plan and how good it is known to be."""

    method: str
    status: Literal["optimal", "feasible", "heuristic", "baseline", "hand-written"]
    objective: Literal["makespan", "paper"] = "makespan"
    prefer: Prefer | None = None
    """Which plan of the front of time and quality loss was asked for; none: a theta or a budget."""
    theta: float = 0.0
    """Seconds that one unit of omega was worth; of `prefer`, the slope of the front at the plan."""
    value: float | None = None
    """Seconds plus theta times sum of omega."""
    bound: float | None = None
    """No plan has a lower value."""
    gap: float | None = None
    """How far value may be above the best, as a share of it."""
    seconds: float | None = None
    """Time the search took."""
    version: str = ""
    """Of the solver."""
    sensitivity: str = "none"
    """The indicator that omega came from."""
    robustness: Robustness | None = None
    """Of plans of the exact method, for a job."""
    note: str = ""


class Speculation(FileForm):
    """Draft settings the planner chose (issue of the engine); absent means plain decoding."""

    mode: Literal["qspec", "w4kv4", "kv4", "ngram", "mtp"]
    gamma: int = Field(gt=0, le=MAX_GAMMA)
    """Tokens drafted before each verify."""
    acceptance: float = Field(ge=0, le=1)
    """Share of drafted tokens that is expected to be kept."""
    extra_bytes: int = 0
    """Memory of the drafts, all stages together."""
    predicted_speedup: float | None = None


class TrafficForm(FileForm):
    """The live traffic that a plan was made for, and how it is predicted to be served.

    Of a plan of several engines each says what holds for all of them, and its own step.
    """

    objective: Literal["throughput", "rate", "latency"]
    requests: int = Field(ge=1, le=MAX_COUNT)
    """How many were simulated."""
    prompt_tokens: Quantiles
    output_tokens: Quantiles
    longest: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Tokens of the longest request, prompt and answer."""
    limits: ServiceLimits
    step_tokens: int = Field(ge=1, le=MAX_COUNT)
    """Tokens of a step at most, chunks of prompts and decoding rows: what `serve` takes."""
    rate_per_s: float
    """Requests a second that the prediction is of."""
    highest_rate_per_s: float | None = None
    """The highest rate that was found within the limits; none: it was not looked for."""
    predicted: ServiceMeasures


class Plan(FileForm):
    """A complete, ordered partition of a model over devices, with its micro-batches."""

    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    model: ModelRef
    cluster: ClusterRef
    workload: Workload
    quantization: QuantizationForm = QuantizationForm()
    prefill_microbatch: int = Field(gt=0)
    """Requests whose prompts go through a stage at a time."""
    prefill_chunk: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Tokens of each of these prompts in a step, at most: a longer prompt takes several steps
    (chunked prefill). None: a step takes whole prompts."""
    decode_microbatch: int = Field(gt=0)
    """Requests that get one more token in a step of a stage."""
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    """In the order of the pipeline; together they have every layer once."""
    nodes: tuple[NodePlan, ...] = ()
    """How to find the stages' machines; one that is not listed is known by its devices."""
    pool: PoolForm | None = None
    """The KV cache of a run. None: as large as the workload needs, where devices have room."""
    speculation: Speculation | None = None
    traffic: TrafficForm | None = None
    """What it serves, where it was planned for live traffic; `workload` then says how many run at
    once (`batch`) and what blocks there are for them."""
    predicted: Predicted | None = None
    inputs: PlanInputs | None = None
    """The entries the prediction was computed from; `llmpq-algo check` needs no other file."""
    solver: SolverReport = SolverReport(method="hand", status="hand-written")

    @model_validator(mode="after")
    def _holds_sane_numbers(self) -> Self:
        for place, number in _numbers(self.model_dump(mode="json", by_alias=True), ""):
            name = next((part for part in place.split(".")[::-1] if not part.isdigit()), place)
            whole = isinstance(number, int)
            size = name.endswith("_bytes") or name in SIZES or ".bytes." in place
            most = (MAX_BYTES if size else MAX_COUNT) if whole else MAX_FLOAT
            least = 0.0
            if name in SIGNED:  # shown only, not computed with
                least, most = -sys.float_info.max, sys.float_info.max
            if not least <= number <= most:  # not a number, too
                kind = "a whole number" if whole else "a number"
                raise ValueError(
                    f"'{place}': got {short_repr(number)}, expected {kind} from {least:g} to "
                    f"{most:g}; correct the file, or re-plan with llmpq-algo"
                )
        return self

    @model_validator(mode="after")
    def _is_a_partition(self) -> Self:
        expected = 0
        for stage in self.stages:
            start, end = stage.layers
            if start != expected:
                kind = "a gap" if start > expected else "an overlap"
                raise ValueError(
                    f"stage {stage.device}: layers [{start}, {end}) leave {kind}; expected to "
                    f"start at layer {expected}"
                )
            if end <= start:
                raise ValueError(f"stage {stage.device}: layers [{start}, {end}) are empty")
            if len(stage.precisions) != end - start:
                raise ValueError(
                    f"stage {stage.device}: {len(stage.precisions)} precisions for "
                    f"{end - start} layers"
                )
            expected = end
        if expected != self.model.num_layers:
            raise ValueError(
                f"the stages cover layers [0, {expected}), the model has {self.model.num_layers}"
            )
        listed = [node.name for node in self.nodes]
        if len(set(listed)) != len(listed):
            raise ValueError(f"a node is listed more than once: {listed}")
        devices = [name for stage in self.stages for name in stage.device_names]
        if len(set(devices)) != len(devices):
            raise ValueError(f"a device has more than one stage: {devices}")
        for name in ("prefill_microbatch", "decode_microbatch"):
            if getattr(self, name) > self.workload.batch:
                raise ValueError(f"{name} is larger than the batch of {self.workload.batch}")
        return self

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The devices of all stages, in order: each runs a process of its own."""
        return tuple(
            Worker(stage=number, member=member, shares=stage.shares, place=place)
            for number, stage in enumerate(self.stages)
            for member, place in enumerate(stage.members)
        )

    @property
    def last_leader(self) -> int:
        """The number among `workers` of the last stage's first device, which samples."""
        return len(self.workers) - len(self.stages[-1].members)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Itself: a plan of several engines (topology.py) has one of each."""
        return (self,)

    @property
    def places(self) -> tuple[StagePlan, ...]:
        """The devices of all stages, in order, each as a stage that has its layers alone."""
        return tuple(place for stage in self.stages for place in stage.members)

    @property
    def compared_with(self) -> str:
        """Which plans the solver's bound is of, in words."""
        grouped = any(stage.shares for stage in self.stages)
        return f"pipelines with {'these groups' if grouped else 'a device a stage'}"

    @property
    def known_as(self) -> str:
        """How good the solver knows the plan to be; where it is optimal, of which plans."""
        status = self.solver.status
        return f"optimal of {self.compared_with}" if status == "optimal" else status

    def with_memory(self, memory: Sequence[MemoryForm | None]) -> Plan:
        """Return the plan with the memory of each of its `workers`."""
        stages = list(self.stages)
        for worker, own in zip(self.workers, memory, strict=True):
            stage, change = stages[worker.stage], dict[str, object]()
            if not worker.shares:
                change["memory"] = own
            else:
                devices = list(stage.devices)
                devices[worker.member] = devices[worker.member].model_copy(update={"memory": own})
                change["devices"] = tuple(devices)
            stages[worker.stage] = stage.model_copy(update=change)
        return self.model_copy(update={"stages": tuple(stages)})

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precision of every layer, in order."""
        return tuple(p for stage in self.stages for p in stage.precisions)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(First position, tokens) of each step that a planned prompt takes."""
        return prompt_chunks(self.workload.prompt_len, self.prefill_chunk)

    @property
    def prefill_step_tokens(self) -> int:
        """Prompt tokens of the largest planned step."""
        return self.prefill_microbatch * self.chunks[0][1]

    def settings(self) -> Quantization:
        """Return how weights are stored, as the byte formulas take it."""
        bits = self.quantization.head_bits
        if bits is None:
            bits = default_head_bits(self.precisions, on_cpu=self.stages[-1].is_cpu)
        return replace(self.quantization.settings(), head_bits=bits)

    def plot(self) -> Picture:
        """Return the plan as a page that a notebook shows; `save("plan.html")` writes it."""
        from llmpq.pictures.html_page import Picture
        from llmpq.pictures.plan_page import plan_page

        return Picture(plan_page(self))

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """Yield what `repr` and `print` show: who holds what, and the rate; `dump_json` has all."""
        work = self.workload
        yield "model", self.model.name
        yield "requests", f"{work.batch} of {work.prompt_len} + {work.gen_len} tokens"
        for stage in self.stages:
            first, end = stage.layers
            yield stage.device, f"layers {first}-{end - 1}, {bits_of(stage.precisions)}"
        if self.predicted is not None:
            yield "tokens_per_s", round(self.predicted.output_tokens_per_s, 1)

    def _repr_html_(self) -> str:
        """Return the plan's cards as SVG, for notebooks."""
        from llmpq.pictures.plan_cards import cards_svg

        return cards_svg(self)

    def promised_steps(self, stage: StagePlan) -> dict[str, dict[str, float]]:
        """Return what is predicted of a stage's steps: seconds, and of how many rows.

        Rows of prefill are chunks of prompts of the workload's length, contexts of decoding rows
        have its mean; empty where nothing is predicted.
        """
        given = {
            "prefill": (stage.prefill_s, self.prefill_microbatch),
            "decode": (stage.decode_s, self.decode_microbatch),
        }
        return {
            kind: {"seconds": seconds, "rows": rows}
            for kind, (seconds, rows) in given.items()
            if seconds is not None
        }

    def require_model(self, spec: ModelSpec) -> None:
        """Raise `PlanMismatchError` unless the plan was made for this architecture."""
        if spec.fingerprint() != self.model.fingerprint:
            raise PlanMismatchError(
                f"the plan was made for model {self.model.name} ({self.model.num_layers} layers, "
                f"{self.model.fingerprint}), got {spec.name} ({spec.num_layers} layers, "
                f"{spec.fingerprint()}); re-plan with llmpq-algo --model"
            )

    def require_cluster(self, name: str, fingerprint: str) -> None:
        """Raise `PlanMismatchError` unless the plan was made for this cluster."""
        if fingerprint != self.cluster.fingerprint:
            raise PlanMismatchError(
                f"the plan was made for cluster {self.cluster.name} ({self.cluster.fingerprint}), "
                f"got {name} ({fingerprint}); re-plan with llmpq-algo --cluster"
            )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file of one engine; `BadPlanError` names what is wrong with it."""
        try:
            data = read_json(path)
        except ValueError as error:
            raise BadPlanError(str(error)) from None
        return cls.from_data(data, where=str(path))

    @classmethod
    def from_data(cls, data: object, *, where: str) -> Plan:
        """Return the plan of a file's data; `BadPlanError` names what is wrong with it."""
        try:
            if isinstance(data, dict) and isinstance(data.get("plans"), list):
                raise ValueError(
                    f"'{where}' is a front of {len(data['plans'])} plans (--pareto), expected one "
                    "plan: each of 'plans' is one in a file of its own"
                )
            if isinstance(data, dict) and isinstance(data.get("engines"), list):
                number = len(data["engines"])
                kind = (
                    "a plan whose engine takes its rows in waves, expected one that takes all at "
                    "once"
                    if number == 1
                    else f"a plan of {number} engines, expected one of a single engine"
                )
                raise ValueError(
                    f"'{where}' is {kind}: make it with llmpq-algo --engines 1; llmpq-dist run and "
                    "serve, and llmpq.runtime.entrypoints.engines.Engines in Python, take this one"
                )
            return cls.parse_data(data, where=where)
        except ValueError as error:
            raise BadPlanError(str(error)) from None


def _numbers(data: object, place: str) -> Iterator[tuple[str, int | float]]:
    """Yield every number in plain data and where it stands, `stages.0.prefill_s`."""
    if isinstance(data, (dict, list)):
        for key, inner in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _numbers(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield place, data

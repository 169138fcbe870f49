"""Messages and files of the profiler's processes: cases, samples, set-ups.

One JSON object a line, over pipes and in `samples.jsonl`. Knows no torch. v is the micro-batch
size, `length` the tokens s of a prompt's chunk in prefill and the attended tokens t+s otherwise, q
the new tokens of one request.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from llmpq.checkpoints.gguf_file import is_model
from llmpq.checkpoints.hub import local_model
from llmpq.costs.cost_model import Padding, Part, Phase, Shares
from llmpq.file_form import FileForm
from llmpq.models.model_spec import ModelSpec, builtin_name
from llmpq.models.tensor_parallel import shares_text
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.memory import CpuActivations
from llmpq.workload import Dtype


class Target(FileForm):
    """What one latency entry is about: a part of the model on a device kind, in one phase."""

    device_kind: str
    part: Part
    phase: Phase
    precision: Precision = Precision.W16A16
    kv: KVPrecision = KVPrecision.KV16
    dtype: Dtype
    shares: Shares = ()
    """Of a layer that devices share, the first one's part by all shares; empty: all of it."""

    @property
    def title(self) -> str:
        """Return the short name shown beside the progress bar."""
        kv = "" if self.kv is KVPrecision.KV16 else f" {self.kv.value}"
        layer = f" {self.precision.value}{kv}" if self.part == "layer" else ""
        layer = f" {self.precision.value}" if self.part == "head" else layer
        part = f", part of {shares_text(self.shares)}" if self.shares else ""
        return f"{self.device_kind} {self.part} {self.phase.value}{layer}{part}"


class TimedCase(FileForm):
    """One shape of a target: what is timed."""

    target: Target
    v: int = Field(gt=0)
    length: int = Field(gt=0)
    q_len: int = Field(default=1, gt=0)
    start: int = Field(default=0, ge=0)
    """Tokens of a prompt before the chunk."""
    launch: bool = False
    """In samples of older profiles: the host's time to enqueue it."""

    @property
    def title(self) -> str:
        """Return the target and the shape: `a100 layer decode w4a16, batch 8, 512 tokens`."""
        verify = f", {self.q_len} at once" if self.q_len > 1 else ""
        behind = f" behind {self.start}" if self.start else ""
        return f"{self.target.title}, batch {self.v}, {self.length} tokens{behind}{verify}"

    @property
    def new_tokens(self) -> int:
        """Tokens that pass through the part."""
        return self.v * (self.length if self.target.phase is Phase.PREFILL else self.q_len)


class CaseTime(FileForm):
    """How long one call took: the median of `repeats`, and the middle half's ends."""

    seconds: float = Field(gt=0)
    low_s: float = Field(gt=0)
    high_s: float = Field(gt=0)
    repeats: int = Field(gt=0)
    layers: int = Field(default=1, gt=0)
    """Distinct layers the call went through; `seconds` is per layer."""

    @property
    def noise(self) -> float:
        """Half the interquartile range over the median."""
        return (self.high_s - self.low_s) / 2 / self.seconds


class Sampling(FileForm):
    """How the job picks its tokens, which the head's time depends on; temperature 0 is greedy."""

    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = Field(default=None, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)

    @property
    def title(self) -> str:
        """Return `greedy`, or the parameters."""
        if self.temperature == 0:
            return "greedy"
        return f"temperature {self.temperature}, top-k {self.top_k or 'all'}, top-p {self.top_p}"


class Conditions(FileForm):
    """What a sample was taken under; under other conditions it is taken again."""

    model_fingerprint: str
    machine: str
    copies: int = Field(gt=0)
    """Processes that ran the same case at once; the timing is the median over them."""
    rest_s: float = Field(default=0.0, ge=0)
    """Pause before every call, in which a stage would wait for the others."""
    cpu_activations: CpuActivations = "exact"
    """Of a CPU."""
    sampling: Sampling = Sampling()
    padding: Padding = "none"
    """How the tokens of steps were padded."""
    padded_to: int = Field(default=1, gt=0)
    """In samples of older profiles, a multiple of which prompts of so many tokens or more took."""
    kernels: str = ""
    """The mark of the sources that were timed (llmpq/costs/kernel_sources.py)."""


class Sample(FileForm):
    """A line of `samples.jsonl`: a case, its timing, and what it was taken under."""

    conditions: Conditions
    case: TimedCase
    timing: CaseTime


class Effort(FileForm):
    """How long one case is repeated."""

    seconds: float = Field(default=0.1, ge=0)
    min_repeats: int = Field(default=5, gt=0)
    rest_s: float = Field(default=0.0, ge=0)
    """Pause before every call on a CPU: a stage that has waited starts with cold caches."""
    sustain_s: float = Field(default=0.0, ge=0)
    """Load before a longer call is timed on a GPU: a busy one lowers its clocks."""


class SetUp(FileForm):
    """First line to a child: which model on which device."""

    model: str
    """Directory or built-in name; only its config is read."""
    threads: int = Field(default=1, gt=0)
    """Threads of a CPU child."""
    cuda: bool = False
    """Whether the child takes the GPU it can see; otherwise the CPU."""
    sms: int | None = None
    """SMs of an emulated GPU."""
    sampling: Sampling = Sampling()
    cpu_activations: CpuActivations = "exact"
    effort: Effort = Effort()


class LinkJob(FileForm):
    """Line that makes two children exchange messages: rank 0 sends first, rank 1 echoes."""

    rank: Literal[0, 1]
    port: int
    hidden: int = Field(gt=0)
    """Size of one token's hidden states."""
    seconds: float = Field(gt=0)
    on_device: bool = False
    """Whether both ends are GPUs, whose links pass the hosts by."""
    host: str = "127.0.0.1"
    """Where the two meet, at `port`."""
    own: str | None = None
    """This end's address, if they are on two hosts."""


class SumJob(FileForm):
    """Line that makes children sum hidden states, as devices that share a stage do."""

    rank: int = Field(ge=0)
    count: int = Field(gt=1)
    port: int
    hidden: int = Field(gt=0)
    """Size of one token's hidden states."""
    dtype: Dtype
    most_tokens: int = Field(gt=0)
    """Of the largest sum."""


class SumTimings(FileForm):
    """Answer to `SumJob`: seconds of a sum by the bytes of the hidden states."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]


class Ready(FileForm):
    """Answer to `SetUp`: what the child runs on."""

    machine: str
    device_name: str


class LinkTimings(FileForm):
    """Answer to `LinkJob`: one-way seconds by message size in bytes."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    rounds_s: tuple[float, ...] = ()
    """Until the answer of one token a row was back, as measured."""
    host_s: float | None = None
    """What an end computes to take one of the smallest messages and to send another; over gloo."""
    burst_s: float = 0.0
    """Between two of the smallest messages that follow each other at once."""


def model_spec(model: str) -> ModelSpec:
    """Return the spec of a model directory, or of a built-in name."""
    if not is_model(model) and ("/" not in model or builtin_name(model) is not None):
        return ModelSpec.by_name(model)
    return ModelSpec.from_directory(local_model(model, config_only=True))

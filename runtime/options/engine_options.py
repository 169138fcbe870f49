"""EngineOptions: how an engine runs a model; the only settings between the CLI, `LLM` and stages.

`LLM` takes the fields as keywords, the commands of `llmpq-dist` have flags of the same names
(`cli/engine_flags.py` reads defaults, choices and help from here), and every stage gets the whole
value. Names and meanings are vLLM's where it has them. Standard library and nouns only.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from llmpq.devices.cluster import Cluster
from llmpq.errors import unknown_name
from llmpq.plans.gpu_memory import require_share
from llmpq.plans.plan import MAX_GAMMA, Prefer
from llmpq.plans.speculation import MODES, SpeculationMode
from llmpq.precision import KVPrecision
from llmpq.workload import DTYPE_BYTES, full_dtype

AUTO: Literal["auto"] = "auto"
Backend = Literal["auto", "threads", "processes", "ray"]
LinkChoice = Literal["auto", "peer", "nccl", "gloo"]
LoadFormat = Literal["auto", "dummy", "copies"]
OnLoss = Literal["restart", "replan", "stop"]
Speculate = SpeculationMode | Literal["auto", "off"]

MAX_TIMEOUT_S = 10**7
"""The longest deadline: four months."""
_SWITCHES = (
    "profile",
    "enable_prefix_caching",
    "offline",
    "copy_weights",
    "enforce_eager",
    "stages_apart",
)
_TEXTS = (
    "revision",
    "quantization",
    "costs",
    "generation_config",
    "layer_cache",
    "ray_address",
    "master_addr",
    "network_interface",
    "trace",
)
OWN_FORMATS, QUANTISED_FORMATS = ("safetensors", "hf"), ("gguf", "bitsandbytes")
"""Values of vLLM's `load_format` that ask for what a checkpoint is anyway; the latter must be."""
PLANNING = ("prefer", "profile", "dtype", "max_num_seqs", "head_bits", "tensor_parallel_size")
"""Fields that only matter where the plan is made here: a given plan states them."""
STATED = ("dtype", "head_bits", "tensor_parallel_size")
"""Those of which a plan's file has the value: the same one changes nothing beside it."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a phase of a run may take before the run fails."""

    wait_nodes_s: float = 30.0
    """Until nodes that have not joined the Ray yet join it; 0: they must be there."""
    placement_s: float = 25.0
    """Until every stage has been started on its node."""
    load_s: float = 600.0
    """Until all weights are loaded."""
    stall_s: float = 30.0
    """Without progress of a stage that loads."""
    step_s: float = 30.0
    """One micro-batch on one stage, or a stage's silence."""

    def __post_init__(self) -> None:
        for name in DEADLINE_NAMES:
            seconds: object = getattr(self, f"{name}_s")
            least_ok = name == "wait_nodes"
            if (
                isinstance(seconds, bool)
                or not isinstance(seconds, (int, float))
                or not (0 < seconds <= MAX_TIMEOUT_S or (least_ok and seconds == 0))
            ):
                raise ValueError(
                    f"the deadline {name} must be a positive number of seconds, at most "
                    f"{MAX_TIMEOUT_S}, got {seconds!r}; leave it out for the default"
                )

    @classmethod
    def parse(cls, text: str) -> Deadlines:
        """Read `load=3600,step=60`; the others keep their defaults."""
        given: dict[str, float] = {}
        for part in text.split(","):
            name, _, seconds = part.partition("=")
            key = name.strip().replace("-", "_")
            try:
                value = float(seconds)
            except ValueError:
                value = None
            if key not in DEADLINE_NAMES or value is None or f"{key}_s" in given:
                raise ValueError(
                    "deadlines must be NAME=SECONDS, separated by commas, with each name once of "
                    f"{', '.join(DEADLINE_NAMES)}, got '{text}'"
                )
            given[f"{key}_s"] = value
        return cls(**given)


DEADLINE_NAMES = tuple(f.name.removesuffix("_s") for f in fields(Deadlines))


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs a model; a flag's help is the docstring of its field."""

    revision: str | None = None
    """Branch, tag or commit of a model of Hugging Face's hub (default: main)."""
    quantization: str | None = None
    """Refuse a model whose files are not quantised with this, such as awq, gptq or fp8 (default:
    run the form they have)."""
    cluster: Cluster | str | Path | None = None
    """Cluster file: its devices are planned for; with a plan, the plan must be made for it."""
    prefer: Prefer | None = None
    """Plan for quality (default: bits as stored where they fit), balanced or speed."""
    profile: bool = False
    """Measure this machine's devices before planning; later runs reuse the costs."""
    dtype: str = AUTO
    """Dtype of activations and 16-bit weights: float16, bfloat16 or float32 (default: as
    stored)."""
    head_bits: Literal[8, 16] | None = None
    """Bits of the output matrix, 16 (as stored) or 8 (default: 8 on CPUs where layers have 8 bits
    or fewer, else 16)."""
    tensor_parallel_size: int | None = None
    """Devices of one machine, alike, that share every layer evenly (tensor parallel); a CPU's cores
    are divided (default: GPUs share layers where a plan gains by it; 1: none do)."""
    max_model_len: int | None = None
    """Tokens of a prompt and its answer (default: the model's positions, at most what fits)."""
    max_num_seqs: int | None = None
    """Requests that run at once (default: what fits)."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU's memory that is used at most, such as 0.9 (default: all that is free)."""
    kv_cache_dtype: str = AUTO
    """Precision of the KV cache: kv16, kv8, kv4, kv2 (int8, int4, int2), or kv8v4: keys in 8 bits,
    values in 4 (default: the plan's)."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step: longer prompts are prefilled in chunks (default, by the plan's times
    and memory: what every stage computes in 0.1 s, at most 2,048, while requests decode, in 0.5 s
    while none does; 512 on CPUs whose times are not known)."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of earlier prompts that begin alike."""
    offline: bool = False
    """All requests are known beforehand: steps hold the plan's whole micro-batches of prompts
    instead of the few tokens that keep latency low."""
    speculate: Speculate | None = None
    """Speculative decoding: qspec, w4kv4, kv4, ngram, mtp (the model's own head), auto
    (what pays by the costs, if anything) or off (default: the plan's)."""
    gamma: int | Literal["auto"] | None = None
    """Tokens drafted per verify, 1 to 7, or auto: by measured times (default: the plan's, else
    auto)."""
    costs: str | Path | None = None
    """costs.json of llmpq-profile, by which drafts are chosen where gamma or speculate is auto."""
    generation_config: str = AUTO
    """Whose generation_config.json says which tokens end answers and how they are sampled by
    default: auto (the model's), vllm (none) or a directory."""
    load_format: LoadFormat = AUTO
    """Weights: auto (the model's), dummy (random ones, made on the device) or copies (random ones,
    alike in all layers)."""
    layer_cache: str | Path | None = None
    """Folder that stores quantised layers, so that a restart reads them."""
    keep_layers_in: Literal["ram"] | None = None
    """Keep quantised layers in this host's memory, too (ram), so that a stage that is lost has them
    again without quantising; they are gone with the command."""
    copy_weights: bool = False
    """Send each host its stage's slice of the model, which its layer cache stores."""
    enforce_eager: bool = False
    """Capture no CUDA graphs."""
    backend: Backend = AUTO
    """How stages run; auto: one in this process, several of one node as processes, else through
    Ray."""
    stages_apart: bool = False
    """Run a single stage, too, as a process of its own, as servers do."""
    links: LinkChoice = AUTO
    """How hidden states travel between GPUs; auto: the fastest that works."""
    ray_address: str | None = None
    """Run through this Ray (auto: that of this machine); without a plan, plan for its devices."""
    master_addr: str | None = None
    """Address at which stages connect (default: the first stage's where they are on several hosts,
    else 127.0.0.1)."""
    master_port: int = 0
    """Port at which stages connect; 0: a free one."""
    network_interface: str | None = None
    """Network interface between hosts: one name, or NODE=NAME,... (default: Ray's own)."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Seconds that phases may take, as load=3600,step=60; of wait_nodes, placement, load, stall and
    step (defaults: 30, 25, 600, 30, 30)."""
    on_loss: OnLoss = "restart"
    """When a stage is lost: restart (others take over, requests go on where they are), replan (also
    on the devices left, if one is gone) or stop (default: restart; of serve: replan)."""
    min_quality: int = 3
    """Fewest bits of weights and KV cache that `replan` may plan with: 16, 8, 4, 3 or 2."""
    trace: str | Path | None = None
    """Write a Chrome/Perfetto trace: every stage's steps, and for which requests."""

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            switch: object = getattr(self, name)
            if switch not in (True, False) or isinstance(switch, float):
                raise ValueError(f"{name} must be True or False, got {switch!r:.60}")
            object.__setattr__(self, name, bool(switch))
        for name in _TEXTS:
            text: object = getattr(self, name)
            if text is not None and not isinstance(text, (str, Path)):
                raise ValueError(f"{name} must be a text, got {text!r:.60}")
        if not isinstance(self.cluster, Cluster | str | Path | None):
            raise ValueError(
                f"cluster must be a file's path or a Cluster, got {self.cluster!r:.60}"
            )
        if isinstance(self.deadlines, str):
            object.__setattr__(self, "deadlines", Deadlines.parse(self.deadlines))
        if not isinstance(self.deadlines, Deadlines):
            raise ValueError(
                "deadlines must be Deadlines, such as Deadlines(step_s=60), or a text, such as "
                f"'load=3600,step=60', got {self.deadlines!r:.60}"
            )
        object.__setattr__(self, "dtype", full_dtype(str(self.dtype)))
        self._read_load_format()
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "tensor_parallel_size",
        ):
            value: object = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r:.60}")
        for name, known in choices().items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise unknown_name(name, str(value), known)
        if self.head_bits not in (None, 8, 16):
            raise ValueError(f"head_bits must be 8 or 16, got {self.head_bits!r}")
        if self.gpu_memory_utilization is not None:
            require_share(self.gpu_memory_utilization)
        if self.dtype != AUTO and self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be auto, {', '.join(DTYPE_BYTES)}, got '{self.dtype}'")
        if self.kv_cache_dtype != AUTO:
            object.__setattr__(self, "kv_cache_dtype", str(self.kv_cache_dtype))  # 8 is kv8
            try:
                KVPrecision.parse(self.kv_cache_dtype)
            except ValueError as error:
                raise ValueError(f"kv_cache_dtype: {error}, or auto (the plan's)") from None
        if self.gamma not in (None, AUTO) and not (
            type(self.gamma) is int and 1 <= self.gamma <= MAX_GAMMA
        ):
            raise ValueError(f"gamma must be 1..{MAX_GAMMA} or auto, got {self.gamma!r}")
        if self.min_quality not in (16, 8, 4, 3, 2):
            raise ValueError(f"min_quality must be 16, 8, 4, 3 or 2 bits, got {self.min_quality!r}")
        if type(self.master_port) is not int or not 0 <= self.master_port < 2**16:
            raise ValueError(
                f"master_port must be 1 to 65535, or 0 for a free one, got {self.master_port}"
            )
        if self.keep_layers_in is not None and self.layer_cache is not None:
            raise ValueError(
                "keep_layers_in='ram' and layer_cache both say where quantised layers are kept: "
                "leave one out"
            )
        if self.ray_address is not None and self.backend not in (AUTO, "ray"):
            raise ValueError(
                f"ray_address has no effect with backend='{self.backend}': leave one out"
            )

    def _read_load_format(self) -> None:
        """Take vLLM's names of a checkpoint's own form, which is found in its files."""
        if self.load_format not in (*OWN_FORMATS, *QUANTISED_FORMATS):
            return
        if self.load_format in QUANTISED_FORMATS and self.quantization is None:
            object.__setattr__(self, "quantization", self.load_format)
        object.__setattr__(self, "load_format", AUTO)

    @property
    def draft_mode(self) -> SpeculationMode | None:
        """Who drafts, once `complete_plan` has decided: a mode, or None for plain decoding."""
        mode = self.speculate
        return None if mode is None or mode == "auto" or mode == "off" else mode

    @property
    def fixed_gamma(self) -> int | None:
        """Tokens drafted per verify, None where step times choose it."""
        return self.gamma if isinstance(self.gamma, int) else None

    def to_data(self) -> dict[str, Any]:
        """Return the fields that were given as JSON data."""
        data = {n: str(v) if isinstance(v, Path) else v for n, v in self.given().items()}
        if "deadlines" in data:
            data["deadlines"] = asdict(self.deadlines)
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> EngineOptions:
        """Return the options that `to_data` wrote."""
        given = dict(data)
        if "deadlines" in given:
            given["deadlines"] = Deadlines(**given["deadlines"])
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        default = EngineOptions()
        names = [f.name for f in fields(self)]
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(default, n)}


@cache
def choices() -> Mapping[str, tuple[str, ...]]:
    """Return the values that fields of few values take, by field."""
    found: dict[str, tuple[str, ...]] = {"speculate": (*MODES, "auto", "off")}
    for name, hint in get_type_hints(EngineOptions).items():
        values = [v for part in (hint, *get_args(hint)) for v in get_args(part) if type(v) is str]
        if values and name not in found and name != "gamma":
            found[name] = tuple(dict.fromkeys(values))
    return found


@cache
def field_docs() -> Mapping[str, str]:
    """Return the docstring under each field, on one line."""
    (body,) = ast.parse(inspect.getsource(EngineOptions)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for declared, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name):
            assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            found[declared.target.id] = " ".join(str(text.value.value).split())
    return found


def as_flags(message: str) -> str:
    """Return a message that names options as keywords with flags in their stead.

    `gamma='auto' needs ...` becomes `--gamma auto needs ...`.
    """
    names = [f.name for f in fields(EngineOptions)] + ["plan", "model"]
    spelled = [name for name in names if "_" in name]

    def flag(found: re.Match[str]) -> str:
        value = found[2] if found[2] is not None else ""
        space = " " if value or re.match(r"[\w./]", message[found.end() :]) else ""
        return f"--{found[1].replace('_', '-')}{space}{value}"

    text = re.sub(rf"(?<![\w'-])({'|'.join(names)})=(?:'([^']*)')?", flag, message)
    return re.sub(
        rf"(?<![\w'/.-])({'|'.join(spelled)})(?![\w']|\.\w)",  # no name of a file
        lambda m: "--" + m[1].replace("_", "-"),
        text,
    )


PLANNED: Mapping[str, Any] = {
    name: getattr(EngineOptions(), name)
    for name in (*PLANNING, "cluster", "gpu_memory_utilization")
}
"""What options are without those that a plan was made by: changes for `replace`."""

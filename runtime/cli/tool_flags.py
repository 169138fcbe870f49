"""The flags of `llmpq-dist check`, `bench`, `eval` and `convert`, and what they become.

Imports no torch and no Ray, so that `--help` is instant.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmpq.commands.command_line import CommandParser, Only, Section, in_seconds, token_count
from llmpq.precision import Precision
from llmpq.runtime.cli.engine_flags import add_engine_flags
from llmpq.runtime.cli.run_flags import add_plan, add_report, add_speculation
from llmpq.runtime.cli.vllm_flags import BENCH_FLAGS, IDLE_FLAGS, OTHER_FLAGS
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.workload import full_dtype

if TYPE_CHECKING:
    from llmpq.sizes.memory import CpuActivations

JOB: Mapping[str, Any] = {
    "bits": "w16a16",
    "kv": "kv16",
    "batch": 32,
    "prompt": 512,
    "gen": 100,
}
"""What a job of `bench` without a plan is, unless flags say otherwise."""
DTYPES = ("float16", "bfloat16", "float32")
Dtype = Literal["float16", "bfloat16", "float32"]
CPU_ACTIVATIONS = (
    "on CPUs, inputs of 3-, 4- and 8-bit weights: exact (16 bits, the default) or rounded to int8"
)
HEAD_BITS = "bits of the output matrix (8 on CPUs where layers have 8 or fewer, else 16)"
EVAL_HEAD_BITS = "bits of the output matrix (the plan's, or 16: only layers are quantised)"


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Which plan to look at, and where."""

    plan: str
    model: str | None
    engine: EngineOptions = field(default_factory=EngineOptions)
    timeout: float
    json: bool


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Where to look, how long, and which model to fit there."""

    ray_address: str | None
    timeout: float
    json: bool
    model: str | None
    context: int | None
    batch: int
    probe_cpu: bool


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Which report to share, and where to."""

    share: str
    output: str | None


@dataclass(frozen=True, kw_only=True)
class DevicesOptions:
    """Which devices a command that runs is to get, or to leave."""

    action: Literal["add", "drain", "list"]
    name: str | None
    cluster: str | None
    horizon: float | None
    pid: int | None
    json: bool


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Which checkpoint to write again, and where to."""

    source: Path
    target: Path


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Which job to time, and how."""

    plan: str | None
    model: str | None
    engine: EngineOptions = field(default_factory=EngineOptions)
    bits: str | None
    symmetric: bool
    head_bits: Literal[8, 16] | None
    cpu_activations: CpuActivations | None
    kv: str | None
    dtype: Dtype | None
    batch: int | None
    prompt: int | None
    gen: int | None
    prefill_microbatch: int | None
    decode_microbatch: int | None
    compare_plain: bool
    warm_up: int
    repeat: int
    seed: int
    chaos: float | None
    json: bool
    report: list[str]
    rows: str | None
    commit: str | None
    baseline: list[str]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """The model whose perplexity is measured, the precision and the text."""

    model: str
    text: str
    precision: str | None
    plan: str | None
    engine: EngineOptions = field(default_factory=EngineOptions)
    symmetric: bool
    head_bits: Literal[8, 16] | None
    cpu_activations: CpuActivations | None
    dtype: Dtype | None
    device: str
    protocol: Literal["all", "gptq"]
    window: int | None
    stride: int | None
    agreement: bool
    reference: str | None
    json: bool


def check_parser() -> CommandParser:
    """Return the flags of `llmpq-dist check`."""
    parser = CommandParser(
        "llmpq-dist check",
        "Check that a plan can run here: devices, memory, model, versions, links. Loads nothing.",
        example="llmpq-dist check plan.json --model DIR",
    )
    parser.positional("plan", metavar="PLAN", help="plan.json of llmpq-algo")
    flags = parser.section("where to look")
    flags.flag(
        "--model",
        daily=True,
        metavar="DIR",
        help="directory or GGUF file (default: the plan's)",
    )
    flags.revision("model")
    flags.flag("--json", daily=True, action="store_true", help="print what was found as JSON")
    add_engine_flags(
        flags,
        "cluster",
        "ray_address",
        "master_addr",
        "deadlines",
        daily=("cluster", "ray_address"),
    )
    flags.flag(
        "--timeout", type=in_seconds, default=90.0, metavar="S", help="seconds for each check (90)"
    )
    return parser


def doctor_parser() -> CommandParser:
    """Return the flags of `llmpq-dist doctor`."""
    parser = CommandParser(
        "llmpq-dist doctor",
        "Say what each device and node can run, by which kernels, what is missing, and what to do.",
        example="llmpq-dist doctor --model DIR --context 32k",
        notes="exit codes: 0 done, 2 usage, 5 --model does not fit, 6 a device cannot run stages",
    )
    flags = parser.section("where to look")
    address = "look at every node of this Ray ('auto': of this machine); default: this machine"
    flags.flag("--ray-address", also=("--address", "--from-ray"), daily=True, help=address)
    flags.flag("--json", daily=True, action="store_true", help="print what was found as JSON")
    seconds = "seconds for each check (default 60)"
    flags.flag("--timeout", daily=True, type=in_seconds, default=60.0, metavar="S", help=seconds)
    fit = parser.section("what to fit there, as llmpq-algo fits does, in the memory that is free")
    named = Only(lambda a: a.model is not None, "without --model", "add it")
    fit.flag("--model", daily=True, metavar="DIR|NAME", help="directory, GGUF file or name")
    fit.revision("model")
    context = "tokens of a request, such as 32k (8k, or the model's longest)"
    fit.flag("--context", daily=True, type=token_count, only=named, metavar="N", help=context)
    fit.flag("--batch", daily=True, type=int, default=1, metavar="N", help="requests at once (1)")
    probe = "measure this machine's CPU for it first (about 2 s); the result is stored"
    fit.flag("--probe-cpu", daily=True, action="store_true", only=named, help=probe)
    return parser


def report_parser() -> CommandParser:
    """Return the flags of `llmpq-dist report`."""
    parser = CommandParser(
        "llmpq-dist report",
        "Write a run's report to be shared: without names, hosts, paths, prompts and answers.",
        example="llmpq-dist report --share report.json -o run.json",
        notes="`llmpq-algo check run.json` computes its prediction again.",
    )
    flags = parser.section("what to share")
    report = "report.json of llmpq-dist run or bench --report report.json"
    flags.flag("--share", required=True, metavar="REPORT", help=report)
    flags.flag("-o", "--output", daily=True, metavar="FILE", help="file to write (else stdout)")
    return parser


def devices_parser() -> CommandParser:
    """Return the flags of `llmpq-dist devices`."""
    parser = CommandParser(
        "llmpq-dist devices",
        "Give devices to a `run` or `serve` that goes on, or take them from it: requests wait and"
        " go on.",
        example="llmpq-dist devices drain node-b",
        notes="add moves layers if that pays: if the job comes further within the horizon in\n"
        "spite of the pause, or layers get bits back. drain moves them if the others have room,\n"
        "at fewer bits if need be (--min-quality of the command). Both say what was done, or why\n"
        "not.",
    )
    parser.positional("action", metavar="add|drain|list", choices=("add", "drain", "list"))
    name = "a node of the cluster, or one of its devices (as plans call it: CPU-1)"
    parser.positional("name", nargs="?", metavar="NODE", help=name)
    flags = parser.section("which devices, of which command")
    cluster = "cluster file with the new devices and those in use (default: devices known before)"
    flags.flag("--cluster", daily=True, metavar="FILE", help=cluster)
    horizon = "how long the job goes on (default: 3600)"
    flags.flag("--horizon", daily=True, type=float, metavar="SECONDS", help=horizon)
    pid = "process of the run or serve, where several run"
    flags.flag("--pid", daily=True, type=int, metavar="N", help=pid)
    flags.flag("--json", daily=True, action="store_true", help="what was done as JSON")
    return parser


def convert_parser() -> CommandParser:
    """Return the flags of `llmpq-dist convert`."""
    parser = CommandParser(
        "llmpq-dist convert",
        "Write a directory with pytorch_model.bin files again as safetensors; runs no code of it.",
        example="llmpq-dist convert OLD NEW",
    )
    parser.positional(
        "source", metavar="SOURCE", type=Path, help="directory with pytorch_model*.bin"
    )
    parser.positional("target", metavar="TARGET", type=Path, help="directory to create")
    return parser


def bench_parser() -> CommandParser:
    """Return the flags of `llmpq-dist bench`."""
    parser = CommandParser(
        "llmpq-dist bench",
        "Time LLM-PQ's offline job: equally long random prompts, a fixed number of greedy tokens.",
        example="llmpq-dist bench --model llama-3.1-8b --load-format dummy --bits w4a16",
        others={**OTHER_FLAGS, **BENCH_FLAGS},
        idle=IDLE_FLAGS,
    )
    what = parser.section("what to run")
    add_plan(what, text="plan.json (default: a whole model on one device)")
    what.flag("--model", daily=True, metavar="DIR|NAME", help="directory, or a built-in name")
    what.revision("model")
    add_engine_flags(what, "load_format", "quantization", daily=("load_format",))
    _add_job(parser.section("the job, without a plan"))
    add_speculation(
        parser.section("speculation"),
        only=Only(
            lambda a: a.load_format == "auto" or a.speculate == "off",
            "on random weights, which accept drafts as no trained model does",
            "give a directory of weights",
        ),
    )
    _add_how(parser.section("how"))
    out = parser.section("results")
    out.flag("--json", daily=True, action="store_true", help="print the report as JSON")
    add_report(out)
    out.flag("--rows", daily=True, metavar="FILE", help="append a result row (JSONL)")
    row = Only(lambda a: a.rows is not None, "without a row to write", "add --rows FILE")
    out.flag("--commit", only=row, help="commit to name in the row, where git is not at hand")
    baseline = "tokens/s of another engine on the same job, for the row"
    out.flag(
        "--baseline", action="append", default=[], metavar="NAME=VALUE", only=row, help=baseline
    )
    return parser


def _add_job(job: Section) -> None:
    unplanned = Only(lambda a: a.plan is None, "with --plan, whose plan says it", "re-plan")
    rounded = Only(_rounds_weights, "on weights that are not rounded", "add --bits w4a16")
    job.flag("--bits", daily=True, metavar="PRECISION", only=unplanned, help=_default("bits"))
    job.flag(
        "--symmetric",
        action="store_true",
        only=(unplanned, rounded),
        help="weights without zero points",
    )
    job.flag("--head-bits", type=int, choices=(8, 16), only=unplanned, help=HEAD_BITS)
    job.flag("--cpu-activations", choices=("exact", "int8"), only=unplanned, help=CPU_ACTIVATIONS)
    job.flag("--kv", daily=True, metavar="PRECISION", only=unplanned, help=_default("kv"))
    text = "of activations and unquantised weights (default: as run's and serve's)"
    job.flag("--dtype", type=full_dtype, choices=DTYPES, only=unplanned, help=text)
    for name, also in (
        ("batch", ("--batch-size",)),
        ("prompt", ("--prompt-len", "--input-len")),
        ("gen", ("--gen-len", "--output-len")),
    ):
        text = _default(name)
        job.flag(
            f"--{name}", daily=True, also=also, type=int, metavar="N", only=unplanned, help=text
        )
    for phase in ("prefill", "decode"):
        job.flag(
            f"--{phase}-microbatch", type=int, metavar="N", only=unplanned, help="default: --batch"
        )


def _add_how(how: Section) -> None:
    add_engine_flags(
        how,
        "backend",
        "enforce_eager",
        "links",
        "ray_address",
        "master_addr",
        "deadlines",
        daily=("backend",),
    )
    how.flag("--warm-up", type=int, default=1, metavar="N", help="jobs that are not timed (1)")
    how.flag(
        "--repeat",
        type=int,
        default=3,
        daily=True,
        metavar="N",
        help="jobs that are timed (3); the median counts",
    )
    how.flag("--seed", type=int, default=0, help="of prompts and dummy weights")
    text = "kill a random stage at this mean interval: stages are restarted, the job goes on"
    how.flag("--chaos", type=float, metavar="SECONDS", help=text)


def _default(name: str) -> str:
    what = {
        "bits": "of all layers",
        "kv": "of the KV cache",
        "batch": "requests at once",
        "prompt": "tokens of a prompt",
        "gen": "tokens to generate of each",
    }[name]
    return f"{what} (default {JOB[name]})"


def _rounds_weights(flags: Namespace) -> bool:
    return Precision.parse(flags.bits or JOB["bits"]).weight_bits < 16


def eval_parser() -> CommandParser:
    """Return the flags of `llmpq-dist eval`."""
    parser = CommandParser(
        "llmpq-dist eval",
        "Measure the perplexity of a model on a text, at any precision.",
        example="llmpq-dist eval --model DIR --text FILE --precision w4a16",
    )
    flags = parser.section("what to measure")
    flags.flag("--model", required=True, metavar="DIR", help="model directory or GGUF file")
    flags.revision("model")
    flags.flag("--text", required=True, metavar="FILE", help="text to predict")
    unplanned = Only(lambda a: a.plan is None, "with --plan, whose plan says it", "drop --plan")
    flags.flag(
        "--precision",
        daily=True,
        only=unplanned,
        help="one for all layers, or one per layer with commas (default w16a16)",
    )
    add_plan(flags, text="take precisions and quantisation from this plan")
    add_engine_flags(flags, "kv_cache_dtype", daily=("kv_cache_dtype",))
    flags.flag("--dtype", type=full_dtype, choices=DTYPES, help="default: the plan's, or float32")
    flags.flag("--symmetric", action="store_true", only=unplanned, help="without zero points")
    flags.flag("--head-bits", type=int, choices=(8, 16), only=unplanned, help=EVAL_HEAD_BITS)
    flags.flag("--cpu-activations", choices=("exact", "int8"), only=unplanned, help=CPU_ACTIVATIONS)
    flags.flag("--device", default="cpu", daily=True, help="cpu (default) or cuda")
    flags.flag(
        "--protocol",
        choices=("all", "gptq"),
        default="all",
        help="gptq: whole windows only, the text's last tokens left out (default all)",
    )
    flags.flag("--window", type=int, metavar="N", help="tokens (default the model's, at most 2048)")
    flags.flag("--stride", type=int, metavar="N", help="windows overlap, starting so far apart")
    flags.flag(
        "--agreement",
        daily=True,
        action="store_true",
        help="also the share of tokens on which the 16-bit model agrees greedily",
    )
    flags.flag("--reference", metavar="DIR", help="16-bit weights, if --model is quantised")
    flags.flag("--json", daily=True, action="store_true", help="print one JSON object")
    return parser

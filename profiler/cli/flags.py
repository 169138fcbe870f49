"""The flags of `llmpq-profile` and `llmpq-quantize`, and the requests that are made of them.

Standard library only, so that `--help` is instant.
"""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmpq.commands.command_line import CommandParser, Only, in_seconds, token_count
from llmpq.precision import WEIGHT_ONLY, KVPrecision
from llmpq.workload import full_dtype

if TYPE_CHECKING:  # --help opens without what sizes need
    from llmpq.sizes.memory import CpuActivations

ALL_KV = ",".join(kv.value for kv in KVPrecision if kv is not KVPrecision.KV16)
BITS = ",".join(str(p.weight_bits) for p in WEIGHT_ONLY)
DTYPES = ("float16", "bfloat16", "float32")
OBSERVED = ("variance", "hessian", "output")
"""Kinds of indicator that read weights and a text."""
NOTES = """\
commands, each with its own --help (flags without one mean `run`):
  run        seconds of layers and links     merge  costs.json of several machines as one
  indicator  quality loss of fewer bits      tune   which kernel multiplies what on a GPU
Plan with the file: llmpq-algo --costs costs.json"""

METHOD = "gptq: codes that lose least on the text (default); rtn: the nearest ones, quicker"
SCHEMES = """\
schemes: w4a4 (Atom: 4-bit weights and activations, outlier channels in 8 bits), w8a8;
weight-only: w8a16, w4a16, w3a16"""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What `run` measures, and where it writes."""

    model: str
    cluster: Path | None
    """None: this machine."""
    output: Path
    samples: Path | None
    device: str | None
    dtype: Literal["float16", "bfloat16", "float32"] | None
    cpu_activations: CpuActivations
    bits: str
    kv: str
    verify: str
    temperature: float
    top_k: int | None
    top_p: float
    quick: bool
    max_batch: int | None
    max_len: int | None
    max_tokens: int | None
    job: str | None
    copies: int | None
    tensor_parallel: str | None
    ray_address: str | None
    wait_nodes: float
    network_interface: str | None


@dataclass(frozen=True, kw_only=True)
class OmegaRequest:
    """How `indicator` weighs what each layer loses."""

    model: str
    output: Path
    kind: Literal["variance", "hessian", "output", "random"]
    text: Path | None
    bits: str
    kv: str
    rounding: Literal["deterministic", "stochastic"]
    granularity: Literal["group", "tensor"]
    windows: int
    window: int
    symmetric: bool
    device: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class MergeRequest:
    """Cost files to join."""

    files: list[Path]
    output: Path


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """The model whose products `tune` searches, and for how long."""

    model: str
    plan: str | None
    bits: str
    batch: int
    job: str
    dtype: Literal["float16", "bfloat16"]
    symmetric: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """What `llmpq-quantize` rounds, how, and where to."""

    model: Path
    output: Path
    scheme: str | None
    plan: Path | None
    text: list[Path]
    method: Literal["gptq", "rtn"]
    variant: Literal["improved", "paper"] | None
    in_turn: bool
    integer_scales: bool
    group_size: str | None
    outliers: int | None
    asymmetric: bool
    kv_cache_dtype: str | None
    windows: int | None
    window: int
    seed: int
    device: str


def run_parser() -> CommandParser:
    """Return the flags of `llmpq-profile [run]`."""
    parser = CommandParser(
        "llmpq-profile run",
        "Time the layers, the embedding, the head and the links of this host: costs.json.",
        example="llmpq-profile --model llama-3.1-8b -o costs.json",
        notes=NOTES,
    )
    what = parser.section("what to time")
    what.flag("--model", required=True, help="model directory, GGUF file, or a built-in name")
    what.revision("model")
    what.flag("--cluster", type=Path, daily=True, help="cluster YAML (default: this machine)")
    hosts = "time every kind on a host of this Ray that has it, and the links between the hosts"
    what.flag("--ray-address", daily=True, also=("--address",), help=hosts)
    what.flag("--device", daily=True, help="only this device kind (default: all present here)")
    what.flag("--bits", default=BITS, daily=True, help=f"precisions to time (default {BITS})")
    kv = "KV precisions to time, such as kv8,kv8v4 (default kv16)"
    what.flag("--kv", default="kv16", daily=True, help=kv)
    what.flag(
        "--job",
        daily=True,
        metavar="512/100",
        help="time only shapes of such a job: prompt tokens / new tokens, such as 32k/1k",
    )
    dtype = "default: the model's, but float32 on a file's CPUs"
    what.flag("--dtype", type=full_dtype, choices=DTYPES, help=dtype)
    rounded = (
        "on CPUs, inputs of 3-, 4- and 8-bit weights, as in the plan: exact (the default) or int8"
    )
    choices = ("exact", "int8")
    what.flag("--cpu-activations", choices=choices, default="exact", help=rounded)
    what.flag("--verify", default="", help="also time verifying of this many tokens: 2,4")
    sampled = Only(lambda a: a.temperature > 0, "on greedy tokens", "add --temperature T")
    what.flag("--temperature", type=float, default=0.0, help="above 0: time sampled tokens")
    what.flag(
        "--top-k", type=int, only=sampled, help="sample among the K likeliest tokens (default all)"
    )
    what.flag(
        "--top-p",
        type=float,
        default=1.0,
        only=sampled,
        help="sample among the likeliest tokens of this total probability",
    )
    shared = (
        "also time parts of layers that so many devices share, and their sums (default: as the "
        "GPUs of a node may share them; CPUs: none; 1: none)"
    )
    what.flag(
        "--tensor-parallel",
        daily=True,
        also=("--tensor-parallel-size", "-tp"),
        metavar="2,4,3:1",
        help=shared,
    )
    much = parser.section("how much")
    much.flag("--quick", action="store_true", daily=True, help="few shapes, short repeats")
    batches = "largest micro-batch (default 32, on a GPU 128; with --quick 16, on a GPU 32)"
    much.flag("--max-batch", type=int, help=batches)
    lengths = Only(lambda a: not a.job, "beside --job, which names its lengths", "leave --job out")
    much.flag(
        "--max-len",
        type=token_count,
        only=lengths,
        help="longest prompt or cache, such as 32k (default 2k, on a GPU 4k; --quick 256, GPU 1k)",
    )
    most = "new tokens of a step, at most (default 4k, on a GPU 32k; --quick 640, GPU 8k)"
    much.flag("--max-tokens", type=token_count, help=most)
    there = Only(lambda a: a.ray_address, "without --ray-address", "add --ray-address HOST:PORT")
    seconds = "seconds for hosts that have not joined the Ray (30; 0: none)"
    much.flag("--wait-nodes", type=in_seconds, default=30.0, metavar="S", only=there, help=seconds)
    network = "network interface between hosts: one name, or NODE=NAME,... (default: Ray's own)"
    much.flag("--network-interface", metavar="NAME", only=there, help=network)
    much.flag(
        "--copies",
        type=int,
        help="processes timed side by side (default: as many as will run on the device)",
    )
    files = parser.section("files")
    files.flag("-o", "--output", type=Path, required=True, help="costs.json to write")
    files.flag(
        "--samples", type=Path, help="samples.jsonl: its timings are reused, new ones appended"
    )
    return parser


def tune_parser() -> CommandParser:
    """Return the flags of `llmpq-profile tune`."""
    parser = CommandParser(
        "llmpq-profile tune",
        "Find the fastest matmul kernels for a model on this GPU; llmpq-dist uses what is found.",
        example="llmpq-profile tune --model DIR --plan plan.json",
    )
    what = parser.section("what to tune")
    what.flag("--model", required=True, help="model directory, GGUF file, or a built-in name")
    what.revision("model")
    what.flag("--plan", daily=True, metavar="PLAN", help="rows and precisions of this plan")
    unplanned = Only(lambda a: a.plan is None, "beside --plan, which says it", "give no plan")
    what.flag(
        "--bits", default="w4a16", daily=True, only=unplanned, help="of the weights (default w4a16)"
    )
    what.flag("--batch", type=int, default=32, daily=True, only=unplanned, help="rows at once (32)")
    job = "prompt and new tokens (default 512/100)"
    what.flag("--job", default="512/100", metavar="512/100", only=unplanned, help=job)
    bfloat16 = "default: bfloat16"
    what.flag(
        "--dtype",
        type=full_dtype,
        choices=DTYPES[:2],
        default="bfloat16",
        only=unplanned,
        help=bfloat16,
    )
    what.flag(
        "--symmetric", action="store_true", only=unplanned, help="weights without zero points"
    )
    much = parser.section("how long")
    much.flag(
        "--seconds",
        type=float,
        default=90.0,
        daily=True,
        help="measure so long at most (default 90)",
    )
    return parser


def indicator_parser() -> CommandParser:
    """Return the flags of `llmpq-profile indicator`."""
    parser = CommandParser(
        "llmpq-profile indicator",
        "Measure omega, the quality loss of each layer at each precision: omega.json.",
        example="llmpq-profile indicator --model DIR --text sample.txt -o omega.json",
        notes="Plan with the file: llmpq-algo --omega-file omega.json",
    )
    observed = _kinds(*OBSERVED)
    what = parser.section("what to measure")
    what.flag("--model", required=True, help="model directory or GGUF file (random: or a name)")
    what.revision("model")
    what.flag(
        "--kind",
        choices=(*OBSERVED, "random"),
        default="variance",
        daily=True,
        help="method (default variance)",
    )
    what.flag("--text", type=Path, daily=True, only=observed, help="calibration text, UTF-8")
    what.flag("--bits", default=BITS, daily=True, help=f"{BITS} (default), w8a8, w4a4")
    what.flag("--kv", default=ALL_KV, daily=True, help="KV precisions (all by default)")
    what.flag("--device", default="cpu", daily=True, only=observed, help="cpu (default) or cuda")
    what.flag(
        "--windows",
        type=int,
        default=16,
        only=observed,
        help="windows of the text to use (default 16)",
    )
    what.flag(
        "--window", type=token_count, default=256, only=observed, help="tokens of a window (256)"
    )
    what.flag(
        "--symmetric", action="store_true", only=observed, help="roundings without zero points"
    )
    what.flag(
        "--rounding",
        choices=("deterministic", "stochastic"),
        default="deterministic",
        only=_kinds("variance"),
        help="default deterministic",
    )
    what.flag(
        "--granularity",
        choices=("group", "tensor"),
        default="group",
        only=_kinds("variance"),
        help="one quantisation step per stored group (default), or per matrix as in the paper",
    )
    what.flag("--seed", type=int, default=0, only=_kinds("random"), help="of --kind random")
    what.flag("-o", "--output", type=Path, required=True, help="omega.json to write")
    return parser


def merge_parser() -> CommandParser:
    """Return the flags of `llmpq-profile merge`."""
    parser = CommandParser(
        "llmpq-profile merge",
        "Join the cost files of several hosts; where two say the same, the later one counts.",
        example="llmpq-profile merge a.json b.json -o costs.json",
    )
    parser.positional(
        "files", nargs="+", type=Path, metavar="costs.json...", help="cost files to join"
    )
    parser.section("files").flag(
        "-o", "--output", type=Path, required=True, help="costs.json to write"
    )
    return parser


def quantize_parser() -> CommandParser:
    """Return the flags of `llmpq-quantize`."""
    parser = CommandParser(
        "llmpq-quantize",
        "Write a quantised copy of a model directory.",
        example="llmpq-quantize MODEL OUT --scheme w4a4 --text sample.txt",
        notes=SCHEMES,
    )
    parser.positional(
        "model", metavar="MODEL", type=Path, help="Hugging Face model directory, or GGUF file"
    )
    parser.positional(
        "output", metavar="OUTPUT", type=Path, help="directory to write; a stopped run continues"
    )
    what = parser.section("what to write")
    what.revision("model")
    what.flag("--scheme", daily=True, help="precision of all layers, or one per layer with commas")
    what.flag(
        "--plan",
        also=("--strat-file-name",),
        type=Path,
        daily=True,
        help="take precisions, group size, symmetry and outliers from this plan",
    )
    what.flag("--kv-cache-dtype", help="KV bits config.json names: 16, 8, 4, 2 (the plan's, or 16)")
    how = parser.section("how to round")
    how.flag(
        "--text", type=Path, required=True, nargs="+", help="text to calibrate on, UTF-8 files"
    )
    how.flag("--method", choices=("gptq", "rtn"), default="gptq", daily=True, help=METHOD)
    how.flag("--device", default="cpu", daily=True, help="cpu (default) or cuda")
    how.flag(
        "--variant",
        choices=("improved", "paper"),
        help="w4a4: Atom's recipe to the letter, or (default) with searched clips, signed scales, "
        "a rotation before `down` and balanced norms",
    )
    how.flag(
        "--in-turn",
        action="store_true",
        only=Only(lambda a: a.method == "gptq", "with --method rtn", "take --method gptq"),
        help="w4a4: fit each linear to the rounded inputs it will get (less perplexity on some "
        "models, fewer drafts accepted on some)",
    )
    how.flag(
        "--integer-scales",
        action="store_true",
        help="w4a4: groups' scales are whole numbers to 15 times a row's unit: faster prompts on "
        "Hopper, which plans do not count; measure the perplexity",
    )
    how.flag("--group-size", help="128 or channel; w4a4 also 64, 32 (default 128)")
    how.flag("--outliers", type=int, help="w4a4: channels in 8 bits (hidden/32, <=128)")
    how.flag(
        "--asymmetric",
        action="store_true",
        help="zero points in w3/w4/w8a16 layers: less error, but Transformers cannot load them",
    )
    text = "calibration windows (default: twice the text, 128 at most)"
    how.flag("--windows", type=int, metavar="N", help=text)
    how.flag("--window", type=token_count, default=2048, help="tokens of a window (2048)")
    how.flag("--seed", type=int, default=0, help="where the windows are taken (0)")
    return parser


def job_lengths(text: str, *, least_gen: int = 1) -> tuple[int, int]:
    """Return prompt tokens and new tokens of `512/100` or `32k/1k`."""
    prompt, _, gen = text.partition("/")
    try:
        lengths = token_count(prompt), token_count(gen)
    except ArgumentTypeError:
        lengths = 0, 0
    if lengths[0] < 1 or lengths[1] < least_gen:
        raise ValueError(f"--job: expected prompt/new tokens such as 512/100, got '{text}'")
    return lengths


def _kinds(*kinds: str) -> Only:
    def holds(flags: Namespace) -> bool:
        return flags.kind in kinds

    return Only(holds, "with another --kind", f"take --kind {' or '.join(kinds)}")

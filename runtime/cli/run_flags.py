"""The flags of `llmpq-dist run`: which there are, what they may say, what they stand for.

Imports no torch and no Ray, so that `--help` is instant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmpq.commands.command_line import CommandParser, Only, Section, token_count
from llmpq.runtime.cli.engine_flags import add_engine_flags
from llmpq.runtime.cli.vllm_flags import IDLE_FLAGS, OTHER_FLAGS
from llmpq.runtime.launch.plans.auto_plan import DEFAULT_NEW_TOKENS
from llmpq.runtime.options.engine_options import MAX_TIMEOUT_S, EngineOptions
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.text.batch_rows import Defaults

NOTES = """\
commands, each with its own --help (flags alone mean `run`):
  run     a file of prompts                 doctor   what this machine can run, and what fits
  serve   OpenAI's API and a page to chat   bench    the speed of equally long prompts
  chat    in the terminal                   eval     how well a text is predicted (perplexity)
  check   whether a plan can run here       report   a run's report, fit to be shared
  convert pytorch_model.bin as safetensors  devices  add one to, or drain one of, a run or server
Make a plan: llmpq-algo --model DIR --cluster my.yaml -o plan.json"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `run` does: which prompts, where answers go, how rows are sampled that do not say it."""

    plan: str | None
    model: str | None
    engine: EngineOptions = field(default_factory=EngineOptions)
    input: str
    output: str
    tune: bool
    resume: bool
    overwrite: bool
    report: Sequence[str]
    json: bool
    max_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float
    seed: int
    ignore_eos: bool
    compare_plain: bool


def run_parser() -> CommandParser:
    """Return the flags of `llmpq-dist [run]`."""
    parser = CommandParser(
        "llmpq-dist run",
        "Run a file of prompts: through a plan, or planned for the devices there are.",
        example="llmpq-dist --model DIR -i prompts.jsonl -o outputs.jsonl",
        notes=NOTES,
        others=OTHER_FLAGS,
        idle=IDLE_FLAGS,
    )
    job = parser.section("job")
    add_plan(job, text="plan.json of llmpq-algo (default: plan for the devices there are)")
    add_model(job)
    job.flag("-i", "--input", required=True, metavar="FILE", help="prompts: JSONL, or a line each")
    job.flag("-o", "--output", required=True, metavar="FILE", help="answers, JSONL")
    job.flag(
        "--resume",
        daily=True,
        action="store_true",
        help="run only the rows that --output has not finished; answers go on where they were",
    )
    overwrite = "replace what --output has"
    job.flag("--overwrite", daily=True, action="store_true", help=overwrite)
    add_report(job)
    job.flag("--json", daily=True, action="store_true", help="print the report as JSON")
    job.flag(
        "--tune",
        action="store_true",
        help="find the fastest matmul kernels for this GPU first, and store them (90 s at most)",
    )
    add_engine_flags(
        job,
        "trace",
        "quantization",
        "cluster",
        "profile",
        "prefer",
        "head_bits",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "generation_config",
        daily=("profile",),
    )
    _add_sampling(parser.section("tokens (rows may say otherwise)"))
    add_speculation(parser.section("speculation"), daily=True)
    add_engine_flags(
        parser.section("launch"),
        "backend",
        "enforce_eager",
        "ray_address",
        "master_addr",
        "master_port",
        "network_interface",
        "copy_weights",
        "layer_cache",
        "keep_layers_in",
        "links",
        "deadlines",
        "on_loss",
        "min_quality",
        daily=("backend",),
    )
    return parser


def add_report(section: Section) -> None:
    """Declare `--report`."""
    text = "write the report: a page for people (.html), else JSON (may repeat)"
    section.flag("--report", daily=True, action="append", default=[], metavar="FILE", help=text)


MODEL_HELP = "directory, GGUF file or name on Hugging Face's hub (default: the plan's)"


def add_model(section: Section, *words: str) -> None:
    """Declare `--model`, and `--revision` of it or of the model that one of the `words` names."""
    section.flag("--model", daily=True, metavar="MODEL", help=MODEL_HELP)
    section.revision("model", *words)


def add_plan(section: Section, *, text: str) -> None:
    """Declare `--plan`, which the paper calls `--strat_file_name`."""
    section.flag(
        "--plan",
        also=("--strat-file-name",),
        daily=True,
        metavar="PLAN",
        help=text,
    )


def _add_sampling(section: Section) -> None:
    defaults = Defaults()
    section.flag(
        "--max-tokens",
        also=("--max-tokens-to-generate",),
        daily=True,
        type=token_count,
        metavar="N",
        help=f"new tokens a row (default: the plan's, without a plan {DEFAULT_NEW_TOKENS})",
    )
    section.flag(
        "--temperature",
        daily=True,
        type=float,
        metavar="T",
        default=defaults.temperature,
        help=f"0: greedy (default {defaults.temperature:g})",
    )
    section.flag(
        "--top-k", type=int, metavar="K", help="sample among the K likeliest tokens (default: all)"
    )
    section.flag(
        "--top-p",
        type=float,
        default=defaults.top_p,
        metavar="P",
        help="sample among the likeliest tokens of this total probability (1)",
    )
    section.flag("--seed", type=int, default=defaults.seed, help="row i draws from seed + i")
    section.flag("--ignore-eos", action="store_true", help="always generate N tokens")


def add_speculation(section: Section, *, daily: bool = False, only: Only | None = None) -> None:
    """Declare the flags about drafts."""
    names = ("speculate",) if daily else ()
    add_engine_flags(section, "speculate", "gamma", "costs", daily=names, only=only)
    section.flag(
        "--compare-plain",
        only=() if only is None else only,
        action="store_true",
        help="then serve the rows again without drafts; the report states the speed-up",
    )


def check_flags(options: RunOptions) -> None:
    """`ValueError` for a value no row could be served with, or for flags that contradict."""
    if options.plan is None:
        _check_planning(options)
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ValueError(
            f"--max-tokens must be at least 1, got {options.max_tokens}; leave it out for the "
            "plan's"
        )
    try:
        SamplerConfig(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    if options.resume and options.overwrite:
        raise ValueError(
            "--resume goes on from the rows of --output, --overwrite replaces them: give one"
        )


def _check_planning(options: RunOptions) -> None:
    """Check the flags of a run that makes its plan itself."""
    if options.model is None:
        raise ValueError(
            "give --model DIR to plan for the devices there are, or --plan PLAN to run a plan of "
            "llmpq-algo"
        )


def check_timeouts(seconds: Mapping[str, float]) -> None:
    """`ValueError` for a flag whose seconds nothing can wait."""
    for flag, limit_s in seconds.items():
        if not 0 < limit_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"{flag} must be a positive number of seconds, at most {MAX_TIMEOUT_S}, got "
                f"{limit_s:g}; leave it out for the default"
            )


def defaults_of(options: RunOptions) -> Defaults:
    """Return what a row gets that says nothing else."""
    return Defaults(
        max_tokens=options.max_tokens or (DEFAULT_NEW_TOKENS if options.plan is None else None),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
    )

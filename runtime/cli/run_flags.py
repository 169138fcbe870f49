"""The flags of `llmpq-dist run`: which there are, what they may say, what they stand for.

Imports no torch and no Ray, so that `--help` is instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from llmpq.commands.command_line import CommandParser, Only, Section, token_count
from llmpq.gpu_memory import GPU_SHARE_HELP
from llmpq.plan import Prefer
from llmpq.runtime.auto_plan import DEFAULT_NEW_TOKENS
from llmpq.runtime.cli.vllm_flags import VLLM_FLAGS
from llmpq.runtime.launch.launcher import (
    BACKEND_HELP,
    BACKENDS,
    MAX_TIMEOUT_S,
    Backend,
    Deadlines,
    Launch,
)
from llmpq.runtime.launch.plans.planned_kv import AUTO
from llmpq.runtime.launch.stages.stage_settings import LINK_CHOICES, LinkChoice
from llmpq.runtime.sampling_params import SamplerConfig
from llmpq.runtime.text.batch_rows import Defaults
from llmpq.speculation import MAX_GAMMA, MODES

NOTES = """\
commands (flags alone mean `run`): run, serve, chat, check, doctor, bench, eval, convert; each has
its own --help.
Make a plan: llmpq-algo --model DIR --cluster my.yaml -o plan.json"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `run` is asked for."""

    plan: str | None
    model: str | None
    input: str
    output: str
    generation_config: str
    kv_cache_dtype: str
    gpu_memory_utilization: float | None
    kv_pool: bool
    no_kv_pool: bool
    cluster: str | None
    from_ray: str | None
    profile: bool
    prefer: Prefer | None
    tune: bool
    resume: bool
    overwrite: bool
    trace: str | None
    report: str | None
    json: bool
    max_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float
    seed: int
    ignore_eos: bool
    speculate: str | None
    gamma: str | None
    costs: str | None
    compare_plain: bool
    backend: Backend
    ray_address: str | None
    no_auto: bool
    master_addr: str | None
    master_port: int
    network_interface: str | None
    copy_weights: bool
    layer_cache: str | None
    links: LinkChoice
    wait_nodes: float
    placement_timeout: float
    load_timeout: float
    stall_timeout: float
    step_timeout: float


def run_parser() -> CommandParser:
    """Return the flags of `llmpq-dist [run]`."""
    parser = CommandParser(
        "llmpq-dist run",
        "Run a file of prompts: through a plan, or planned for the devices there are.",
        example="llmpq-dist --model DIR -i prompts.jsonl -o outputs.jsonl",
        notes=NOTES,
        others=VLLM_FLAGS,
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
        help="keep finished rows of --output and run the others",
    )
    overwrite = "replace what --output has"
    job.flag("--overwrite", daily=True, action="store_true", help=overwrite)
    job.flag("--report", daily=True, metavar="FILE", help="write the report as JSON")
    job.flag("--json", daily=True, action="store_true", help="print the report as JSON")
    job.flag("--trace", metavar="FILE", help="write a Chrome/Perfetto trace")
    cluster = "check that the plan was made for it; without a plan: plan for its devices"
    job.flag("--cluster", metavar="YAML", help=cluster)
    unplanned = Only(lambda a: a.plan is None, "with a plan", "give no plan")
    job.flag(
        "--from-ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        only=unplanned,
        help="plan for the devices of this Ray (default address: auto) and run there",
    )
    job.flag(
        "--profile",
        daily=True,
        action="store_true",
        only=unplanned,
        help="measure this machine first; the costs are kept for later runs",
    )
    job.flag(
        "--tune",
        action="store_true",
        help="find the fastest products on this machine's GPU first (90 s at most); kept",
    )
    add_prefer(job)
    kv = "kv16, kv8, kv4 or kv2 (int8, int4, int2) instead of what the plan says"
    job.flag("--kv-cache-dtype", default=AUTO, metavar="KV", help=kv)
    job.flag("--gpu-memory-utilization", type=float, metavar="SHARE", help=GPU_SHARE_HELP)
    add_kv_pool(job)
    add_generation_config(job, "ends of answers")
    _add_sampling(parser.section("tokens (rows may say otherwise)"))
    add_speculation(parser.section("speculation"), daily=True)
    _add_launch(parser.section("launch"))
    return parser


def add_prefer(section: Section) -> None:
    """Declare `--prefer`, of the plan that is made where none is given."""
    section.flag(
        "--prefer",
        choices=get_args(Prefer),
        only=Only(lambda a: a.plan is None, "with a plan", "give no plan"),
        help="plan for quality (default: bits as stored where they fit), balanced or speed",
    )


MODEL_HELP = "directory, GGUF file or name on Hugging Face's hub (default: the plan's)"


def add_model(section: Section, *words: str) -> None:
    """Declare `--model`, and `--revision` of it or of the model that one of the `words` names."""
    section.flag("--model", daily=True, metavar="MODEL", help=MODEL_HELP)
    section.revision("model", *words)


def add_kv_pool(section: Section) -> None:
    """Declare `--kv-pool` and `--no-kv-pool`; neither: a pool wherever one serves."""
    pool = "on GPUs, too, KV in one pool of blocks, or say why not (default: where it can be)"
    section.flag("--kv-pool", action="store_true", help=pool)
    slots = "on GPUs a slot of the plan's length for every request, as drafts have it"
    section.flag("--no-kv-pool", action="store_true", help=slots)


def add_generation_config(section: Section, what: str) -> None:
    """Declare `--generation-config`; `what` is read of it."""
    section.flag(
        "--generation-config",
        default=AUTO,
        metavar="DIR",
        help=f"whose generation_config.json says {what}: auto (the model's, default), vllm (none) "
        "or a directory",
    )


def kv_pool_wish(kv_pool: bool, no_kv_pool: bool) -> bool | None:
    """Return what the two flags say; `ValueError` where they contradict."""
    if kv_pool and no_kv_pool:
        raise ValueError("--kv-pool and --no-kv-pool contradict: give one of them")
    return True if kv_pool else False if no_kv_pool else None


def add_plan(section: Section, *, required: bool = False, text: str = "") -> None:
    """Declare `--plan`, which the paper calls `--strat_file_name`."""
    section.flag(
        "--plan",
        also=("--strat-file-name",),
        required=required,
        daily=True,
        metavar="PLAN",
        help=text or "plan.json of llmpq-algo; the .json may be left out",
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


def add_speculation(section: Section, *, daily: bool = False, only: Only | tuple[()] = ()) -> None:
    """Declare the flags about drafts."""
    section.flag(
        "--speculate",
        daily=daily,
        only=only,
        metavar="MODE",
        help=f"{', '.join(MODES)}, auto (what pays by --costs, if anything) or off (default: the "
        "plan's); same tokens",
    )
    section.flag(
        "--gamma",
        only=only,
        metavar="N",
        help=f"tokens drafted per verify, 1..{MAX_GAMMA}, or auto (by --costs; a single GPU times "
        "its own steps); default: the plan's, else auto",
    )
    section.flag("--costs", only=only, metavar="FILE", help="costs.json of llmpq-profile, for auto")
    section.flag(
        "--compare-plain",
        only=only,
        action="store_true",
        help="then serve the rows again without drafts; the report states the speed-up",
    )


def _add_launch(section: Section) -> None:
    deadlines, launch = Deadlines(), Launch()
    section.flag(
        "--backend", daily=True, choices=BACKENDS, default=launch.backend, help=BACKEND_HELP
    )
    section.flag(
        "--ray-address",
        also=("--address",),
        metavar="ADDRESS",
        help="run through this Ray ('auto': the one of this machine)",
    )
    section.flag(
        "--no-auto",
        action="store_true",
        help="start nothing: join the Ray that runs already (as --ray-address auto)",
    )
    add_master_addr(section)
    section.flag(
        "--master-port",
        type=int,
        default=launch.master_port,
        metavar="PORT",
        help="default: a free one",
    )
    network = "network interface between hosts: one name, or NODE=NAME,... (default: Ray's own)"
    section.flag("--network-interface", metavar="NAME", help=network)
    copies = "send each host its stage's slice of --model; kept in --layer-cache (default ~/.cache)"
    section.flag("--copy-weights", action="store_true", help=copies)
    layers = "keep quantised layers here: a restart reads them"
    section.flag("--layer-cache", metavar="DIR", help=layers)
    links = "between GPUs; auto: the best that works"
    section.flag("--links", choices=LINK_CHOICES, default="auto", help=links)
    add_wait_nodes(section)
    for name, default, what in (
        ("placement", deadlines.placement_s, "seconds"),
        ("load", deadlines.load_s, "seconds"),
        ("stall", deadlines.stall_s, "seconds without progress of a stage that loads"),
        ("step", deadlines.step_s, "seconds"),
    ):
        seconds = f"{what} (default {default:g})"
        section.flag(f"--{name}-timeout", type=float, default=default, metavar="S", help=seconds)


def add_master_addr(section: Section, only: Only | tuple[()] = ()) -> None:
    """Declare `--master-addr`."""
    section.flag(
        "--master-addr",
        metavar="IP",
        only=only,
        help="address for stages to connect (default: the first stage's where they are on several "
        "hosts, else 127.0.0.1)",
    )


def add_wait_nodes(section: Section) -> None:
    """Declare `--wait-nodes`."""
    default = Deadlines().wait_nodes_s
    seconds = f"seconds for nodes that have not joined the Ray (default {default:g}; 0: none)"
    section.flag("--wait-nodes", type=float, default=default, metavar="S", help=seconds)


def check_wait(seconds: float) -> None:
    """`ValueError` for a `--wait-nodes` that nobody can wait."""
    if not 0 <= seconds <= MAX_TIMEOUT_S:
        raise ValueError(
            f"--wait-nodes must be 0 to {MAX_TIMEOUT_S} seconds, got {seconds:g}; leave it out for "
            "the default"
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
    if not 0 <= options.master_port < 2**16:
        raise ValueError(
            f"--master-port must be 1 to 65535, or 0 for a free one, got {options.master_port}"
        )
    if options.resume and options.overwrite:
        raise ValueError(
            "--resume keeps the rows that --output has, --overwrite replaces them: give one"
        )
    check_timeouts({
        f"--{name}-timeout": getattr(options, f"{name}_timeout")
        for name in ("placement", "load", "stall", "step")
    })  # fmt: skip
    check_wait(options.wait_nodes)


def _check_planning(options: RunOptions) -> None:
    """Check the flags of a run that makes its plan itself."""
    if options.model is None:
        raise ValueError(
            "give --model DIR to plan for the devices there are, or --plan PLAN to run a plan of "
            "llmpq-algo"
        )
    if options.from_ray is not None and options.cluster is not None:
        raise ValueError("give the devices in one way: --from-ray or --cluster")
    if options.from_ray is not None and options.profile:
        raise ValueError(
            "--profile measures this machine, --from-ray plans for others: leave --profile out, or "
            "run llmpq-profile on each node and plan with llmpq-algo --costs"
        )
    if options.from_ray is not None and options.ray_address not in (None, options.from_ray):
        raise ValueError("--from-ray and --ray-address name two Rays; leave --ray-address out")


def check_timeouts(seconds: Mapping[str, float]) -> None:
    """`ValueError` for a flag whose seconds nothing can wait."""
    for flag, limit_s in seconds.items():
        if not 0 < limit_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"{flag} must be a positive number of seconds, at most {MAX_TIMEOUT_S}, got "
                f"{limit_s:g}; leave it out for the default"
            )


def launch_of(options: RunOptions) -> Launch:
    """Return where the stages meet."""
    return Launch(
        backend=options.backend,
        ray_address=options.ray_address
        or options.from_ray
        or ("auto" if options.no_auto else None),
        master_addr=options.master_addr,
        master_port=options.master_port,
        network_interface=options.network_interface,
    )


def deadlines_of(options: RunOptions) -> Deadlines:
    """Return how long things may take."""
    return Deadlines(
        wait_nodes_s=options.wait_nodes,
        placement_s=options.placement_timeout,
        load_s=options.load_timeout,
        stall_s=options.stall_timeout,
        step_s=options.step_timeout,
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

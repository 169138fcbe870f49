"""The flags of `llmpq-algo`; each command makes a request of them (planner/problem/requests.py).

Standard library only, so that `--help` is instant. The paper's spellings are accepted, not listed.
"""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence

from llmpq.commands.command_line import CommandParser, Only, Section, in_seconds, token_count
from llmpq.errors import nearest
from llmpq.planner.problem.limits import MAX_BATCH
from llmpq.planner.problem.requests import (
    DTYPES,
    METHODS,
    PREFERENCES,
    TRAFFIC_OBJECTIVES,
    PlanRequest,
)
from llmpq.plans.gpu_memory import GPU_SHARE_HELP
from llmpq.workload import full_dtype

EXPORTS = ("vllm", "sglang", "llamacpp", "accelerate", "compressed-tensors", "gptqmodel", "svg")
READ_GGUF = ("ollama", "lm-studio", "lmstudio", "koboldcpp", "gguf", "jan")
"""Programs that have no command of their own to write, and run what is made for llama.cpp."""
DEFAULT_POINTS = 25
"""Points of a front, unless `--pareto-points` says."""
CPU_ACTIVATIONS = (
    "on CPUs, inputs of 3-, 4- and 8-bit weights: exact (16 bits, the default) or rounded to int8"
)
PROBE_CPU = (
    "measure this machine's CPU first (about 2 s), where it is planned for; the result is stored"
)
HEAD_BITS = (
    "bits of the output matrix (8 on CPUs with --bits of 8 or fewer, else 16); not in the loss"
)
THETA_OUT = "leave that out"
GROUP_SIZES = "weights that share a scale: 128, 64, 32 (slower on GPUs), or 0 for a channel"
NOTES = """\
commands, each with its own --help (flags alone mean `plan`):
  fits    whether a model fits, and how far     devices  this machine's, or cards known by name
  plan    which layers where, at which bits     models   models that are known by name
  check   a plan, or a run that was shared      export   a plan for vLLM, llama.cpp, ..., or SVG
  verify  a plan by its certificate             costs    times that others measured
  simulate how a plan serves live traffic
live traffic instead of a batch: --trace FILE, or --prompt, --gen and --rate (--help-all)
exit codes: 0 done, 2 usage or bad input, 3 bad plan, 4 plan for another model or cluster,
5 does not fit, 130 interrupted"""

FITS_NOTES = """\
Bytes are those that a run takes, counted: no GPU and no search. Times are of plans
found by counting, `llmpq-algo plan` finds the best. exit codes: 0 fits, 2 usage or bad
input, 5 does not fit"""


COSTS_NOTES = """\
SOURCE: `aiconfigurator` (the installed package aiconfigurator-core), its wheel (pip download
--no-deps aiconfigurator-core), or a profile of LLMServingSim, a folder with tp1/dense.csv.
exit codes: 0 done, 2 usage or bad input"""

SIMULATE_NOTES = """\
The engines' own scheduler decides every step (chunked prefill, admission, preemption), which
takes as long as the plan's cost entries say. Files of a trace: arrival, prompt and answer in
at_s, prompt_tokens, output_tokens, or the columns of Azure, Mooncake and BurstGPT. exit codes: 0
done, 2 usage or bad input, 3 bad plan"""

VERIFY_NOTES = """\
The certificate has the costs of layers, messages and memory that the plan was made from, and
multipliers from which a bound of all plans follows. The check computes in whole numbers and
shares no code with the search; its gap is often larger than the search's own. exit codes: 0 all
holds, 2 usage or no certificate, 3 a line does not hold"""

CHECK_NOTES = """\
Bytes, times and the proof are computed again by code that shares nothing with the search.
exit codes: 0 right, 2 usage or bad input, 3 bad plan, 4 plan for another model or cluster, 5
does not fit"""

PAPER_METHOD = ("--shaq-efficient", "--llm-pq-efficient")
"""The paper's flags for `--method heuristic`."""
PAPER_FIT = ("--fit", "--fit-cost-model")
"""The paper's flags for fitted costs, which costs are always."""


_SHARED_OUT = "layers are shared out by the plan: leave it out"
_AT_ONCE = "requests at once are --batch N"
_IN_ALL = "a plan runs any number of prompts; those at once are --batch N"
_KV_BITS = "bits of the KV cache are --kv 8"
_BITS = "a checkpoint's own form is found in its files; other bits of the weights are --bits 4"
_IN_RAM = "the CPU computes whole layers: --devices 4090,cpu"
ENGINE_FLAGS = {
    "-m": "the model is --model DIR, a GGUF file or a name",
    "-c": "tokens of a request, prompt and answer, are --context N",
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "-ts", "--tensor-split"), _SHARED_OUT),
    **dict.fromkeys(("--max-num-seqs", "-np", "--parallel", "--batch-size"), _AT_ONCE),
    **dict.fromkeys(("--num-prompts", "--num-requests", "--n-prompts"), _IN_ALL),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), _KV_BITS),
    **dict.fromkeys(("--cpu-offload-gb", "--n-cpu-moe", "--cpu-moe"), _IN_RAM),
    **dict.fromkeys(("--quantization", "--quant", "-q"), _BITS),
    **dict.fromkeys(("--gpus", "--num-gpus", "--gpu"), "devices are --devices 4090:2"),
    "--cpu": "a CPU is a device: --devices 4090,cpu=64GB",
}
"""Flags of vLLM and llama.cpp -> what stands for them where devices are planned for."""


def plan_request(words: Sequence[str]) -> PlanRequest:
    """Return what these flags of `llmpq-algo plan` ask for; `ValueError` for what is wrong."""
    return plan_parser().read_as(PlanRequest, without_paper_flags(words))


def without_paper_flags(words: Sequence[str]) -> list[str]:
    """Return a command line with listed flags in place of those that only the paper has.

    Other spellings of a flag (`--global-bz` of `--batch`) are declared beside it.
    """
    found: list[str] = []
    method = next((word for word in words if word.replace("_", "-") in PAPER_METHOD), None)
    for word in words:
        if word.replace("_", "-") not in (*PAPER_METHOD, *PAPER_FIT):
            found.append(word)
    if method is None:
        return found
    given = plan_parser().read_given(found).get("method", "heuristic")
    if given != "heuristic":
        raise ValueError(f"{method} is --method heuristic, got --method {given}; leave one out")
    return [*found, "--method", "heuristic"]


def read_flag(name: str, value: str) -> dict[str, object]:
    """Return what one flag of `llmpq-algo plan` sets, by its field of a request."""
    return plan_parser().read_given([f"--{name}={value}"])


def _flag_of(word: str) -> str:
    """Return the flag of a word that has none: cards' names are devices, others are models."""
    from llmpq.devices.device_list import read_devices

    try:
        read_devices(word)
    except ValueError:
        return "--model"
    return "--devices"


def plan_parser() -> CommandParser:
    """Return the flags of `llmpq-algo [plan]`."""
    parser = CommandParser(
        "llmpq-algo plan",
        "Plan which layers of a model run on which device at which precision.",
        example="llmpq-algo --devices 4090,3090:2,cpu --model qwen3-32b --batch 8 -o plan.json",
        notes=NOTES,
        flag_of=_flag_of,
        others=ENGINE_FLAGS,
    )
    _what_to_plan(parser.section("model, devices, job"))
    add_traffic(parser.section("live traffic, instead of a batch"), daily=False)
    _how_to_choose(parser.section("quality"))
    _limits(parser.section("constraints"))
    _how_to_solve(parser.section("solving"))
    _what_to_print(parser.section("output"))
    return parser


def _what_to_plan(section: Section) -> None:
    add_model(section)
    add_cluster(section)
    no_traffic = Only(
        lambda a: a.trace is None and a.prompt is None,
        "with live traffic, which says it",
        "leave --trace or --prompt out",
    )
    section.flag(
        "--batch",
        also=("--global-bz", "--global-batch-size"),
        daily=True,
        type=int,
        default=16,
        only=no_traffic,
        metavar="N",
        help=f"requests in flight, at most {MAX_BATCH:,} (16)",
    )
    whole = Only(lambda a: a.context is None, "with --context", "leave --context out")
    for name, paper, default, what in (
        ("prompt", "s", 512, "prompt tokens per request"),
        ("gen", "n", 100, "tokens to generate per request"),
    ):
        section.flag(
            f"--{name}-len",
            also=(f"--{paper}",),
            daily=True,
            type=token_count,
            default=default,
            only=(whole, no_traffic) if name == "prompt" else no_traffic,
            metavar="N",
            help=f"{what} ({default})",
        )
    context = "prompt and answer together, such as 32k (k: 1,024); --gen-len of it is answer"
    other = ("--ctx-size", "--max-model-len")
    section.flag(
        "--context", also=other, type=token_count, only=no_traffic, metavar="N", help=context
    )
    section.flag(
        "--costs",
        daily=True,
        metavar="FILE",
        help="costs.json of llmpq-profile; without it times are estimated",
    )
    section.flag("--probe-cpu", action="store_true", help=PROBE_CPU)
    section.flag(
        "--dtype",
        type=full_dtype,
        choices=DTYPES,
        default="auto",
        help="auto: the model's own, but float32 on CPUs not known to be quick in it",
    )


def add_model(section: Section) -> None:
    """Declare the ways to name a model."""
    model = "Hugging Face directory, GGUF file, or a name such as qwen3-32b"
    section.flag("--model", daily=True, metavar="DIR|NAME", help=model)
    section.revision("model")
    section.flag("--model-name", help="paper's form: opt, with --model-size 30b")
    section.flag("--model-size", help="paper's form: 30b")


def add_cluster(section: Section) -> None:
    """Declare the ways to describe devices; without any, this machine's."""
    section.flag(
        "--devices",
        daily=True,
        help="of one machine, such as 4090,3090:2,cpu (default: this machine's)",
    )
    cluster = "cluster YAML: several machines, links, reserves"
    section.flag("--cluster", daily=True, metavar="YAML", help=cluster)
    section.flag("--device-names", nargs="+", help="paper's form: T4 V100, one node per kind")
    section.flag("--device-numbers", nargs="+", type=int, help="paper's form: 3 1")
    section.flag("--from-ray", nargs="?", const="auto", help="devices of a running Ray cluster")


def _how_to_choose(section: Section) -> None:
    no_front = Only(lambda a: not a.pareto, "with --pareto", "leave --pareto out")
    no_budget = Only(
        lambda a: a.quality_budget is None, "with --quality-budget", "leave --quality-budget out"
    )
    front = Only(lambda a: a.pareto, "without --pareto", "add --pareto")
    omega = "omega.json of llmpq-profile indicator: each layer's quality loss at each precision"
    section.flag("--omega-file", metavar="FILE", help=omega)
    section.flag(
        "--prefer",
        daily=True,
        choices=PREFERENCES,
        only=(no_front, no_budget, Only(lambda a: a.theta is None, "with --theta", THETA_OUT)),
        help="quality, balanced (the knee of time and quality; default) or speed",
    )
    section.flag(
        "--theta",
        type=float,
        only=(no_front, no_budget),
        help="paper's form, instead: seconds that one unit of quality loss (omega) is worth",
    )
    budget = (
        "the fastest plan that loses no more than this (0: nothing, 1: as all at 4 bits; in the "
        "unit of --omega-file where there is one)"
    )
    section.flag("--quality-budget", type=float, metavar="LOSS", help=budget)
    section.flag(
        "--pareto", action="store_true", help="list the Pareto front of time and quality loss"
    )
    points = f"points at most (default {DEFAULT_POINTS})"
    section.flag("--pareto-points", type=int, only=front, help=points)
    bits = "precisions allowed, such as 4,8,16 or w8a8,w4a16 (default: all but 3 bits)"
    section.flag("--bits", daily=True, help=bits)
    kv = "KV bits allowed, such as 16,8,4 or 8v4: keys in 8, values in 4 (default 16)"
    section.flag("--kv", also=("--kv-cache-dtype",), default="16", help=kv)


def add_free_memory(section: Section) -> None:
    """Declare how much of the devices' memory is left to others."""
    reserve = "left free on each device, such as 1GiB (0.5GiB of cards that may drive a screen)"
    section.flag("--reserve", metavar="SIZE", help=reserve)
    section.flag("--gpu-memory-utilization", type=float, metavar="SHARE", help=GPU_SHARE_HELP)


def _limits(section: Section) -> None:
    add_free_memory(section)
    section.flag(
        "--pin", action="append", default=[], metavar="LAYERS=DEVICE", help="0-3=T4-0 (may repeat)"
    )
    section.flag(
        "--engines",
        daily=True,
        default="auto",
        only=tuple(_one_pipeline(flag) for flag in ("--pareto", "--pin", "--max-devices")),
        metavar="N",
        help="pipelines that share the job, each with the whole model (auto: as many as are best)",
    )
    section.flag("--max-devices", type=int, help="use at most this many devices")
    section.flag(
        "--tensor-parallel",
        also=("--tensor-parallel-size", "-tp"),
        metavar="N|SHARES",
        help="devices of a node that share each stage: 2 (alike, evenly), or shares, such as 3:1 "
        "(1: none; left out: as is best)",
    )
    section.flag(
        "--group",
        also=("--group-size",),
        type=int,
        default=1,
        help="consecutive layers that get one precision (1)",
    )
    section.flag("--prefill-microbatch", type=int, help="fix the prefill micro-batch")
    section.flag("--decode-microbatch", type=int, help="fix the decode micro-batch")
    _add_rounding(section)
    section.flag(
        "--cpu-activations", choices=("exact", "int8"), default="exact", help=CPU_ACTIVATIONS
    )
    section.flag("--outliers", type=int, help="w4a4: channels in 8 bits (hidden/32, at most 128)")


def _add_rounding(section: Section) -> None:
    """Declare how matrices are rounded, which decides their bytes."""
    section.flag("--symmetric", action="store_true", help="symmetric weight quantisation")
    section.flag("--weight-group-size", type=int, help=GROUP_SIZES)
    section.flag("--head-bits", type=int, choices=(8, 16), help=HEAD_BITS)


def _one_pipeline(flag: str) -> Only:
    """Return that several engines are not planned with a flag that is of one pipeline."""
    name = flag.removeprefix("--").replace("-", "_")
    return Only(
        lambda a: a.engines in ("auto", "1") or not getattr(a, name),
        f"with {flag}, which is of one pipeline",
        f"leave {flag} out",
    )


def _how_to_solve(section: Section) -> None:
    section.flag("--method", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    section.flag(
        "--objective",
        choices=("makespan", "paper", *TRAFFIC_OBJECTIVES),
        default="makespan",
        help="makespan: the true pipeline time; paper: its eq. (4). Of live traffic: throughput, "
        "rate (the highest within the limits, the default where there are some) or latency",
    )
    section.flag(
        "--solver",
        choices=("highs", "cbc", "gurobi"),
        only=Only(_uses_solver, "without --method ilp (or all)", "add it"),
        help="of --method ilp (default highs)",
    )
    gap = "relative gap to prove, 0 to 1 (1e-6)"
    section.flag("--gap", also=("--ilp-tolerance",), type=float, default=1e-6, help=gap)
    seconds = (
        "seconds after which every search ends, or inf (60); most end before, when they have done "
        "half as many seconds of work (three quarters for live traffic, whose seconds are of CPU "
        "time), so that a plan does not depend on a machine's load; a twentieth of that at most "
        "is for the line `robust`: how wrong costs may be"
    )
    section.flag(
        "--time-limit", also=("--ilp-time-limit",), type=in_seconds, default=60.0, help=seconds
    )
    section.flag(
        "--speculate",
        metavar="MODE",
        only=Only(lambda a: not a.pareto, "with --pareto", "leave --pareto out"),
        help="add drafts to the plan: auto (if any fit and pay), qspec, w4kv4, kv4, ngram, "
        "mtp (the model's own head)",
    )


def _uses_solver(flags: Namespace) -> bool:
    return flags.method in ("ilp", "all")


def _what_to_print(section: Section) -> None:
    tables = (
        Only(lambda a: not a.pareto, "with --pareto", "leave --pareto out"),
        Only(lambda a: not a.json, "with --json", "leave --json out"),
    )
    section.flag(
        "-o",
        "--output",
        daily=True,
        metavar="FILE",
        help="plan JSON to write (of --pareto: all its plans)",
    )
    section.flag(
        "--report",
        daily=True,
        metavar="FILE.html",
        help="one page for people: cards, bits, timeline, why; with --pareto or --method all those",
    )
    section.flag(
        "--explain",
        daily=True,
        action="store_true",
        only=tables,
        help="say why this plan, and how sure it is",
    )
    section.flag(
        "--what-if",
        action="append",
        default=[],
        metavar="CHANGE",
        only=tables,
        help="re-plan with +V100, -T4:2, bits=8 or several, -T4,+V100, and compare (may repeat)",
    )
    section.flag("--json", action="store_true", help="print the plan as JSON, nothing else")
    section.flag("--debug", action="store_true", help="log what the solver does")


def fits_parser() -> CommandParser:
    """Return the flags of `llmpq-algo fits`."""
    parser = CommandParser(
        "llmpq-algo fits",
        "Say whether a model fits these devices, with which context, how fast, and what would.",
        example="llmpq-algo fits --model qwen3-32b --devices 4090,3090 --context 32k",
        notes=FITS_NOTES,
        flag_of=_flag_of,
        others=ENGINE_FLAGS,
    )
    section = parser.section("model and devices")
    add_model(section)
    add_cluster(section)
    add_free_memory(section)
    _what_to_fit(parser.section("requests"))
    bits = "precisions allowed, such as 4,8,16 or w8a8,w4a16 (default: all but 3 bits)"
    kv = "KV bits allowed, such as 16,8,4 or 8v4 (default 16; others are listed beside)"
    quality = parser.section("precision")
    quality.flag("--bits", daily=True, help=bits)
    quality.flag("--kv", also=("--kv-cache-dtype",), daily=True, help=kv)
    _add_rounding(quality)
    as_planned = "default: as llmpq-algo plan"
    quality.flag("--dtype", type=full_dtype, choices=DTYPES, default="auto", help=as_planned)
    quality.flag("--omega-file", metavar="FILE", help="measured quality loss, else a guess")
    out = parser.section("costs and output")
    out.flag("--costs", metavar="FILE", help="costs.json of llmpq-profile, else estimates")
    out.flag("--probe-cpu", action="store_true", help=PROBE_CPU)
    out.flag("--json", daily=True, action="store_true", help="print all of it as JSON")
    return parser


def _what_to_fit(section: Section) -> None:
    batch = f"requests at once, at most {MAX_BATCH:,} (1)"
    section.flag("--batch", daily=True, type=int, default=1, metavar="N", help=batch)
    context = "tokens of each, prompt and answer, such as 32k (8k, or the model's longest)"
    other = ("--ctx-size", "--max-model-len")
    section.flag("--context", also=other, daily=True, type=token_count, metavar="N", help=context)
    whole = Only(lambda a: a.context is None, "with --context", "leave --context out")
    prompt = "its prompt, instead of --context"
    section.flag("--prompt-len", type=token_count, only=whole, metavar="N", help=prompt)
    section.flag("--gen-len", type=token_count, default=100, metavar="N", help="its answer (100)")


def add_traffic(section: Section, *, daily: bool) -> None:
    """Declare the ways to say which requests come; `daily`: in `--help`, too."""
    trace = "requests of a service: Azure's CSV, Mooncake's or our JSON lines, ..."
    section.flag("--trace", daily=daily, metavar="FILE", help=trace)
    for name, example in (("prompt", "1020,2735,4142"), ("gen", "129,424,601")):
        what = "of prompts" if name == "prompt" else "of answers"
        section.flag(
            f"--{name}",
            daily=daily,
            metavar="N,N",
            help=f"instead: lengths {what}, each as likely, such as {example}",
        )
    rate = "requests a second, or max: the highest within the limits (default: the trace's)"
    section.flag("--rate", daily=daily, metavar="R|max", help=rate)
    section.flag(
        "--ttft", daily=daily, type=in_seconds, metavar="S", help="limit of the first token"
    )
    section.flag(
        "--tpot", daily=daily, type=in_seconds, metavar="S", help="limit of a further token"
    )
    section.flag(
        "--requests", type=int, metavar="N", help="requests to simulate (200; of a trace its first)"
    )


def simulate_parser() -> CommandParser:
    """Return the flags of `llmpq-algo simulate`."""
    parser = CommandParser(
        "llmpq-algo simulate",
        "Predict how a plan's engines serve live traffic: first tokens, further tokens, rates.",
        example="llmpq-algo simulate plan.json --prompt 512,2048 --gen 128 --rate 2 --ttft 2",
        notes=SIMULATE_NOTES,
    )
    parser.positional("plan", metavar="PLAN", help="plan.json, of one engine or of several")
    add_traffic(parser.section("traffic"), daily=True)
    how = parser.section("engine and output")
    budget = "token budget of a step, as of llmpq-dist serve (default: the plan's)"
    how.flag("--max-num-batched-tokens", type=int, metavar="N", help=budget)
    how.flag("--json", daily=True, action="store_true", help="print all of it as JSON")
    return parser


def costs_parser() -> CommandParser:
    """Return the flags of `llmpq-algo costs import`."""
    parser = CommandParser(
        "llmpq-algo costs",
        "Import tables of kernels that others measured as the costs of a model.",
        example="llmpq-algo costs import aiconfigurator --system h100_sxm --model llama-3.1-8b "
        "-o costs.json",
        notes=COSTS_NOTES,
    )
    parser.positional("action", metavar="import", choices=("import",), help="what to do")
    parser.positional("source", metavar="SOURCE", help="aiconfigurator, its wheel, or a folder")
    add_model(parser.section("model"))
    which = parser.section("which of the tables, and output")
    system = "of AIConfigurator: a100_sxm, h100_sxm, h200_sxm, l40s, rtx_pro_6000_server, ..."
    which.flag("--system", daily=True, metavar="NAME", help=system)
    engine = "whose kernels: vllm, trtllm or sglang (the first that there is)"
    which.flag("--engine", daily=True, metavar="NAME", help=engine)
    kind = "the card, as `llmpq-algo devices --known` names it (default: the system's)"
    which.flag("--kind", daily=True, metavar="CARD", help=kind)
    dtype = "of 16-bit values (the model's own)"
    which.flag("--dtype", type=full_dtype, choices=DTYPES, default="auto", help=dtype)
    merge = "add to a file that exists, such as the times of another card, instead of replacing it"
    which.flag("--merge", daily=True, action="store_true", help=merge)
    which.flag("-o", "--output", daily=True, metavar="FILE", help="costs.json to write")
    return parser


def check_parser() -> CommandParser:
    """Return the flags of `llmpq-algo check`."""
    parser = CommandParser(
        "llmpq-algo check",
        "Check a plan by what it carries, or against a model and devices; or a shared run.",
        notes=CHECK_NOTES,
        example="llmpq-algo check plan.json",
    )
    parser.positional(
        "plan", metavar="PLAN", help="plan.json, or what `llmpq-dist report --share` wrote"
    )
    add_model(parser.section("model, if not the plan's own"))
    add_cluster(parser.section("devices it should fit, if not those it was made for"))
    return parser


def verify_parser() -> CommandParser:
    """Return the flags of `llmpq-algo verify`."""
    parser = CommandParser(
        "llmpq-algo verify",
        "Check by the certificate beside a plan that it is feasible, and how near the best it is.",
        notes=VERIFY_NOTES,
        example="llmpq-algo verify plan.json",
    )
    parser.positional("plan", metavar="PLAN", help="plan.json, which llmpq-algo -o wrote")
    section = parser.section("what it is checked by")
    section.flag("--certificate", metavar="FILE", help="default: PLAN.certificate.json beside it")
    return parser


def _engine(name: str) -> str:
    """Read the name of an engine to export to, dots and case as they may be."""
    plain = name.lower().replace(".", "").replace("_", "-")
    if plain in EXPORTS:
        return plain
    if plain in READ_GGUF:
        raise ArgumentTypeError(
            f"'{name}' loads GGUF files: those that `--to llamacpp` says how to make"
        )
    raise ArgumentTypeError(
        f"unknown engine '{name}': {nearest(plain, EXPORTS)}known: {', '.join(EXPORTS)}"
    )


def export_parser() -> CommandParser:
    """Return the flags of `llmpq-algo export`."""
    parser = CommandParser(
        "llmpq-algo export",
        "Write a plan as another engine's settings, or its cards as a picture (svg).",
        example="llmpq-algo export plan.json --to vllm -o serve.sh",
    )
    parser.positional("plan", metavar="PLAN", help="plan JSON")
    section = parser.section("what to write")
    engine = "|".join(EXPORTS)
    section.flag("--to", type=_engine, metavar="ENGINE", required=True, help=engine)
    section.flag("-o", "--output", daily=True, metavar="FILE", help="file to write (else stdout)")
    add_model(parser.section("model, where the plan's own name does not say it"))
    return parser


def models_parser() -> CommandParser:
    """Return the flags of `llmpq-algo models`."""
    parser = CommandParser(
        "llmpq-algo models",
        "List model families and built-in models, and what each runs with.",
        example="llmpq-algo models qwen3",
    )
    parser.positional("word", metavar="WORD", nargs="?", help="only names that have it (all)")
    section = parser.section("how")
    section.flag("--json", daily=True, action="store_true", help="machine-readable")
    return parser


def devices_parser() -> CommandParser:
    """Return the flags of `llmpq-algo devices`."""
    parser = CommandParser(
        "llmpq-algo devices",
        "List this machine's devices, or every known card.",
        example="llmpq-algo devices 4070",
    )
    name = "known cards whose name has it (none: this machine's devices)"
    parser.positional("word", metavar="WORD", nargs="?", help=name)
    section = parser.section("which, and how")
    section.flag("--known", daily=True, action="store_true", help="the table of known cards")
    section.flag("--json", daily=True, action="store_true", help="machine-readable")
    section.flag("--from-ray", daily=True, nargs="?", const="auto", help="ask Ray instead")
    section.flag("--yaml", daily=True, action="store_true", help="a cluster YAML to start from")
    return parser

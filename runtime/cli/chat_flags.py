"""The flags of `llmpq-dist chat`, and what they become. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.commands.command_line import CommandParser, Only
from llmpq.gpu_memory import GPU_SHARE_HELP
from llmpq.runtime.cli.run_flags import add_generation_config, add_plan
from llmpq.runtime.launch.launcher import BACKEND_HELP, BACKENDS, Backend
from llmpq.runtime.launch.plans.planned_kv import AUTO


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Which model to talk to, and how it answers."""

    directory: str | None
    model: str | None
    plan: str | None
    cluster: str | None
    max_model_len: int | None
    dtype: str
    kv_cache_dtype: str
    gpu_memory_utilization: float | None
    backend: Backend
    chat_template: str | None
    system: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    generation_config: str


def chat_parser() -> CommandParser:
    """Return the flags of `llmpq-dist chat`."""
    parser = CommandParser(
        "llmpq-dist chat",
        "Talk to a model in the terminal; one without a chat template continues what you type.",
        example="llmpq-dist chat examples/demo-7m",
        notes="Ctrl-C ends an answer, Ctrl-D the chat; /help lists the commands. A line that ends\n"
        "in a backslash goes on in the next one. Lines from a pipe are turns, too.",
    )
    parser.positional("directory", nargs="?", metavar="DIR", help="model directory or GGUF file")
    what = parser.section("what to talk to")
    what.flag("--model", daily=True, metavar="DIR", help="the same, as `run` and `serve` have it")
    what.revision("directory", "model")
    add_plan(what, text="plan.json of llmpq-algo (default: plan for the devices there are)")
    what.flag("--cluster", metavar="YAML", help="plan for, or check, its devices")
    unplanned = Only(lambda a: a.plan is None, "with --plan, whose plan says it", "re-plan")
    what.flag("--max-model-len", type=int, metavar="N", help="tokens of a whole conversation")
    what.flag("--dtype", default=AUTO, only=unplanned, help="float16, bfloat16 or float32")
    what.flag("--kv-cache-dtype", default=AUTO, metavar="KV", help="kv16, kv8, kv4 or kv2")
    what.flag("--gpu-memory-utilization", type=float, metavar="SHARE", help=GPU_SHARE_HELP)
    what.flag("--backend", choices=BACKENDS, default="auto", help=BACKEND_HELP)
    what.flag("--chat-template", metavar="FILE", help="Jinja, instead of the model's own")
    how = parser.section("how it answers")
    how.flag("--system", daily=True, metavar="TEXT", help="a system message before the first turn")
    tokens = "tokens of an answer (default: generation_config.json's, else what there is room for)"
    how.flag("--max-tokens", daily=True, type=int, metavar="N", help=tokens)
    for name, kind, text in (
        ("--temperature", float, "0: greedy (default: generation_config.json's, else 1)"),
        ("--top-p", float, "only tokens of this probability together"),
        ("--top-k", int, "only the K likeliest"),
        ("--seed", int, "draw the same tokens again"),
    ):
        how.flag(name, daily=name == "--temperature", type=kind, metavar="N", help=text)
    add_generation_config(how, "ends of answers and default sampling")
    return parser

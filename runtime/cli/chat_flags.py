"""The flags of `llmpq-dist chat`, and what they become. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmpq.commands.command_line import CommandParser
from llmpq.runtime.cli.engine_flags import add_engine_flags
from llmpq.runtime.cli.run_flags import add_plan
from llmpq.runtime.cli.vllm_flags import IDLE_FLAGS, LENGTH_FLAGS, OTHER_FLAGS
from llmpq.runtime.options.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Which model to talk to, and how it answers."""

    directory: str | None
    model: str | None
    plan: str | None
    engine: EngineOptions = field(default_factory=EngineOptions)
    chat_template: str | None
    system: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None


def chat_parser() -> CommandParser:
    """Return the flags of `llmpq-dist chat`."""
    parser = CommandParser(
        "llmpq-dist chat",
        "Talk to a model in the terminal; one without a chat template continues what you type.",
        example="llmpq-dist chat examples/demo-7m",
        notes="Ctrl-C ends an answer, Ctrl-D the chat; /help lists the commands. A line that ends\n"
        "in a backslash goes on in the next one. Lines from a pipe are turns, too.",
        others={**OTHER_FLAGS, **LENGTH_FLAGS},
        idle=IDLE_FLAGS,
    )
    parser.positional("directory", nargs="?", metavar="DIR", help="model directory or GGUF file")
    what = parser.section("what to talk to")
    what.flag("--model", daily=True, metavar="DIR", help="the same, as `run` and `serve` have it")
    what.revision("directory", "model")
    add_plan(what, text="plan.json of llmpq-algo (default: plan for the devices there are)")
    add_engine_flags(
        what,
        "quantization",
        "cluster",
        "max_model_len",
        "dtype",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "prefer",
        "head_bits",
        "speculate",
        "gamma",
        "costs",
        "layer_cache",
        "enforce_eager",
        "backend",
        "generation_config",
    )
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
    return parser

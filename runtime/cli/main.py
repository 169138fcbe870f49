"""`llmpq-dist`: run or serve a plan, look at its places, time it, evaluate it.

    llmpq-dist [run] --plan plan.json --model DIR -i prompts.jsonl -o outputs.jsonl
    llmpq-dist chat DIR | serve | doctor | check plan.json | bench ... | devices drain NODE | ...

Every failure ends with one sentence on stderr and the exit code of its outcome.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from llmpq.commands.command_line import Command, run_command
from llmpq.errors import unknown_name
from llmpq.runtime.cli import tool_flags
from llmpq.runtime.cli.chat_flags import ChatOptions, chat_parser
from llmpq.runtime.cli.run_flags import RunOptions, run_parser
from llmpq.runtime.cli.serve_flags import ServeOptions, serve_parser
from llmpq.runtime.options.engine_options import as_flags

COMMANDS = {
    "run": Command(run_parser, RunOptions, "llmpq.runtime.cli.run"),
    "check": Command(tool_flags.check_parser, tool_flags.CheckOptions, "llmpq.runtime.tools.check"),
    "doctor": Command(
        tool_flags.doctor_parser, tool_flags.DoctorOptions, "llmpq.runtime.tools.doctor"
    ),
    "report": Command(
        tool_flags.report_parser, tool_flags.ReportOptions, "llmpq.runtime.tools.share_report"
    ),
    "devices": Command(
        tool_flags.devices_parser, tool_flags.DevicesOptions, "llmpq.runtime.tools.devices"
    ),
    "convert": Command(
        tool_flags.convert_parser,
        tool_flags.ConvertOptions,
        "llmpq.runtime.weights.convert",
        "convert_and_say",
    ),
    "bench": Command(tool_flags.bench_parser, tool_flags.BenchOptions, "llmpq.runtime.tools.bench"),
    "serve": Command(
        serve_parser, ServeOptions, "llmpq.runtime.cli.serve", extras=("run", "serve")
    ),
    "chat": Command(chat_parser, ChatOptions, "llmpq.runtime.cli.chat"),
    "eval": Command(tool_flags.eval_parser, tool_flags.EvalOptions, "llmpq.runtime.tools.evaluate"),
}


OLLAMA = {
    "pull": "models of the hub are downloaded when they are run, or before: hf download NAME",
    "list": "what is in Hugging Face's cache is listed by: hf cache ls",
    "ls": "what is in Hugging Face's cache is listed by: hf cache ls",
    "rm": "models are removed from Hugging Face's cache by: hf cache rm NAME",
    "ps": "what a server runs is on its page at /, and in /metrics",
    "show": "what a model takes is said by: llmpq-algo fits --model NAME",
    "stop": "a server ends by SIGTERM or Ctrl-C, and its model with it",
}
"""Command of Ollama's -> what stands for it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name = words.pop(0) if words and not words[0].startswith("-") else "run"
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("llmpq").setLevel(logging.INFO)
    return run_command(
        "llmpq-dist",
        lambda: _run(name, words),
        interrupted=_interrupted(name),
        no_memory="take fewer or shorter rows, lower precisions or a device with more",
        extras=COMMANDS[name].extras if name in COMMANDS else (),
        spelled=as_flags,
        own_process=argv is None,
    )


def _run(name: str, words: Sequence[str]) -> int:
    try:
        code = _dispatch(name, words)
    finally:
        refused = _flush()
    if refused is not None:
        raise refused
    return code


def _dispatch(name: str, words: Sequence[str]) -> int:
    if name in OLLAMA:
        raise ValueError(f"there is no command '{name}' here: {OLLAMA[name]}")
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    command = COMMANDS[name]
    options, function = command.read(words), command.work()
    if name == "convert":
        return int(function(options.source, options.target))
    return int(function(options))


def _open_closed_streams() -> None:
    """Let what is printed go nowhere where the caller closed it: files and exit code remain."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _flush() -> OSError | None:
    """Flush standard output; return the error if it cannot be written, and drop what is left."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OSError(error.errno, error.strerror, "standard output")
    return None


def _interrupted(command: str) -> str:
    if command == "run":
        return (
            "interrupted; rows that are finished, if any, are in the output file, continue with: "
            "llmpq-dist run --resume and the same arguments"
        )
    return f"'{command}' was interrupted before its end; run it again"

"""`llmpq-dist`: run a plan, convert a checkpoint, evaluate a precision.

    llmpq-dist [run] --strat_file_name plan.json --model DIR -i prompts.jsonl -o outputs.jsonl
    llmpq-dist check plan.json | bench ... | convert ... | eval ...

Every failure ends with one sentence on stderr and the exit code of its outcome.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from llmpq.errors import ExitCode, LlmpqError, unknown_name
from llmpq.output_paths import refusal

COMMANDS = {
    "run": ("llmpq.runtime.cli.run", "run a batch file through a plan (the default)"),
    "check": ("llmpq.runtime.tools.check", "look whether a plan can run here"),
    "convert": ("llmpq.runtime.weights.convert", "turn pytorch_model.bin into safetensors"),
    "bench": ("llmpq.runtime.tools.bench", "time LLM-PQ's offline job"),
    "eval": ("llmpq.runtime.tools.evaluate", "perplexity of a model on a text"),
}
"""Subcommand -> module with `add_arguments(parser)` and `main(args) -> int`, and its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, "run")
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("llmpq").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        if not words[0].startswith("-") and words[0] not in COMMANDS:
            raise unknown_name("command", words[0], COMMANDS)
        code = _dispatch(words)
        refused = _flush()
        if refused is not None:
            raise refused
        return code
    except LlmpqError as error:
        return _end(str(error), error.exit_code)
    except ValueError as error:
        return _end(str(error), ExitCode.USAGE)
    except OSError as error:
        return _end(refusal(error), ExitCode.USAGE)
    except (RuntimeError, MemoryError) as error:
        # Imports torch, which whatever ran out of memory has imported before.
        from llmpq.out_of_memory import first_line, out_of_memory

        if not out_of_memory(error):
            raise
        return _end(
            f"out of memory: {first_line(error)}; take fewer or shorter rows, lower precisions or "
            "a device with more",
            ExitCode.DOES_NOT_FIT,
        )
    except KeyboardInterrupt:
        return _end(_interrupted(words[0]), ExitCode.INTERRUPTED)


def _open_closed_streams() -> None:
    """Let what is printed go nowhere where the caller closed it: files and exit code remain."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _dispatch(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="llmpq-dist", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module_name, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        # Only the command that is asked for is imported: torch and Ray take seconds.
        if words[0] == name:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
    args = parser.parse_args(words)
    return int(importlib.import_module(COMMANDS[args.command][0]).main(args))


def _flush() -> OSError | None:
    """Send off what was printed; return why nothing takes it, which nobody will hear again."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OSError(error.errno, error.strerror, "standard output")
    return None


def _interrupted(command: str) -> str:
    if command == "run":
        return (
            "interrupted; finished rows are in the output file, continue with: llmpq-dist run "
            "--resume and the same arguments"
        )
    return f"'{command}' was interrupted before its end; run it again"


def _end(message: str, code: ExitCode) -> int:
    _flush()
    sys.stderr.write(f"llmpq-dist: {' '.join(message.split())}\n")
    return code


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt

"""`llmpq-profile`: what the parts of a model cost on this host, and how layers bear rounding.

llmpq-profile [run] --model DIR|NAME --cluster c.yaml -o costs.json
llmpq-profile indicator --kind variance --model DIR --text FILE -o omega.json
llmpq-profile merge a.json b.json -o costs.json
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from llmpq.errors import ExitCode, LlmpqError
from llmpq.output_paths import check_files, refusal
from llmpq.profiler.cli import indicator as indicator_command
from llmpq.profiler.cli import run as run_command

COMMANDS = ("run", "indicator", "merge")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bare flags mean `run`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments.insert(0, "run")
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        cluster = getattr(args, "cluster", None)  # of `run` only
        check_files({"--cluster": cluster}, {"--output": args.output})
        return int(args.main(args))
    except ValueError as error:
        sys.stderr.write(f"llmpq-profile: {error}\n")
        return ExitCode.USAGE
    except OSError as error:
        sys.stderr.write(f"llmpq-profile: {refusal(error)}\n")
        return ExitCode.USAGE
    except LlmpqError as error:
        sys.stderr.write(f"llmpq-profile: {error}\n")
        return error.exit_code
    except (RuntimeError, MemoryError) as error:
        # Imports torch, which whatever ran out of memory has imported before.
        from llmpq.out_of_memory import first_line, out_of_memory

        if not out_of_memory(error):
            raise
        sys.stderr.write(
            f"llmpq-profile: out of memory: {first_line(error)}; take a shorter --window, or "
            "another --device\n"
        )
        return ExitCode.DOES_NOT_FIT
    except KeyboardInterrupt:
        sys.stderr.write("llmpq-profile: stopped; samples taken so far are kept, run it again\n")
        return ExitCode.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmpq-profile",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{run,indicator,merge}")
    run = commands.add_parser("run", help="time layers, embedding, head and links of this host")
    run_command.add_arguments(run)
    indicator = commands.add_parser("indicator", help="omega: how layers bear low precision")
    indicator_command.add_arguments(indicator)
    merge = commands.add_parser("merge", help="join cost files of several hosts")
    merge.add_argument("files", nargs="+", type=Path, help="cost files; a later one wins")
    merge.add_argument("-o", "--output", type=Path, required=True, help="costs.json to write")
    merge.set_defaults(main=run_command.merge)
    return parser


if __name__ == "__main__":
    sys.exit(main())

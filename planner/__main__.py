"""`llmpq-algo`: reads the command line, nothing else; the work is in planner/cli.py."""

from __future__ import annotations

import sys

from llmpq.planner.arguments import (
    COMMANDS,
    check_parser,
    devices_parser,
    export_parser,
    plan_parser,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = _joined(list(sys.argv[1:] if argv is None else argv))
    command = words.pop(0) if words and words[0] in COMMANDS else "plan"
    parsers = {
        "plan": plan_parser,
        "check": check_parser,
        "export": export_parser,
        "devices": devices_parser,
    }
    args = parsers[command]().parse_args(words)
    from llmpq.planner import cli

    return cli.run(command, args)


def _joined(words: list[str]) -> list[str]:
    """Join `--what-if -T4-0` to one word, which argparse would take for two flags."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--what-if", "--what_if"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


if __name__ == "__main__":
    sys.exit(main())

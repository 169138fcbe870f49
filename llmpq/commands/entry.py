"""Where the installed commands begin: Ctrl-C while their modules load ends with a sentence.

Loading takes a second, longer on a busy machine, in which run_command does not watch yet.
Standard library only, for the same reason.
"""

from __future__ import annotations

import importlib
import sys

INTERRUPTED = 130
"""`llmpq.errors.ExitCode.INTERRUPTED`, which would have to load first."""


def algo() -> int:
    """Run `llmpq-algo`."""
    return _run("llmpq-algo", "llmpq.planner.__main__")


def dist() -> int:
    """Run `llmpq-dist`."""
    return _run("llmpq-dist", "llmpq.runtime.cli.main")


def profile() -> int:
    """Run `llmpq-profile`."""
    return _run("llmpq-profile", "llmpq.profiler.__main__")


def quantize() -> int:
    """Run `llmpq-quantize`."""
    return _run("llmpq-quantize", "llmpq.profiler.cli.quantize")


def _run(program: str, module: str) -> int:
    try:
        main = importlib.import_module(module).main
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted\n")
        return INTERRUPTED
    return int(main())

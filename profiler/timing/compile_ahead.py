"""Compile a GPU's kernels before anything is timed: some processes for each precision, all at once.

A layer's kernels are compiled when first called, a few seconds each, and cached on disk: one
process after the other would spend minutes on them. The same cases are called here that will be
timed, so nothing has to be known of kernels; neighbours in the list share most, so a process takes
a piece of it. Knows no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

from llmpq.errors import StageLostError
from llmpq.precision import Precision
from llmpq.profiler.timing.cases import CaseTime, Effort, Ready, SetUp, TimedCase
from llmpq.profiler.timing.worker_processes import JobFailedError, TimingProcess

log = logging.getLogger(__name__)

MOST_TOKENS = 4224
"""New tokens of a case; longer prompts take the kernels of these."""


COMPILER_BYTES = 8 << 30
"""Memory of the GPU that a process may need: a few layers, and caches of the longest cases."""


RESTARTS = 2
"""Of a process whose GPU refuses further work; after that its cases compile as they are timed."""

NAMED = 6
"""Failed cases that a warning names."""


def compile_ahead(
    set_up: SetUp, cases: Sequence[TimedCase], gpu: int | None, *, processes: int = 1
) -> dict[TimedCase, str]:
    """Call the cases' kernels once, in about so many processes, at least one for each precision.

    Nothing is done where that is a single one. Returns the cases that failed, which a warning
    names, with their errors: too large beside the other processes, or they fail again when timed.
    """
    of_precision: dict[Precision, list[TimedCase]] = {}
    for case in cases:
        if case.new_tokens <= MOST_TOKENS:
            of_precision.setdefault(case.target.precision, []).append(case)
    each = max(1, processes // max(1, len(of_precision)))
    pieces = [piece for its in of_precision.values() for piece in _pieces(its, each)]
    if len(pieces) < 2:
        return {}
    once = set_up.model_copy(update={"effort": Effort(seconds=1e-4, min_repeats=1)})
    with ThreadPoolExecutor(len(pieces)) as pool:
        # Consumed, so that an error of a thread is raised here.
        parts = list(pool.map(lambda its: _call(once, its, gpu), pieces))
    failed = {case: error for part in parts for case, error in part.items()}
    for error in dict.fromkeys(failed.values()):
        its = [case.title for case, reason in failed.items() if reason == error]
        more = f" and {len(its) - NAMED} more" if len(its) > NAMED else ""
        log.warning("compiling ahead failed for %s%s: %s", "; ".join(its[:NAMED]), more, error)
    return failed


def _pieces(cases: Sequence[TimedCase], count: int) -> list[Sequence[TimedCase]]:
    """Return the cases in at most so many runs of neighbours, as long as each other."""
    size = -(-len(cases) // count)
    return [cases[i : i + size] for i in range(0, len(cases), size)]


def _call(set_up: SetUp, cases: Sequence[TimedCase], gpu: int | None) -> dict[TimedCase, str]:
    """Call cases one after the other in a process; return those that failed, with the error."""
    failed: dict[TimedCase, str] = {}
    restarts = 0
    with ExitStack() as stack:
        try:
            child = _child(set_up, gpu, stack)
            for case in cases:
                child.send(case)
                try:
                    child.receive(CaseTime)
                except JobFailedError as error:
                    failed[case] = str(error)
                    if not error.lost:
                        continue
                    restarts += 1
                    if restarts > RESTARTS:
                        break
                    child.close()
                    child = _child(set_up, gpu, stack)
        except StageLostError as error:
            log.warning("%s; its kernels are compiled as they are timed", error)
    return failed


def _child(set_up: SetUp, gpu: int | None, stack: ExitStack) -> TimingProcess:
    child = stack.enter_context(closing(TimingProcess(set_up, gpu=gpu)))
    child.receive(Ready)
    return child

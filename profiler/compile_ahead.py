"""Compile a GPU's kernels before anything is timed: a process for each precision, all at once.

A layer's kernels are compiled when first called, a few seconds each, and kept on disk: one process
after the other would spend minutes on them. The same cases are called here that will be timed, so
nothing has to be known of kernels. Knows no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from llmpq.errors import StageLostError
from llmpq.precision import Precision
from llmpq.profiler.messages import Case, Ready, SetUp, Timing
from llmpq.profiler.processes import Child, JobFailedError

log = logging.getLogger(__name__)

MOST_TOKENS = 4224
"""New tokens of a case; longer prompts take the kernels of these."""


def compile_ahead(set_up: SetUp, cases: Sequence[Case], gpu: int | None) -> None:
    """Call the cases' kernels once; nothing is done for a single precision."""
    of_precision: dict[Precision, list[Case]] = {}
    for case in cases:
        if case.new_tokens <= MOST_TOKENS:
            of_precision.setdefault(case.target.precision, []).append(case)
    if len(of_precision) < 2:
        return
    hasty = set_up.model_copy(update={"seconds_per_case": 1e-4, "min_repeats": 1, "sustain_s": 0.0})
    with ThreadPoolExecutor(len(of_precision)) as pool:
        # Consumed, so that an error of a thread is raised here.
        list(pool.map(lambda its: _call(hasty, its, gpu), of_precision.values()))


def _call(set_up: SetUp, cases: Sequence[Case], gpu: int | None) -> None:
    with closing(Child(set_up, gpu=gpu)) as child:
        try:
            child.receive(Ready)
            for case in cases:
                child.send(case)
                # Too large beside the other processes, or it will fail again when it is timed.
                with suppress(JobFailedError):
                    child.receive(Timing)
        except StageLostError as error:
            log.warning("%s; its kernels are compiled as they are timed", error)

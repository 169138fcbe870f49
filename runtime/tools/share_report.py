"""`llmpq-dist report --share`: of a run's report what may be shown to others."""

from __future__ import annotations

import sys
from pathlib import Path

from llmpq.errors import ExitCode
from llmpq.file_form import read_json
from llmpq.plans.shared_run import shared_run
from llmpq.runtime.cli.tool_flags import ReportOptions


def main(options: ReportOptions) -> int:
    """Write the shared form of a report, to a file or to stdout."""
    report = read_json(options.share)
    if not isinstance(report, dict):
        raise ValueError(f"'{options.share}': expected a report of `llmpq-dist run --report`")
    run = shared_run(report, where=options.share)
    if options.output is None:
        sys.stdout.write(run.dump_json())
    else:
        run.save_json(Path(options.output))
    return ExitCode.DONE

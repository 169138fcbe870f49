"""`llmpq-profile`: what the parts of a model cost on this host, and how layers bear rounding.

llmpq-profile [run] --model DIR|NAME [--cluster c.yaml] -o costs.json
llmpq-profile indicator --kind variance --model DIR --text FILE -o omega.json
llmpq-profile merge a.json b.json -o costs.json
llmpq-profile tune --model DIR [--plan plan.json]
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from llmpq.commands.command_line import run_command
from llmpq.commands.output_paths import check_files
from llmpq.commands.ray_address import import_ray
from llmpq.profiler.cli import flags

COMMANDS = ("run", "indicator", "merge", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bare flags mean `run`."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and words[0] in COMMANDS else "run"
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("llmpq").setLevel(logging.INFO)
    return run_command(
        "llmpq-profile",
        lambda: _started(command, words)(),
        interrupted="stopped; samples taken so far are on disk, run it again",
        no_memory="take a shorter --window, or another --device",
        own_process=argv is None,
    )


def _started(command: str, words: Sequence[str]) -> Callable[[], int]:
    """Read the flags, then import what does the work: torch takes seconds, `--help` none."""
    if command == "merge":
        merging = flags.merge_parser().read_as(flags.MergeRequest, words)
        check_files({}, {"--output": str(merging.output)})
        from llmpq.profiler.cli import run

        return lambda: run.merge(merging)
    if command == "indicator":
        weighing = flags.indicator_parser().read_as(flags.OmegaRequest, words)
        check_files({}, {"--output": str(weighing.output)})
        from llmpq.profiler.cli import indicator

        return lambda: indicator.main(weighing)
    if command == "tune":
        tuning = flags.tune_parser().read_as(flags.TuneRequest, words)
        check_files({"--plan": tuning.plan}, {})
        from llmpq.profiler.cli import tune

        return lambda: tune.main(tuning)
    timing = flags.run_parser().read_as(flags.ProfileRequest, words)
    check_files({"--cluster": str(timing.cluster)}, {"--output": str(timing.output)})
    if timing.ray_address is not None:
        import_ray(timing.ray_address)
        from llmpq.profiler.cli import run_hosts

        return lambda: run_hosts.main(timing)
    from llmpq.profiler.cli import run

    return lambda: run.main(timing)


if __name__ == "__main__":
    sys.exit(main())

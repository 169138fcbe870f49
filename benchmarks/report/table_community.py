"""The table of runs that people shared: `benchmarks/data/community/*.json`, each checked."""

from __future__ import annotations

from collections.abc import Sequence

from report.table_cells import ROOT

from llmpq.planner.check.check import check_run
from llmpq.plans.shared_run import SharedRun
from llmpq.precision import bits_of

FOLDER = ROOT / "benchmarks" / "data" / "community"
COLUMNS = (
    "devices",
    "model",
    "weights",
    "KV",
    "requests",
    "predicted",
    "measured",
    "tokens/s",
    "llmpq",
    "row",
)


def runs() -> dict[str, SharedRun]:
    """Return every shared run by its file's name; one whose arithmetic is wrong is an error."""
    found = {path.name: SharedRun.load_json(path) for path in sorted(FOLDER.glob("*.json"))}
    for run in found.values():
        check_run(run)
    return found


class Community:
    """All shared runs, a line each."""

    def render(self) -> str:
        """Return the table as Markdown."""
        lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
        for name, run in runs().items():
            work, plan = run.plan.workload, run.plan
            stages = zip(run.stages, plan.stages, strict=True)
            reported = [stage.reported or own.kind for stage, own in stages]
            cells = (
                ", ".join(dict.fromkeys(reported)) + f" ({len(plan.stages)})",
                plan.model.name,
                bits_of(plan.precisions),
                work.kv.typed,
                f"{run.completed}: {run.total_input_tokens:,} + {run.total_output_tokens:,} tokens",
                "-" if run.predicted_s is None else f"{run.predicted_s:.3g} s",
                f"{run.total_s:.3g} s",
                f"{run.output_throughput:.4g}",
                run.versions.get("llmpq", "-"),
                f"[{name.removesuffix('.json')}](../../benchmarks/data/community/{name})",
            )
            lines.append(_line(cells))
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


COMMUNITY_TABLES = {"community": Community()}

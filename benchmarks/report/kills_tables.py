"""The tables of stages that are killed: pauses, commands under kills, plans of what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from report.table_cells import Row, load, markdown

FAILURES = ("lost", "twice", "different", "hung")


class PausesTable:
    """A line for each row of `chaos.py answers`."""

    def render(self) -> str:
        """Return the table as Markdown."""
        body = [
            [
                row["case"]["model"],
                row["case"]["drafts"] or "none",
                str(row["case"]["kills"]),
                str(row["case"]["answers"]),
                *(str(row["case"][name]) for name in FAILURES),
                f"{row['value']:.2f}",
                f"{row['case']['p99_s']:.2f}",
                f"{row['case']['load_average']:.0f}",
            ]
            for row in load("chaos.jsonl", "pause", {})
        ]
        head = ("model", "drafts", "kills", "answers", *FAILURES, "pause p50 s", "p99 s", "load")
        return markdown(head, body)


class CommandsTable:
    """A line for each row of `chaos.py batch` and `serve`."""

    def render(self) -> str:
        """Return the tables as Markdown."""
        batch = [
            [
                f"{row['case']['rows']}",
                f"{row['case']['every_s']:g}",
                str(row["case"]["kills"]),
                str(len(row["case"]["recoveries"])),
                "yes" if row["case"]["in_order"] else "no",
                str(row["case"]["different"]),
                _seconds([one["predicted_s"] for one in row["case"]["recoveries"]]),
                _seconds([one["measured_s"] for one in row["case"]["recoveries"]]),
                f"{row['value']:.0f} ({row['baselines']['undisturbed']:.0f})",
                f"{row['case']['load_average']:.0f}",
            ]
            for row in load("chaos.jsonl", "batch_under_kills", {})
        ]
        serve = [_served(row) for row in load("chaos.jsonl", "goodput_under_kills", {})]
        return "\n\n".join(
            [
                markdown(
                    ("rows", "a kill every s", "kills", "recoveries", "in order", "different",
                     "predicted s", "measured s", "whole job s (undisturbed)", "load"),
                    batch,
                ),
                markdown(
                    ("requests", "a kill every s", "kills", "recoveries", "wrong, lost, different",
                     "503 before a stream", "predicted s", "measured s", "goodput between faults",
                     "tokens by predicted; within limits (predicted)",
                     "driver MiB, middle and last third", "load"),
                    serve,
                ),
            ]
        )  # fmt: skip


class InterruptsTable:
    """A line for each row of `chaos.py interrupts`."""

    def render(self) -> str:
        """Return the table as Markdown."""
        body = [
            [
                str(row["case"]["signals"]),
                ", ".join(f"{code}: {count}" for code, count in row["case"]["codes"].items()),
                str(row["case"]["wrong"]),
                str(row["case"]["whole"]),
                f"{row['value']:.2f}",
                f"{row['case']['p99_s']:.2f}",
                f"{row['spread'][1]:.2f}",
                f"{row['case']['load_average']:.0f}",
            ]
            for row in load("chaos.jsonl", "interrupts", {})
        ]
        head = ("commands", "exit codes", "hung, left behind or wrong", "resumed to the end",
                "until the end p50 s", "p99 s", "longest s", "load")  # fmt: skip
        return markdown(head, body)


class AddedTable:
    """A line for each row of `elastic.py added`."""

    def render(self) -> str:
        """Return the table as Markdown."""
        body = []
        for row in load("chaos.jsonl", "added_device", {}):
            case = row["case"]
            pairs = zip(case["tokens_per_s"], case["tokens_per_s_predicted"], strict=True)
            body.append(
                [
                    *(f"{measured:.1f} ({predicted:.1f})" for measured, predicted in pairs),
                    f"{row['value']:.3f} ({row['predicted']:.3f})",
                    f"{row['value'] / row['predicted'] - 1:+.1%}",
                    f"{case['pause_s'][1]:.2f} ({case['pause_s'][0]:.2f})",
                    f"{case['wait_s'][0]:.2f} ({case['wait_s'][1]:.2f})",
                    f"{case['load_average']:.1f}" if "load_average" in case else "-",
                ]
            )
        head = ("tokens/s before (predicted)", "after (predicted)", "times (predicted)", "off",
                "pause s (predicted)", "longest wait for a token s (before)", "load")  # fmt: skip
        return markdown(head, body)


class ReplanTable:
    """The newest row of each cluster and unit."""

    def render(self) -> str:
        """Return the table as Markdown."""
        newest = {
            (row["case"]["cluster"], row["unit"]): row for row in load("replan.jsonl", "replan", {})
        }
        clusters = sorted({cluster for cluster, _ in newest})
        body = [
            [
                str(cluster),
                newest[cluster, "s"]["case"]["model"],
                str(newest[cluster, "s"]["n"]),
                *(f"{newest[cluster, unit]['spread'][1]:.2f}" for unit in ("s", "s of CPU")),
            ]
            for cluster in clusters
        ]
        return markdown(("cluster", "model", "devices removed, each", "longest s", "of CPU"), body)


def _served(row: Row) -> list[str]:
    case = row["case"]
    return [
        str(case["requests"]),
        f"{case['every_s']:g}",
        str(case["kills"]),
        str(case["recoveries"]),
        ", ".join(str(case[name]) for name in ("wrong", "lost", "different")),
        str(case["refused"]),
        _seconds(case["predicted_s"]),
        _seconds(case["measured_s"]),
        f"{row['value']:.2f}",
        _by_predicted(case),
        ", ".join(f"{size:.0f}" for size in case["driver_mib"]),
        f"{case['load_average']:.0f}",
    ]


def _by_predicted(case: Mapping[str, Any]) -> str:
    if "tokens_by_predicted" not in case:
        return ""
    within = case["untouched_within_limits"], case["untouched_within_limits_predicted"]
    return f"{case['tokens_by_predicted']:.2f}; {within[0]:.2f} ({within[1]:.2f})"


def _seconds(values: Sequence[float]) -> str:
    """Return the least and the most."""
    return f"{min(values):.1f} to {max(values):.1f}" if values else ""

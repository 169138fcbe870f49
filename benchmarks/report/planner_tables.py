"""The tables of what tried to catch the planner out: odd clusters, and proofs by brute force.

Of the newest commit that has rows of each; `-dirty` there means that rows came while it ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from report.table_cells import Row, load, markdown

WORSE = 1e-6
"""Relative distance above another method's value that counts as worse."""
MARGIN_S = 1.0
"""Seconds beyond the limit that reading, checking and writing a plan may take."""
FAR = 0.005
"""Relative distance of a replay that counts."""
ODD_HEAD = (
    "limit",
    "problems",
    "exact worse",
    "gap p50",
    "gap p95",
    "proven",
    "over the limit",
    "replay over 0.5 %",
    "of the search",
    "not accepted",
    "slowest",
)


class OddTable:
    """A line for each time limit of the seeded problems."""

    def render(self) -> str:
        """Return the table and which seeds are worse, as Markdown."""
        rows = [r for r in load("odd_clusters.jsonl", "odd_clusters", {}) if "seed" in r["case"]]
        newest = {row["case"]["limit_s"]: _clean(row) for row in rows}  # the last row's
        own = [row for row in rows if _clean(row) == newest[row["case"]["limit_s"]]]
        commits = ", ".join(f"{newest[limit]} ({limit:g} s)" for limit in sorted(newest))
        return f"{summary(own)}\n\nCommits: {commits}."


class ProofsTable:
    """A line for each part: its blocks of seeds at the newest commit that has some."""

    def render(self) -> str:
        """Return the table as Markdown."""
        rows = load("planner.jsonl", "planner_proofs", {})
        body = []
        for part in ("same", "stopped", "more", "topologies"):
            mine = [row for row in rows if row["case"]["part"] == part]
            newest = _clean(mine[-1]) if mine else ""
            blocks = {r["case"]["seeds"]: r for r in mine if _clean(r) == newest}
            proofs = [row["baselines"] for row in blocks.values()]
            body.append(
                [
                    part,
                    str(sum(_count(seeds) for seeds in blocks)),
                    str(sum(int(base["compared"]) for base in proofs)),
                    str(sum(int(base["proven"]) for base in proofs)),
                    str(sum(int(row["value"]) for row in blocks.values())),
                    newest,
                ]
            )
        return markdown(("part", "seeds", "with a plan", "proven", "failed", "commit"), body)


MIXED = ("card", "each", "pipeline", "even TP", "water-filling")
"""The simple ways beside an answer, as rows of mixed clusters name them."""


class MixedTable:
    """The best topology of mixed clusters beside simple ones, as ratios; the newest row of each."""

    def render(self) -> str:
        """Return the table as Markdown."""
        rows = load("mixed_clusters.jsonl", "mixed_clusters", {})
        found = {(row["case"]["number"], row["case"]["job"]): row for row in rows}
        newest = [found[key] for key in sorted(found)]
        cpu_s = {
            name: sorted(
                row["baselines"]["cpu_s"]
                for row in newest
                if row["case"]["job"].isdecimal() is batch
            )
            for name, batch in (("batch jobs", True), ("traces", False))
        }
        head = ("cards", "model", "job", "loss", "engines", "answer", *MIXED, "s (CPU s)")
        worse = sum(row["value"] > 1 + WORSE for row in newest)
        commits = ", ".join(dict.fromkeys(_clean(row) for row in newest))
        clusters = len({number for number, _ in found})
        sentences = [
            f"{len(newest)} jobs on {clusters} clusters, {worse} beaten.",
            *(
                f"CPU of {len(own)} {name}: p50 {own[len(own) // 2]:.1f} s, most {own[-1]:.1f} s."
                for name, own in cpu_s.items()
                if own
            ),
            f"Commits: {commits}.",
        ]
        return f"{markdown(head, [_mixed_line(row) for row in newest])}\n\n{' '.join(sentences)}"


def _mixed_line(row: Row) -> list[str]:
    case, base = row["case"], row["baselines"]
    unit = "tokens/s" if case["job"].isdecimal() else "requests/s"
    others = [f"{base['ours'] / base[name]:.2f}x" if base.get(name) else "-" for name in MIXED]
    return [
        case["cards"].replace("|", "+"),
        case["model"],
        case["job"],
        f"{case['budget']:g}",
        str(case["engines"]),
        f"{base['ours']:.4g} {unit}",
        *others,
        f"{base['seconds']:.1f} ({base['cpu_s']:.1f})",
    ]


ABLATION_HEAD = (
    "search",
    "cases",
    "worse",
    "better",
    "value, mean",
    "at worst",
    "at best",
    "proven",
    "CPU s of proofs",
)
SEEN = 1e-4
"""Relative distance of values that counts; a busy machine alone makes less."""


class AblationTable:
    """A line for each part of the start that was switched off, beside the same cases with all."""

    def render(self) -> str:
        """Return the table as Markdown."""
        rows = load("planner_ablation.jsonl", "planner_ablation", {})
        found: dict[str, dict[tuple[str, float], Row]] = {}
        for row in rows:
            case = row["case"]
            found.setdefault(case["off"], {})[case["name"], case["limit_s"]] = row
        whole = found.pop("", {})
        return markdown(ABLATION_HEAD, [_without(off, own, whole) for off, own in found.items()])


def _without(
    off: str, own: dict[tuple[str, float], Row], whole: dict[tuple[str, float], Row]
) -> list[str]:
    pairs = [(row, whole[key]) for key, row in own.items() if key in whole]
    planned = [(a, b) for a, b in pairs if max(a["value"], b["value"]) < NO_PLAN]
    ratios = [a["value"] / b["value"] for a, b in planned if b["value"] > 0] or [math.nan]
    both = [
        (a["baselines"]["cpu_s"], b["baselines"]["cpu_s"])
        for a, b in pairs
        if a["baselines"].get("proven") and b["baselines"].get("proven")
    ]
    proven, of_whole = (
        sum(bool(pair[side]["baselines"].get("proven")) for pair in pairs) for side in (0, 1)
    )
    return [
        off if off.startswith("with ") else f"without {off}",
        str(len(pairs)),
        str(sum(ratio > 1 + SEEN for ratio in ratios)),
        str(sum(ratio < 1 - SEEN for ratio in ratios)),
        f"{math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1:+.3%}",
        f"{max(ratios) - 1:+.2%}",
        f"{min(ratios) - 1:+.2%}",
        f"{proven} instead of {of_whole}",
        f"{sum(a for a, _ in both):.1f} instead of {sum(b for _, b in both):.1f}",
    ]


NO_PLAN = 1e9
"""Value of a row without a plan."""


def summary(rows: Sequence[Row]) -> str:
    """Return the table of rows of seeded problems; of one problem and limit the newest counts."""
    found = {(row["case"]["seed"], row["case"]["limit_s"]): row for row in rows}
    limits = sorted({limit for _, limit in found})
    body = [_line(limit, [r for (_, at), r in found.items() if at == limit]) for limit in limits]
    worse = [r["case"]["name"] for r in found.values() if r["value"] > 1 + WORSE]
    return f"{markdown(ODD_HEAD, body)}\n\nWorse: {', '.join(worse) or 'none'}."


def _line(limit_s: float, rows: Sequence[Row]) -> list[str]:
    planned = [r["baselines"] for r in rows if "exact" in r["baselines"]]
    gaps = sorted(base.get("gap", math.inf) for base in planned) or [math.nan]
    seconds = [r["baselines"]["seconds"] for r in rows]
    of_search = [base["search_difference"] for base in planned if "search_difference" in base]
    cells = [
        f"{limit_s:g} s",
        f"{len(rows)} ({len(rows) - len(planned)} without a plan)",
        sum(r["value"] > 1 + WORSE for r in rows),
        f"{gaps[len(gaps) // 2]:.2%}",
        f"{gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))]:.2%}",
        f"{sum(base['proven'] for base in planned) / max(1, len(planned)):.0%}",
        sum(s > limit_s + MARGIN_S for s in seconds),
        sum(abs(base["replay_difference"]) > FAR for base in planned),
        sum(abs(d) > FAR for d in of_search) if of_search else "",
        sum(not base["checked"] for base in planned),
        f"{max(seconds):.1f} s",
    ]
    return [str(cell) for cell in cells]


def _clean(row: Row) -> str:
    return str(row["commit"]).removesuffix("-dirty")


def _count(seeds: str) -> int:
    low, high = seeds.split("-")
    return int(high) - int(low) + 1

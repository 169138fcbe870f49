"""What came of published config.json files: a line of each model_type."""

from __future__ import annotations

from dataclasses import dataclass

from report.table_cells import load, markdown

HEAD = ("model_type", "configs", "planned", "equal to Transformers", "refused for")
LACKS = "llmpq lacks "


@dataclass(frozen=True, kw_only=True)
class ConfigsTable:
    """The newest row of `configs.py published`."""

    def render(self) -> str:
        """Return the table."""
        case = load("configs.jsonl", "published_configs", {})[-1]["case"]
        lines = []
        for kind, counts in sorted(case["families"].items(), key=_order):
            why = "; ".join(sorted({_short(text) for text in case["refused"].get(kind, ())}))
            made = [str(counts[key]) for key in ("configs", "planned", "equal")]
            lines.append([kind, *made, why])
        total = [sum(c[key] for c in case["families"].values()) for key in KEYS]
        lines.append(["all", *(str(number) for number in total), ""])
        return markdown(HEAD, lines)


KEYS = ("configs", "planned", "equal")


def _order(item: tuple[str, dict[str, int]]) -> tuple[int, str]:
    return -item[1]["planned"], item[0]


def _short(text: str) -> str:
    """Return what a refusal says is lacking, or the whole sentence."""
    if LACKS not in text:
        return text.removeprefix("config.json: ").partition(";")[0]
    return text.partition(LACKS)[2].partition("; it runs")[0]

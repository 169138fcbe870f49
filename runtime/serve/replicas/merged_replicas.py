"""Several replicas' metrics, and what the page draws of them, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SUMMED = ("running", "waiting", "blocks", "blocks_held")


def merged_metrics(texts: Sequence[bytes]) -> bytes:
    """Return metrics in Prometheus' text format as one text: each family once, all its samples.

    The samples of two texts differ by their labels.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                _, what, family, *_ = line.split(" ", 3)
                own = heads.setdefault(family, [])
                if not any(known.split(" ", 2)[1] == what for known in own):
                    own.append(line)
            elif line:
                samples.setdefault(family, []).append(line)
    lines = [line for name, own in heads.items() for line in (*own, *samples.get(name, ()))]
    return ("\n".join(lines) + "\n").encode()


def merged_page(pages: Sequence[dict[str, Any]], nothing: dict[str, Any]) -> dict[str, Any]:
    """Return what the page draws of several replicas: their stages in a row, their counts summed.

    `nothing`: what it draws of a server without an engine; the replicas' fields replace it.
    """
    whole = dict(nothing)
    whole |= {name: sum(one[name] for one in pages) for name in _SUMMED}
    whole["sums"] = {name: sum(one["sums"][name] for one in pages) for name in nothing["sums"]}
    whole["stages"] = [stage for one in pages for stage in one["stages"]]
    whole["recoveries"] = sorted(
        (recovery for one in pages for recovery in one["recoveries"]),
        key=lambda recovery: str(recovery["began"]),
    )
    whole["asks"] = next((one["asks"] for one in pages if one["asks"] is not None), None)
    plans = [one["plan"] for one in pages if one["plan"] is not None]
    if plans:
        rates = [plan["tokens_per_s"] for plan in plans]
        whole["plan"] = {
            **plans[0],
            "stages": [stage for plan in plans for stage in plan["stages"]],
            "tokens_per_s": None if None in rates else sum(rates),
        }
    return whole

"""The charts of pages as Vega-Lite specifications: data in, JSON out.

Colours are CSS variables of the page, so that dark, light and printed pages need no second drawing.
What tells series apart is never colour alone: place, shape, dash or text does, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Chart = dict[str, Any]
"""A Vega-Lite specification."""

KINDS = {
    "prefill": "var(--prefill)",
    "decode": "var(--decode)",
    "mixed": "var(--mixed)",
    "draft": "var(--draft)",
    "verify": "var(--verify)",
    "round": "var(--verify)",
}
"""Kind of step -> colour."""
_AXES = {
    "domainColor": "var(--line)",
    "tickColor": "var(--line)",
    "gridColor": "var(--line)",
    "gridOpacity": 0.5,
    "labelColor": "var(--ink)",
    "titleColor": "var(--ink)",
    "titleFontWeight": "normal",
    "labelLimit": 120,
}
_CONFIG = {
    "background": None,
    "aria": False,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": _AXES,
    "legend": {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "orient": "top"},
    "text": {"color": "var(--ink)"},
}


def _chart(values: Sequence[Mapping[str, Any]], height: int, **rest: Any) -> Chart:
    return {
        "config": _CONFIG,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": list(values)},
        **rest,
    }


def timeline(stages: Sequence[str], bars: Sequence[Mapping[str, Any]]) -> Chart:
    """Return bars of steps over time, a row a stage; the wheel or the page's buttons zoom.

    A bar: `stage`, `kind`, `start_s`, `end_s`, `ms` (how long it took) and `what`.
    """
    kinds = [kind for kind in KINDS if any(bar["kind"] == kind for bar in bars)]
    order = list(dict.fromkeys(stages))
    step = 34 if len(order) <= 12 else 16
    return _chart(
        bars,
        step * len(order),
        params=[
            {
                "name": "window",
                "select": {"type": "interval", "encodings": ["x"]},
                "bind": "scales",
            }
        ],
        mark={"type": "bar", "stroke": "var(--ground)", "strokeWidth": 0.2, "clip": True},
        encoding={
            "x": {"field": "start_s", "type": "quantitative", "title": "seconds"},
            "x2": {"field": "end_s"},
            "y": {"field": "stage", "type": "nominal", "sort": order, "title": None},
            "color": {
                "field": "kind",
                "type": "nominal",
                "scale": {"domain": kinds, "range": [KINDS[kind] for kind in kinds]},
                "title": None,
            },
            "tooltip": [
                {"field": "stage", "title": "stage"},
                {"field": "what", "title": "step"},
                {"field": "ms", "title": "took, ms", "format": ".3~f"},
            ],
        },
    )


def front(points: Sequence[Mapping[str, Any]]) -> Chart:
    """Return plans by time and quality loss.

    A point: `plan` (its number), `total_s`, `sum_omega`, `tokens_per_s`, `bits`, `stages`,
    `chosen` (how it is preferred, or nothing).
    """
    x = {
        "field": "total_s",
        "type": "quantitative",
        "title": "time of the job, s",
        "scale": {"zero": False},
    }
    y = {"field": "sum_omega", "type": "quantitative", "title": "quality loss"}
    tooltip = [
        {"field": "plan", "title": "plan"},
        {"field": "total_s", "title": "time, s", "format": ".4~g"},
        {"field": "tokens_per_s", "title": "tokens/s", "format": ".4~g"},
        {"field": "sum_omega", "title": "quality loss", "format": ".4~g"},
        {"field": "bits", "title": "bits"},
        {"field": "stages", "title": "stages"},
    ]
    return _chart(
        points,
        280,
        layer=[
            {
                "mark": {"type": "line", "color": "var(--mark)", "strokeDash": [4, 3]},
                "encoding": {"x": x, "y": y},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "color": "var(--mark)"},
                "encoding": {"x": x, "y": y, "tooltip": tooltip},
            },
            {
                "transform": [{"filter": "datum.chosen"}],
                "mark": {
                    "type": "point",
                    "shape": "square",
                    "size": 320,
                    "strokeWidth": 2,
                    "color": "var(--ink)",
                },
                "encoding": {"x": x, "y": y, "tooltip": tooltip},
            },
            {
                "transform": [{"filter": "datum.chosen"}],
                "mark": {"type": "text", "dx": 14, "dy": -12, "align": "left"},
                "encoding": {"x": x, "y": y, "text": {"field": "chosen"}},
            },
        ],
    )


def methods(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Return tokens/s of methods, each with its rate as text: `method`, `tokens_per_s`."""
    y = {
        "field": "method",
        "type": "nominal",
        "sort": [row["method"] for row in rows],
        "title": None,
    }
    x = {"field": "tokens_per_s", "type": "quantitative", "title": "tokens/s"}
    return _chart(
        rows,
        26 * len(rows),
        encoding={"x": x, "y": y},
        layer=[
            {
                "mark": {"type": "bar", "color": "var(--mark)"},
                "encoding": {"tooltip": [{"field": "method"}, {"field": "tokens_per_s"}]},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 4},
                "encoding": {"text": {"field": "tokens_per_s", "format": ".1f"}},
            },
        ],
    )


def pairs(rows: Sequence[Mapping[str, Any]], *, title: str) -> Chart:
    """Return predicted and measured bars side by side: `stage`, `which`, `ms`."""
    order = list(dict.fromkeys(row["stage"] for row in rows))
    y = {"field": "stage", "type": "nominal", "sort": order, "title": None}
    offset = {"field": "which", "sort": ["predicted", "measured"]}
    x = {"field": "ms", "type": "quantitative", "title": title}
    colours = {"domain": ["predicted", "measured"], "range": ["var(--soft-bar)", "var(--mark)"]}
    return _chart(
        rows,
        36 * len(order),
        encoding={"x": x, "y": y, "yOffset": offset},
        layer=[
            {
                "mark": {"type": "bar", "stroke": "var(--ink)", "strokeWidth": 0.5},
                "encoding": {
                    "color": {"field": "which", "scale": colours, "title": None},
                    "tooltip": [{"field": "stage"}, {"field": "which"}, {"field": "ms"}],
                },
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 10},
                "encoding": {"text": {"field": "ms", "format": ".2f"}},
            },
        ],
    )


def over_time(
    samples: Sequence[Mapping[str, Any]], lines: Mapping[str, str], *, title: str
) -> Chart:
    """Return lines over time: field of a sample -> its name; `t_s` is the time."""
    names = list(lines.values())
    dashes = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2]][: len(names)]
    values = [
        {"t_s": sample["t_s"], "name": name, "value": sample[field]}
        for field, name in lines.items()
        for sample in samples
        if sample.get(field) is not None
    ]
    encoding: dict[str, Any] = {
        "x": {"field": "t_s", "type": "quantitative", "title": "seconds since the first request"},
        "y": {"field": "value", "type": "quantitative", "title": title},
        "tooltip": [{"field": "t_s"}, {"field": "name"}, {"field": "value"}],
    }
    if len(names) > 1:
        colours = ["var(--mark)", "var(--ink)", "var(--prefill)", "var(--decode)"]
        encoding["color"] = {
            "field": "name",
            "scale": {"domain": names, "range": colours[: len(names)]},
            "title": None,
        }
        encoding["strokeDash"] = {
            "field": "name",
            "scale": {"domain": names, "range": dashes},
            "title": None,
        }
    mark = {
        "type": "line",
        "interpolate": "linear",
        "color": "var(--mark)",
        "point": len(samples) < 40,
    }
    return _chart(values, 180, mark=mark, encoding=encoding)

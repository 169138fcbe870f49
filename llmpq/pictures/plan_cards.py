"""A plan's devices as SVG cards, drawn to scale of memory: a bar per layer, then what else is held.

One drawing for pages, notebooks and papers: `card` is one device, `cards_svg` all of them as a
file. Bits differ in colour, in pattern and in the text beside the bars. Colours are attributes and
classes, so that a page can restyle them for dark screens.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from llmpq.pictures.memory_parts import LayerRun, device_bytes, layer_runs, memory_parts
from llmpq.pictures.stage_links import LinkLoad, link_loads
from llmpq.units import format_size

if TYPE_CHECKING:
    from llmpq.plans.plan import Plan, StagePlan

COLOURS = {16: "#1d4e89", 8: "#3c9ab3", 4: "#f2a541", 3: "#d1495b"}
"""Weight bits -> colour."""
PARTS = {
    "weights": "#3c9ab3",
    "embedding, head": "#6b7fa3",
    "KV cache": "#8fbf8f",
    "recurrent state": "#5f8f5f",
    "states of prefixes": "#8fbf8f",
    "workspace": "#c9b8dd",
    "framework": "#a9a9b4",
    "free": "#ffffff",
    "left to others": "#d8d8d8",
}
"""Part of memory -> colour."""
BAR, CARD, TALL = 92, 210, 240
"""Pixels: width of the bars, of a card with the text beside them, height of the largest."""
GAP, EDGE, TOP, FOOT, ACROSS = 64, 24, 96, 84, 5
"""Between two cards (an arrow), around them, above and below a row of them; cards in a row."""
LINE = 13
"""Least height of a part that has its text beside it."""
MOST_BARS = 400
"""Layers of a stage that are drawn one by one; more are drawn as runs of one precision."""


def patterns() -> str:
    """Return the definitions that the cards' bars refer to: once a page, or a file."""
    marks = {
        16: "",
        8: '<path d="M0 6 L6 0" class="mark" stroke="#ffffff" stroke-opacity=".55"/>',
        4: '<circle cx="3" cy="3" r="1" class="mark" fill="#1b1f24" fill-opacity=".55"/>',
        3: '<path d="M0 0 L6 6 M0 6 L6 0" class="mark" stroke="#ffffff" stroke-opacity=".6"/>',
    }
    found = [
        f'<pattern id="bits-{bits}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" rx="0" fill="{colour}"/>{marks[bits]}</pattern>'
        for bits, colour in COLOURS.items()
    ]
    return f"<defs>{''.join(found)}</defs>"


def cards_svg(plan: Plan) -> str:
    """Return the whole plan as an SVG file: title, legend, a card for each stage, the links."""
    count = len(plan.stages)
    across = min(count, ACROSS)
    rows = -(-count // across)
    width = max(620, 2 * EDGE + across * (CARD + GAP) - GAP)
    row_height = TALL + FOOT
    height = TOP + rows * row_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        patterns(),
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(EDGE, 28, plan_title(plan), size=16, weight="bold"),
        text(EDGE, 48, plan_outcome(plan)),
        *_legend(plan),
    ]
    loads = link_loads(plan)
    for index in range(count):
        row, column = divmod(index, across)
        x, y = EDGE + column * (CARD + GAP), TOP + row * row_height
        inner = f'<g transform="translate({x} {y})">{card(plan, index)}'
        inner += "".join(_under(plan, plan.stages[index]))
        if index + 1 < count:
            inner += _arrow(loads[index] if loads else None)
        parts.append(inner + "</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def card(plan: Plan, index: int) -> str:
    """Return the inside of an SVG of `CARD` x `TALL`: one device and what it holds."""
    stage = plan.stages[index]
    most = max(map(device_bytes, plan.stages)) or 1
    size = device_bytes(stage)
    tall = TALL * size / most if size else TALL
    shapes = [
        f'<rect x="0.5" y="{TALL - tall + 0.5:.1f}" width="{BAR - 1}" height="{tall - 1:.1f}" '
        f'rx="3" class="card" fill="#ffffff" stroke="#57606a"/>'
    ]
    at = float(TALL)
    parts = memory_parts(plan, index)
    if not parts:
        return "".join([*shapes, *_layers(stage, at, tall)])
    labels: list[tuple[float, str]] = []
    for part in parts:
        high = tall * part.nbytes / size
        at -= high
        if part.name == "weights":
            shapes += _layers(stage, at + high, high)
            labels += _run_labels(layer_runs(stage), at + high, high)
            continue
        shown = f"{part.name} {format_size(part.nbytes)}"
        if part.name != "free":
            shapes.append(_bar(at, high, PARTS[part.name], shown))
        labels.append((at + high / 2, shown))
    return "".join([*shapes, *_spread(labels)])


def _layers(stage: StagePlan, bottom: float, tall: float) -> list[str]:
    """Return a bar per layer, from the bottom up."""
    shapes, at = [], bottom
    for run in layer_runs(stage):
        high = tall * run.share
        bars = run.count if stage.num_layers <= MOST_BARS else 1
        for row in range(bars):
            name = f"layer {run.first + row}" if bars > 1 else _layers_text(run)
            y = at - (row + 1) * high / bars
            gap = min(0.7, 0.3 * high / bars)
            fill = f"url(#bits-{run.precision.weight_bits})"
            shapes.append(_bar(y, high / bars - gap, fill, f"{name}, {run.precision.value}"))
        at -= high
    return shapes


def _layers_text(run: LayerRun) -> str:
    return f"layer {run.first}" if run.count == 1 else f"layers {run.first}-{run.last}"


def _run_labels(runs: Sequence[LayerRun], bottom: float, tall: float) -> list[tuple[float, str]]:
    """Return the text of runs; of many short ones, of the whole stage."""
    if len(runs) > 5:
        bits = sorted({run.precision.weight_bits for run in runs}, reverse=True)
        counts = {b: sum(r.count for r in runs if r.precision.weight_bits == b) for b in bits}
        named = ", ".join(f"{count} at {b}" for b, count in counts.items())
        return [(bottom - tall / 2, f"layers by bits: {named}")]
    found, at = [], bottom
    for run in runs:
        high = tall * run.share
        found.append((at - high / 2, f"{_layers_text(run)}: {run.precision.weight_bits} bits"))
        at -= high
    return found


def _bar(y: float, high: float, fill: str, title: str) -> str:
    return (
        f'<rect x="4" y="{y:.2f}" width="{BAR - 8}" height="{max(0.4, high):.2f}" fill="{fill}" '
        f'class="part"><title>{escape(title, quote=False)}</title></rect>'
    )


def _spread(labels: Sequence[tuple[float, str]]) -> list[str]:
    """Return texts beside their parts, moved up where two would overlap: from the bottom up."""
    placed, low = [], TALL - 2.0
    for middle, shown in labels:
        y = min(middle + 4, low)
        low = y - LINE
        placed.append((y, shown))
    short = max(0.0, LINE - 3 - placed[-1][0]) if placed else 0.0
    return [text(BAR + 6, y + short, shown, size=10.5) for y, shown in placed]


def _under(plan: Plan, stage: StagePlan) -> list[str]:
    """Return the lines below a card."""
    start, end = stage.layers
    slowest = plan.predicted is not None and plan.predicted.bottleneck == stage.device
    lines = [
        (f"{stage.device}: layers {start}-{end - 1}", "bold"),
        (memory_text(stage), "normal"),
        (times_text(stage), "normal"),
    ]
    if slowest:
        lines.append(("bottleneck", "bold"))
    return [
        text(0, TALL + 17 + 16 * row, line, weight=weight)
        for row, (line, weight) in enumerate(lines)
    ]


def _arrow(load: LinkLoad | None) -> str:
    x, y = CARD + 4, TALL + 13
    drawn = (
        f'<path d="M{x} {y} h{GAP - 22} m-6 -5 l7 5 l-7 5" fill="none" class="ink-line" '
        f'stroke="#444444" stroke-width="1.5"/>'
    )
    if load is None:
        return drawn
    return drawn + text(x - 4, y + 17, f"{format_size(load.decode_bytes)}/step", size=10)


def _legend(plan: Plan) -> list[str]:
    parts, x = [], EDGE
    for bits in sorted({p.weight_bits for p in plan.precisions}, reverse=True):
        parts.append(f'<rect x="{x}" y="62" width="14" height="12" fill="url(#bits-{bits})"/>')
        parts.append(text(x + 19, 73, f"{bits} bits"))
        x += 72
    for index in range(len(plan.stages)):
        if any(part.name == "KV cache" for part in memory_parts(plan, index)):
            parts.append(
                f'<rect x="{x}" y="62" width="14" height="12" fill="{PARTS["KV cache"]}"/>'
            )
            parts.append(text(x + 19, 73, "KV cache"))
            break
    return parts


def plan_title(plan: Plan) -> str:
    """Return model, requests and micro-batches."""
    work = plan.workload
    return (
        f"{plan.model.name}: {work.requests} of {work.prompt_len} + {work.gen_len} tokens, "
        f"micro-batches of {plan.prefill_microbatch} and {plan.decode_microbatch}"
    )


def plan_outcome(plan: Plan) -> str:
    """Return the predicted rate and how good the plan is known to be."""
    said = []
    if plan.predicted is not None:
        how = "estimated" if plan.predicted.estimated else "predicted"
        said.append(f"{plan.predicted.output_tokens_per_s:.0f} tokens/s {how}")
    if plan.solver.gap is not None:
        said.append(plan.known_as)
    return ", ".join(said) or plan.known_as


def memory_text(stage: StagePlan) -> str:
    """Return how much of its limit a stage fills."""
    if stage.memory is None:
        return "memory not counted"
    return f"{format_size(stage.memory.total_bytes)} of {format_size(stage.memory.limit_bytes)}"


def times_text(stage: StagePlan) -> str:
    """Return the predicted times of a step."""
    if stage.prefill_s is None or stage.decode_s is None:
        return "times not predicted"
    return f"step {ms(stage.prefill_s)} prefill, {ms(stage.decode_s)} decode"


def ms(seconds: float) -> str:
    """Return seconds as milliseconds: as many digits as tell small times apart."""
    value = 1e3 * seconds
    return f"{value:.1f} ms" if value >= 10 else f"{value:.3g} ms"


def text(x: float, y: float, shown: str, *, size: float = 12, weight: str = "normal") -> str:
    """Return a line of text as SVG."""
    style = f'font-size="{size:g}"' + (f' font-weight="{weight}"' if weight != "normal" else "")
    said = escape(shown, quote=False)
    return f'<text x="{x:g}" y="{y:.1f}" {style} class="ink" fill="#1b1f24">{said}</text>'


def card_label(plan: Plan, index: int) -> str:
    """Return what a card shows in one sentence, quoted as an attribute's value."""
    stage = plan.stages[index]
    parts = ", ".join(f"{p.name} {format_size(p.nbytes)}" for p in memory_parts(plan, index))
    runs = ", ".join(f"{_layers_text(r)} {r.precision.value}" for r in layer_runs(stage))
    said = escape(f"{stage.device}: {runs}; {parts or 'memory not counted'}")
    return f'"{said}"'

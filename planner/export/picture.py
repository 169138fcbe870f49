"""A plan as an SVG picture: a card per stage, as tall as its memory, a bar per layer by its bits.

The bars fill as much of a card as the stage fills of its memory; arrows are the pipeline.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan, StagePlan
from llmpq.planner.export.result import Exported
from llmpq.units import format_size

COLOURS = {16: "#1d4e89", 8: "#3c9ab3", 4: "#f2a541", 3: "#d1495b"}
"""Weight bits -> colour."""
CARD, GAP, TALL, TOP, LOW, WIDE = 170, 70, 220, 92, 74, 620
"""Pixels: width of a card, room between two, height of the largest, above and below
them, and the least width of the picture."""


def picture(plan: Plan, spec: ModelSpec) -> Exported:
    """Return the plan as SVG."""
    width = max(WIDE, len(plan.stages) * (CARD + GAP) - GAP + 60)
    height = TOP + TALL + LOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(30, 28, _title(plan), size=16, weight="bold"),
        _text(30, 48, _outcome(plan)),
        *_legend(plan),
    ]
    most = max(_limit_bytes(stage) for stage in plan.stages)
    for index, stage in enumerate(plan.stages):
        x = 30 + index * (CARD + GAP)
        parts += _card(plan, stage, x, TALL * _limit_bytes(stage) / most)
        if index:
            parts.append(_arrow(x - GAP))
    return Exported(text="\n".join([*parts, "</svg>"]) + "\n", not_expressed=())


def _title(plan: Plan) -> str:
    work = plan.workload
    return (
        f"{plan.model.name}: {work.batch} requests of {work.prompt_len} + {work.gen_len} tokens, "
        f"micro-batches of {plan.prefill_microbatch} and {plan.decode_microbatch}"
    )


def _outcome(plan: Plan) -> str:
    said = []
    if plan.predicted is not None:
        how = "estimated" if plan.predicted.estimated else "predicted"
        said.append(f"{plan.predicted.output_tokens_per_s:.0f} tokens/s {how}")
    if plan.solver.gap is not None:
        said.append(plan.solver.status)
    return ", ".join(said) or plan.solver.status


def _legend(plan: Plan) -> list[str]:
    parts, x = [], 30
    for bits in sorted({p.weight_bits for p in plan.precisions}, reverse=True):
        parts.append(f'<rect x="{x}" y="60" width="14" height="12" fill="{COLOURS[bits]}"/>')
        parts.append(_text(x + 19, 71, f"{bits} bits"))
        x += 80
    return parts


def _card(plan: Plan, stage: StagePlan, x: int, tall: float) -> list[str]:
    """Return one stage: its card, bars from the bottom up, and what is known of it."""
    top, (start, end) = TOP + TALL - tall, stage.layers
    bar = tall * _share(stage) / max(1, end - start)
    parts = [
        f'<rect x="{x}" y="{top:.1f}" width="{CARD}" height="{tall:.1f}" rx="5" fill="#f4f4f4" '
        f'stroke="#888"/>'
    ]
    for row, precision in enumerate(stage.precisions):
        y = TOP + TALL - (row + 1) * bar
        parts.append(
            f'<rect x="{x + 5}" y="{y:.2f}" width="{CARD - 10}" height="{max(0.5, bar - 0.7):.2f}" '
            f'fill="{COLOURS[precision.weight_bits]}"/>'
        )
    slowest = plan.predicted is not None and plan.predicted.bottleneck == stage.device
    lines = [
        (f"{stage.device}: layers {start}-{end - 1}", "bold"),
        (_memory_line(stage), "normal"),
        (_times_line(stage) + (", slowest" if slowest else ""), "normal"),
    ]
    for row, (line, weight) in enumerate(lines):
        parts.append(_text(x, TOP + TALL + 19 + 18 * row, line, weight=weight))
    return parts


def _arrow(x: int) -> str:
    y = TOP + TALL - 30
    return (
        f'<path d="M{x + 8} {y} H{x + GAP - 16} m-7 -6 l8 6 l-8 6" fill="none" stroke="#444" '
        f'stroke-width="2"/>'
    )


def _limit_bytes(stage: StagePlan) -> int:
    """Return the device's memory; of a plan written by hand all are alike."""
    return stage.memory.limit_bytes if stage.memory is not None else 1


def _share(stage: StagePlan) -> float:
    return stage.memory.total_bytes / stage.memory.limit_bytes if stage.memory is not None else 1.0


def _memory_line(stage: StagePlan) -> str:
    if stage.memory is None:
        return "memory not counted"
    return f"{format_size(stage.memory.total_bytes)} of {format_size(stage.memory.limit_bytes)}"


def _times_line(stage: StagePlan) -> str:
    if stage.prefill_s is None or stage.decode_s is None:
        return "times not predicted"
    return f"{1e3 * stage.prefill_s:.1f} + {1e3 * stage.decode_s:.1f} ms"


def _text(x: int, y: int, text: str, *, size: int = 13, weight: str = "normal") -> str:
    style = f'font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'

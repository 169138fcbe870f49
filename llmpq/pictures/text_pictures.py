"""A plan's pictures for terminals of 100 columns: memory of each device, the pipeline over time.

Letters say what colours say, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from llmpq.pictures.memory_parts import device_bytes, layer_runs, memory_parts
from llmpq.pictures.predicted_steps import predicted_steps

if TYPE_CHECKING:
    from llmpq.plans.plan import Plan

NAME, WIDE = 18, 80
"""Columns: of a device's name, of the largest bar and of the time line."""
LETTERS = {
    "embedding, head": ("E", "blue"),
    "KV cache": ("K", "green"),
    "recurrent state": ("S", "green"),
    "states of prefixes": ("s", "green"),
    "workspace": ("w", "magenta"),
    "framework": ("f", "white"),
    "free": (".", "dim"),
    "left to others": ("-", "dim"),
}
BITS = {16: ("#", "blue"), 8: ("8", "cyan"), 4: ("4", "yellow"), 3: ("3", "red")}
"""Bits of a layer's weights -> letter and colour."""


def memory_bars(plan: Plan) -> list[Text]:
    """Return a line for each device, as long as its memory, and the legend; none uncounted."""
    most = max(map(device_bytes, plan.stages))
    if not most:
        return []
    found = []
    for index, stage in enumerate(plan.stages):
        pieces: list[tuple[str, str, float]] = []
        for part in memory_parts(plan, index):
            share = WIDE * part.nbytes / most
            if part.name == "weights":
                for run in layer_runs(stage):
                    letter, style = BITS[run.precision.weight_bits]
                    pieces.append((letter, style, share * run.share))
            else:
                pieces.append((*LETTERS[part.name], share))
        line, at = _named(stage.device), 0.0
        for letter, style, share in pieces:
            line.append(letter * (round(at + share) - round(at)), style)
            at += share
        found.append(line)
    named = [f"{BITS[bits][0]} {bits}-bit layers" for bits in BITS if _has(plan, bits)]
    held = {part.name for index in range(len(plan.stages)) for part in memory_parts(plan, index)}
    named += [f"{letter} {name}" for name, (letter, _) in LETTERS.items() if name in held]
    legend = [""]
    for each in named:
        if len(legend[-1]) + len(each) > WIDE - 3:
            legend.append("")
        legend[-1] += f"{', ' if legend[-1] else ''}{each}"
    return [*found, *(Text(f"{'':{NAME}} {words}", "dim") for words in legend)]


def pipeline_lines(plan: Plan) -> list[Text]:
    """Return what each stage does over time as predicted; none where nothing is predicted."""
    steps = predicted_steps(plan).steps
    end_s = max((step.end_s for step in steps), default=0.0)
    if not end_s:
        return []
    column_s = end_s / WIDE
    busy = [[{"prefill": 0.0, "decode": 0.0} for _ in range(WIDE)] for _ in plan.stages]
    for step in steps:
        first, last = int(step.start_s / column_s), min(WIDE - 1, int(step.end_s / column_s))
        for column in range(min(first, WIDE - 1), last + 1):
            begin, end = column * column_s, (column + 1) * column_s
            covered = min(end, step.end_s) - max(begin, step.start_s)
            busy[step.stage][column][step.kind] += max(0.0, covered) / column_s
    found = []
    for stage, columns in zip(plan.stages, busy, strict=True):
        line = _named(stage.device)
        for shares in columns:
            kind = "prefill" if shares["prefill"] >= shares["decode"] else "decode"
            style = "blue" if kind == "prefill" else "yellow"
            letter = kind[0].upper() if sum(shares.values()) >= 0.5 else kind[0]
            line.append(letter if sum(shares.values()) >= 0.05 else " ", style)
        found.append(line)
    legend = f"{end_s:.3f} s; P prefill, D decode: busy for half of the time or more, p, d: less"
    return [*found, Text(f"{'':{NAME}} {legend}", "dim")]


def _named(device: str) -> Text:
    name = device if len(device) <= NAME else device[: NAME - 1] + "~"
    return Text(f"{name:{NAME}} ")


def _has(plan: Plan, bits: int) -> bool:
    return any(precision.weight_bits == bits for precision in plan.precisions)

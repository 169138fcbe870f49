"""A plan as one HTML file: devices to scale, links, stages, the predicted pipeline, what else is.

What the planner knows beyond plan.json (why, other methods, the front, changes) comes in as
`Beside`; a plan without it has a page, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from llmpq.pictures.charts import front, methods, timeline
from llmpq.pictures.html_page import HtmlPage, lines, numbers, table
from llmpq.pictures.memory_parts import layer_runs, memory_parts
from llmpq.pictures.plan_cards import (
    CARD,
    COLOURS,
    PARTS,
    TALL,
    card,
    card_label,
    cards_svg,
    memory_text,
    ms,
    patterns,
    plan_outcome,
    times_text,
)
from llmpq.pictures.predicted_steps import predicted_steps
from llmpq.pictures.stage_links import link_loads
from llmpq.precision import bits_of
from llmpq.units import format_size, shown_loss

if TYPE_CHECKING:
    from llmpq.plans.plan import Plan, StagePlan
    from llmpq.plans.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What the planner says beside a plan."""

    why: Sequence[str] = ()
    changes: Sequence[str] = ()
    """What other bits, other devices or another job would give, a sentence each."""
    notes: Sequence[str] = ()
    methods: Sequence[Mapping[str, Any]] = ()
    """Of other plans: `method`, and `tokens_per_s`, `time_s`, `omega`, `bits`, or `why_not`."""
    front: Sequence[Plan] = ()
    """Plans that are not beaten in both time and quality."""
    chosen: Mapping[int, str] = field(default_factory=dict)
    """Index in the front -> how such a plan is asked for."""
    coverage: str = ""
    """What is known of plans that the front does not list."""


def plan_page(plan: Plan, beside: Beside | None = None) -> str:
    """Return the page of a plan."""
    beside = beside or Beside()
    page = HtmlPage(
        title=f"{plan.model.name} on {plan.cluster.name}",
        data={
            "plan": _data(plan),
            "links": [asdict(load) for load in link_loads(plan)],
            "beside": {
                "why": list(beside.why),
                "changes": list(beside.changes),
                "notes": list(beside.notes),
                "methods": [dict(row) for row in beside.methods],
                "front": [_data(one) for one in beside.front],
            },
        },
        files={"plan.svg": cards_svg(plan)},
    )
    page.section("The plan", headline_numbers(plan), note(job_text(plan)))
    page.section("Why this plan", lines([*plain_words(plan), *beside.why]))
    page.section("Devices", cards(plan))
    page.section("Links", links_table(plan))
    page.section("Stages", stages_table(plan), memory_table(plan))
    page.section("Predicted pipeline", predicted_timeline(page, plan))
    page.section("Time against quality", *_front(page, beside))
    page.section("Other methods", *_methods(page, beside))
    page.section("What would change it", lines(beside.changes))
    page.section("Notes", lines(beside.notes))
    return page.text()


def topology_page(topology: Topology, said: Sequence[str] = ()) -> str:
    """Return the page of a plan of several engines; `said`: what the planner says beside it."""
    first = topology.engines[0].plan
    page = HtmlPage(
        title=f"{first.model.name} on {first.cluster.name}, {len(topology.engines)} engines",
        data={"plan": json.loads(topology.dump_json()), "beside": {"notes": list(said)}},
        files={f"engine-{i}.svg": cards_svg(own) for i, own in enumerate(topology.plans)},
    )
    predicted = topology.predicted
    promised = (
        note("The plan predicts no times.")
        if predicted is None
        else numbers(
            {
                "engines": str(len(topology.engines)),
                "tokens/s": f"{predicted.output_tokens_per_s:.1f}",
                "whole job": f"{predicted.total_s:.3f} s",
                "quality loss": shown_loss(predicted.sum_omega),
            }
        )
    )
    page.section("The plan", promised, lines(said))
    for number, engine in enumerate(topology.engines):
        plan = engine.plan
        page.section(
            f"Engine {number}: {engine.rows} rows",
            headline_numbers(plan),
            note(job_text(plan)),
            lines(plain_words(plan)),
            cards(plan),
            links_table(plan),
            stages_table(plan),
            memory_table(plan),
        )
    return page.text()


def _data(plan: Plan) -> Any:
    return json.loads(plan.dump_json())


def note(text: str) -> str:
    """Return a paragraph in a quiet colour."""
    return f'<p class="note">{escape(text)}</p>' if text else ""


def headline_numbers(plan: Plan) -> str:
    """Return what a plan promises, in a few numbers."""
    predicted = plan.predicted
    if predicted is None:
        return note("The plan predicts no times.")
    how = "estimated" if predicted.estimated else "predicted"
    named = {
        f"tokens/s, {how}": f"{predicted.output_tokens_per_s:.1f}",
        "first token of all": f"{predicted.prefill_s:.3f} s",
        "whole job": f"{predicted.total_s:.3f} s",
        "quality loss": shown_loss(predicted.sum_omega),
        "known to be": plan.known_as,
    }
    if plan.solver.gap is not None and plan.solver.status != "optimal":
        named[f"above the best of {plan.compared_with} by at most"] = f"{plan.solver.gap:.2%}"
    return numbers(named)


def job_text(plan: Plan) -> str:
    """Return the job and how it is cut, in a sentence."""
    work = plan.workload
    chunk = "" if plan.prefill_chunk is None else f", chunks of {plan.prefill_chunk} tokens"
    return (
        f"{work.requests} of {work.prompt_len} prompt tokens and {work.gen_len} new ones; "
        f"micro-batches of {plan.prefill_microbatch} (prefill{chunk}) and "
        f"{plan.decode_microbatch} (decode); {work.dtype}, {work.kv.value}"
    )


def plain_words(plan: Plan) -> list[str]:
    """Return what the plan does and what bounds it, from its own fields."""
    counts = ", ".join(f"{stage.device} {stage.num_layers}" for stage in plan.stages)
    said = [f"The {plan.model.num_layers} layers of the model are split by devices: {counts}."]
    if len(plan.stages) == 1:
        said = [f"{plan.stages[0].device} runs all {plan.model.num_layers} layers."]
    said.append(f"Weights are stored as {bits_of(plan.precisions)}.")
    predicted = plan.predicted
    if predicted is not None:
        scale = (
            "0 is none"
            if predicted.all_4bit_omega is None
            else f"0 is none, {shown_loss(predicted.all_4bit_omega)} is every layer at 4 bits"
        )
        said.append(f"The predicted quality loss is {shown_loss(predicted.sum_omega)} ({scale}).")
        slow = next(s for s in plan.stages if s.device == predicted.bottleneck)
        phase = "tokens" if predicted.decode_s >= predicted.prefill_s else "prompts"
        said.append(
            f"{slow.device} is the bottleneck of {phase}: {times_text(slow)}."
            if len(plan.stages) > 1
            else f"{times_text(slow)[0].upper()}{times_text(slow)[1:]}."
        )
        if predicted.estimated:
            said.append("Times are estimated from a table of devices; llmpq-profile measures them.")
    full = [s for s in plan.stages if s.memory is not None and _nearly_full(s)]
    if full:
        said.append(f"Nearly full: {', '.join(s.device for s in full)}.")
    return said


def _nearly_full(stage: StagePlan) -> bool:
    memory = stage.memory
    return memory is not None and memory.total_bytes > 0.95 * memory.limit_bytes


def cards(plan: Plan, *, beside: bool = False) -> str:
    """Return the devices to one scale of memory, in the order of the pipeline.

    `beside`: others of the page came before, and brought patterns and legend.
    """
    items = []
    loads = link_loads(plan)
    for index, stage in enumerate(plan.stages):
        slowest = plan.predicted is not None and plan.predicted.bottleneck == stage.device
        load = loads[index] if loads else None
        where = "" if stage.node == "elsewhere" else f" on {stage.node}"
        shown = [
            f"<h3>{index}. {escape(stage.device)}</h3>",
            f"<p>{escape(stage.kind)}{escape(where)}</p>",
            f'<svg viewBox="0 0 {CARD} {TALL}" role="img" aria-label={card_label(plan, index)} '
            f'font-family="sans-serif">{card(plan, index)}</svg>',
            f"<p>layers {stage.layers[0]}-{stage.layers[1] - 1}; {memory_text(stage)}</p>",
            f"<p>{times_text(stage)}</p>",
        ]
        if slowest:
            shown.append('<p class="badge">bottleneck</p>')
        if load is not None:
            shown.append(
                f"<p>to {escape(load.target)}: {format_size(load.prefill_bytes)} a prefill step, "
                f"{format_size(load.decode_bytes)} a decode step</p>"
            )
        items.append(f"<li{' class=slowest' if slowest else ''}>{''.join(shown)}</li>")
    drawn = f'<ol class="cards">{"".join(items)}</ol>'
    if beside:
        return drawn
    said = note("Each device is as tall as its memory; each bar at its foot is a layer.")
    return f'<svg class="defs" aria-hidden="true">{patterns()}</svg>{_key(plan)}{drawn}{said}'


def _key(plan: Plan) -> str:
    bits = sorted({p.weight_bits for p in plan.precisions}, reverse=True)
    named = [
        (f"url(#bits-{b})" if b in COLOURS else PARTS["weights"], f"{b}-bit layer") for b in bits
    ]
    held = {part.name for i in range(len(plan.stages)) for part in memory_parts(plan, i)}
    named += [(PARTS[name], name) for name in PARTS if name in held and name != "weights"]
    boxes = "".join(
        f'<li><svg viewBox="0 0 14 12" aria-hidden="true"><rect width="14" height="12" '
        f'fill="{fill}"/></svg> {name}</li>'
        for fill, name in named
    )
    return f'<ul class="key" aria-label="legend">{boxes}</ul>'


def links_table(plan: Plan) -> str:
    """Return what links carry."""
    rows = [
        [
            load.source,
            load.target,
            format_size(load.prefill_bytes),
            ms(load.prefill_s),
            format_size(load.decode_bytes),
            ms(load.decode_s),
        ]
        for load in link_loads(plan)
    ]
    columns = ("from", "to", "prefill step", "takes", "decode step", "takes ")
    return table(
        columns, rows, caption="hidden states, and tokens on the way back", left=("from", "to")
    )


def stages_table(plan: Plan) -> str:
    """Return stages with bits and predicted times; the bottleneck is marked."""
    bottleneck = None if plan.predicted is None else plan.predicted.bottleneck
    names = [stage.device for stage in plan.stages]
    rows = [
        [
            stage.device,
            f"{stage.layers[0]}-{stage.layers[1] - 1}",
            ", ".join(f"{run.count} x {run.precision.value}" for run in layer_runs(stage)),
            "-" if stage.prefill_s is None else ms(stage.prefill_s),
            "-" if stage.decode_s is None else ms(stage.decode_s),
            "bottleneck" if stage.device == bottleneck else "",
        ]
        for stage in plan.stages
    ]
    return table(
        ("stage", "layers", "bits", "prefill step", "decode step", "role"),
        rows,
        caption="layers and predicted times of a step",
        left=("stage", "layers", "bits", "role"),
        marked=names.index(bottleneck) if bottleneck in names else None,
    )


def memory_table(plan: Plan) -> str:
    """Return what each device holds."""
    held = {part.name for i in range(len(plan.stages)) for part in memory_parts(plan, i)}
    names = [name for name in PARTS if name in held]
    rows = []
    for index, stage in enumerate(plan.stages):
        if stage.memory is not None:
            sizes = {part.name: part.nbytes for part in memory_parts(plan, index)}
            cells = [format_size(sizes.get(name, 0)) for name in names]
            rows.append([stage.device, *cells, format_size(stage.memory.limit_bytes)])
    return table(
        ("device", *names, "limit"), rows, caption="bytes of each device", left=("device",)
    )


def predicted_timeline(page: HtmlPage, plan: Plan) -> str:
    """Return when each stage computes which micro-batch, as the plan predicts it."""
    found = predicted_steps(plan)
    if not found.steps:
        return ""
    names = [stage.device for stage in plan.stages]
    bars = [
        {
            "stage": names[step.stage],
            "kind": step.kind,
            "start_s": round(step.start_s, 6),
            "end_s": round(step.end_s, 6),
            "ms": _step_ms(plan.stages[step.stage], step.kind),
            "what": f"prefill {step.batch}"
            if step.kind == "prefill"
            else f"decode {step.batch}, token {step.token + 1}",
        }
        for step in found.steps
    ]
    whole = found.tokens_shown >= found.tokens
    shown = "all" if whole else f"the first {found.tokens_shown}"
    caption = (
        f"A bar is a micro-batch on a stage; shown are {shown} of {found.tokens} tokens of each "
        "request. Each step takes the mean time of its stage."
    )
    return page.chart("predicted-pipeline", timeline(names, bars), caption, zooms=True)


def _step_ms(stage: StagePlan, kind: str) -> float:
    return 1e3 * ((stage.prefill_s if kind == "prefill" else stage.decode_s) or 0.0)


def _front(page: HtmlPage, beside: Beside) -> list[str]:
    if not beside.front:
        return []
    points, losses = [], []
    for index, plan in enumerate(beside.front):
        predicted = plan.predicted
        assert predicted is not None, "the planner always predicts"
        losses.append(shown_loss(predicted.sum_omega))
        points.append(
            {
                "plan": index + 1,
                "total_s": predicted.total_s,
                "tokens_per_s": predicted.output_tokens_per_s,
                "sum_omega": predicted.sum_omega,
                "bits": bits_of(plan.precisions),
                "stages": stages_text(plan),
                "chosen": beside.chosen.get(index, ""),
            }
        )
    rows = [
        [
            str(point["plan"]),
            f"{point['total_s']:.3f} s",
            f"{point['tokens_per_s']:.1f}",
            loss,
            str(point["bits"]),
            str(point["stages"]),
            str(point["chosen"]),
        ]
        for point, loss in zip(points, losses, strict=True)
    ]
    columns = ("plan", "time", "tokens/s", "quality loss", "bits", "stages", "asked for by")
    mine = next((i for i, how in beside.chosen.items() if "balanced" in how), None)
    each = "".join(
        f"<details><summary>Plan {index + 1}: {bits_of(plan.precisions)}, "
        f"{plan_outcome(plan)}</summary>{cards(plan, beside=True)}</details>"
        for index, plan in enumerate(beside.front)
        if len(plan.stages) <= 16
    )
    return [
        page.chart("front", front(points), "Each point is a plan that no other beats in both."),
        table(
            columns,
            rows,
            caption="plans, fastest first",
            left=("bits", "stages", "asked for by"),
            marked=mine,
        ),
        note(beside.coverage),
        each,
    ]


def stages_text(plan: Plan) -> str:
    """Return which device has which layers."""
    return " | ".join(f"{s.device} {s.layers[0]}-{s.layers[1] - 1}" for s in plan.stages)


def _methods(page: HtmlPage, beside: Beside) -> list[str]:
    rows = [row for row in beside.methods if "why_not" not in row]
    if not beside.methods:
        return []
    drawn = [{"method": r["method"], "tokens_per_s": r["tokens_per_s"]} for r in rows]
    cells = [
        [
            row["method"],
            row.get("bits") or row.get("why_not", ""),
            shown_loss(row["omega"]) if "omega" in row else "-",
            f"{row['time_s']:.3f} s" if "time_s" in row else "-",
            f"{row['tokens_per_s']:.1f}" if "tokens_per_s" in row else "-",
            "-" if row.get("exact_s") is None else f"{row['exact_s']:.3f} s",
        ]
        for row in beside.methods
    ]
    columns = ("method", "bits", "quality loss", "time", "tokens/s", "exact at its loss")
    return [
        page.chart("methods", methods(drawn), "Tokens/s of each method's plan.") if drawn else "",
        table(columns, cells, caption="methods side by side", left=("method", "bits")),
    ]

"""The plan as people read it: a table of stages, a table of memory, a few sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.devices.device_list import ELSEWHERE
from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from llmpq.models.stored_head import has_further_layers, has_mtp_head
from llmpq.planner.cli.alternatives import Speed
from llmpq.plans.plan import Plan, Robustness, StagePlan
from llmpq.precision import KVPrecision, Precision, bits_of
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.units import format_size, short_size, shown, shown_loss
from llmpq.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from llmpq.planner.cli.alternatives import MethodRow


def bits_text(stage: StagePlan) -> str:
    """Return a stage's precisions run by run: `8 x w4a16, 2 x w8a16`."""
    runs = [(p, len(list(run))) for p, run in groupby(stage.precisions)]
    if len(runs) > 4:
        kinds = sorted(set(stage.precisions), key=lambda p: -p.weight_bits)
        return ", ".join(f"{stage.precisions.count(p)} x {p.value}" for p in kinds) + " (mixed)"
    return ", ".join(f"{count} x {p.value}" for p, count in runs)


def rounding_text(plan: Plan, stage: StagePlan) -> str:
    """Return the precision of a CPU's activations, where it is not the usual one."""
    rounds = stage.is_cpu and plan.quantization.cpu_activations == "int8"
    few_bits = any(p.weight_bits < p.activation_bits for p in stage.precisions)
    return ", int8 activations" if rounds and few_bits else ""


def head_text(plan: Plan, stage: StagePlan) -> str:
    """Return the output matrix's bits where its stage has it in fewer than 16."""
    own = stage is plan.stages[-1] and plan.settings().head_bits == 8
    return ", output matrix w8a16" if own else ""


def stage_table(plan: Plan) -> Table:
    """Return stage, device, layers, bits, memory and times.

    Times are of the same requests in either phase, all of the batch: of their prompts, and of one
    more token each. A stage waits for others besides.
    """
    from rich import box
    from rich.table import Table

    work = plan.workload
    prompts = -(-work.batch // plan.prefill_microbatch) * len(plan.chunks)
    tokens = -(-work.batch // plan.decode_microbatch)
    table = Table(box=box.SIMPLE_HEAD, title=None, pad_edge=False)
    for name, justify in (
        ("stage", "right"),
        ("device", "left"),
        ("layers", "left"),
        ("bits", "left"),
        ("memory", "right"),
        (f"prompts of {work.batch}", "right"),
        (f"a token of {work.batch}", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    marks = _slowest(plan)
    for index, stage in enumerate(plan.stages):
        memory = stage.memory
        table.add_row(
            str(index),
            stage.device if stage.node == ELSEWHERE else f"{stage.device} ({stage.node})",
            f"{stage.layers[0]}-{stage.layers[1] - 1}",
            bits_text(stage) + rounding_text(plan, stage) + head_text(plan, stage),
            f"{format_size(memory.total_bytes)} / {format_size(memory.limit_bytes)}"
            if memory
            else "",
            "" if stage.prefill_s is None else _ms(prompts * stage.prefill_s),
            "" if stage.decode_s is None else _ms(tokens * stage.decode_s),
            marks[index],
        )
    return table


ALIKE = 0.99
"""A stage is the slowest of a phase where the next one takes less than this share of its time."""


def _slowest(plan: Plan) -> list[str]:
    """Return the mark of every stage: the slowest of prompts, of tokens, of both, or none."""
    found: list[list[str]] = [[] for _ in plan.stages]
    for phase, times in (
        ("prompts", [stage.prefill_s for stage in plan.stages]),
        ("tokens", [stage.decode_s for stage in plan.stages]),
    ):
        known = [seconds or 0.0 for seconds in times]
        *_, second, first = [0.0, *sorted(known)]
        if len(known) > 1 and first and second < ALIKE * first:
            found[known.index(first)].append(phase)
    return [f"<- slowest of {' and '.join(phases)}" if phases else "" for phases in found]


WIDE = 140
"""Columns of a terminal from which on tables have their sizes in full."""


def memory_table(plan: Plan, width: int = WIDE) -> Table:
    """Return where each stage's memory goes, and that of the devices that share one.

    `width`: columns of the terminal.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    prefixes = any(stage.memory and stage.memory.prefix_bytes for stage in plan.stages)
    columns = ["device", "weights", "embed/head", "KV", "prefixes", "workspace", "context"]
    if not prefixes:
        columns.remove("prefixes")
    for name in (*columns, "total", "limit", "free"):
        left = name == "device"
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    written = format_size if width >= WIDE else short_size
    listed = [
        (stage is not one, one)
        for stage in plan.stages
        for one in (stage, *(stage.members if stage.shares else ()))
    ]
    for is_member, stage in listed:
        m = stage.memory
        if m is None:
            continue
        sizes = (
            m.weights_bytes,
            m.embedding_bytes,
            m.kv_bytes,
            *([m.prefix_bytes] if prefixes else []),
            m.workspace_bytes,
            m.context_bytes,
            m.total_bytes,
            m.limit_bytes,
            m.limit_bytes - m.total_bytes,
        )
        name = f"  {stage.device}" if is_member else stage.device
        table.add_row(name, *map(written, sizes))
    return table


def headline(plan: Plan, compared_with: str | None = None) -> list[str]:
    """Return what the plan promises, in a few lines.

    `compared_with`: the plans that its bound is of, where these are more than its own stages say.
    """
    work, predicted, solver = plan.workload, plan.predicted, plan.solver
    served = plan.traffic is not None  # the plan's job is then what its engine was planned as
    job = f"{work.requests} of {work.prompt_len} + {work.gen_len} tokens"
    lines = [
        f"{plan.model.name} on {plan.cluster.name}: {'live traffic' if served else job}, "
        f"{work.dtype}, {_cache_text(work)}",
        f"micro-batches: prefill {plan.prefill_microbatch}, decode {plan.decode_microbatch}"
        + (f"; {chunks_line(plan)}" if plan.prefill_chunk is not None else ""),
    ]
    if plan.pool is not None:
        most = format_size(max(plan.pool.stage_bytes))
        packed = work.kv is not KVPrecision.KV16
        newest = f", and the newest {BLOCK_TOKENS} of each in 16 bits" if packed else ""
        lines.append(
            f"KV pool: {plan.pool.num_blocks} blocks, {plan.pool.tokens} tokens at once of "
            f"requests of any lengths{newest}; at most {most} a stage"
        )
        if plan.pool.state_bytes:
            states = plan.pool.state_bytes
            kv = sum(plan.pool.stage_bytes) - work.batch * states
            lines.append(
                f"KV {format_size(kv // plan.pool.tokens)} a token, recurrent state "
                f"{format_size(states)} a request"
            )
    if predicted is not None:
        source = "estimated, not profiled" if predicted.estimated else "from the profile"
        if served:
            lines.append(f"times {source}")
        else:
            lines.append(
                f"predicted: {predicted.total_s:.3f} s (prefill {predicted.prefill_s:.3f}, decode "
                f"{predicted.decode_s:.3f}); times {source}"
            )
            lines.append(speed_line(plan))
        lines += loss_lines(plan)
    lines.append(f"{solver.method}: {quality_of(plan, compared_with)}")
    if solver.robustness is not None:
        lines.append(robustness_line(solver.robustness, plan.compared_with))
    return lines


TENTHS = 1000
"""Shares are shown in tenths of a per cent."""


def shown_proven(share: float) -> str:
    """Return a share that holds, rounded down."""
    return f"{math.floor(share * TENTHS) / TENTHS:.1%}"


def robustness_line(found: Robustness, plans: str) -> str:
    """Return by how much costs may be wrong with a plan near the best of some plans.

    What is proven is rounded down, what is refuted up; within a tenth of a per cent they are one.
    """
    near, share = f"within {found.near:.0%} of the best of {plans}", shown_proven(found.proven)
    if found.proven < 1 / TENTHS:
        line = f"robust: no cost error is shown to keep the plan {near}"
    else:
        line = f"robust: {near} while every cost is off by up to {share} either way, each by itself"
    if found.refuted is None:
        return line
    other = f"another may be better by more ({found.better})"
    if found.refuted - found.proven <= 1 / TENTHS:
        return f"{line}; beyond, {other}"
    return f"{line}; at {math.ceil(found.refuted * TENTHS) / TENTHS:.1%} {other}"


def _cache_text(work: Workload) -> str:
    """Return the precision of the cache: 16 bits mean that it is not quantised."""
    plain = work.kv is KVPrecision.KV16 and work.dtype == "float32"
    return "KV in float32" if plain else work.kv.value


WARNING = "warning: "


def warnings_of(notes: Sequence[str]) -> list[str]:
    """Return the notes that warn; they stand above a plan."""
    return [note for note in notes if note.startswith(WARNING)]


def remarks_of(notes: Sequence[str]) -> list[str]:
    """Return the other notes as lines; they stand below a plan."""
    return [f"note: {note}" for note in notes if not note.startswith(WARNING)]


def speed_line(plan: Plan) -> str:
    """Return what one request waits and gets, and what the whole job does."""
    speed = Speed.of_plan(plan)
    each = "" if speed.request_per_s is None else f", then {shown(speed.request_per_s)} tokens/s"
    if speed.batch == 1:
        whole = f" (with its prompt {shown(speed.job_per_s)})" if each else ""
        return f"first token after {speed.first_token_s:.3f} s{each}{whole}"
    each = f"{each} a request" if each else ""
    return (
        f"first token of the last request after {speed.first_token_s:.3f} s (all {speed.batch} "
        f"sent at once){each}; the job {shown(speed.job_per_s)} tokens/s"
    )


def chunks_line(plan: Plan) -> str:
    """Return in what chunks prompts are computed."""
    count = len(plan.chunks)
    steps = "whole" if count == 1 else f"in {count} steps"
    return f"prompts {steps}, chunks of {plan.prefill_chunk} tokens"


GUESSES = {
    "none": "quality is not priced",
    "generic": "a guess from the variance of rounding, equal for all layers",
    "synthetic": "made up for the model, not measured",
    "random": "drawn at random",
}
"""Indicators that were not measured on the model, and what they are."""


UNROUNDED = Precision.W16A16


def loss_lines(plan: Plan) -> list[str]:
    """Return the plan's quality loss beside that of uniform precisions, and where it is from."""
    predicted, indicator = plan.predicted, plan.solver.sensitivity
    if predicted is None:
        return []
    if indicator == "generic" and predicted.sum_omega == 0 and set(plan.precisions) != {UNROUNDED}:
        return ["quality loss: 0, every layer keeps the checkpoint's own codes"]
    uniform = {"8 bits": predicted.all_8bit_omega, "4 bits": predicted.all_4bit_omega}
    known = [f"at {b} {shown_loss(omega)}" for b, omega in uniform.items() if omega is not None]
    beside = f" (all layers {', '.join(known)})" if known else ""
    source, loss = GUESSES.get(indicator, "measured"), shown_loss(predicted.sum_omega)
    lines = [f"quality loss: {loss}{beside}; indicator {indicator}, {source}"]
    worst = predicted.all_4bit_omega
    if worst is not None and predicted.sum_omega > worst * NOT_WORSE:
        lines.append(
            "warning: the plan loses more quality than all layers at 4 bits; less is lost with "
            + " or ".join(_less_loss(plan))
        )
    return lines


NOT_WORSE = 1.01
"""A loss up to so many times that of 4 bits everywhere is not warned of."""


def _less_loss(plan: Plan) -> list[str]:
    """Return what may lose less than a plan: no choice that it has already."""
    solver, bits = plan.solver, max(precision.weight_bits for precision in plan.precisions)
    ways = {
        "more bits (--bits)": bits < 4,
        "more KV bits (--kv)": plan.workload.kv is not KVPrecision.KV16,
        "--prefer quality": solver.prefer not in (None, "quality"),
        "a larger --theta": solver.prefer is None and solver.theta > 0,
        "more memory": True,
        "a shorter context": True,
        "a smaller batch": plan.workload.batch > 1,
    }
    return [way for way, is_one in ways.items() if is_one]


STEP_BY_STEP = "the time is predicted step by step"
"""How a plan says that it takes more than the times which the search proves it best for."""


def quality_of(plan: Plan, compared_with: str | None = None) -> str:
    """Return how good the plan is known to be; `compared_with`: of which plans the bound is."""
    solver = plan.solver
    if solver.value is None:
        return solver.status
    if solver.prefer is not None and solver.status == "optimal":
        proof = f"proven {plan.known_as}: none is faster without losing more quality"
        return f"--prefer {solver.prefer}, {proof}"
    how = f"theta {solver.theta:.4g}, {solver.objective}"
    how = how if solver.prefer is None else f"--prefer {solver.prefer}: {how}"
    value = f"objective {solver.value:.6g} ({how})"
    if solver.gap is None:
        return f"{value}, no bound"
    if solver.status == "optimal":
        return f"{value}, proven {plan.known_as}"
    best = f"the best of {compared_with or plan.compared_with} (bound {solver.bound:.6g})"
    above = f"{value}, at most {solver.gap:.2%} above {best}"
    if STEP_BY_STEP in solver.note:
        return f"{above}: the bound takes a stage's mean time over all chunks and tokens"
    return above


def print_plan(
    console: Console,
    plan: Plan,
    *,
    seconds: float | None = None,
    alternatives: Sequence[str] = (),
    notes: Sequence[str] = (),
    compared_with: str | None = None,
) -> None:
    """Print warnings among the notes, headline, alternatives, stages and memory."""
    for line in (*warnings_of(notes), *headline(plan, compared_with), *alternatives):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if seconds is not None:
        console.print(f"solved in {seconds:.2f} s", highlight=False)
    console.print(stage_table(plan))
    console.print(memory_table(plan, console.width))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 10 else f"{seconds:.1f} s"


def comparison_table(rows: Mapping[str, MethodRow | str], *, budget: float | None) -> Table:
    """Return the methods side by side, as plans or why there is none.

    Each is compared with the exact method at no more quality loss than its own, or than a budget.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    exact = "exact at its loss" if budget is None else f"exact at {budget:g}"
    columns = ("bits", "quality loss", "time", "tokens/s", exact, "slower", "solved in")
    for name in columns:
        table.add_column(name, justify="left" if name == "bits" else "right")
    for method, row in rows.items():
        if isinstance(row, str):
            table.add_row(method, row)
            continue
        table.add_row(
            method,
            row.bits,
            f"{shown_loss(row.omega)}",
            f"{row.time_s:.3f} s",
            f"{row.tokens_per_s:.1f}",
            "-" if row.exact_s is None else f"{row.exact_s:.3f} s",
            "-" if row.exact_s is None else f"{row.time_s / row.exact_s:.3f}x",
            "" if row.solved_in_s is None else f"{row.solved_in_s:.2f} s",
        )
    return table


def front_table(plans: Sequence[Plan], chosen: int) -> Table:
    """Return the front of time against quality loss, fastest first; a star marks one of them.

    Losses are rounded up, so that each is a `--quality-budget` that its plan is within. Behind a
    time of a plan that is not proven stands a `?`.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = ("", "time", "tokens/s", "loss", "bits", "KV", "micro-\nbatches", "stages")
    for name in columns:
        left = name in ("bits", "stages")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for number, plan in enumerate(plans, start=1):
        predicted = plan.predicted
        assert predicted is not None, "the planner always predicts"
        proven = " " if plan.solver.status == "optimal" else "?"
        table.add_row(
            f"{number}*" if number == chosen + 1 else str(number),
            f"{predicted.total_s:.3f} s{proven}",
            f"{predicted.output_tokens_per_s:.1f}",
            shown_loss(predicted.sum_omega),
            bits_of(plan.precisions),
            plan.workload.kv.typed,
            f"{plan.prefill_microbatch}, {plan.decode_microbatch}",
            "\n".join(f"{s.device} {s.layers[0]}-{s.layers[1] - 1}" for s in plan.stages),
        )
    return table


def mtp_notes(plan: Plan, spec: ModelSpec) -> list[str]:
    """Say what becomes of the layers that predict further tokens; nothing where a plan has them."""
    drafting = plan.speculation is not None and plan.speculation.mode == "mtp"
    if drafting or not spec.mtp_layers:
        return []
    layers = f"{spec.mtp_layers} layer{'s' * (spec.mtp_layers > 1)}"
    if FAMILIES[spec.family].names.mtp is None:
        return [f"left out: {layers} for further tokens (MTP), which llmpq does not run here"]
    if not has_mtp_head(plan.model.path, spec):
        held = has_further_layers(plan.model.path, spec)
        why = "the files hold no whole head that drafts"
        if is_gguf(plan.model.path or ""):
            why = "llmpq reads no head that drafts from GGUF files"
        return [f"left out: {layers} for further tokens (MTP): {why}"] if held else []
    how = "--speculate mtp drafts with the first one"
    return [f"not loaded: {layers} for further tokens (MTP): {how}"]

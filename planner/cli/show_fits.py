"""Prints `llmpq-algo fits`: the answer, the choices of bits, the devices, what would fit."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmpq.errors import DoesNotFitError
from llmpq.planner.cli.fit_report import BatchFit, BitsFit, FitReport, fit_answer
from llmpq.planner.cli.report import GUESSES, WIDE, remarks_of, warnings_of
from llmpq.planner.cli.show_plan import open_console, say
from llmpq.planner.problem.requests import FitsRequest
from llmpq.units import format_size, short_size, shown_loss

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


BEYOND = " *"
"""Behind contexts longer than the model's positions."""


def show_fits(request: FitsRequest) -> None:
    """Answer on stdout; `DoesNotFitError` where nothing fits."""
    found = fit_answer(request)
    if request.json:
        sys.stdout.write(json.dumps(as_json(found.report), indent=1) + "\n")
    else:
        print_fits(open_console(), found.report)
        if found.plan is not None:
            say(open_console(), f"plan it: {next_command(request, found.report)}")
    if found.refusal is not None:
        sys.stdout.flush()
        raise DoesNotFitError(found.refusal)


def as_json(report: FitReport) -> dict[str, Any]:
    """Return the report as plain data."""
    return {"schema": 1, **asdict(report)}


def fits_text(report: FitReport) -> str:
    """Return what `print_fits` prints."""
    from io import StringIO

    from rich.console import Console

    console = Console(file=StringIO(), width=140)
    print_fits(console, report)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def print_fits(console: Console, report: FitReport) -> None:
    """Print a report for a person."""
    say(console, report.said)
    state = format_size(report.state_bytes_per_request)
    each = f"KV cache {format_size(report.kv_bytes_per_token)} a token ({report.dtype})"
    each += f", recurrent state {state} a request" if _has_state(report) else ""
    if report.window_bytes_per_request:
        window = format_size(report.window_bytes_per_request)
        each += f", layers with a window {window} a request at most"
    say(console, each)
    console.print(forms_table(report))
    loads = (load for form in report.forms for load in form.loads)
    if any(load.longest_context > report.max_context for load in loads):
        say(console, f"{BEYOND.strip()}: beyond the model's {report.max_context:,} positions")
    source = GUESSES.get(report.indicator, "measured")
    unit = "1: all layers at 4 bits" if report.indicator == "generic" else "indicator's unit"
    say(console, f"loss of quality (0: none, {unit}): {report.indicator}, {source}")
    times = "estimated from the table of devices" if report.estimated else "from a profile"
    say(console, f"tokens/s: of all requests together, at the end of the context; {times}")
    if report.fits:
        console.print(devices_table(report, console.width))
        if report.engines is not None:
            say(console, f"faster: {report.engines}")
    elif report.remedies:
        say(console, "what fits, cheapest first:")
        for way in report.remedies:
            say(console, f"  {way}")
    for line in (*warnings_of(report.notes), *remarks_of(report.notes)):
        say(console, line)


def _has_state(report: FitReport) -> bool:
    return report.state_bytes_per_request > 0


def forms_table(report: FitReport) -> Table:
    """Return the choices of bits, most precise first, and what each gives."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("weights")
    columns = ["KV", "fits", "loss"]
    for load in report.forms[0].loads:
        columns += [f"context of {load.batch}", "first token", "tokens/s"]
    for name in columns:
        table.add_column(name, justify="left" if name == "fits" else "right")
    for form in report.forms:
        cells = [form.weights, form.kv.removeprefix("kv"), _fits(form)]
        cells.append(shown_loss(form.quality_loss))
        for load in form.loads:
            cells += [
                _context(load, report.max_context),
                _seconds(load.first_token_s),
                _rate(load.tokens_per_s),
            ]
        table.add_row(*cells)
    return table


def _fits(form: BitsFit) -> str:
    """Return whether a choice fits, and by which flags it is allowed where none were given."""
    if not form.fits:
        return "no"
    return f"with {form.flags}" if form.flags else "yes"


def _context(load: BatchFit, positions: int) -> str:
    beyond = BEYOND if load.longest_context > positions else ""
    return f"{load.longest_context:,}{beyond}" if load.longest_context else "-"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{_number(seconds)} s"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else _number(rate)


def _number(value: float) -> str:
    """Return a number of three digits, and of all before the point."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def devices_table(report: FitReport, width: int) -> Table:
    """Return where the memory of every device goes, for a terminal of so many columns."""
    from rich import box
    from rich.table import Table

    narrow = width < WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0) if narrow else (0, 1))
    table.add_column("device", no_wrap=True)
    table.add_column("layers", no_wrap=True)
    names = ["memory", "left free", "weights", "embed/head", "KV", "of it a token"]
    names += ["a request", "of prefixes"] if _has_state(report) else []
    for name in (*names, "workspace", "CUDA, torch", "free"):
        table.add_column(name, justify="right")
    for own in report.devices:
        layers = "left out" if own.layers is None else f"{own.layers[0]}-{own.layers[1] - 1}"
        sizes = [own.memory_bytes, own.reserve_bytes, own.weights_bytes, own.embedding_bytes]
        sizes += [own.kv_bytes, own.kv_bytes_per_token]
        sizes += [own.state_bytes_per_request, own.prefix_bytes] if _has_state(report) else []
        sizes += [own.workspace_bytes, own.context_bytes, own.free_bytes]
        table.add_row(own.device, layers, *map(short_size if narrow else format_size, sizes))
    return table


def next_command(request: FitsRequest, report: FitReport) -> str:
    """Return the command that plans the same requests."""
    words = ["llmpq-algo"]
    for name in ("model", "model_name", "model_size", "devices", "cluster", "from_ray"):
        words += _flag(name, getattr(request, name))
    for name in ("device_names", "device_numbers"):
        values = getattr(request, name)
        words += [f"--{name.replace('_', '-')}", *map(str, values)] if values else []
    words += ["--context", str(report.context), "--batch", str(request.batch)]
    words += [] if request.gen_len == 100 else ["--gen-len", str(request.gen_len)]
    for name in ("bits", "kv", "weight_group_size", "head_bits"):
        words += _flag(name, getattr(request, name))
    for name in ("reserve", "gpu_memory_utilization", "costs", "omega_file"):
        words += _flag(name, getattr(request, name))
    for name in ("symmetric", "probe_cpu"):
        words += [f"--{name.replace('_', '-')}"] if getattr(request, name) else []
    words += [] if request.dtype == "auto" else ["--dtype", request.dtype]
    return shlex.join([*words, "-o", "plan.json"])


def _flag(name: str, value: object) -> list[str]:
    return [] if value is None else [f"--{name.replace('_', '-')}", str(value)]

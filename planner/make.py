"""Makes a plan: by names, as `llmpq-algo` does (`make_plan`), or from values (`plan_workload`).

`plan_workload` is what a run without a plan asks for. With `prefer="quality"`, its default, layers
keep the precision they are stored in where they fit; where they do not, they lose as little as
they must (planner/front/preference.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmpq.cluster import Cluster
from llmpq.cost_model import CostModel
from llmpq.default_dtype import dtype_note
from llmpq.errors import DoesNotFitError, unknown_name
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan, Prefer
from llmpq.planner.answer import Answer, Wish, answer, read_wish
from llmpq.planner.cli.arguments import DTYPES, METHODS, PREFERENCES, plan_request
from llmpq.planner.costs.probed import book_of
from llmpq.planner.evaluate.step_by_step import step_note
from llmpq.planner.problem.cpu_here import outdated_rates, rates_for
from llmpq.planner.problem.kept_grid import kept_grid
from llmpq.planner.problem.make_problem import (
    default_bits,
    generic_sensitivity,
    make_problem,
    open_head,
)
from llmpq.planner.problem.own_codes import with_own_codes
from llmpq.planner.problem.positions import positions_note
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.stored_precisions import offered, stored_layers
from llmpq.precision import Precision
from llmpq.workload import Workload

TIME_LIMIT_S = 60.0


def make_plan(
    model: str | Path,
    *,
    revision: str | None = None,
    devices: str | None = None,
    cluster: str | Path | None = None,
    batch: int = 16,
    prompt_len: int = 512,
    gen_len: int = 100,
    bits: str | None = None,
    kv: str = "16",
    dtype: str = "auto",
    gpu_memory_utilization: float | None = None,
    costs: str | Path | None = None,
    omega_file: str | Path | None = None,
    prefer: Prefer | None = None,
    theta: float | None = None,
    quality_budget: float | None = None,
    method: str | None = None,
    time_limit_s: float = 60.0,
) -> Plan:
    """Return the best plan of a job, as `llmpq-algo` makes it with the flags of these names.

    The devices are `devices` ("4090,3090:2,cpu"), those of a cluster file, or this machine's.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if prefer is not None and prefer not in PREFERENCES:
        raise unknown_name("prefer", prefer, PREFERENCES)
    if method is not None and method not in METHODS:
        raise unknown_name("method", method, METHODS)
    wishes: dict[str, object] = {
        "--model": model,
        "--revision": revision,
        "--devices": devices,
        "--cluster": cluster,
        "--batch": batch,
        "--prompt-len": prompt_len,
        "--gen-len": gen_len,
        "--bits": bits,
        "--kv": kv,
        "--dtype": dtype,
        "--gpu-memory-utilization": gpu_memory_utilization,
        "--costs": costs,
        "--omega-file": omega_file,
        "--prefer": prefer,
        "--theta": theta,
        "--quality-budget": quality_budget,
        "--method": method,
        "--time-limit": time_limit_s,
    }
    words = [str(word) for pair in wishes.items() if pair[1] is not None for word in pair]
    request = plan_request(words)
    problem, path, _ = make_problem(request)
    return answer(problem, read_wish(request, problem.cluster), path).plan


@dataclass(frozen=True, kw_only=True)
class MadePlan:
    """A plan and what to say about it."""

    plan: Plan
    seconds: float
    notes: tuple[str, ...]

    def with_notes(self, notes: Sequence[str]) -> MadePlan:
        """Return it with more to say."""
        return replace(self, notes=(*notes, *self.notes))

    def text(self, width: int = 110) -> str:
        """Return the plan's table as `llmpq-algo` prints it, and the notes."""
        from io import StringIO

        from rich.console import Console

        from llmpq.planner.cli.report import print_plan

        console = Console(file=StringIO(), width=width)
        print_plan(console, self.plan, seconds=self.seconds)
        for note in self.notes:
            console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text


def plan_workload(
    model_dir: str | Path,
    cluster: Cluster,
    workload: Workload,
    *,
    costs: CostModel | None = None,
    bits: Sequence[Precision] | None = None,
    prefer: Prefer = "quality",
    windows: Sequence[int] = (),
    time_limit_s: float = TIME_LIMIT_S,
) -> MadePlan:
    """Return a plan of a job on the devices of a cluster; `DoesNotFitError` says what is short.

    `costs`: measured, of some kinds of device or all; the others are estimated. `windows`: batch
    sizes that will do instead of the workload's, best first: the first that fits is taken.
    """
    spec = ModelSpec.from_directory(model_dir)
    grid = kept_grid(model_dir, cluster.devices)
    stored = stored_layers(str(model_dir), spec, kept=grid)
    layers = () if stored is None else offered(stored, bits)
    own = grid or Quantization()
    if layers:
        allowed = tuple({precision for layer in layers for precision in layer})
        own = with_own_codes(own, model_dir, spec, allowed, workload.dtype_bytes)
    wish = Wish(
        method="exact",
        time_limit_s=time_limit_s,
        gap=1e-6,
        backend="highs",
        budget=None,
        kvs=(workload.kv,),
        typed=False,
        prefer=prefer,
    )

    def solved(choices: Sequence[Precision], batch: int) -> Answer:
        work = workload.model_copy(update={"batch": batch})
        problem = _problem(spec, cluster, work, costs, choices, layers, own)
        return answer(problem, wish, str(Path(model_dir)))

    usual = default_bits(None, costs, cluster)
    ways = _ways(solved, bits, layers, usual, whole_first=prefer == "quality")
    best = _first_that_fits(ways, windows or (workload.batch,))
    work, book = best.problem.workload, best.problem.costs
    notes = [dtype_note(spec, cluster, work.dtype), positions_note(spec, work), best.outcome.note]
    notes.append(step_note(best.problem, best.outcome.assignment))
    known = () if costs is None else costs.device_kinds
    rates = rates_for(cluster, work.dtype, profiled=known)
    notes += [found.text() for found in rates]
    notes += outdated_rates(cluster, work.dtype, profiled=known, taken=rates)
    notes += book.unprofiled(cluster.devices) + book.warnings(cluster.devices, work)
    return MadePlan(
        plan=best.plan,
        seconds=best.outcome.seconds,
        notes=tuple(note for note in notes if note),
    )


@dataclass(frozen=True, kw_only=True)
class _Way:
    """One way to choose precisions, and the smallest window for which it is worth taking."""

    solve: Callable[[int], Answer]
    least_window: int = 1


def _ways(
    solved: Callable[[Sequence[Precision], int], Answer],
    bits: Sequence[Precision] | None,
    layers: Sequence[Sequence[Precision]],
    usual: Sequence[Precision],
    *,
    whole_first: bool,
) -> list[_Way]:
    """Return how precisions may be chosen, best first."""
    if layers:
        stored = tuple(p for p in Precision if any(p in own for own in layers))
        return [_Way(solve=lambda batch: solved(stored, batch))]
    if bits is not None:
        return [_Way(solve=lambda batch: solved(bits, batch))]
    whole = _Way(solve=lambda batch: solved((Precision.W16A16,), batch), least_window=8)
    some = _Way(solve=lambda batch: solved(usual, batch))
    return [whole, some] if whole_first and Precision.W16A16 in usual else [some]


def _first_that_fits(ways: Sequence[_Way], windows: Sequence[int]) -> Answer:
    refusal: DoesNotFitError | None = None
    for way in ways:
        for batch in windows:
            if batch < min(way.least_window, windows[0]):
                continue
            try:
                return way.solve(batch)
            except DoesNotFitError as error:
                refusal = error
    assert refusal is not None, "there is a window at least"
    raise refusal


def _problem(
    spec: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    costs: CostModel | None,
    choices: Sequence[Precision],
    layers: tuple[tuple[Precision, ...], ...],
    quantization: Quantization,
) -> Problem:
    kvs = (workload.kv,)
    quantization = replace(quantization, head_bits=open_head(choices))
    known = () if costs is None else costs.device_kinds
    book = book_of(
        *(spec, cluster.devices, costs, rates_for(cluster, workload.dtype, profiled=known)),
        dtype=workload.dtype,
        precisions=choices,
        kvs=kvs,
        quantization=quantization,
    )
    return Problem(
        spec=spec,
        cluster=cluster,
        workload=workload,
        choices=tuple(choices),
        sensitivity=generic_sensitivity(spec, choices, kvs),
        costs=book,
        theta=0.0,
        quantization=quantization,
        offered=layers,
    )

"""How a plan of several engines is shown, and what simpler topologies would give beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmpq.planner.cli.alternatives import PROVEN_GAP, Speed, not_used
from llmpq.planner.cli.report import bits_text, loss_lines, robustness_line, warnings_of
from llmpq.planner.problem.limits import MOST_WAVES
from llmpq.planner.solving.answer import TIE, Answer, TopologyAnswer
from llmpq.planner.solving.plan_search import CUT
from llmpq.planner.solving.topology_search import TOPOLOGY_GAP
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology
from llmpq.units import format_size, shown, shown_loss

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from llmpq.devices.cluster import Device
    from llmpq.planner.solving.topologies import Simple


def topology_lines(
    best: Answer, found: TopologyAnswer | None, exactly: int | None = None
) -> list[str]:
    """Return what is best, and what the best card, pipeline and replicas give, a line each.

    Nothing where there is one device. `exactly`: so many engines were to be there.
    """
    if found is None:
        return _left_out(best, None)
    # A pipeline that runs rows in waves is planned for those of one.
    work = best.problem.workload if found.topology is None else found.topology.workload
    simple = found.found.simple
    pipeline = found.pipeline.plan.predicted
    assert pipeline is not None, "the planner always predicts"
    stages = ", ".join(stage.device for stage in found.pipeline.plan.stages)
    waves = found.pipeline.waves
    words = f"{stages}, rows in {waves} waves" if waves > 1 else stages
    own = (words, waves * pipeline.total_s, pipeline.sum_omega)
    rows = work.batch * work.gen_len
    lines = _verdict(found, exactly)
    joined = any(device.joined for device in found.pipeline.problem.cluster.devices)
    unit = "group" if joined else "card"  # --tensor-parallel makes groups that are never parted
    for name, one in (
        (f"best single {unit}", simple["card"]),
        ("best pipeline", own),
        ("even tensor parallel", simple["shared"]),
        ("one engine a node", simple["node"]),
        (f"one engine a {unit}", simple["each"]),
        ("equal replicas", simple["equal"]),
    ):
        if one is None and name in ("one engine a node", "equal replicas", "even tensor parallel"):
            continue
        if exactly == 1 and name in ("one engine a node", f"one engine a {unit}", "equal replicas"):
            continue
        text = _simple_text(one, rows, alone=work.batch == 1, cut=found.found.cut)
        lines.append(f"{name}: {text}")
    lines += _searched(found)
    if found.topology is None:
        return lines + _left_out(best, found)
    return lines + _fewer_at_once(found.topology) + _unused(found, found.topology, _gap(found))


def _fewer_at_once(topology: Topology) -> list[str]:
    """Return how to plan for fewer rows at once, where an engine has the most waves there are."""
    if max(one.waves for one in topology.engines) < MOST_WAVES:
        return []
    fewer = max(1, topology.workload.batch // (2 * MOST_WAVES))
    return [
        f"rows in {MOST_WAVES} waves are the most that are planned: with fewer at once bits and "
        f"times may be better, and such a plan runs any number of rows: --what-if batch={fewer} "
        f"says what --batch {fewer} gives"
    ]


def _searched(found: TopologyAnswer) -> list[str]:
    """Return which groups of devices were looked at, where there can be some."""
    kinds, left_out = found.found.groups, found.found.groups_left_out
    if not kinds + left_out:
        return []
    more = f"; {left_out} more sets of devices were not" if left_out else ""
    measured = found.found.groups_measured
    of = f"{measured} with measured, the others with" if 0 < measured < kinds else "with"
    costs = "measured" if measured == kinds else "estimated"
    return [
        f"tensor parallel: {kinds} kinds of groups of a node's devices searched as stages, "
        f"{of} {costs} costs{more}"
    ]


def _simple_text(one: Simple | None, tokens: int, *, alone: bool, cut: bool) -> str:
    """`alone`: of one request, whose tokens/s behind its prompt stand above, too.

    `cut`: the time limit may have ended the search before it was looked at.
    """
    if one is None:
        return "none was found in time" if cut else "none has room for the job"
    where, seconds, omega = one
    rate = f"{shown(tokens / seconds)} tokens/s{' with its prompt' if alone else ''}"
    return f"{where}: {rate}, quality loss {shown_loss(omega)}"


def _verdict(found: TopologyAnswer, exactly: int | None) -> list[str]:
    """Return how many engines are best, and how sure that is; of a tie, why these."""
    engines = 1 if found.topology is None else len(found.topology.engines)
    words = "one engine" if engines == 1 else f"{engines} engines"
    gap = _gap(found)
    if math.isinf(gap):
        sure = "no bound over topologies is known"
    elif gap <= PROVEN_GAP:
        others = "topology is" if exactly is None else f"{exactly} engines are"
        others = "one engine is" if exactly == 1 else others
        sure = f"proven: no {others} better by more than {TOPOLOGY_GAP:.1%}"
    else:
        what = "topology" if exactly is None else f"{exactly} engines"
        what = "one engine" if exactly == 1 else what
        sure = f"the best {what} found, at most {gap:.1%} above the best there may be"
        sure += f"; {CUT}" if found.found.cut else ""
    lines = [f"engines: {words} ({sure})"]
    if found.found.quicker is not None:
        lines.append(_tie(found))
    return lines


def _tie(found: TopologyAnswer) -> str:
    """Return why engines that send nothing are taken, where the best that was found sends."""
    quicker = found.found.quicker or 0.0
    by = f"{quicker:.1%} quicker" if quicker > 0 else "no quicker"
    return (
        f"one engine a card is taken, for nothing is sent between cards: the best that does is "
        f"{by} as the scheduler runs both, and predictions of such plans may be {TIE:.0%} off"
    )


def _gap(found: TopologyAnswer) -> float:
    """Return how much better a topology may be, as a share; infinite where no bound is known."""
    bound = found.found.bound
    value = found.found.value if found.plans else found.known.value
    return max(0.0, value / bound - 1) if bound > 0 else math.inf


def _left_out(best: Answer, found: TopologyAnswer | None) -> list[str]:
    used = {place.device for place in best.plan.places}
    whole = best if found is None else found.pipeline
    gap = best.outcome.gap if found is None else _gap(found)
    unused = [d.name for d in whole.problem.cluster.devices if _unused_of(d, used)]
    return not_used(unused, gap)


def _unused_of(device: Device, used: set[str]) -> bool:
    own = {one.name for one in device.joined} or {device.name}
    return not own & used


def _unused(found: TopologyAnswer, topology: Topology, gap: float) -> list[str]:
    used = {place.device for place in topology.places}
    unused = [d.name for d in found.pipeline.problem.cluster.devices if _unused_of(d, used)]
    return not_used(unused, gap)


def print_topology(
    console: Console,
    topology: Topology,
    lines: Sequence[str],
    notes: Sequence[str],
    *,
    seconds: float,
) -> None:
    """Print a plan of several engines: what it promises, its engines, and their stages."""
    work, predicted = topology.workload, topology.predicted
    assert predicted is not None, "the planner always predicts"
    estimated = any(p.predicted is not None and p.predicted.estimated for p in topology.plans)
    source = "estimated, not profiled" if estimated else "from the profile"
    model, ending = f"{topology.model.name} on {topology.cluster.name}", work.dtype
    engines = f"{len(topology.engines)} engine{'s' * (len(topology.engines) > 1)}"
    if any(plan.traffic is not None for plan in topology.plans):
        job = [f"{model}: live traffic, {ending}, {engines}; times {source}"]
    else:
        job = [
            f"{model}: {work.requests} of {work.prompt_len} + {work.gen_len} tokens, {ending}, "
            f"{engines}",
            f"predicted: {predicted.total_s:.3f} s, {shown(predicted.output_tokens_per_s)} "
            f"tokens/s of all engines; times {source}",
            wait_line(topology),
        ]
    for line in (
        *warnings_of(notes),
        *job,
        *loss_lines(_lossiest(topology)),
        *_robust(topology),
        *lines,
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"solved in {seconds:.2f} s", highlight=False)
    console.print(engine_table(topology))


def _robust(topology: Topology) -> list[str]:
    found = topology.solver.robustness
    return [] if found is None else [robustness_line(found, "topologies")]


def wait_line(topology: Topology) -> str:
    """Return how long the last request waits for its first token, and its tokens/s from then on.

    Rows that an engine has no room for at once begin once those before have ended.
    """
    speeds = [(engine.waves - 1, Speed.of_plan(engine.plan)) for engine in topology.engines]
    last = max(before * speed.total_s + speed.first_token_s for before, speed in speeds)
    rates = [speed.request_per_s for _, speed in speeds if speed.request_per_s is not None]
    line = (
        f"first token of the last request after {last:.3f} s (all {topology.workload.batch} sent "
        "at once)"
    )
    if not rates:
        return line
    least, most = shown(min(rates)), shown(max(rates))
    return f"{line}, then {least if least == most else f'{least} to {most}'} tokens/s a request"


def _lossiest(topology: Topology) -> Plan:
    """Return the plan that loses most."""
    return max(topology.plans, key=lambda p: p.predicted.sum_omega if p.predicted else 0.0)


def engine_table(topology: Topology) -> Table:
    """Return the engines, each with its rows, and its stages below each other."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=None, pad_edge=False)
    for name, justify in (
        ("engine", "right"),
        ("rows", "right"),
        ("at once", "right"),
        ("time", "right"),
        ("tokens/s", "right"),
        ("device", "left"),
        ("layers", "left"),
        ("bits", "left"),
        ("memory", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for number, engine in enumerate(topology.engines):
        plan = engine.plan
        first = (
            str(number),
            str(engine.rows),
            str(plan.workload.batch),
            "" if engine.predicted_s is None else f"{engine.predicted_s:.2f} s",
            "" if engine.tokens_per_s is None else shown(engine.tokens_per_s),
        )
        for position, stage in enumerate(plan.stages):
            memory = stage.memory
            table.add_row(
                *(first if position == 0 else ("",) * len(first)),
                stage.device,
                f"{stage.layers[0]}-{stage.layers[1] - 1}",
                bits_text(stage),
                ""
                if memory is None
                else f"{format_size(memory.total_bytes)} / {format_size(memory.limit_bytes)}",
            )
    return table

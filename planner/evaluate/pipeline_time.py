"""How long a pipeline takes: the closed forms every solver minimises.

tp, td   each stage's time per prefill step (a chunk of every prompt of a micro-batch, the mean over
         chunks) and per decode micro-batch
hp, hd   each hop's time to the next stage (sent while the next micro-batch computes)
rp, rd   the sampled tokens' way from the last stage back to the first
bhp ...  the part of each of these that occupies the link: the rest only delays the message
mp, md   numbers of prefill steps (micro-batches times the chunks of a prompt) and of decode
         micro-batches; n tokens a request
x'       the mean of x over micro-batches, of which the last may be smaller (microbatch.py)

    P = max(tp', bhp', brp')   D = max(td', bhd', brd')   S = sum td + sum hd

    T = (mp-1) P + sum tp + sum hp + rp                   prefill, first token (rp only if n >= 2)
      + (n-2) max(md D, S + rd) + S + (md-1) D            the other n-1 tokens (n >= 2)

brp counts in P only if n >= 2, brd in D only if n > 2: nothing travels back after the last token.

Chunks fill the pipeline one behind the other as micro-batches do: with C chunks over D stages a
prompt's first token takes (C-1) P + sum tp, not C sum tp.

Exact for equal micro-batches (simulate.py agrees), but for a way back that is slower than every
stage. With a smaller last one, or chunks of which the later ones see more keys, it is exact where
the pipeline is full; it is off by less than what the last one takes of two stages more or less,
once a job. Where that is much, a plan predicts its time step by step (step_by_step.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.planner.costs.links import Floats
from llmpq.planner.problem.outcome import BUDGET_ROUNDING, Assignment
from llmpq.planner.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Times of a pipeline's stages and hops, in seconds."""

    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    hop_prefill_s: tuple[float, ...] = ()
    hop_decode_s: tuple[float, ...] = ()
    back_prefill_s: float = 0.0
    back_decode_s: float = 0.0
    busy_prefill_s: tuple[float, ...] = ()
    """For how long each message of prefill occupies its link, the way back last."""
    busy_decode_s: tuple[float, ...] = ()
    held_prefill_s: tuple[float, ...] = ()
    """What P is the largest of: stages, messages, the way back last. Empty: equal micro-batches."""
    held_decode_s: tuple[float, ...] = ()

    def paces(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return what P and D are the largest of, the way back last where there is one."""
        prefill = self.held_prefill_s or (*self.prefill_s, *self.busy_prefill_s)
        return prefill, self.held_decode_s or (*self.decode_s, *self.busy_decode_s)


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Prefill (with the first token) and decode (the other n-1 tokens), in seconds."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """End-to-end time."""
        return self.prefill_s + self.decode_s


def makespan(t: StageTimes, *, mp: int, md: int, n: int) -> PhaseTimes:
    """Return the time of the job (formula in the module's docstring)."""
    first_back = t.back_prefill_s if n > 1 else 0.0
    held_p, held_d = t.paces()
    returns = bool(t.busy_prefill_s)
    slowest_prefill = max(held_p[:-1] if returns and n < 2 else held_p)
    prefill = (mp - 1) * slowest_prefill + sum(t.prefill_s) + sum(t.hop_prefill_s) + first_back
    if n < 2:
        return PhaseTimes(prefill_s=prefill, decode_s=0.0)
    once = sum(t.decode_s) + sum(t.hop_decode_s)
    slowest = max(held_d[:-1] if returns and n < 3 else held_d)
    period = max(md * slowest, once + t.back_decode_s)
    decode = (n - 2) * period + once + (md - 1) * slowest
    return PhaseTimes(prefill_s=prefill, decode_s=decode)


def paper_time(t: StageTimes, *, mp: int, md: int, n: int) -> PhaseTimes:
    """Return eq. (4) of the paper, T_dec read as n-1 tokens.

    (mp-1) P + sum tp + (n-1) ((md-1) D + sum td): the pipeline drains after every token. Hops bound
    P and D but are not in the sums (constraint 7).
    """
    slowest_prefill = max(*t.prefill_s, *t.busy_prefill_s[:-1], 0.0)
    prefill = (mp - 1) * slowest_prefill + sum(t.prefill_s)
    if n < 2:
        return PhaseTimes(prefill_s=prefill, decode_s=0.0)
    slowest = max(*t.decode_s, *t.busy_decode_s[:-1], 0.0)
    decode = (n - 1) * ((md - 1) * slowest + sum(t.decode_s))
    return PhaseTimes(prefill_s=prefill, decode_s=decode)


def published_code_time(t: StageTimes, *, mp: int, md: int, n: int) -> PhaseTimes:
    """Return eq. (4) as its authors' code computes it: sum td counted for one token only.

    Kept to reproduce their predictions; degenerate as an objective (it always picks md = 1).
    """
    prefill = (mp - 1) * max(t.prefill_s) + sum(t.prefill_s)
    decode = (n - 1) * (md - 1) * max(t.decode_s) + sum(t.decode_s)
    return PhaseTimes(prefill_s=prefill, decode_s=decode)


def stage_times(p: Problem, a: Assignment) -> StageTimes:
    """Return the times of an assignment's stages."""
    x = p.numbers(a.prefill_microbatch, a.decode_microbatch)
    prefill, decode = (
        _stages(a, x.prefill_s, x.ends_prefill_s),
        _stages(a, x.decode_s, x.ends_decode_s),
    )
    held_p = _stages(a, x.held_prefill_s, x.held_ends_prefill_s)
    held_d = _stages(a, x.held_decode_s, x.held_ends_decode_s)
    links = [(s.cls, t.cls) for s, t in zip(a.stages, a.stages[1:], strict=False)]
    ends = (a.stages[-1].cls, a.stages[0].cls)
    alone = len(a.stages) == 1
    return StageTimes(
        prefill_s=prefill,
        decode_s=decode,
        hop_prefill_s=tuple(float(x.hop_prefill.total_s[link]) for link in links),
        hop_decode_s=tuple(float(x.hop_decode.total_s[link]) for link in links),
        back_prefill_s=0.0 if alone else float(x.back_prefill.total_s[ends]),
        back_decode_s=0.0 if alone else float(x.back_decode.total_s[ends]),
        busy_prefill_s=_ways(x.hop_prefill.busy_s, x.back_prefill.busy_s, links, ends),
        busy_decode_s=_ways(x.hop_decode.busy_s, x.back_decode.busy_s, links, ends),
        held_prefill_s=held_p + _ways(x.hop_prefill.held_s, x.back_prefill.held_s, links, ends),
        held_decode_s=held_d + _ways(x.hop_decode.held_s, x.back_decode.held_s, links, ends),
    )


def _stages(a: Assignment, layers: Floats, ends: Floats) -> tuple[float, ...]:
    """Return the time of every stage: `layers` [L, C, B], `ends` [C, 2]."""
    found = []
    for position, stage in enumerate(a.stages):
        held = zip(range(stage.start, stage.end), stage.choices, strict=True)
        total = sum(layers[i, stage.cls, b] for i, b in held)
        if position == 0:
            total += ends[stage.cls, 0]
        if position == len(a.stages) - 1:
            total += ends[stage.cls, 1]
        found.append(float(total))
    return tuple(found)


def _ways(
    hop: Floats, back: Floats, links: list[tuple[int, int]], ends: tuple[int, int]
) -> tuple[float, ...]:
    """Return the time of each message on a ring of stages, the way back last."""
    last = float(back[ends]) if links else 0.0
    return (*(float(hop[link]) for link in links), last)


def sum_omega(p: Problem, a: Assignment) -> float:
    """Return the quality loss of an assignment: the sum over layers of omega."""
    total = 0.0
    for stage in a.stages:
        for i, b in zip(range(stage.start, stage.end), stage.choices, strict=True):
            total += float(p.omega[i, b])
    return total


def keeps_budget(p: Problem, a: Assignment, budget: float | None) -> bool:
    """Whether the quality loss is within a budget, however its sum rounds; None: no budget."""
    return budget is None or sum_omega(p, a) <= budget * (1 + BUDGET_ROUNDING / 2)


def job_time(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the makespan of an assignment, whatever objective it was found for."""
    mp, md = p.counts(a.prefill_microbatch, a.decode_microbatch)
    if p.objective != "makespan":  # its numbers take every micro-batch as a whole one
        p = p.with_changes(objective="makespan")
    return makespan(stage_times(p, a), mp=mp, md=md, n=p.workload.gen_len)


def value(p: Problem, a: Assignment) -> float:
    """Return the problem's objective: time plus theta times sum of omega, in seconds."""
    mp, md = p.counts(a.prefill_microbatch, a.decode_microbatch)
    form = makespan if p.objective == "makespan" else paper_time
    time = form(stage_times(p, a), mp=mp, md=md, n=p.workload.gen_len)
    return time.total_s + p.theta * sum_omega(p, a)

"""How long a pipeline takes: the closed forms every solver minimises.

tp, td   each stage's time per prefill and decode micro-batch
hp, hd   each hop's time to the next stage (sent while the next micro-batch computes)
rp, rd   the sampled tokens' way from the last stage back to the first
bhp ...  the part of each of these that occupies the link: the rest only delays the message
mp, md   numbers of prefill and decode micro-batches; n tokens a request

    P = max(tp, bhp, brp)   D = max(td, bhd, brd)   S = sum td + sum hd

    T = (mp-1) P + sum tp + sum hp + rp                   prefill, first token (rp only if n >= 2)
      + (n-2) max(md D, S + rd) + S + (md-1) D            the other n-1 tokens (n >= 2)

brp counts in P only if n >= 2, brd in D only if n > 2: nothing travels back after the last token.

Exact for equal micro-batches (simulate.py agrees); an upper bound with a ragged last one,
or where the way back is slower than every stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.planner.costs.links import Hops
from llmpq.planner.outcome import Assignment
from llmpq.planner.problem import Problem


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
    ways = t.busy_prefill_s if n > 1 else t.busy_prefill_s[:-1]
    slowest_prefill = max((*t.prefill_s, *ways))
    prefill = (mp - 1) * slowest_prefill + sum(t.prefill_s) + sum(t.hop_prefill_s) + first_back
    if n < 2:
        return PhaseTimes(prefill_s=prefill, decode_s=0.0)
    once = sum(t.decode_s) + sum(t.hop_decode_s)
    slowest = max((*t.decode_s, *(t.busy_decode_s if n > 2 else t.busy_decode_s[:-1])))
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
    prefill, decode = [], []
    for position, stage in enumerate(a.stages):
        layers = range(stage.start, stage.end)
        tp = sum(x.prefill_s[i, stage.cls, b] for i, b in zip(layers, stage.choices, strict=True))
        td = sum(x.decode_s[i, stage.cls, b] for i, b in zip(layers, stage.choices, strict=True))
        if position == 0:
            tp += x.ends_prefill_s[stage.cls, 0]
            td += x.ends_decode_s[stage.cls, 0]
        if position == len(a.stages) - 1:
            tp += x.ends_prefill_s[stage.cls, 1]
            td += x.ends_decode_s[stage.cls, 1]
        prefill.append(float(tp))
        decode.append(float(td))
    links = [(s.cls, t.cls) for s, t in zip(a.stages, a.stages[1:], strict=False)]
    ends = (a.stages[-1].cls, a.stages[0].cls)
    alone = len(a.stages) == 1
    return StageTimes(
        prefill_s=tuple(prefill),
        decode_s=tuple(decode),
        hop_prefill_s=tuple(float(x.hop_prefill.total_s[link]) for link in links),
        hop_decode_s=tuple(float(x.hop_decode.total_s[link]) for link in links),
        back_prefill_s=0.0 if alone else float(x.back_prefill.total_s[ends]),
        back_decode_s=0.0 if alone else float(x.back_decode.total_s[ends]),
        busy_prefill_s=_busy(x.hop_prefill, x.back_prefill, links, ends),
        busy_decode_s=_busy(x.hop_decode, x.back_decode, links, ends),
    )


def _busy(
    hop: Hops, back: Hops, links: list[tuple[int, int]], ends: tuple[int, int]
) -> tuple[float, ...]:
    """Return for how long each message on a ring of stages occupies its link, the way back last."""
    last = float(back.busy_s[ends]) if links else 0.0
    return (*(float(hop.busy_s[link]) for link in links), last)


def sum_omega(p: Problem, a: Assignment) -> float:
    """Return the quality loss of an assignment: the sum over layers of omega."""
    total = 0.0
    for stage in a.stages:
        for i, b in zip(range(stage.start, stage.end), stage.choices, strict=True):
            total += float(p.omega[i, b])
    return total


def job_time(p: Problem, a: Assignment) -> PhaseTimes:
    """Return the makespan of an assignment, whatever objective it was found for."""
    mp, md = p.counts(a.prefill_microbatch, a.decode_microbatch)
    return makespan(stage_times(p, a), mp=mp, md=md, n=p.workload.gen_len)


def value(p: Problem, a: Assignment) -> float:
    """Return the problem's objective: time plus theta times sum of omega, in seconds."""
    mp, md = p.counts(a.prefill_microbatch, a.decode_microbatch)
    form = makespan if p.objective == "makespan" else paper_time
    time = form(stage_times(p, a), mp=mp, md=md, n=p.workload.gen_len)
    return time.total_s + p.theta * sum_omega(p, a)

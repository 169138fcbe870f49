"""A steady state of an engine under live traffic: what its step takes, and the rate it keeps up.

P and G are the mean tokens of a prompt and of an answer. R requests decode at once, in as many
groups as there are stages; each ends after G tokens, so R / G new ones begin a step and bring
R P / G tokens of prompts with them, computed in the same steps. A step takes a group's r rows and
its share of the prompts, at most the step's budget of tokens:

    T      max(groups x the slowest stage, all stages and links)   seconds a token of each request
    rate   R / (G T)
    TPOT   T of a step with the prompts of the other R - 1 requests alone
    TTFT   T (steps of a prompt + 1/2), half a step being under way

R is bounded by the requests at once and by the pool, which holds P + G / 2 tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.planner.evaluate.engine_simulation import EngineModel, StepRows
from llmpq.planner.traffic.named_traffic import NamedTraffic
from llmpq.service_measures import ServiceLimits
from llmpq.sizes.kv_format import BLOCK_TOKENS


@dataclass(frozen=True, kw_only=True)
class MeanLengths:
    """Mean lengths of a traffic's requests, and the longest request."""

    prompt: float
    output: float
    longest: int
    """Tokens of prompt and answer."""

    @classmethod
    def of(cls, traffic: NamedTraffic) -> MeanLengths:
        """Return those of a traffic."""
        rows = traffic.arrivals
        return cls(
            prompt=sum(one.prompt_tokens for one in rows) / len(rows),
            output=sum(one.output_tokens for one in rows) / len(rows),
            longest=max(one.prompt_tokens + one.output_tokens for one in rows),
        )


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """Requests at once, and what follows of them."""

    running: int
    rate_per_s: float
    tpot_s: float
    ttft_s: float

    def keeps(self, limits: ServiceLimits) -> bool:
        """Whether it is within the limits."""
        pairs = ((self.ttft_s, limits.ttft_s), (self.tpot_s, limits.tpot_s))
        return all(limit is None or own <= limit for own, limit in pairs)


def steady_state(model: EngineModel, lengths: MeanLengths, running: int) -> SteadyState | None:
    """Return the steady state of so many requests at once; None where they cannot be."""
    each = lengths.prompt + lengths.output / 2
    tokens = model.limits.num_blocks * BLOCK_TOKENS
    if running > model.limits.max_rows or running * (each + BLOCK_TOKENS / 2) > max(tokens, each):
        return None
    groups = min(len(model.stages), running)
    rows = -(-running // groups)
    prompts = rows * lengths.prompt / max(lengths.output, 1.0)
    budget = model.limits.step_tokens - rows
    if prompts > budget:
        return None
    cycle = _cycle_s(model, groups, _rows(rows, prompts, lengths))
    others = _rows(rows, prompts * (running - 1) / running, lengths)
    steps = max(1.0, lengths.prompt / budget)
    return SteadyState(
        running=running,
        rate_per_s=running / (max(lengths.output, 1.0) * cycle),
        tpot_s=min(cycle, _cycle_s(model, groups, others)),
        ttft_s=(steps + 0.5) * cycle,
    )


def _cycle_s(model: EngineModel, groups: int, step: StepRows) -> float:
    """Return the seconds after which every group has had a step."""
    stages = [stage.seconds(step) for stage in model.stages]
    hops = [stage.hop(step) for stage in model.stages]
    busiest = max([*stages, *(occupied for occupied, _ in hops)])
    return max(groups * busiest, sum(stages) + sum(total for _, total in hops))


def _rows(rows: int, prompts: float, lengths: MeanLengths) -> StepRows:
    """Return a step of so many rows amid their answers, and tokens amid prompts."""
    chunk = round(prompts)
    chunks = [(round(max(0.0, lengths.prompt - chunk) / 2), chunk)] if chunk else []
    ended = rows / max(lengths.output, 1.0)
    return StepRows(
        chunks=chunks,
        caches=[round(lengths.prompt + lengths.output / 2)] * rows,
        samples=round(rows + ended),
    )


def best_state(
    model: EngineModel, lengths: MeanLengths, limits: ServiceLimits
) -> SteadyState | None:
    """Return the steady state of the highest rate within limits; None where there is none."""
    best, most, running = None, model.limits.max_rows, 1
    while running <= most:
        found = steady_state(model, lengths, running)
        if (
            found is not None
            and found.keeps(limits)
            and (best is None or found.rate_per_s > best.rate_per_s)
        ):
            best = found
        running = most if running < most < running * 1.25 else running + max(1, running // 4)
    return best

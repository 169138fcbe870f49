"""Turns `--speculate`, `--gamma` and what the plan says into one decision."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from llmpq.checkpoints.stored_codes import stored_codes
from llmpq.commands.command_line import refuse_without_effect
from llmpq.cost_model import CostModel
from llmpq.errors import unknown_name
from llmpq.plan import Plan
from llmpq.precision import Precision
from llmpq.speculation import (
    MAX_GAMMA,
    MODES,
    READS_KV4,
    PlanTimes,
    SpeculationMode,
    StepTimes,
    choose_mode,
    usable_modes,
)

_log = logging.getLogger("llmpq.run")


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The decision: no mode means plain decoding, no gamma one that is chosen while running."""

    mode: SpeculationMode | None = None
    gamma: int | None = None
    costs: str | None = None


def choose_speculation(
    plan: Plan,
    mode: str | None,
    gamma: str | None,
    costs: str | None,
    *,
    compare: bool = False,
    model: str | None = None,
) -> Drafts:
    """Return the decision; `ValueError` says why a wish cannot be met, or has no effect.

    `model`: whose weights are run, where it is not the plan's own.
    """
    if mode == "off" or (mode is None and plan.speculation is None):
        _refuse_without_drafts(mode, gamma, costs, compare)
        return Drafts()
    length = None if gamma in (None, "auto") else _parse_gamma(str(gamma))
    if costs is not None and length is not None and mode != "auto":
        raise ValueError(
            f"--costs has no effect with --gamma {gamma}: costs choose the number of drafts, or "
            "with --speculate auto the mode; leave one of them out"
        )
    if mode is None and plan.speculation is not None:
        mode = plan.speculation.mode
        if gamma is None and costs is None:
            length = plan.speculation.gamma
    kept = stored_codes(model or plan.model.path)
    if mode == "auto":
        return _automatic(plan, costs, length, kept)
    if mode not in MODES:
        raise unknown_name("speculation mode", str(mode), [*MODES, "auto", "off"])
    known = mode
    _require_usable(plan, known, kept)
    if length is None and costs is None and not times_itself(plan):
        raise ValueError(
            f"--gamma auto needs a cost model to weigh drafts of {known}: add --costs costs.json "
            f"(llmpq-profile), or give --gamma 1..{MAX_GAMMA}"
        )
    return Drafts(mode=known, gamma=length, costs=_costs_to_obey(plan, costs))


def times_itself(plan: Plan) -> bool:
    """Whether the engine times its own drafts and verifies at the start: a whole model on a GPU."""
    return len(plan.stages) == 1 and not plan.stages[0].is_cpu


def _automatic(
    plan: Plan, costs: str | None, length: int | None, kept: Collection[Precision]
) -> Drafts:
    """Choose the mode with the highest predicted speed-up in the middle of the job.

    A length that was given stays: only the mode is chosen.
    """
    if costs is None:
        raise ValueError("--speculate auto needs --costs costs.json (llmpq-profile)")
    model = CostModel.load_json(costs)
    times: dict[SpeculationMode, StepTimes] = {
        mode: PlanTimes(plan, model, mode) for mode in usable_modes(plan, kept)
    }
    context = plan.workload.prompt_len + plan.workload.gen_len / 2
    best = choose_mode(times, rows=plan.decode_microbatch, context=context)
    if best is None:
        _log.info("speculation: off, no draft is predicted to pay at this batch and context")
        return Drafts()
    mode, gamma, speedup = best
    _log.info("speculation: %s, predicted %.2fx with a gamma of %d", mode, speedup, gamma)
    return Drafts(mode=mode, gamma=length, costs=_costs_to_obey(plan, costs))


def _costs_to_obey(plan: Plan, costs: str | None) -> str | None:
    """Return the cost model that draft lengths follow; None where the engine times its own steps.

    Differences of a few percent decide, which is what cost models err by.
    """
    return None if costs is None or times_itself(plan) else str(Path(costs).resolve())


def _refuse_without_drafts(
    mode: str | None, gamma: str | None, costs: str | None, compare: bool
) -> None:
    """`ValueError` for flags about drafts where there are none."""
    flags = {"--gamma": gamma is not None, "--costs": costs is not None, "--compare-plain": compare}
    refuse_without_effect(
        flags,
        "with --speculate off" if mode == "off" else "without drafts, and the plan has none",
        "add --speculate MODE" if mode is None else "name a mode",
    )


def _require_usable(plan: Plan, mode: SpeculationMode, kept: Collection[Precision]) -> None:
    usable = ", ".join(usable_modes(plan, kept))
    if mode in usable_modes(plan, kept):
        return
    if mode in usable_modes(plan):
        raise ValueError(
            f"--speculate {mode} would draft at the target's cost: the model's layers keep codes "
            "of its checkpoint (FP8, or 4 bits that stand for a table's numbers), which such "
            f"drafts cannot read at less; choose one of {usable}"
        )
    held = ", ".join(sorted({precision.value for precision in plan.precisions}))
    needs = {
        "qspec": "4-bit layers (w4a16)",
        "w4kv4": "16- or 8-bit layers and a 16-bit KV cache",
        "kv4": "a 16-bit KV cache",
    }[mode]
    also = f" with {plan.workload.kv.value}" if mode in READS_KV4 else ""
    raise ValueError(
        f"--speculate {mode} needs {needs}, the plan has {held}{also}; choose one of {usable}"
    )


def _parse_gamma(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MAX_GAMMA:
        raise ValueError(f"--gamma must be 1..{MAX_GAMMA} or auto, got '{text}'")
    return int(text)

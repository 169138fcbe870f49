"""Refuses flags of `llmpq-algo` that the others leave nothing to do, before anything is read."""

from __future__ import annotations

import argparse
from typing import get_args

from llmpq.speculation import SpeculationMode


def refuse_unheeded(args: argparse.Namespace) -> None:
    """Raise `ValueError` for a flag without an effect, naming what it lacks or what drops it."""
    _refuse_dropped(args)
    needs = (
        ("--pareto-points", args.pareto_points is not None, args.pareto, "--pareto"),
        (
            "--solver",
            args.solver is not None,
            args.method in ("ilp", "all") and not args.shaq_efficient,
            "--method ilp (or all)",
        ),
        (
            "--shaq-efficient",
            args.shaq_efficient,
            args.method in (None, "heuristic"),
            "--method heuristic",
        ),
    )
    for flag, given, heeded, needed in needs:
        if given and not heeded:
            raise ValueError(f"{flag} does nothing without {needed}; add it or leave {flag} out")
    modes = ("auto", *get_args(SpeculationMode))
    if args.speculate is not None and args.speculate not in modes:
        raise ValueError(f"--speculate {args.speculate}: expected one of {', '.join(modes)}")


def _refuse_dropped(args: argparse.Namespace) -> None:
    """Refuse flags that others drop: a front is of every theta, a budget has its own."""
    sentences = {"--explain": args.explain, "--what-if": args.what_if}
    theta = {"--theta": args.theta is not None}
    drafts = {"--speculate": args.speculate is not None}
    for mode, chosen, unheeded in (
        ("--pareto", args.pareto, {**sentences, **drafts, **theta}),
        ("--quality-budget", args.quality_budget is not None, theta),
        ("--json", args.json, sentences),
    ):
        given = [flag for flag, value in unheeded.items() if value]
        if chosen and given:
            raise ValueError(f"{mode} does not go with {' or '.join(given)}; leave one of them out")

"""A plan as other engines' settings, with what they cannot express said; one file per engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from llmpq.model_spec import ModelSpec
from llmpq.pictures.plan_cards import cards_svg
from llmpq.plan import Plan
from llmpq.planner.export.accelerate import accelerate
from llmpq.planner.export.compressed_tensors import compressed_tensors
from llmpq.planner.export.gptqmodel import gptqmodel
from llmpq.planner.export.llamacpp import llamacpp
from llmpq.planner.export.result import Exported
from llmpq.planner.export.sglang import sglang
from llmpq.planner.export.vllm import vllm
from llmpq.planner.problem.named_inputs import model_of_plan
from llmpq.planner.problem.requests import ExportRequest

WRITERS: dict[str, Callable[[Plan, ModelSpec], Exported]] = {
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "accelerate": accelerate,
    "compressed-tensors": compressed_tensors,
    "gptqmodel": gptqmodel,
    "svg": lambda plan, spec: Exported(text=cards_svg(plan), not_expressed=()),
}


def export_plan(request: ExportRequest) -> None:
    """Write a plan for an engine to `-o` or stdout; the rest goes to stderr, a line each."""
    plan = Plan.load(request.plan)
    exported = WRITERS[request.to](plan, model_of_plan(request, plan))
    if request.output:
        Path(request.output).write_text(exported.text)
    else:
        sys.stdout.write(exported.text)
    for line in exported.warnings:
        sys.stderr.write(f"warning: {line}\n")
    for line in exported.not_expressed:
        sys.stderr.write(f"not expressed: {line}\n")

"""A plan as other engines' settings, with what they cannot express said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from llmpq.model_spec import ModelSpec, builtin_configs
from llmpq.plan import Plan
from llmpq.planner.export.checkpoints import compressed_tensors, gptqmodel
from llmpq.planner.export.launchers import llamacpp, sglang, vllm
from llmpq.planner.export.maps import accelerate
from llmpq.planner.export.result import Exported

WRITERS: dict[str, Callable[[Plan, ModelSpec], Exported]] = {
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "accelerate": accelerate,
    "compressed-tensors": compressed_tensors,
    "gptqmodel": gptqmodel,
}


def export_plan(args: argparse.Namespace) -> None:
    """Write a plan for an engine to `-o` or stdout; the rest goes to stderr, a line each."""
    plan = Plan.load(args.plan)
    exported = WRITERS[args.to](plan, _spec(args, plan))
    if args.output:
        Path(args.output).write_text(exported.text)
    else:
        sys.stdout.write(exported.text)
    for line in exported.not_expressed:
        sys.stderr.write(f"not expressed: {line}\n")


def _spec(args: argparse.Namespace, plan: Plan) -> ModelSpec:
    """Return the plan's model: as told, by its path, or by its name."""
    if args.model or args.model_name:
        from llmpq.planner.request import read_model

        spec, _ = read_model(args)
    elif plan.model.path and Path(plan.model.path).is_dir():
        spec = ModelSpec.from_directory(plan.model.path)
    elif plan.model.name in builtin_configs():
        spec = ModelSpec.by_name(plan.model.name)
    else:
        raise ValueError(f"the plan's model '{plan.model.name}' is not here; give --model DIR")
    plan.require_model(spec)
    return spec

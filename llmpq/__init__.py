"""llmpq: plan a model over the devices you have, and run the plan.

    from llmpq import LLM, SamplingParams

    with LLM("examples/demo-7m") as llm:
        for answer in llm.generate(["def main():"], SamplingParams(max_tokens=32)):
            print(answer.text)

These names are loaded on first use: importing the package loads no torch, and the planner runs
where there is none. The modules beside this file are the nouns that all rooms share.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llmpq.missing_packages import missing_package
from llmpq.python_names import COMMAND_OF, python_door
from llmpq.version import __version__ as __version__

if TYPE_CHECKING:
    from llmpq.planner.make import make_plan as make_plan
    from llmpq.plans.plan import Plan as Plan
    from llmpq.runtime.entrypoints.llm import LLM as LLM
    from llmpq.runtime.entrypoints.llm import CompletionOutput as CompletionOutput
    from llmpq.runtime.entrypoints.llm import EngineOptions as EngineOptions
    from llmpq.runtime.entrypoints.llm import Logprob as Logprob
    from llmpq.runtime.entrypoints.llm import RequestOutput as RequestOutput
    from llmpq.runtime.entrypoints.llm import SamplingParams as SamplingParams
    from llmpq.runtime.entrypoints.llm import StructuredOutputsParams as StructuredOutputsParams

_DOOR = {
    "LLM": "llmpq.runtime.entrypoints.llm",
    "EngineOptions": "llmpq.runtime.entrypoints.llm",
    "SamplingParams": "llmpq.runtime.entrypoints.llm",
    "StructuredOutputsParams": "llmpq.runtime.entrypoints.llm",
    "RequestOutput": "llmpq.runtime.entrypoints.llm",
    "CompletionOutput": "llmpq.runtime.entrypoints.llm",
    "Logprob": "llmpq.runtime.entrypoints.llm",
    "Plan": "llmpq.plans.plan",
    "make_plan": "llmpq.planner.make",
}
"""Name -> the module that has it."""

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineOptions",
    "Logprob",
    "Plan",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "make_plan",
]


def __getattr__(name: str) -> object:
    if name not in _DOOR:
        raise AttributeError(f"module 'llmpq' has no attribute '{name}'")
    try:
        value = getattr(importlib.import_module(_DOOR[name]), name)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        raise ModuleNotFoundError(f"llmpq.{name}: {missing}", name=error.name) from None
    if name in COMMAND_OF:
        value = python_door(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

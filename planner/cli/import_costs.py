"""What `llmpq-algo costs import` does: reads tables that others measured, writes costs.json."""

from __future__ import annotations

import sys
from pathlib import Path

from llmpq.costs.cost_model import CostModel
from llmpq.devices.device_spec import known_kind, unknown_card
from llmpq.file_form import check_writable
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.aiconfigurator import SystemTables, installed_package, read_tables
from llmpq.planner.costs.llmservingsim import is_profile, read_profile
from llmpq.planner.problem.named_inputs import read_model
from llmpq.planner.problem.requests import CostsRequest
from llmpq.workload import Dtype

INSTALLED = "aiconfigurator"


def import_costs(request: CostsRequest) -> None:
    """Write the costs of a model that a table has, and say what they are of."""
    if not request.output:
        raise ValueError("give -o costs.json, the file to write")
    check_writable(request.output)
    spec = read_model(request).spec
    found = _read(request, spec)
    if Path(request.output).is_file() and request.merge:
        found = CostModel.load_json(request.output).merged(found)
    found.save_json(request.output)
    kinds, precisions = (
        sorted({of(entry) for entry in found.entries if entry.part == "layer"})
        for of in (lambda e: e.device_kind, lambda e: e.precision.value)
    )
    sys.stdout.write(
        f"{found.versions.get('imported', '')}: {spec.name} on {', '.join(kinds)}, "
        f"{', '.join(precisions)}\nwrote {request.output}: llmpq-algo --costs {request.output}\n"
    )


def _read(request: CostsRequest, spec: ModelSpec) -> CostModel:
    path = installed_package() if request.source == INSTALLED else Path(request.source)
    if not path.exists():
        raise ValueError(
            f"no such file or folder: '{request.source}'; expected {INSTALLED} (the installed "
            "package), its wheel, or a profile of LLMServingSim (a folder with tp1/dense.csv)"
        )
    if path.is_dir() and is_profile(path):
        if request.system or request.engine:
            raise ValueError("a profile of LLMServingSim has one GPU: leave --system, --engine out")
        if request.kind is None:
            raise ValueError("give --kind, the card it is of, such as --kind 4090")
        return read_profile(path, spec, _kind(request.kind))
    tables = SystemTables(path, request.system or "", request.engine)
    if request.system is None:
        raise ValueError(
            f"give --system: {', '.join(tables.systems)}"
            if tables.systems
            else f"'{request.source}' has no tables; expected {INSTALLED}, its wheel, or a profile "
            "of LLMServingSim (a folder with tp1/dense.csv)"
        )
    _ = tables.chosen_engine  # says which systems and engines there are
    memory = None if request.kind else int(tables.facts().get("mem_capacity", 0)) or None
    kind = _kind(request.kind or request.system.removesuffix("_server"), memory)
    return read_tables(tables, spec, kind, _dtype(request, spec))


def _dtype(request: CostsRequest, spec: ModelSpec) -> Dtype:
    """Return the dtype that entries are stored under; the tables are of 16-bit floats."""
    named = spec.dtype if request.dtype == "auto" else request.dtype
    return "float16" if named == "float16" else "bfloat16"


def _kind(name: str, memory_bytes: int | None = None) -> str:
    """Return the table's name of a card."""
    found = known_kind(name.replace("_", " "), memory_bytes)
    if found is None:
        raise ValueError(f"{unknown_card(name)}; give --kind")
    return found

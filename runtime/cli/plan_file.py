"""Plans by the name that commands are given."""

from __future__ import annotations

from pathlib import Path

from llmpq.errors import BadPlanError
from llmpq.plans.plan import Plan
from llmpq.plans.topology import Topology, read_plan


def load_plan(name: str) -> Plan:
    """Read a plan of one engine by path, with or without `.json`."""
    return Plan.load(_path_of(name))


def load_engines(name: str) -> Plan | Topology:
    """Read a plan by path, of one engine or of several."""
    return read_plan(_path_of(name))


def _path_of(name: str) -> Path:
    if not name.strip():
        raise ValueError("the plan's name is empty: expected a file of llmpq-algo's, plan.json")
    path = Path(name)
    with_ending = path.parent / f"{path.name}.json"
    if not path.exists() and with_ending.exists():
        path = with_ending
    if path.suffix == ".pkl":
        raise BadPlanError(f"'{path}': llmpq reads no pickle files; make a plan with llmpq-algo")
    return path

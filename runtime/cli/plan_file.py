"""Plans by the name that commands are given."""

from __future__ import annotations

from pathlib import Path

from llmpq.errors import BadPlanError
from llmpq.plan import Plan


def load_plan(name: str) -> Plan:
    """Read a plan by path, with or without `.json`."""
    path = Path(name)
    with_ending = path.parent / f"{path.name}.json"
    if not path.exists() and with_ending.exists():
        path = with_ending
    if path.suffix == ".pkl":
        raise BadPlanError(f"'{path}': llmpq reads no pickle files; make a plan with llmpq-algo")
    return Plan.load(path)

"""Costs measured on this machine before, kept in the user's cache directory.

    $XDG_CACHE_HOME/llmpq/costs/FINGERPRINT/KIND.json      (~/.cache where it is not set)

FINGERPRINT is the model's, KIND what a device's costs are stored under. A file holds one kind of
device; links lie with their first end. Costs of other kernels, or of another engine, are still the
closest there is; a note says so.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from llmpq.costs.cost_model import CostModel
from llmpq.costs.kernel_sources import stage_mark
from llmpq.devices.device_spec import device_specs

_KERNELS = "kernels"
"""Key of `versions`: kernel_sources.py's mark of a stage."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._@-]+")


def cache_folder() -> Path:
    """Return the folder of all costs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmpq" / "costs"


def cached_costs(fingerprint: str, kinds: Iterable[str]) -> tuple[CostModel | None, list[str]]:
    """Return what was measured of these kinds of device, and a note for each unusable file."""
    found: CostModel | None = None
    notes = []
    for kind in sorted(set(kinds)):
        path = _path(fingerprint, kind)
        if not path.is_file():
            continue
        try:
            model = CostModel.load_json(path)
            if model.model_fingerprint != fingerprint or model.device_kinds != (kind,):
                raise ValueError(f"'{path}' holds costs of another model or device")
        except ValueError as error:
            notes.append(f"costs in the cache are not used: {error}; measure them with --profile")
            continue
        if model.versions.get(_KERNELS) != _mark(kind):
            notes.append(
                f"the costs of {kind} were measured with other kernels, or another engine, than "
                "these; llmpq-dist run --profile measures them anew"
            )
        found = model if found is None else found.merged(model)
    return found, notes


def store_costs(costs: CostModel) -> list[Path]:
    """Keep costs, a file per kind of device; returns the files."""
    written = []
    for kind in costs.device_kinds:
        own = CostModel(
            model=costs.model,
            model_fingerprint=costs.model_fingerprint,
            entries=tuple(entry for entry in costs.entries if entry.device_kind == kind),
            links=tuple(link for link in costs.links if link.source_kind == kind),
            sums=tuple(one for one in costs.sums if one.kinds[0] == kind),
            versions={**costs.versions, _KERNELS: _mark(kind)},
        )
        path = _path(costs.model_fingerprint, kind)
        if path.is_file():
            with contextlib.suppress(ValueError):  # of another form: replaced
                own = _added(CostModel.load_json(path), own, _mark(kind))
        own.save_json(path)
        written.append(path)
    return written


def _mark(kind: str) -> str:
    spec = device_specs().get(kind.partition("@")[0])
    return stage_mark(on_cpu=spec is not None and spec.is_cpu)


def _added(kept: CostModel, new: CostModel, mark: str) -> CostModel:
    """Return both; what is kept of other kernels stays marked, as long as one entry is left."""
    both = kept.merged(new)
    left = len(both.entries) > len(new.entries)
    if left and kept.versions.get(_KERNELS) != mark:
        both = both.model_copy(update={"versions": {**both.versions, _KERNELS: "mixed"}})
    return both


def _path(fingerprint: str, kind: str) -> Path:
    return cache_folder() / fingerprint / f"{_UNSAFE.sub('_', kind)}.json"

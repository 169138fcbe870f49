"""Settings that a launcher gives its stages beside the plan. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from llmpq.runtime.options.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What one stage gets beside the plan: the engine's options and its node's paths."""

    model_dir: str
    options: EngineOptions = field(default_factory=EngineOptions)
    driver_model_dir: str | None = None
    """The directory on the driver's host, where a node has the model elsewhere."""
    end_ids: tuple[int, ...] | None = None
    """Tokens that end an answer, which guides choose, too; None: those of config.json."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    address: str | None = None
    """Its node's own address, at which other hosts' stages reach it; None: all are on this host."""
    network_interface: str | None = None
    """Over which stages of several hosts talk, where it is not the one of `address`."""
    awaited: bool = False
    """Whether requests wait for the stage: steps are then warmed up by the first of each size."""

    def to_data(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return data | {"options": self.options.to_data()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StageSettings:
        """Return the settings that `to_data` wrote."""
        ends = data["end_ids"]
        changed = {
            "options": EngineOptions.from_data(data["options"]),
            "end_ids": None if ends is None else tuple(ends),
            "suppressed": tuple(data["suppressed"]),
        }
        return cls(**{**data, **changed})

"""The driver's checkpoint, read by stages on other hosts through Ray."""

from __future__ import annotations

import contextlib
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llmpq.runtime.weights.remote_slice import SliceReader

_READERS = 4
"""Stages that are given pieces at once."""


class WeightServer:
    """A `SliceSource` that travels to the stages; the files stay on the driver's host."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, directory: str) -> Self:
        """Start reading a model directory of this host."""
        here = ray.get_runtime_context().get_node_id()
        actor = (
            ray.remote(SliceReader)
            .options(
                num_cpus=0,
                max_concurrency=_READERS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote(directory)
        )
        return cls(actor)

    def listing(self) -> dict[str, Any]:
        """Return the checkpoint's JSON files, its index and the headers of its weight files."""
        listing: dict[str, Any] = ray.get(self._actor.listing.remote())
        return listing

    def piece(self, file: str, start: int, end: int) -> tuple[bytes, str]:
        """Return the bytes `[start, end)` of a file and their SHA-256."""
        piece: tuple[bytes, str] = ray.get(self._actor.piece.remote(file, start, end))
        return piece

    def close(self) -> None:
        """End the reader."""
        with contextlib.suppress(Exception):
            ray.kill(self._actor)

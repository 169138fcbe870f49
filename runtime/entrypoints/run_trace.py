"""RunTrace: what stages recorded of a run's steps, until it is written as one Chrome trace."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.steps.trace import MAX_EVENTS, StageRecord, joined, write_chrome_trace

_log = logging.getLogger("llmpq.runtime")


class RunTrace:
    """The records of one engine's stages; kept only where there is a file to write."""

    def __init__(self, path: str | Path | None) -> None:
        """`path`: the file, None for none."""
        self._path = path
        self._names: dict[int, str] = {}
        """Of requests, by id."""
        self._records: list[StageRecord] = []
        """Of each stage."""
        self._written = False

    def name(self, request_ids: Sequence[int], name: str) -> None:
        """Note how a prompt's requests are called."""
        if self._path is not None and len(self._names) < MAX_EVENTS:
            self._names |= dict.fromkeys(request_ids, name)

    def take(self, client: PipelineClient) -> list[StageRecord]:
        """Return what every stage recorded since the last call; asks the stages."""
        records = client.records()
        if self._path is not None:
            # Stages of another plan have records of their own: those of before are let go.
            same = len(self._records) == len(records)
            pairs = zip(self._records, records, strict=True) if same else ()
            self._records = [joined(*pair) for pair in pairs] if same else records
            self._written = False
        return records

    def parts(self, client: PipelineClient) -> tuple[list[str], list[StageRecord]]:
        """Return the stages' names and all that they recorded; `close` writes no file then."""
        self.take(client)
        self._written = True
        stages = enumerate(client.plan.places)
        return [f"stage {i} {stage.device}" for i, stage in stages], self._records

    def write(self, client: PipelineClient) -> None:
        """Write the file, if one is wanted."""
        if self._path is None:
            return
        names, records = self.parts(client)
        self._written = False  # until it is: a disk may be full
        write_chrome_trace(self._path, names, records, self._names)
        self._written = True

    def close(self, client: PipelineClient) -> None:
        """Write the file at the end, unless it was; a file that cannot be is only logged."""
        try:
            if not self._written:
                self.write(client)
        except OSError as error:
            _log.warning("the trace '%s' could not be written: %s", self._path, error)

"""Inputs of a plan: the device, link and cost entries that it uses, and its model.

A plan carries them, so that its memory and its times can be computed again from the file alone, on
a machine that has neither the cluster file nor the profile. Knows nothing of how a plan is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

from pydantic import Field

from llmpq.costs.cost_model import MAX_S, LatencyEntry, Part, Phase
from llmpq.devices.cluster import Device, Emulate
from llmpq.devices.device_spec import DeviceSpec
from llmpq.file_form import FileForm
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision


class DeviceInput(FileForm):
    """A device that has a stage: its memory and its kind's facts."""

    name: str
    kind: str
    profile_kind: str
    node: str
    index: int = Field(ge=0)
    memory_bytes: int = Field(ge=0)
    reserve_bytes: int = Field(ge=0)
    threads: int | None = None
    emulate: Emulate | None = None
    spec: DeviceSpec
    time_factor: float = Field(default=1.0, gt=0)
    """What the cost entries' times were multiplied with; 1 but in studies of their error."""

    @classmethod
    def of(cls, device: Device, *, time_factor: float = 1.0) -> Self:
        """Return the entry of a cluster's device."""
        return cls(
            name=device.name,
            kind=device.kind,
            profile_kind=device.profile_kind,
            node=device.node,
            index=device.index,
            memory_bytes=device.memory_bytes,
            reserve_bytes=device.reserve_bytes,
            threads=device.threads,
            emulate=device.emulate,
            spec=device.spec,
            time_factor=time_factor,
        )

    def device(self) -> Device:
        """Return the device as a cluster would have it."""
        return Device(
            name=self.name,
            kind=self.kind,
            profile_kind=self.profile_kind,
            node=self.node,
            index=self.index,
            spec=self.spec,
            memory_bytes=self.memory_bytes,
            reserve_bytes=self.reserve_bytes,
            threads=self.threads,
            emulate=self.emulate,
        )


class LinkInput(FileForm):
    """One way between two devices: b bytes arrive after delay + handshake + b * per_byte seconds.

    During all but the delay the message occupies the link, its sender and its receiver.
    """

    source: str
    target: str
    delay_s: float = Field(ge=0, le=MAX_S)
    handshake_s: float = Field(ge=0, le=MAX_S)
    per_byte_s: float = Field(ge=0, le=MAX_S)

    def busy_s(self, num_bytes: float) -> float:
        """Return for how long a message occupies its way."""
        return self.handshake_s + self.per_byte_s * num_bytes

    def seconds(self, num_bytes: float) -> float:
        """Return the time until a message has arrived."""
        return self.delay_s + self.busy_s(num_bytes)


class PlanInputs(FileForm):
    """The entries a plan uses: of its stages' devices, of the links between them, of its costs."""

    model: ModelSpec
    devices: tuple[DeviceInput, ...]
    """In the order of the stages."""
    links: tuple[LinkInput, ...] = ()
    """From each stage to the next, and from the last back to the first."""
    costs: tuple[LatencyEntry, ...]

    def renamed(self, names: Mapping[str, tuple[str, int]]) -> Self:
        """Return the same entries of devices with other names, and numbers on their nodes."""
        devices = [
            one.model_copy(update=dict(zip(("name", "index"), names[one.name], strict=True)))
            for one in self.devices
        ]
        links = [
            one.model_copy(update={"source": names[one.source][0], "target": names[one.target][0]})
            for one in self.links
        ]
        return self.model_copy(update={"devices": tuple(devices), "links": tuple(links)})

    def link(self, source: str, target: str) -> LinkInput:
        """Return the link from one device to another; `ValueError` if the plan has none."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise ValueError(f"no link from {source} to {target} among the plan's inputs")

    def cost(
        self,
        profile_kind: str,
        part: Part,
        phase: Phase,
        precision: Precision,
        kv: KVPrecision,
    ) -> LatencyEntry:
        """Return a part's cost entry; of prefill and the ends, one with another KV will do."""
        found = list(self._of(profile_kind, part, phase, precision))
        exact = [entry for entry in found if entry.kv is kv]
        if part == "layer" and phase is Phase.DECODE:
            found = exact
        if found:
            return (exact or found)[0]
        raise ValueError(
            f"no cost of {profile_kind} {part} {phase.value} {precision.value} {kv.value} among "
            "the plan's inputs"
        )

    def _of(
        self, profile_kind: str, part: Part, phase: Phase, precision: Precision
    ) -> Iterable[LatencyEntry]:
        for entry in self.costs:
            if (entry.device_kind, entry.part, entry.phase) == (profile_kind, part, phase) and (
                part != "layer" or entry.precision is precision
            ):
                yield entry

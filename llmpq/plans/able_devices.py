"""Which of a cluster's devices run what a plan is asked to have on each of them.

What is forced (a dtype, bits of the KV cache, rounded activations) is on every device of a plan:
those that do not run it are left out before anything is planned, and said.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llmpq.devices.cluster import Cluster, Device
from llmpq.devices.default_dtype import require_dtype
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.capabilities import PACKED_KV, Lack, execution_modes, lack_of, reads_packed_kv
from llmpq.precision import KVPrecision, Precision
from llmpq.workload import Dtype


class NoDeviceRunsError(ValueError):
    """None of the devices runs what is asked for."""


@dataclass(frozen=True, kw_only=True)
class Forced:
    """What every device of a plan has, whatever else is chosen."""

    spec: ModelSpec
    kvs: tuple[KVPrecision, ...]
    """One of these."""
    dtype: Dtype | None = None
    """None: one that all devices have."""
    layers: Sequence[Sequence[Precision]] = ()
    """What each layer may have, or all of them; none: any."""
    copies: str | None = None
    """The drafts asked for, where they read a copy of the cache in 4 bits (`--speculate`)."""
    max_len: int | None = None
    """Tokens of the longest request; None: the model's positions."""

    @property
    def rounded(self) -> list[Precision]:
        """The precisions of layers that have none but rounded activations."""
        only = [own for own in self.layers if all(p.activation_bits < 16 for p in own)]
        return [precision for own in only for precision in own]

    def lack(self, device: Device) -> Lack | None:
        """Return why a device does not run it; None where it does, or another program may."""
        if self.dtype == "bfloat16" and not device.spec.has_bfloat16:
            return Lack(
                why="--dtype bfloat16 needs GPUs from Ampere on",
                remedy="leave --dtype out or give float16 or float32",
            )
        copy = None if self.copies is None else self.lack_of_kv(device, KVPrecision.KV4)
        if copy is not None:
            remedy = f"leave --speculate {self.copies} out or give ngram"
            return Lack(why=f"{copy.why}, as drafts read", remedy=remedy)
        found = [self.lack_of_kv(device, kv) for kv in self.kvs]
        return None if None in found else found[0]

    def lack_of_kv(self, device: Device, kv: KVPrecision) -> Lack | None:
        """Return why a device does not run a cache of these bits."""
        if device.spec.export_only is not None:
            return None
        modes = execution_modes(
            gpu=not device.spec.is_cpu,
            kv=kv,
            drafts=False,
            precisions=self.rounded,
            dtype=self.dtype or "bfloat16",
        )
        asked = [mode for mode in modes if mode != "gpu"]  # a model that no GPU runs is exported
        lack = lack_of(self.spec, asked, max_len=self.max_len)
        if lack is None and kv is not KVPrecision.KV16 and not reads_packed_kv(device.spec):
            return Lack(why=PACKED_KV, remedy="plan with --kv 16")
        return lack


def able_devices(
    cluster: Cluster, forced: Forced, pinned: Collection[str] = ()
) -> tuple[Cluster, list[str]]:
    """Return the cluster with the devices that run what is forced, and a line on the others.

    Devices keep their names and numbers. `NoDeviceRunsError` where none is left, or where one that
    is pinned does not run it.
    """
    lacking: dict[Lack, list[Device]] = {}
    for device in cluster.devices:
        lack = forced.lack(device)
        if lack is not None:
            lacking.setdefault(lack, []).append(device)
    if not lacking:
        return cluster, []
    gone = {device.name for own in lacking.values() for device in own}
    for lack, own in lacking.items():
        for name in sorted({device.name for device in own}.intersection(pinned)):
            raise NoDeviceRunsError(f"--pin {name}: {lack.why}; {lack.remedy}")
    if len(gone) == len(cluster.devices):
        if forced.dtype is not None:
            require_dtype(cluster, forced.dtype)
        raise NoDeviceRunsError(
            "; ".join(
                f"{lack.why}: no device is left of {_kinds(own)}; {lack.remedy}"
                for lack, own in lacking.items()
            )
        )
    left = [device for device in cluster.devices if device.name not in gone]
    return cluster.grouped(left), [
        f"{_kinds(own)} left out: {lack.why} (to use {'it' if len(own) == 1 else 'them'}: "
        f"{lack.remedy})"
        for lack, own in lacking.items()
    ]


def _kinds(devices: Sequence[Device]) -> str:
    return ", ".join(dict.fromkeys(device.kind for device in devices))

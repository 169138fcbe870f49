"""The devices people have: nodes, devices, links, read from a cluster YAML.

A device's `profile_kind` is the key its measured costs are stored under: the card's name, with what
changes its speed (threads of a CPU stage, SMs of an emulated GPU) after an `@`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from llmpq.devices.device_spec import (
    DeviceSpec,
    canonical_kind,
    device_specs,
    which_memory,
)
from llmpq.devices.device_text import groups_of_text
from llmpq.errors import nearest, unknown_name
from llmpq.file_form import FileForm
from llmpq.units import Size


class Emulate(FileForm):
    """Make a GPU behave as a smaller one: a share of its SMs and a memory cap."""

    sms: int | None = Field(default=None, gt=0, le=65536)
    """Multiprocessors it may use."""
    memory: Size | None = None


class Link(FileForm):
    """A connection: 1e9 bits per second one way, and latency of one message."""

    MEANT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("bandwidth", "speed", "gbit", "gbits", "rate"), "gbps"),
        **dict.fromkeys(("latency", "delay", "rtt", "rtt_us", "latency_ms"), "latency_us"),
    }
    gbps: float = Field(ge=1e-6, le=1e9)
    """Gigabits per second, one way."""
    latency_us: float = Field(ge=0, le=1e9)
    """Microseconds that a message of no bytes takes."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time one message of `num_bytes` takes."""
        return self.latency_us * 1e-6 + num_bytes * 8 / (self.gbps * 1e9)


_CardName = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) is int else name)]
"""A card's name, which may be a number in YAML: 3060."""


class DeviceGroup(FileForm):
    """`count` equal devices of one node."""

    MEANT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("type", "name", "model", "gpu", "gpu_type", "card", "device"), "kind"),
        **dict.fromkeys(("num", "n", "number", "quantity", "num_gpus"), "count"),
        **dict.fromkeys(("vram", "vram_gb", "memory_gb", "mem"), "memory"),
        **dict.fromkeys(("cores", "cpus", "num_threads"), "threads"),
    }
    kind: _CardName
    """A card that `llmpq-algo devices --known` lists, `CPU`, or any name beside `spec`."""
    count: int = Field(default=1, gt=0, le=1000)
    memory: Size | None = None
    """Memory of each device, instead of the table's."""
    reserve: Size | None = None
    """Memory of each device that stays free for others; left out, what the table says of it."""
    threads: int | None = Field(default=None, gt=0, le=65536)
    """Threads of a CPU stage; the field is an error on a GPU."""
    emulate: Emulate | None = None
    spec: DeviceSpec | None = None
    """Inline description of a kind that is not in the table."""


def _groups(devices: object) -> object:
    """Return devices with those said as text, as a card's number or as `T4: 8` as groups."""
    listed = devices if isinstance(devices, list) else [devices]
    found: list[object] = []
    for one in listed:
        words = [str(one)] if type(one) in (str, int) else _counted(one)
        found += [group for word in words for group, _ in groups_of_text(word, "device")]
        if not words:
            found.append(one)
    return devices if found == [devices] else found


def _counted(one: object) -> list[str]:
    """Return a table of cards and how many as texts, nothing for any other value."""
    if not isinstance(one, dict) or not all(type(count) is int for count in one.values()):
        return []
    return [] if set(one) & set(DeviceGroup.model_fields) else [f"{k}:{n}" for k, n in one.items()]


class PairLink(Link):
    """A link between two nodes, within one (named twice), or of single devices.

    A device is named as in a plan, `RTX-3090-0`, or by its place, `box:1`; with a node it is every
    link of the device to that node.
    """

    between: tuple[str, str]
    """Names of two nodes, or one name twice."""


class Links(FileForm):
    """How nodes are connected; a pair overrides the defaults."""

    MEANT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("network", "ethernet", "internode", "inter_node"), "between_nodes"),
        **dict.fromkeys(("nvlink", "pcie", "intranode", "intra_node"), "within_node"),
    }
    between_nodes: Link = Link(gbps=10, latency_us=50)
    within_node: Link = Link(gbps=64, latency_us=20)
    pairs: tuple[PairLink, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _rest_by_default(cls, data: object) -> object:
        """Take of a link that is said in part the rest from its default."""
        if not isinstance(data, dict):
            return data
        whole = {
            key: {**cls.model_fields[key].get_default().model_dump(), **data[key]}
            for key in ("between_nodes", "within_node")
            if isinstance(data.get(key), dict)
        }
        return {**data, **whole}


class Node(FileForm):
    """One machine."""

    MEANT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("gpus", "gpu", "cards", "accelerator"), "devices"),
        **dict.fromkeys(("ip", "address", "addr", "hostname"), "host"),
        **dict.fromkeys(("id", "node"), "name"),
    }
    name: str
    host: str | None = None
    """The name or address (IPv4 or IPv6) of its Ray node; left out, `labels` or devices tell."""
    devices: Annotated[tuple[DeviceGroup, ...], BeforeValidator(_groups)] = ()
    """Groups, or texts as `--devices` takes them: `[T4:8, cpu=64GB+16threads]`, `{T4: 8}`."""
    accelerators: _CardName | None = None
    """Short form of one device group, `T4:3`."""
    labels: Mapping[str, str] = {}
    """Labels that its Ray node was started with."""
    model_dir: str | None = None
    """Where this node keeps the model, if not where the command says."""

    @model_validator(mode="after")
    def _has_devices(self) -> Self:
        if bool(self.devices) == bool(self.accelerators):
            raise ValueError(f"node '{self.name}': give either 'devices' or 'accelerators'")
        return self

    def groups(self) -> tuple[DeviceGroup, ...]:
        """Return the device groups, the short form expanded."""
        if self.accelerators is None:
            return self.devices
        kind, _, count = self.accelerators.partition(":")
        if "," in kind or (count and not count.isdecimal()):
            raise ValueError(
                f"node '{self.name}': accelerators must be KIND:COUNT, got "
                f"'{self.accelerators}'; several kinds are a list under 'devices'"
            )
        return (DeviceGroup(kind=kind, count=int(count or 1)),)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device a stage can run on."""

    name: str
    """Unique in the cluster: `T4-0`, `T4-1`, `V100-32GB-0`."""
    kind: str
    profile_kind: str
    node: str
    index: int
    """Number of the device on its node."""
    spec: DeviceSpec
    memory_bytes: int
    reserve_bytes: int
    threads: int | None
    emulate: Emulate | None
    joined: tuple[Device, ...] = ()
    """Devices that it stands for, which share its stages in tensor parallel
    (devices/joined_devices.py)."""
    shares: tuple[int, ...] = ()
    """Of `joined`."""
    sum_link: Link | None = None
    """How sums between `joined` travel."""

    @property
    def limit_bytes(self) -> int:
        """Memory a stage may use, the framework's context included."""
        return self.memory_bytes - self.reserve_bytes

    def alone(self) -> DeviceGroup:
        """Return it as a group of one, for another cluster."""
        return DeviceGroup(
            kind=self.kind,
            memory=self.memory_bytes,
            reserve=self.reserve_bytes,
            threads=self.threads,
            emulate=self.emulate,
            spec=self.spec,
        )


class PlanningHints(FileForm):
    """What the cluster's author recommends for planning; command-line flags override it."""

    model: str | None = None
    """As `--model`."""
    theta: float | None = None
    """As `--theta`."""
    omega_file: str | None = None
    """As `--omega-file`."""
    probe_cpu: bool = False
    """As `--probe-cpu`, for CPUs without a profile that this machine has not measured before."""
    note: str = ""


class Cluster(FileForm):
    """A named set of nodes and links."""

    MEANT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("gpus", "devices", "machines", "hosts", "servers", "cards"), "nodes"),
        **dict.fromkeys(("network", "interconnect", "bandwidth", "link"), "links"),
    }
    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    name: str
    nodes: tuple[Node, ...] = Field(min_length=1)
    links: Links = Links()
    planning: PlanningHints = PlanningHints()
    _only: frozenset[str] | None = PrivateAttr(default=None)
    """Names of the devices of a part; None: all."""
    _grouped: tuple[Device, ...] | None = PrivateAttr(default=None)
    """Devices that stand for those of the file; None: those themselves."""

    @model_validator(mode="after")
    def _names_are_unique_and_known(self) -> Self:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"node names must differ, got {names}")
        _ = self._pair_links
        specs: dict[str, DeviceSpec] = {}
        for device in self.devices:
            _require_same(specs.setdefault(device.kind, device.spec), device)
        return self

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device, in file order; of a part its own."""
        only, all_of_them = self._only, self._grouped or self._listed
        return tuple(d for d in all_of_them if only is None or d.name in only)

    def part(self, names: Collection[str]) -> Cluster:
        """Return these devices with their names, numbers and links; it is no cluster of a file."""
        part = self.model_copy()
        part._only = frozenset(names)
        part.__dict__.pop("devices", None)
        return part

    def grouped(self, devices: Sequence[Device]) -> Cluster:
        """Return the cluster with these devices instead, which may be groups of its own.

        It is the same cluster still: its fingerprint is that of the file's devices.
        """
        whole = self.model_copy()
        whole._grouped = tuple(devices)
        whole.__dict__.pop("devices", None)
        return whole

    def ungrouped(self) -> Cluster:
        """Return the cluster with the devices of its file."""
        if self._grouped is None:
            return self
        whole = self.model_copy()
        whole._grouped = whole._only = None
        whole.__dict__.pop("devices", None)
        return whole

    @cached_property
    def _listed(self) -> tuple[Device, ...]:
        """Every device of the file."""
        counts: dict[str, int] = {}
        devices = []
        for node in self.nodes:
            index = 0
            for group in node.groups():
                for _ in range(group.count):
                    devices.append(resolve(node, group, index, counts))
                    index += 1
        return tuple(devices)

    def device(self, name: str) -> Device:
        """Return a device by name (`T4-1`) or by place (`node:index`)."""
        for device in self.devices:
            if name in (device.name, f"{device.node}:{device.index}"):
                return device
        raise unknown_name("device", name, [d.name for d in self.devices])

    def link(self, source: Device, target: Device) -> Link:
        """Return the link of two devices: their own, else that of their nodes."""
        own = self.own_link(source, target)
        if own is not None:
            return own
        pair = self._pair_links.get(frozenset({("node", source.node), ("node", target.node)}))
        if pair is not None:
            return pair
        same = source.node == target.node
        return self.links.within_node if same else self.links.between_nodes

    def own_link(self, source: Device, target: Device) -> Link | None:
        """Return the link that names one of two devices, or both; None where none does."""
        devices = _leading(source).name, _leading(target).name
        nodes = source.node, target.node
        for ends in (
            {("device", devices[0]), ("device", devices[1])},
            {("device", devices[0]), ("node", nodes[1])},
            {("node", nodes[0]), ("device", devices[1])},
        ):
            found = self._pair_links.get(frozenset(ends))
            if found is not None:
                return found
        return None

    def has_own_links(self, device: Device) -> bool:
        """Whether a link names the device: it is then unlike all others of its kind."""
        return any(("device", _leading(device).name) in ends for ends in self._pair_links)

    @cached_property
    def _pair_links(self) -> dict[frozenset[tuple[str, str]], Link]:
        """The links of `pairs` by their two ends, each a node's name or a device's."""
        found: dict[frozenset[tuple[str, str]], Link] = {}
        for pair in self.links.pairs:
            ends = [self._end(end) for end in pair.between]
            shown = f"links.pairs: [{', '.join(pair.between)}]"
            if ends[0] == ends[1] and ends[0][0] == "device":
                raise ValueError(f"{shown} is one device, expected two; name the other one")
            if frozenset(ends) in found:
                raise ValueError(f"{shown} is given twice; leave one of them out")
            found[frozenset(ends)] = Link(gbps=pair.gbps, latency_us=pair.latency_us)
        return found

    def _end(self, name: str) -> tuple[str, str]:
        """Return what an end of a pair is: ("node", its name) or ("device", its name)."""
        nodes = [node.name for node in self.nodes]
        devices = [d for d in self._listed if name in (d.name, f"{d.node}:{d.index}")]
        if name in nodes and not devices:
            return "node", name
        if len(devices) == 1 and name not in nodes:
            return "device", devices[0].name
        if devices:
            raise ValueError(
                f"links.pairs: '{name}' is a node and a device, or two devices; name the device by "
                "its place, such as node:0, and give nodes other names"
            )
        known = [*nodes, *(d.name for d in self._listed)]
        shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
        raise ValueError(
            f"links.pairs: unknown node or device '{name}': {nearest(name, known)}known: {shown}"
        )

    def fingerprint(self) -> str:
        """Return a short hash of devices and links; names of the file and hosts do not count."""
        own = self._listed if self._only is None else self.devices
        devices = [[d.name, d.profile_kind, d.memory_bytes, d.reserve_bytes, d.node] for d in own]
        content = {"devices": devices, "links": self.links.model_dump(mode="json")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster YAML; `ValueError` names the file, the key and the nearest valid one."""
        if not str(path).strip():
            raise ValueError("the name of a cluster file is empty")
        try:
            data = yaml.load(Path(path).read_text(), Loader=_Loader)  # noqa: S506
        except FileNotFoundError:
            raise ValueError(f"no such cluster file: '{path}'") from None
        except IsADirectoryError:
            raise ValueError(f"'{path}' is a directory, expected a cluster YAML") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ValueError(f"'{path}' is not valid YAML{_place_of(error)}") from None
        if _is_table_of_kinds(data):
            raise ValueError(
                f"'{path}' is a table of device kinds, expected a cluster: 'name' and 'nodes' that "
                "say which devices you have; llmpq-algo devices --yaml prints this machine's"
            )
        return cls.parse_data(data, where=str(path))

    @classmethod
    def from_counts(cls, names: Sequence[str], counts: Sequence[int]) -> Cluster:
        """Read the paper's `--device_names T4 V100 --device_numbers 3 1`; a node per kind."""
        if len(names) != len(counts):
            raise ValueError(
                f"--device_names has {len(names)} names and --device_numbers {len(counts)} numbers;"
                " expected as many of each"
            )
        nodes: list[dict[str, Any]] = [
            {"name": f"node-{i}", "devices": [{"kind": canonical_kind(name), "count": count}]}
            for i, (name, count) in enumerate(zip(names, counts, strict=True))
        ]
        title = "-".join(f"{n}x{c}" for n, c in zip(names, counts, strict=True))
        return cls.parse_data({"name": title, "nodes": nodes}, where="--device_names")


class _Loader(yaml.SafeLoader):
    """YAML without its numbers to the base of 60, which `3090:2` would be one of."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if not form.match("3090:2")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)


def _leading(device: Device) -> Device:
    """Return the device that receives and sends for a group, or it itself."""
    return device.joined[0] if device.joined else device


def _is_table_of_kinds(data: object) -> bool:
    """Whether YAML holds what clusters/gpus.yaml does: kinds and their specifications."""
    if not isinstance(data, dict) or not data:
        return False
    return all(isinstance(spec, dict) and "mem_gbps" in spec for spec in data.values())


def _place_of(error: Exception) -> str:
    """Return ` at line 3, column 3: what is wrong`, on one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ": " + " ".join(str(error).split())
    problem = " ".join(str(getattr(error, "problem", None) or "unreadable").split())
    return f" at line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _table_kind(node: Node, kind: str) -> str:
    """Return the table's name of a kind; the error says whose kind it is."""
    try:
        return canonical_kind(kind)
    except ValueError as error:
        raise ValueError(f"node '{node.name}': {error}") from None


def _require_same(spec: DeviceSpec, device: Device) -> None:
    """Refuse a device that is not what its kind means elsewhere: costs go by the kind."""
    for name in DeviceSpec.model_fields:
        expected, got = getattr(spec, name), getattr(device.spec, name)
        if got != expected:
            raise ValueError(
                f"node '{device.node}': kind '{device.kind}' has {name} {got}, expected {expected} "
                "as where the kind comes first; give other devices a kind of their own"
            )


def resolve(node: Node, group: DeviceGroup, index: int, counts: dict[str, int]) -> Device:
    """Turn one member of a group into a device, numbering devices per kind."""
    kind = group.kind if group.spec is not None else _table_kind(node, group.kind)
    spec = group.spec or device_specs()[kind]
    if group.threads is not None and not spec.is_cpu:
        raise ValueError(f"node '{node.name}': 'threads' is for CPU devices, {kind} is a GPU")
    threads = (group.threads or 1) if spec.is_cpu else None
    emulate = group.emulate
    suffix = f"@{threads}t" if threads else f"@{emulate.sms}sm" if emulate and emulate.sms else ""
    memory = (emulate.memory if emulate else None) or group.memory
    if memory is None and spec.sold_with:
        raise ValueError(f"node '{node.name}': {which_memory(kind)}, by 'memory'")
    memory = spec.installed(memory or spec.memory)
    reserve = spec.default_reserve(memory) if group.reserve is None else group.reserve
    if reserve >= memory:
        raise ValueError(f"node '{node.name}': reserve leaves nothing of {kind}'s memory")
    number = counts.get(kind, 0)
    counts[kind] = number + 1
    return Device(
        name=f"{kind}-{number}",
        kind=kind,
        profile_kind=kind + suffix,
        node=node.name,
        index=index,
        spec=spec,
        memory_bytes=memory,
        reserve_bytes=reserve,
        threads=threads,
        emulate=emulate,
    )

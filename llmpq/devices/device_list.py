"""Devices as one says them: `4090,3090:2,cpu`, in one text, for a machine without a cluster YAML.

    DEVICES   one device or several, separated by commas (or + and ;): 4090,3090:2,cpu
    device    NAME, NAME:COUNT or COUNTxNAME; a card's name in any common spelling
    a card that is not in the table        mycard=24GB+936GB/s+71TFLOPS
    a card whose memory was changed        4090=48GB
    the host's cores                       cpu=64GB+16threads

Devices that this machine has are this machine's: `cpu` is then its cores and memory. What the text
leaves open of others is assumed, and `assumptions` says what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.cluster import Cluster, Links
from llmpq.devices.device_spec import (
    device_specs,
    known_kind,
    siblings,
    unknown_card,
    which_memory,
)
from llmpq.devices.this_machine import MIB, NODE, Host, MachineDevices, cpu_group, gpu_group
from llmpq.errors import shortened
from llmpq.units import MAX_SIZE, format_size, parse_size

CPU_THREADS = 8
"""Threads of a `cpu` that states none."""
CONTEXT = "0.5 GiB"
"""Memory that the framework takes on a card described in the text: what most cards' entries say."""
INLINE = "{}=...GB+...GB/s+...TFLOPS, its memory, bandwidth and dense 16-bit rate"
ELSEWHERE = "machine"
"""Name of the node of devices that are not this machine's."""
MAX_COUNT = 1000
MAX_WORDS = 12
"""Words of the longest name of a card."""
_COUNTED = (
    re.compile(r"(?P<name>.*?)\s*:\s*(?P<count>\d{1,9})"),
    re.compile(r"(?P<name>.*?)\s*[xX*]\s*(?P<count>\d{1,9})"),
    re.compile(r"(?P<count>\d{1,9})(?:\s*[xX*]\s*|\s+)(?P<name>[^=|].*)"),
)
"""Ways to say how many: `3090:2`, `3090x2` and `RTX 3090 x2`, `2x3090` and `2 x RTX 3090`."""
_ANY_CARD = re.compile(r"(?:n?gpus?|cuda|nvidia|amd|auto|all|any|local|here)[ :_-]?\d*")
"""What people write for the cards that there are."""
_JOINED = re.compile(r"[;+&]|\band\b")
"""What people write for a comma: `4090 + 3090`, `4090 and 2x 3090`."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z/]+)", re.IGNORECASE)
_BANDWIDTH = {"gb/s": 1.0, "gbps": 1.0, "gbs": 1.0, "tb/s": 1e3, "tbps": 1e3, "tbs": 1e3}
_RATE = ("tflops", "tflop/s", "tflop", "tf", "tflops/s")
_MOST = {"memory": MAX_SIZE, "mem_gbps": 1e6, "tflops": 1e6, "threads": 65536}
_THREADS = ("threads", "thread", "t", "cores", "core")


@dataclass(frozen=True)
class DeviceList:
    """The cluster that a text describes, and what was assumed for what it leaves open."""

    cluster: Cluster
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class _Facts:
    """What stands after the `=` of a device; None where it is not said."""

    memory: int | None = None
    mem_gbps: float | None = None
    tflops: float | None = None
    threads: int | None = None


def read_devices(
    text: str, *, machine: MachineDevices | None = None, where: str = "--devices"
) -> DeviceList:
    """Read `4090,3090:2,cpu`: devices of one machine; `ValueError` offers the nearest names.

    `machine`: this one. The devices are taken to be its own where it has all of them.
    """
    groups, assumed = [], []
    for item in _items(text.replace("\u00d7", "x")):
        group, notes = _group(item, where)
        groups.append(group)
        assumed += notes
    if not groups:
        raise ValueError(f"{where} is empty, expected devices such as 4090,3090:2,cpu")
    here = machine is not None and _has(machine, groups)
    host = machine.host if machine is not None and here else None
    assumed += _complete_cpus([group for group in groups if _is_cpu(group)], host)
    counts = [f"{g['kind']}:{g['count']}" if g["count"] > 1 else g["kind"] for g in groups]
    if machine is not None and here:
        groups, in_use = _as_they_are(groups, machine)
        assumed += in_use
    node = {"name": NODE if here else ELSEWHERE, "devices": groups}
    data = {"name": ",".join(counts), "nodes": [node]}
    cluster = Cluster.parse_data(data, where=where)
    if len(cluster.devices) > MAX_COUNT:
        raise ValueError(
            f"{where}: got {len(cluster.devices):,} devices, expected at most {MAX_COUNT:,}"
        )
    return DeviceList(cluster, (*_machine(cluster), *filter(None, dict.fromkeys(assumed))))


def _has(machine: MachineDevices, groups: list[dict[str, Any]]) -> bool:
    """Whether the groups are a machine's devices: its GPUs, and no more cores than it has."""
    cpus = [group for group in groups if _is_cpu(group)]
    gpus = [group for group in groups if not _is_cpu(group)]
    stated = sum(group["count"] * group.get("threads", 1) for group in cpus)
    memory = sum(group["count"] * group.get("memory", 0) for group in cpus)
    return (
        machine.has([kind for group in gpus for kind in [group["kind"]] * group["count"]])
        and stated <= machine.host.cores
        and memory <= machine.host.total_bytes
        and not any("spec" in group for group in groups)
    )


def _as_they_are(
    groups: list[dict[str, Any]], machine: MachineDevices
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups with the memory that this machine's GPUs have free now, and what is not.

    A group that states its memory is left as it is said.
    """
    left = list(machine.gpus)
    found: list[dict[str, Any]] = []
    notes = []
    for group in groups:
        own = [gpu for gpu in left if gpu.kind == group["kind"]][: group["count"]]
        left = [gpu for gpu in left if gpu not in own]
        if "memory" in group or not own:
            found.append(group)
            continue
        for gpu in own:
            measured = gpu_group(gpu, machine.host)
            if measured["reserve"]:
                size = format_size(measured["reserve"])
                notes.append(f"{size} of {gpu.kind} (GPU {gpu.index}) are in use now")
            if found and {**found[-1], "count": 1} == {**measured, "count": 1}:
                found[-1]["count"] += 1
            else:
                found.append({**measured, "count": 1})
    return found, notes


def _is_cpu(group: dict[str, Any]) -> bool:
    spec = device_specs().get(group["kind"])
    return spec is not None and spec.is_cpu


def _machine(cluster: Cluster) -> Iterator[str]:
    """Yield what is assumed of the machine as a whole."""
    link = Links().within_node
    if len(cluster.devices) > 1:
        yield (
            f"one machine, {link.gbps:g} Gb/s and {link.latency_us:g} us between any two devices "
            "(as PCIe 4.0 x4); describe other links or several machines in a cluster YAML"
        )


def _items(text: str) -> Iterator[str]:
    """Yield one device each: between commas, or words that are several devices without them."""
    for part in text.split(","):
        own = [one.strip() for one in _JOINED.split(part)] if "=" not in part else []
        if len(own) > 1 and all(map(_readable, own)):
            yield from own
        elif part.strip():
            yield from _several(part.split()) or [part.strip()]


def _several(words: list[str]) -> list[str]:
    """Return the devices that words name one after the other, nothing if they do not."""
    items: list[str] = []
    while words:
        longest = min(len(words), MAX_WORDS)
        takes = next((n for n in range(longest, 0, -1) if _readable(" ".join(words[:n]))), 0)
        if not takes:
            return []
        items.append(" ".join(words[:takes]))
        words = words[takes:]
    return items


def _readable(item: str) -> bool:
    name, _, described = _parts(item)
    return bool(described) or known_kind(name) is not None


def _parts(item: str) -> tuple[str, int, str]:
    """Return name, count and what stands after the `=`; the count is where a known name is left.

    What follows a colon is a count, also where the card has as many GB: `V100:16` are 16 cards.
    """
    likely = _COUNTED[0].fullmatch(item)
    found = None
    for pattern in _COUNTED:
        match = pattern.fullmatch(item)
        if match is None or (match.start("count") == 0 and known_kind(match["count"]) is not None):
            continue  # in `4090 3090` the first is a card, too
        name, _, described = match["name"].partition("=")
        if described or known_kind(name.strip()) is not None:
            found = likely = match
            break
    counted = found is not None and item[: found.start("count")].rstrip()[-1:] in (":", "*")
    if likely is None or (known_kind(item) is not None and not counted):
        name, _, described = item.partition("=")
        return name.strip(), 1, described.strip()
    name, _, described = likely["name"].partition("=")
    return name.strip(), int(likely["count"]), described.strip()


def _group(item: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the device group of one item, and what is assumed for it."""
    name, count, described = _parts(item)
    item = shortened(item)
    if _ANY_CARD.fullmatch(name.lower()) and not described:
        own = f"leave {where} out for what this machine has, or " if where == "--devices" else ""
        raise ValueError(
            f"{where} {item}: '{name}' names no card; {own}say which cards, such as 4090,3090:2"
        )
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"{where} {item}: expected 1 to {MAX_COUNT:,} devices, got {count:,}")
    facts = _facts(described, item, where) if "=" in item else _Facts()
    kind = known_kind(name)
    if kind is None and ":" in name:
        got = shortened(name.split(":", 1)[1])
        raise ValueError(
            f"{where} {item}: expected NAME:COUNT, such as 3090:2, got '{got}' for a count"
        )
    if kind is None:
        return _own_card(name, count, facts, item, where)
    spec = device_specs()[kind]
    if spec.is_cpu:
        return _cpu(kind, count, facts), []
    if facts.threads:
        raise ValueError(f"{where} {item}: '{name}' is the {kind}, a card, which has no threads")
    if facts.mem_gbps or facts.tflops:
        return _described_anew(kind, name, count, facts, f"{where} {item}")
    if spec.sold_with and facts.memory is None:
        example = f"{name}={spec.sold_with[-1].replace(' ', '')}"
        raise ValueError(f"{where} {item}: {which_memory(kind)}, such as {example}")
    group: dict[str, Any] = {"kind": kind, "count": count}
    if facts.memory is not None:
        return _with_memory(group, name, facts.memory)
    return group, which_version(name, kind) + _count_or_memory(item, name, count)


def _with_memory(group: dict[str, Any], name: str, memory: int) -> tuple[dict[str, Any], list[str]]:
    """Return cards with the memory that the text states: of a name's versions the one sold so.

    The size that a card is sold by is what the table has of it, which is what CUDA reports.
    """
    sizes = (memory / 1e9, memory / 2**30)
    kind = next(filter(None, (known_kind(f"{name} {size:g}GB") for size in sizes)), None)
    if kind is not None and not device_specs()[kind].sold_with:
        return group | {"kind": kind}, []
    group |= {"kind": kind or group["kind"], "memory": memory}
    if kind:
        return group, []
    own, table = group["kind"], device_specs()[group["kind"]].memory
    if siblings(own):
        return group, [f"{name} with {format_size(memory)} is the {own} with other memory"]
    more = f"{name} with {format_size(memory)}: the table's has {format_size(table)}"
    return group, [more] if memory > table else []


def _count_or_memory(item: str, name: str, count: int) -> list[str]:
    """Say that a number behind a colon is a count, where there are cards of as many GB."""
    if ":" not in item or count == 1 or known_kind(f"{name} {count}GB") is None:
        return []
    return [f"{item} is {count} cards; one of {count} GB is {name}-{count}gb"]


def _described_anew(
    kind: str, name: str, count: int, facts: _Facts, source: str
) -> tuple[dict[str, Any], list[str]]:
    """Return a card of the table with other figures, as a kind of its own."""
    word = _word(name)
    word = f"{word}-as-described" if word.lower() == kind.lower() else word
    given = {
        "memory": facts.memory,
        "mem_gbps": facts.mem_gbps,
        "fp16_tflops": facts.tflops,
        "fp32_tflops": None if facts.tflops is None else facts.tflops / 2,
    }
    change: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if facts.memory is not None:
        change |= {"memory_source": source, "sold_with": ()}
    spec = device_specs()[kind].model_copy(update={**change, "aliases": (), "source": source})
    note = f"{word} is as described, what the text leaves open as the {kind}"
    return {"kind": word, "count": count, "spec": spec.model_dump(mode="json")}, [note]


def which_version(name: str, kind: str) -> list[str]:
    """Say which of several cards of a name is meant, where the name leaves it open."""
    others = siblings(kind)
    if not others or known_kind(name) == kind == known_kind(f"{name} {_sold_gb(kind)}GB") is None:
        return []
    if any(known_kind(f"{name} {_sold_gb(other)}GB") == other for other in others):
        return [f"{name} is the {kind}; the other is {' or '.join(others)}"]
    return []


def _sold_gb(kind: str) -> str:
    size = re.search(r"-(\d+)GB$", kind)
    return size[1] if size else str(round(device_specs()[kind].memory / 2**30))


def _cpu(kind: str, count: int, facts: _Facts) -> dict[str, Any]:
    """Return stages on the host's cores, with what the text says of them."""
    spec = device_specs()[kind]
    said = {"threads": facts.threads, "memory": facts.memory}
    group: dict[str, Any] = {"kind": kind, "count": count}
    group |= {key: value for key, value in said.items() if value is not None}
    if facts.mem_gbps or facts.tflops:
        change: dict[str, Any] = {"mem_gbps": facts.mem_gbps or spec.mem_gbps}
        if facts.tflops:
            rate = facts.tflops / (facts.threads or CPU_THREADS)
            change |= dict.fromkeys(("fp16_tflops", "fp32_tflops"), rate)
        group["spec"] = spec.model_copy(update=change).model_dump(mode="json")
    return group


def _complete_cpus(groups: Sequence[dict[str, Any]], host: Host | None) -> list[str]:
    """Fill in what a text leaves open of its `cpu`s, from this machine's host or by assumption.

    They share what the host has beside what they are said to have. Returns what was filled in.
    """
    count = sum(group["count"] for group in groups)
    each = "cpu" if count == 1 else f"each of {count} cpu devices"
    shares: dict[str, int] = {}
    for key, whole in (cpu_group(host) if host is not None and groups else {}).items():
        if key in ("threads", "memory", "reserve"):
            sharing = [g for g in groups if ("threads" if key == "threads" else "memory") not in g]
            stated = sum(group["count"] * group.get(key, 0) for group in groups)
            shares[key] = max(0, whole - stated) // max(1, sum(g["count"] for g in sharing))
    return [_complete_cpu(group, each, shares) for group in groups]


def _complete_cpu(group: dict[str, Any], each: str, shares: Mapping[str, int]) -> str:
    """Fill in one group; `shares`: what each has of this machine's host, nothing elsewhere."""
    spec = device_specs()[group["kind"]]
    example = "cpu=64GB+60GB/s+16threads"
    speed = [] if "spec" in group else [f"{spec.mem_gbps:g} GB/s"]
    taken = {"threads": CPU_THREADS, "memory": spec.memory}
    if shares:
        memory = max(2 * MIB, shares["memory"])
        taken = {"threads": max(1, shares["threads"]), "memory": memory}
        if "memory" not in group:
            taken["reserve"] = min(shares["reserve"], memory - MIB)
    open_facts = {key: value for key, value in taken.items() if key not in group}
    group |= open_facts
    shown = [f"{group['threads']} threads"] if "threads" in open_facts else []
    if "memory" in open_facts:
        free = group["memory"] - group.get("reserve", 0)
        shown.append(f"{format_size(free)} of memory")
    if not shown and not speed:
        return ""
    if not shares:
        return f"{each} has {', '.join(shown + speed)}; or say {example}"
    own = f"{each} is this machine's: {', '.join(shown)} free; " if shown else ""
    return own + (f"it reads {speed[0]} unless measured" if speed else "")


def _word(name: str) -> str:
    """Return a card's name as one word."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")[:40] or "mycard"


def _own_card(
    name: str, count: int, facts: _Facts, item: str, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Return a card that the table does not have, as the text describes it."""
    word = _word(name)
    given = {
        "memory": facts.memory,
        "bandwidth": facts.mem_gbps,
        "16-bit rate": facts.tflops,
    }
    missing = [what for what, value in given.items() if not value]
    if len(missing) == len(given):
        raise ValueError(
            f"{where} {item}: {unknown_card(name)}; describe it as {INLINE.format(word.lower())}"
        )
    if missing or not name or facts.threads:
        wrong = f"no {' and no '.join(missing)}" if missing else "a card has a name and no threads"
        raise ValueError(f"{where} {item}: {wrong}; expected {INLINE.format(word.lower())}")
    spec = {
        "memory": facts.memory,
        "mem_gbps": facts.mem_gbps,
        "fp16_tflops": facts.tflops,
        "context": CONTEXT,
        "source": f"{where} {item}",
    }
    note = f"{word} is as described, with {CONTEXT} for its driver and libraries"
    return {"kind": word, "count": count, "spec": spec}, [note]


def _facts(described: str, item: str, where: str) -> _Facts:
    """Read `24GB+936GB/s+71TFLOPS`, in any order."""
    found: dict[str, Any] = {}
    for part in described.split("+"):
        match = _NUMBER.fullmatch(part.strip())
        key, value = _fact(match) if match else ("", None)
        if value is None or not 0 < value <= _MOST[key]:
            raise ValueError(
                f"{where} {item}: got '{shortened(part.strip())}', expected memory, bandwidth or a "
                "rate with its unit: 24GB, 936GB/s, 71TFLOPS (of a cpu also 16threads)"
            )
        if key in found:
            raise ValueError(f"{where} {item}: '{part.strip()}' says {key} a second time")
        found[key] = value
    return _Facts(**found)


def _fact(match: re.Match[str]) -> tuple[str, Any]:
    """Return which fact a number with a unit is, and its value; None if it is none."""
    number, unit = float(match[1]), match[2].lower()
    if re.match("[GT]b", match[2]):  # bits: links have them, memory does not
        return "", None
    if unit in _BANDWIDTH:
        return "mem_gbps", number * _BANDWIDTH[unit]
    if unit in _RATE:
        return "tflops", number
    if unit in _THREADS:
        return "threads", int(number)
    try:
        return "memory", parse_size(match[0])
    except ValueError:
        return "", None

"""One device or several as one says them: `4090,3090:2,cpu`, to groups as a cluster file has them.

    devices   separated by commas (or + and ;): 4090,3090:2,cpu
    device    NAME, NAME:COUNT or COUNTxNAME; a card's name in any common spelling
    a card that is not in the table        mycard=24GB+936GB/s+71TFLOPS
    a card whose memory was changed        4090=48GB
    the host's cores                       cpu=64GB+16threads

Knows no machine: what a text leaves open stays open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmpq.devices.device_spec import (
    device_specs,
    known_kind,
    siblings,
    unknown_card,
    which_memory,
)
from llmpq.errors import shortened
from llmpq.units import MAX_SIZE, format_size, parse_size

CPU_THREADS = 8
"""Threads of a `cpu` that states none."""
CONTEXT = "0.5 GiB"
"""Memory that the framework takes on a card described in the text: what most cards' entries say."""
INLINE = "{}=...GB+...GB/s+...TFLOPS, its memory, bandwidth and dense 16-bit rate"
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
class _Facts:
    """What stands after the `=` of a device; None where it is not said."""

    memory: int | None = None
    mem_gbps: float | None = None
    tflops: float | None = None
    threads: int | None = None


def groups_of_text(text: str, where: str) -> list[tuple[dict[str, Any], list[str]]]:
    """Return each device of a text as a group of a cluster file, with what is said of it.

    `ValueError` begins with `where` and offers the nearest names.
    """
    return [_group(item, where) for item in _items(text.replace("\u00d7", "x"))]


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
        got = shortened(item.partition("=")[0].split(":", 1)[1])
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

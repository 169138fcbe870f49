"""Configurations that `llmpq-profile tune` found on this very card, in the user's cache directory.

    $XDG_CACHE_HOME/llmpq/products/CARD.json      (~/.cache where it is not set)

They hold for one card, driver and version of the kernels. A file of other ones, or one that cannot
be read, is named and left alone: products are then chosen untuned.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmpq.file_form import FileForm
from llmpq.kernels import kernel_table
from llmpq.kernels.gemm.ranking.config import Config, config_entry
from llmpq.kernels.gemm.ranking.predict import Product

_log = logging.getLogger("llmpq.products")
_DRIVER = Path("/proc/driver/nvidia/version")


class LearnedEntry(FileForm):
    """One product's fastest configuration, and what it gained."""

    bits: int
    n: int
    k: int
    rows: int
    """As `choice.rounded_rows` has them."""
    form: str
    config: dict[str, Any]
    us: float
    before_us: float
    """Of what was timed around the product, with what would be chosen untuned."""

    @property
    def product(self) -> Product:
        """The product it is for."""
        return Product(self.bits, self.n, self.k, self.rows, self.form)


class LearnedTable(FileForm):
    """What was found on a card."""

    schema_version: int = 1
    card: str
    driver: str
    kernels: str
    made: datetime.datetime
    entries: tuple[LearnedEntry, ...]

    def configs(self) -> dict[Product, Config]:
        """Return the configurations; raises `ValueError` for one that no kernel has."""
        try:
            return {entry.product: Config(**entry.config) for entry in self.entries}
        except TypeError as error:
            raise ValueError(f"a configuration is unknown: {error}") from None


@dataclass(frozen=True)
class CardKey:
    """A card with its driver and the version of the kernels."""

    card: str
    driver: str
    kernels: str

    @property
    def path(self) -> Path:
        """Where its table lies."""
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", self.card)
        return base / "llmpq" / "products" / f"{name}.json"


def card_key(device: torch.device) -> CardKey:
    """Return what a CUDA device's table is for."""
    p = torch.cuda.get_device_properties(device)
    card = f"{p.name} sm_{p.major}{p.minor} {p.multi_processor_count}"
    return CardKey(card, driver_version(), kernels_version())


def driver_version() -> str:
    """Return the GPU driver's version, "unknown" where none says it."""
    if _DRIVER.is_file():
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text())
        if found:
            return found[1]
    return "unknown"


@functools.cache
def kernels_version() -> str:
    """Return what changes with the sources of the products and with Triton."""
    folder = Path(__file__).parent
    digest = hashlib.sha256(importlib.metadata.version("triton").encode())
    table = Path(kernel_table.__file__)
    for path in [table, *sorted(folder.glob("*.py")), *sorted(folder.glob("*.json"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read(key: CardKey, *, now: datetime.datetime) -> tuple[dict[Product, Config], str]:
    """Return the configurations for a card and a sentence about them, "" where there is no file."""
    path = key.path
    if not path.is_file():
        return {}, ""
    again = "products are chosen untuned; llmpq-profile tune measures them again"
    try:
        table = LearnedTable.load_json(path)
        configs = table.configs()
    except ValueError as error:
        return {}, f"'{path}' is not used: {error}; {again}"
    other = [
        what for what in ("card", "driver", "kernels") if getattr(table, what) != getattr(key, what)
    ]
    if other:
        return {}, f"'{path}' is not used: it was made with another {', '.join(other)}; {again}"
    age = age_text(now - table.made)
    return (
        configs,
        f"{len(configs)} products run as tuned {age} ago on this {key.card} ('{path}')",
    )


def write(key: CardKey, entries: Mapping[Product, LearnedEntry], *, now: datetime.datetime) -> Path:
    """Add entries to a card's table, which replace those of the same products; returns the file."""
    kept: dict[Product, LearnedEntry] = {}
    if read(key, now=now)[0]:
        kept = {entry.product: entry for entry in LearnedTable.load_json(key.path).entries}
    table = LearnedTable(
        card=key.card,
        driver=key.driver,
        kernels=key.kernels,
        made=now,
        entries=tuple((kept | dict(entries)).values()),
    )
    table.save_json(key.path)
    return key.path


def age_text(age: datetime.timedelta) -> str:
    """Return an age in its largest whole unit: "3 days"."""
    seconds = max(0, int(age.total_seconds()))
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = seconds // size
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"


@functools.cache
def learned(device: torch.device) -> dict[Product, Config]:
    """Return what was found on a device's card before, and log how old it is."""
    configs, note = read(card_key(device), now=datetime.datetime.now(datetime.UTC))
    if note:
        (_log.info if configs else _log.warning)("%s", note)
    return configs


def entry_of(product: Product, config: Config, us: float, before_us: float) -> LearnedEntry:
    """Return the file's form of a found configuration."""
    return LearnedEntry(
        bits=product.bits,
        n=product.n,
        k=product.k,
        rows=product.rows,
        form=product.form,
        config=config_entry(config),
        us=us,
        before_us=before_us,
    )

"""Reads AIConfigurator's tables (aiconfigurator-core, Apache-2.0): kernels under vLLM and others.

Of a system, such as h100_sxm, they have products by rows and shape, attention of prompts and of
decoding rows, and mixtures of experts, in ms. Products of shapes between those listed are straight
between their four neighbours, beyond them in proportion. What is computed beside (norms, rotation,
activation) has no table: the system's memory rate and launch time stand for it. pyarrow, which
reads the files, is imported on first use.
"""

from __future__ import annotations

import importlib.util
import io
import re
import zipfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from llmpq.costs.cost_model import CostModel
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.imported import (
    AttentionTimes,
    Curve,
    end_entries,
    layer_entries,
    summed,
)
from llmpq.precision import Precision
from llmpq.sizes.attended_keys import windows_of
from llmpq.workload import DTYPE_BYTES, Dtype

PACKAGE = "aiconfigurator_core"
ENGINES = ("vllm", "trtllm", "sglang")
"""Engines whose kernels have tables; the first of a system's is taken unless one is named."""
PRECISIONS = {
    "bfloat16": Precision.W16A16,
    "float16": Precision.W16A16,
    "int8_wo": Precision.W8A16,
    "int4_wo": Precision.W4A16,
}
"""Number formats of the tables that llmpq has, too."""
SMALL_KERNELS, ROW_WIDTHS = 4, 12.0
"""Beside products and attention of a layer: launches, and how often a token's row is moved."""
MS = 1e-3
Rows = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class SystemTables:
    """The files of a system and an engine: in a wheel, or a folder that has `systems`."""

    root: Path
    system: str
    engine: str | None

    @cached_property
    def _names(self) -> list[str]:
        if self.root.is_file():
            with zipfile.ZipFile(self.root) as wheel:
                return wheel.namelist()
        return [path.relative_to(self.root).as_posix() for path in self.root.rglob("systems/**/*")]

    @cached_property
    def systems(self) -> list[str]:
        """Systems that have tables."""
        found = re.compile(r"(?:^|/)systems/data/([^/]+)/gemm/.*\.parquet$")
        return sorted({m[1] for name in self._names if (m := found.search(name))})

    @cached_property
    def chosen_engine(self) -> str:
        """The engine whose kernels are read; `ValueError` names those there are."""
        pattern = re.compile(rf"systems/data/{re.escape(self.system)}/gemm/([^/]+)/")
        there = sorted({m[1] for name in self._names if (m := pattern.search(name))})
        if self.system not in self.systems:
            raise ValueError(
                f"no tables of '{self.system}' in '{self.root}'; --system takes "
                f"{', '.join(self.systems) or 'none: it has no tables at all'}"
            )
        wanted = [self.engine] if self.engine else [name for name in ENGINES if name in there]
        if not wanted or wanted[0] not in there:
            raise ValueError(
                f"no tables of {self.engine} on {self.system}; --engine takes {', '.join(there)}"
            )
        return str(wanted[0])

    def read(self, kind: str, table: str, where: Mapping[str, Any]) -> tuple[Rows, str]:
        """Return the columns of a table's newest version, of rows with these values."""
        pattern = re.compile(
            rf"systems/data/{re.escape(self.system)}/{kind}/{self.chosen_engine}/([^/]+)/"
            rf"{table}\.parquet$"
        )
        found = [(m[1], name) for name in self._names if (m := pattern.search(name))]
        if not found:
            raise ValueError(
                f"no table {table} of {self.chosen_engine} on {self.system} in '{self.root}'; "
                "another --engine may have it"
            )
        version, name = max(found, key=lambda one: [int(n) for n in re.findall(r"\d+", one[0])])
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        rows = pq.read_table(io.BytesIO(self._bytes(name)))
        for column, value in where.items():
            rows = rows.filter(pc.equal(rows[column], value))
        return rows.to_pydict(), version

    def facts(self) -> Mapping[str, float]:
        """Return what is known of the system's GPU."""
        name = next(n for n in self._names if n.endswith(f"systems/{self.system}.yaml"))
        found: Mapping[str, float] = yaml.safe_load(self._bytes(name))["gpu"]
        return found

    def _bytes(self, name: str) -> bytes:
        if self.root.is_file():
            with zipfile.ZipFile(self.root) as wheel:
                return wheel.read(name)
        return (self.root / name).read_bytes()


def installed_package() -> Path:
    """Return the folder of the installed package; `ValueError` says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "aiconfigurator-core is not installed: pip download --no-deps aiconfigurator-core, and "
            "give the path of its wheel"
        )
    return Path(spec.submodule_search_locations[0])


def read_tables(tables: SystemTables, spec: ModelSpec, kind: str, dtype: Dtype) -> CostModel:
    """Return the costs of a model on a system; `ValueError` for what the tables do not have."""
    if spec.latent is not None or spec.recurrent is not None or spec.differs_in_attention:
        raise ValueError(
            f"tables of AIConfigurator are read of models whose layers all attend by keys and "
            f"values of the same heads, {spec.name} is another: measure it with llmpq-profile"
        )
    rows, version = tables.read("gemm", "gemm_perf", {})
    products: dict[Precision, Curve] = {}
    grids: dict[Precision, ProductTimes] = {}
    for name, precision in PRECISIONS.items():
        times = ProductTimes.of(rows, name)
        if times is None or precision in grids:
            continue
        layer = _layer(tables, spec, times, name, precision)
        if layer is not None:
            grids[precision] = times
            products[precision] = summed((layer, _beside(tables, spec, dtype)))
    if Precision.W16A16 not in grids:
        raise ValueError(f"the tables of {tables.system} have no 16-bit products of {spec.name}")
    attention = _attention(tables, spec)
    head = grids[Precision.W16A16].curve(spec.vocab, spec.hidden)
    row_s = 3 * spec.hidden * DTYPE_BYTES[dtype] / _rate(tables)
    embedding = ((1.0, row_s + _launch(tables)), (2.0, 2 * row_s + _launch(tables)))
    entries = [
        *layer_entries(kind, products, attention, dtype=dtype),
        *end_entries(kind, "embedding", embedding, dtype=dtype),
        *end_entries(kind, "head", head, dtype=dtype),
    ]
    source = f"AIConfigurator, {tables.system}, {tables.chosen_engine} {version}"
    return CostModel(
        model=spec.name,
        model_fingerprint=spec.fingerprint(),
        entries=tuple(entries),
        versions={"imported": source},
    )


@dataclass(frozen=True)
class ProductTimes:
    """Seconds of products by rows m, outputs n and inputs k, of one number format."""

    times: Mapping[tuple[int, int], Mapping[int, float]]
    """(n, k) -> m -> seconds."""

    @classmethod
    def of(cls, rows: Rows, name: str) -> ProductTimes | None:
        """Return those of a format; None where the table has none."""
        found: dict[tuple[int, int], dict[int, float]] = {}
        columns = (rows[c] for c in ("gemm_dtype", "m", "n", "k", "latency"))
        for own, m, n, k, latency in zip(*columns, strict=True):
            if own == name:
                seconds = found.setdefault((int(n), int(k)), {})
                seconds[int(m)] = min(float(latency) * MS, seconds.get(int(m), 1e9))
        return cls(found) if found else None

    def curve(self, n: int, k: int) -> Curve:
        """Return the seconds of a product by rows."""
        corners = [
            (share_n * share_k, self._near(a, b))
            for a, share_n in _between(n, sorted({n for n, _ in self.times}))
            for b, share_k in _between(k, sorted({k for _, k in self.times}))
        ]
        rows = set.intersection(*(set(own) for _, own in corners))
        return tuple((float(m), sum(w * own[m] for w, own in corners)) for m in sorted(rows))

    def _near(self, n: int, k: int) -> Mapping[int, float]:
        """Return the times of a listed shape; where it is not there, of the next larger n's."""
        found = self.times.get((n, k))
        if found is not None:
            return found
        other = min(self.times, key=lambda s: (abs(s[1] - k), abs(s[0] - n)))
        scale = n * k / (other[0] * other[1])
        return {m: seconds * scale for m, seconds in self.times[other].items()}


def _between(value: int, listed: Sequence[int]) -> list[tuple[int, float]]:
    """Return listed values and their weights: the two around a value, or one beyond the ends."""
    at = bisect_left(listed, value)
    if at < len(listed) and listed[at] == value:
        return [(value, 1.0)]
    if at in (0, len(listed)):
        end = listed[0] if at == 0 else listed[-1]
        return [(end, value / end)]
    low, high = listed[at - 1], listed[at]
    share = (value - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def _layer(
    tables: SystemTables, spec: ModelSpec, times: ProductTimes, name: str, precision: Precision
) -> Curve | None:
    """Return the products of a layer by tokens; None where its experts have no such times."""
    one = spec.of_layer(spec.num_layers - 1)
    shapes = [s for s in one.linears() if not s.name.startswith("experts.")]
    curves = [times.curve(s.out_features, s.in_features) for s in shapes]
    if spec.experts:
        experts = _experts(tables, one, name)
        if experts is None:
            if precision is Precision.W16A16:
                raise ValueError(
                    f"the tables of {tables.system} have no mixture of {spec.experts} experts of "
                    f"{spec.hidden} channels, {spec.experts_per_token} a token, in 16 bits"
                )
            return None
        curves.append(experts)
    return summed(curves)


def _experts(tables: SystemTables, one: ModelSpec, name: str) -> Curve | None:
    """Return the experts of a layer by tokens, all on one device."""
    inner = next(s.in_features for s in one.linears() if s.name == "experts.0.down")
    shape = {
        "moe_dtype": name,
        "hidden_size": one.hidden,
        "inter_size": inner,
        "topk": one.experts_per_token,
        "num_experts": one.experts,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
    }
    rows, _ = tables.read("moe", "moe_perf", shape)
    found: dict[float, float] = {}
    balanced = "balanced" in rows["distribution"]
    columns = (rows[c] for c in ("distribution", "num_tokens", "latency"))
    for distribution, tokens, latency in zip(*columns, strict=True):
        if distribution == "balanced" or not balanced:
            found[float(tokens)] = min(float(latency) * MS, found.get(float(tokens), 1e9))
    return tuple(sorted(found.items())) if len(found) > 1 else None


def _attention(tables: SystemTables, spec: ModelSpec) -> AttentionTimes:
    """Return attention of the model's heads, or of the nearest listed in proportion."""
    base = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": spec.head_dim}
    found = []
    for table in ("context_attention_perf", "generation_attention_perf"):
        rows, _ = tables.read("attention", table, base)
        windows = rows.get("window_size") or [0] * len(rows["latency"])
        listed = [
            dict(zip(rows, values, strict=True))
            for values, window in zip(zip(*rows.values(), strict=True), windows, strict=True)
            if not window
        ]
        heads = {(r["num_heads"], r["num_key_value_heads"] or r["num_heads"]) for r in listed}
        if not heads:
            raise ValueError(
                f"the tables of {tables.system} have no 16-bit attention of heads of "
                f"{spec.head_dim} channels, which {spec.name} has: another --engine may"
            )
        near = min(heads, key=lambda own: _distance(own, (spec.heads, spec.kv_heads)))
        decoding = table.startswith("generation")
        scale = spec.kv_heads / near[1] if decoding else spec.heads / near[0]
        found.append(
            [
                (r["batch_size"], r["isl"], r["step"], r["latency"] * MS * scale)
                for r in listed
                if (r["num_heads"], r["num_key_value_heads"] or r["num_heads"]) == near
            ]
        )
    prompts, decoding_rows = found
    return AttentionTimes(
        prompts=prompts,
        decoding=[(rows, isl + step, seconds) for rows, isl, step, seconds in decoding_rows],
        windows=windows_of(spec),
    )


def _distance(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Return how many times the heads and the KV heads differ, together."""
    ratio = 1.0
    for a, b in zip(one, other, strict=True):
        ratio *= max(a, b) / max(1, min(a, b))
    return ratio


def _rate(tables: SystemTables) -> float:
    facts = tables.facts()
    return float(facts["mem_bw"]) * float(facts.get("mem_bw_empirical_scaling_factor", 0.8))


def _launch(tables: SystemTables) -> float:
    return float(tables.facts().get("mem_empirical_constant_latency", 3e-6))


def _beside(tables: SystemTables, spec: ModelSpec, dtype: Dtype) -> Curve:
    """Return what a layer computes beside its products and attention, by tokens."""
    launches = SMALL_KERNELS * _launch(tables)
    row_s = ROW_WIDTHS * spec.hidden * DTYPE_BYTES[dtype] / _rate(tables)
    return ((1.0, launches + row_s), (2.0, launches + 2 * row_s))

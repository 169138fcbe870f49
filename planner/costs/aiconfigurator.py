"""Reads AIConfigurator's tables (aiconfigurator-core, Apache-2.0): kernels under vLLM and others.

Of a system, such as h100_sxm, they have products by rows and shape, attention of prompts and of
decoding rows, mixtures of experts, and sums over 2, 4 and 8 GPUs, in ms. Products of shapes between
those listed are straight between their four neighbours, beyond them in proportion. What is computed
beside (norms, rotation, activation) has no table: the system's memory rate and launch time stand
for it. What a device computes of layers that it shares with others is read in the same way, for its
heads and channels. pyarrow, which reads the files, is imported on first use.
"""

from __future__ import annotations

import importlib.util
import io
import re
import zipfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from llmpq.costs.cost_model import CostModel, LatencyEntry, SumCost
from llmpq.devices.joined_devices import MOST_TOGETHER, is_cut, members_of
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.imported import (
    AttentionTimes,
    Curve,
    end_entries,
    layer_entries,
    summed,
    thinned,
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
PARTS = ((1, 1), (1, 1, 1), (1,) * 4, (1,) * 8, (3, 1))
"""Shares of layers that devices share, of which the first device's part is read."""
MS, SUM_BYTES = 1e-3, 2
"""Seconds of the tables' times; bytes of the numbers that their sums count."""
MOST_SUM_BYTES = 2**28
"""Of sums that are read: hidden states of 16,384 tokens of 8,192 channels."""
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
        found = self._versions(kind, self.chosen_engine, table)
        if not found:
            raise ValueError(
                f"no table {table} of {self.chosen_engine} on {self.system} in '{self.root}'; "
                "another --engine may have it"
            )
        version, name = max(found, key=_version)
        return self._columns(name, where), version

    def sums(self) -> Rows:
        """Return the all-reduces of the engine, or else of NCCL; none where neither has some."""
        for engine, table, where in (
            (self.chosen_engine, "custom_allreduce_perf", {}),
            ("nccl", "nccl_perf", {"nccl_dtype": "half"}),
        ):
            found = self._versions("comm", engine, table)
            if found:
                return self._columns(
                    max(found, key=_version)[1], {"op_name": "all_reduce", **where}
                )
        return {}

    def _versions(self, kind: str, engine: str, table: str) -> list[tuple[str, str]]:
        """Return (version, name in the package) of a table."""
        pattern = re.compile(
            rf"systems/data/{re.escape(self.system)}/{kind}/{engine}/([^/]+)/{table}\.parquet$"
        )
        return [(m[1], name) for name in self._names if (m := pattern.search(name))]

    def _columns(self, name: str, where: Mapping[str, Any]) -> Rows:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        rows = pq.read_table(io.BytesIO(self._bytes(name)))
        for column, value in where.items():
            rows = rows.filter(pc.equal(rows[column], value))
        found: Rows = rows.to_pydict()
        return found

    def facts(self, of: str = "gpu") -> Mapping[str, float]:
        """Return what is known of the system's GPU, or of its node."""
        name = next(n for n in self._names if n.endswith(f"systems/{self.system}.yaml"))
        found: Mapping[str, float] = yaml.safe_load(self._bytes(name)).get(of, {})
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
    kernels = _Kernels.of(tables, spec, rows)
    entries = kernels.layers(spec, kind, dtype)
    if not any(entry.precision is Precision.W16A16 for entry in entries):
        raise ValueError(f"the tables of {tables.system} have no 16-bit products of {spec.name}")
    for shares in PARTS:
        if is_cut(spec, shares):
            part = kernels.layers(members_of(spec, shares)[0].own, kind, dtype)
            entries += [entry.model_copy(update={"shares": shares}) for entry in part]
    head = kernels.products[Precision.W16A16].curve(spec.vocab, spec.hidden)
    row_s = 3 * spec.hidden * DTYPE_BYTES[dtype] / _rate(tables)
    embedding = ((1.0, row_s + _launch(tables)), (2.0, 2 * row_s + _launch(tables)))
    entries += end_entries(kind, "embedding", embedding, dtype=dtype)
    entries += end_entries(kind, "head", head, dtype=dtype)
    source = f"AIConfigurator, {tables.system}, {tables.chosen_engine} {version}"
    return CostModel(
        model=spec.name,
        model_fingerprint=spec.fingerprint(),
        entries=tuple(entries),
        sums=tuple(_sums(tables, kind)),
        versions={"imported": source},
    )


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Times of a system's kernels for a model, and for what devices have of it that share it."""

    products: Mapping[Precision, ProductTimes]
    experts: Mapping[Precision, Mapping[int, Curve]]
    """Precision -> channels of an expert's middle -> seconds of all experts by tokens."""
    attention: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
    """Rows of prompts, and of decoding."""
    tables: SystemTables

    @classmethod
    def of(cls, tables: SystemTables, spec: ModelSpec, gemm: Rows) -> _Kernels:
        """Return those of a model's shapes; `ValueError` for what the tables do not have."""
        products: dict[Precision, ProductTimes] = {}
        experts: dict[Precision, Mapping[int, Curve]] = {}
        for name, precision in PRECISIONS.items():
            times = ProductTimes.of(gemm, name)
            if times is None or precision in products:
                continue
            if spec.experts:
                found = _experts(tables, spec.of_layer(spec.num_layers - 1), name)
                if not found and precision is Precision.W16A16:
                    raise ValueError(
                        f"the tables of {tables.system} have no mixture of {spec.experts} experts "
                        f"of {spec.hidden} channels, {spec.experts_per_token} a token, in 16 bits"
                    )
                if not found:
                    continue
                experts[precision] = found
            products[precision] = times
        prompts = _attention_rows(tables, spec, "context_attention_perf")
        decoding = _attention_rows(tables, spec, "generation_attention_perf")
        return cls(products=products, experts=experts, attention=(prompts, decoding), tables=tables)

    def layers(self, own: ModelSpec, kind: str, dtype: Dtype) -> list[LatencyEntry]:
        """Return the entries of a layer, or of what a device has of it (`Member.own`)."""
        beside = _beside(self.tables, own, dtype)
        products = {b: summed((self._layer(own, b), beside)) for b in self.products}
        return layer_entries(kind, products, self._attention_of(own), dtype=dtype)

    def _layer(self, own: ModelSpec, precision: Precision) -> Curve:
        """Return the products of a layer by tokens."""
        one, times = own.of_layer(own.num_layers - 1), self.products[precision]
        shapes = [s for s in one.linears() if not s.name.startswith("experts.")]
        curves = [times.curve(s.out_features, s.in_features) for s in shapes]
        if own.experts:
            by_width = self.experts[precision]
            corners = _between(_expert_width(one), sorted(by_width))
            curves += [tuple((x, share * y) for x, y in by_width[w]) for w, share in corners]
        return summed(curves)

    def _attention_of(self, own: ModelSpec) -> AttentionTimes:
        """Return attention of so many heads, or of the nearest listed in proportion."""
        prompts, decoding = (
            _of_heads(rows, own, by_kv=by_kv)
            for rows, by_kv in zip(self.attention, (False, True), strict=True)
        )
        return AttentionTimes(
            prompts=prompts,
            decoding=[(rows, isl + step, seconds) for rows, isl, step, seconds in decoding],
            windows=windows_of(own),
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


def _experts(tables: SystemTables, one: ModelSpec, name: str) -> dict[int, Curve]:
    """Return the experts of a layer by tokens, of each width that is listed.

    Widths are of all experts on one device, and of those that so many share evenly.
    """
    whole = _expert_width(one)
    shape = {
        "moe_dtype": name,
        "hidden_size": one.hidden,
        "inter_size": whole,
        "topk": one.experts_per_token,
        "num_experts": one.experts,
        "moe_ep_size": 1,
    }
    rows, _ = tables.read("moe", "moe_perf", shape)
    found: dict[int, dict[float, float]] = {}
    balanced = "balanced" in rows["distribution"]
    columns = (rows[c] for c in ("moe_tp_size", "distribution", "num_tokens", "latency"))
    for parts, distribution, tokens, latency in zip(*columns, strict=True):
        if distribution == "balanced" or not balanced:
            times = found.setdefault(whole // int(parts), {})
            times[float(tokens)] = min(float(latency) * MS, times.get(float(tokens), 1e9))
    return {width: tuple(sorted(own.items())) for width, own in found.items() if len(own) > 1}


def _expert_width(one: ModelSpec) -> int:
    return next(s.in_features for s in one.linears() if s.name == "experts.0.down")


def _attention_rows(
    tables: SystemTables, spec: ModelSpec, table: str
) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table of 16-bit attention without windows, of the model's heads."""
    base = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": spec.head_dim}
    rows, _ = tables.read("attention", table, base)
    windows = rows.get("window_size") or [0] * len(rows["latency"])
    listed = [
        dict(zip(rows, values, strict=True))
        for values, window in zip(zip(*rows.values(), strict=True), windows, strict=True)
        if not window
    ]
    if not listed:
        raise ValueError(
            f"the tables of {tables.system} have no 16-bit attention of heads of "
            f"{spec.head_dim} channels, which {spec.name} has: another --engine may"
        )
    return listed


def _of_heads(
    listed: Sequence[Mapping[str, Any]], own: ModelSpec, *, by_kv: bool
) -> list[tuple[int, int, int, float]]:
    """Return (rows, tokens, tokens before them, seconds) of the heads that are nearest.

    In proportion to the heads: of keys and values (`by_kv`), else of queries.
    """

    def heads(row: Mapping[str, Any]) -> tuple[int, int]:
        return row["num_heads"], row["num_key_value_heads"] or row["num_heads"]

    wanted = own.heads, own.kv_heads
    near = min({heads(row) for row in listed}, key=lambda one: (_distance(one, wanted), one))
    scale = own.kv_heads / near[1] if by_kv else own.heads / near[0]
    return [
        (r["batch_size"], r["isl"], r["step"], r["latency"] * MS * scale)
        for r in listed
        if heads(r) == near
    ]


def _sums(tables: SystemTables, kind: str) -> Iterator[SumCost]:
    """Yield sums over so many devices of a kind; between the numbers listed straight."""
    rows, by_count = tables.sums(), dict[int, dict[int, float]]()
    columns = (rows.get(c, ()) for c in ("num_gpus", "message_size", "latency"))
    for count, numbers, latency in zip(*columns, strict=True):
        times, num_bytes = by_count.setdefault(int(count), {}), SUM_BYTES * int(numbers)
        times[num_bytes] = min(float(latency) * MS, times.get(num_bytes, 1e9))
    if not by_count:
        return
    gbps = 8e-9 * tables.facts("node").get("intra_node_bw", 0.0)
    for count in range(min(by_count), min(max(by_count), MOST_TOGETHER) + 1):
        corners = [(by_count[n], share) for n, share in _between(count, sorted(by_count))]
        sizes = set.intersection(*(set(times) for times, _ in corners))
        sizes = {size for size in sizes if size <= MOST_SUM_BYTES}
        curve = [(float(b), sum(share * t[b] for t, share in corners)) for b in sorted(sizes)]
        if len(curve) > 1:
            own = thinned(tuple(curve))
            yield SumCost(kinds=(kind,) * count, times=own, gbps=gbps or None)


def _distance(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Return how many times the heads and the KV heads differ, together."""
    ratio = 1.0
    for a, b in zip(one, other, strict=True):
        ratio *= max(a, b) / max(1, min(a, b))
    return ratio


def _version(found: tuple[str, str]) -> list[int]:
    """Return what sorts the versions of a table."""
    return [int(n) for n in re.findall(r"\d+", found[0])]


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

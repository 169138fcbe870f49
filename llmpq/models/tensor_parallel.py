"""Tensor parallel inside a stage: what each of its devices, its members, holds of every layer.

    attention    whole groups of query heads with their key and value heads; where members are more
                 than those, a group is cut and its keys and values are held by several members
    MLP          channels of its middle, of one MLP, of every expert and of the shared one alike
    the rest     norms, routers, recurrences, embedding: every member has all of it

A member computes what a smaller model would (`Member.own`); the sum over members of what its last
products give is the layer's. Parts that cannot be cut are computed by every member, without a sum.
The head is the first member's; GPUs that have room for a part of it compute the logits of few rows
together.

Legend: H query heads, G key/value heads, D channels of a head, F channels of an MLP's middle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llmpq.models.model_spec import SHARED, ModelSpec
from llmpq.precision import WeightScheme

UNITS = (128, 64, 32)
"""MLP channels that stay together, the most first: groups of quantised inputs stay whole."""
SMALL_UNITS = (16, 8, 4, 2, 1)
"""The same of MLPs that are too narrow for those."""

MAX_JOINED, MAX_SHARE = 64, 10_000
"""Most devices of a stage; most that a share may be."""

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges, one behind the other."""


@dataclass(frozen=True, kw_only=True)
class PartSlice:
    """What a member takes of a part of a layer."""

    rows: Runs | None = None
    """Of its first dimension; None: all."""
    columns: tuple[int, int] | None = None
    """Of a matrix's second dimension; None: all."""
    zeros: bool = False
    """Zeros in its place: a bias behind a sum is the first member's."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One device of a stage, by the shares that the stage's devices have of every layer."""

    spec: ModelSpec
    """Of the whole model."""
    shares: tuple[int, ...]
    index: int

    @cached_property
    def heads(self) -> range | None:
        """Its query heads; None where every member computes attention whole.

        Norms over all heads at once need all of them; fewer heads than members cannot be cut.
        """
        spec = self.spec
        if spec.qk_norm_whole or not any(map(spec.attends, range(spec.num_layers))):
            return None
        groups = 1
        if spec.latent is None:
            groups = math.gcd(spec.kv_heads, spec.global_kv_heads or 0)
        units = next(
            (
                units
                for units in range(groups, spec.heads + 1, groups)
                if units >= len(self.shares) and spec.heads % units == 0
            ),
            None,
        )
        if units is None:
            return None
        return _scaled(apportioned(units, self.shares)[self.index], spec.heads // units)

    def kv_of(self, kv_heads: int) -> tuple[int, ...]:
        """Return the key/value heads, of a layer that has so many, that its queries attend to.

        As many queries for each; one may be there twice where its group is cut.
        """
        if self.heads is None:
            return tuple(range(kv_heads))
        each = self.spec.heads // kv_heads
        first, end = self.heads.start, self.heads.stop
        if first % each == 0 and end % each == 0:
            return tuple(range(first // each, end // each))
        if first // each == (end - 1) // each:
            return (first // each,)
        together = math.gcd(first, end, each)
        return tuple(head // each for head in range(first, end, together))

    @cached_property
    def cuts_mlps(self) -> bool:
        """Whether MLPs are cut: all that the model has are wide enough, and none looks at all of
        its gates at once."""
        spec = self.spec
        widths = {spec.ffn, spec.shared_ffn, spec.dense_ffn, *spec.ffns} - {0}
        whole = spec.gate_sparsity > 0 or any(spec.gate_sparsities)
        return not whole and all(_unit(width, self.shares) > 0 for width in widths)

    def channels(self, width: int) -> range:
        """Return its channels of an MLP that has so many in its middle."""
        if not self.cuts_mlps or width == 0:
            return range(width)
        unit = _unit(width, self.shares)
        return _scaled(apportioned(width // unit, self.shares)[self.index], unit)

    @cached_property
    def tokens(self) -> range:
        """Its tokens of the vocabulary, where all devices compute logits together; else empty."""
        unit = _unit(self.spec.vocab, self.shares)
        if unit == 0:
            return range(0)
        return _scaled(apportioned(self.spec.vocab // unit, self.shares)[self.index], unit)

    @cached_property
    def own(self) -> ModelSpec:
        """The model that it computes: fewer heads, narrower MLPs."""
        spec = self.spec

        def width(whole: int) -> int:
            return len(self.channels(whole))

        change: dict[str, Any] = {}
        if self.heads is not None:
            change["heads"] = len(self.heads)
            if spec.latent is None:
                change["kv_heads"] = len(self.kv_of(spec.kv_heads))
            if spec.global_kv_heads is not None:
                change["global_kv_heads"] = len(self.kv_of(spec.global_kv_heads))
        return replace(
            spec,
            ffn=width(spec.ffn),
            shared_ffn=width(spec.shared_ffn),
            dense_ffn=width(spec.dense_ffn),
            ffns=tuple(map(width, spec.ffns)),
            **change,
        )

    def cuts(self, layer: int) -> dict[str, PartSlice]:
        """Return what it takes of the parts of a layer; it has the others whole."""
        whole, found = self.spec.of_layer(layer), dict[str, PartSlice]()
        if self.heads is not None and whole.mixer in ("attention", "both"):
            found |= self._attention_cuts(whole, self.heads)
        if self.cuts_mlps and whole.has_mlp:
            for owner in whole.mlps():
                found |= self._mlp_cuts(whole, owner, whole.ffn)
            if whole.shared_ffn:
                found |= self._mlp_cuts(whole, SHARED, whole.shared_ffn)
        return found

    def input_schemes(self, layer: int, scheme: WeightScheme) -> dict[str, WeightScheme]:
        """Return how its part is stored of matrices that it has some inputs of, by linear."""
        cuts, found = self.cuts(layer), {}
        for linear in self.spec.of_layer(layer).linears():
            cut = cuts.get(f"{linear.name}.weight")
            if cut is not None and cut.columns is not None:
                found[linear.name] = scheme.of_inputs(*cut.columns, linear.in_features)
        return found

    def has_few_bits(self, outliers: int) -> bool:
        """Whether something is left of each matrix of w4a4 layers beside so many outliers."""
        kinds = {self.spec.of_layer(layer): layer for layer in range(self.spec.num_layers)}
        for whole, layer in kinds.items() if outliers else ():
            cuts = self.cuts(layer)
            for linear in whole.linears():
                cut = cuts.get(f"{linear.name}.weight")
                first = 0 if cut is None or cut.columns is None else cut.columns[0]
                if first >= linear.in_features - outliers:
                    return False
        return True

    def _attention_cuts(self, whole: ModelSpec, heads: range) -> dict[str, PartSlice]:
        """Rows of what makes queries, keys and values, columns of the output matrix."""
        found = {"o.bias": PartSlice(zeros=self.index > 0)} if self.index > 0 else {}
        if whole.latent is not None:
            latent = whole.latent
            made = "q_b" if latent.q_rank else "q"
            by_head = {
                f"{made}.weight": latent.q_head_dim,
                "kv_b.weight": latent.nope_dim + latent.v_dim,
            }
            for name, dim in by_head.items():
                found[name] = PartSlice(rows=_runs(heads, dim))
            return found | {"o.weight": PartSlice(columns=_runs(heads, latent.v_dim)[0])}
        dim, kv = whole.head_dim, self.kv_of(whole.kv_heads)
        made = whole.attention_input
        pieces = [(heads, 0), *((kv, whole.heads), (kv, whole.heads + whole.kv_heads))]
        taken = pieces[: {"q": 1, "qk": 2, "qkv": 3}[made]]
        end = whole.heads + (len(taken) - 1) * whole.kv_heads
        taken += [(heads, end)] if whole.attention_gate else []
        rows = tuple(run for own, first in taken for run in _runs(own, dim, first=first))
        found |= {f"{made}.{kind}": PartSlice(rows=rows) for kind in ("weight", "bias")}
        found["o.weight"] = PartSlice(columns=_runs(heads, dim)[0])
        if whole.qk_norm_apart:
            for kind in ("weight", "bias"):
                found[f"q_norm.{kind}"] = PartSlice(rows=_runs(heads, dim))
                found[f"k_norm.{kind}"] = PartSlice(rows=_runs(kv, dim))
        if whole.sinks:
            found["sinks"] = PartSlice(rows=_runs(heads, 1))
        if whole.head_gate:
            found["head_gate.weight"] = PartSlice(rows=_runs(heads, 1))
        return found

    def _mlp_cuts(self, whole: ModelSpec, owner: str, width: int) -> dict[str, PartSlice]:
        """Rows of what makes an MLP's middle, columns of what it ends with."""
        own = self.channels(width)
        rows = _runs(own, 1) + (_runs(own, 1, first=width) if whole.gated else ())
        up = f"{owner}gate_up" if whole.gated else f"{owner}up"
        found = {f"{up}.{kind}": PartSlice(rows=rows) for kind in ("weight", "bias")}
        found[f"{owner}down.weight"] = PartSlice(columns=(own.start, own.stop))
        return found | ({f"{owner}down.bias": PartSlice(zeros=True)} if self.index > 0 else {})


def shares_text(shares: Sequence[int]) -> str:
    """Return shares as they are typed: `2` of even ones, `3:1`."""
    return str(len(shares)) if len(set(shares)) == 1 else ":".join(map(str, shares))


def parse_shares(text: str | None) -> tuple[int, ...]:
    """Read `2`, devices that share stages evenly, or their shares, `3:1`; none of one device."""
    if text is None:
        return ()
    parts = text.split(":")
    if not all(part.isdecimal() and 0 < int(part) <= MAX_SHARE for part in parts):
        raise ValueError(
            f"--tensor-parallel must be a number of devices, such as 2, or their shares, such as "
            f"3:1, got '{text}'"
        )
    shares = tuple(map(int, parts)) if len(parts) > 1 else (1,) * int(text)
    if len(shares) > MAX_JOINED:
        raise ValueError(f"--tensor-parallel {text}: at most {MAX_JOINED} devices share a stage")
    return shares if len(shares) > 1 else ()


def apportioned(units: int, shares: Sequence[int]) -> list[range]:
    """Return consecutive ranges of units by shares, each at least one, by largest remainders."""
    if units < len(shares):
        raise ValueError(f"{units} units cannot be shared by {len(shares)} devices")
    total, spare = sum(shares), units - len(shares)
    ideal = [max(0.0, units * share / total - 1) for share in shares]
    scale = spare / sum(ideal) if sum(ideal) > 0 else 0.0
    wanted = [own * scale for own in ideal]
    counts = [1 + math.floor(own + 1e-9) for own in wanted]
    by_rest = sorted(range(len(shares)), key=lambda i: (counts[i] - 1 - wanted[i], i))
    for i in by_rest[: units - sum(counts)]:
        counts[i] += 1
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _unit(width: int, shares: Sequence[int]) -> int:
    """Return how many channels of an MLP stay together; 0 where it cannot be cut.

    The largest unit that the shares come out even with, or the finest that keeps groups whole.
    """
    whole = sum(shares) // math.gcd(*shares)
    fits = [unit for unit in UNITS if width % unit == 0]
    fine = [unit for unit in fits if width // unit >= whole]
    some = [unit for unit in (*fits[::-1], *SMALL_UNITS) if width % unit == 0]
    return next((unit for unit in (*fine, *some) if width // unit >= len(shares)), 0)


def _scaled(units: range, size: int) -> range:
    return range(units.start * size, units.stop * size)


def _runs(numbers: Iterable[int], size: int, *, first: int = 0) -> Runs:
    """Return the ranges of units of `size`, counted from unit `first` on; neighbours as one."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        start = (first + number) * size
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + size)
        else:
            runs.append((start, start + size))
    return tuple(runs)

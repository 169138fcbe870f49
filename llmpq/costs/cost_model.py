"""Measured or estimated costs: how long a layer, an embedding, a head or a message takes.

Latency of one decoder layer is linear in shape terms (paper sec. 4.1):
    prefill  1, v, s, v*s, v*s^2, v*s*p, p   v micro-batch size, s tokens of a chunk, p before it
    decode   1, v, v*(t+s), t+s           t+s tokens in the cache
    verify   1, v, v*q, v*(t+s), t+s      q new tokens a request
An entry may hold several regimes (launch floor, memory bound, compute bound); its time is their
maximum, which stays linear for the planner once v is fixed. Times in seconds.

Attention counts the keys that a token sees (llmpq/sizes/attended_keys.py): on layers with a window
s^2, s*p and t+s are those of the window, the mean over the model's layers.

v*s*p is attention of a chunk to the blocks before it. Another kernel does it than attends within a
prompt, and it reads KV as it is stored, so it is measured; where it is not, 2 v*s^2 stand for it.
p is what the program of a chunk takes to walk over the keys before it: all that counts of short
chunks, whose programs do not fill a GPU.

A GPU takes tiles of rows, and another kernel every so many rows, which no term follows. A regime
may therefore add a polyline in the new tokens of the micro-batch (v*s, v or v*q) to its terms. New
tokens are counted with the padding that the engine adds (llmpq/sizes/step_padding.py).

Of a stage that devices share in tensor parallel, parts of a layer are measured (`shares` of an
entry) and sums over devices (`SumCost`); what a group of devices takes is put together from these
(planner/costs/group_costs.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmpq.errors import nearest
from llmpq.file_form import FileForm
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.attended_keys import (
    Tokens,
    Windows,
    attended_keys,
    keys_before_chunk,
    twice_the_pairs,
)
from llmpq.sizes.memory import CpuActivations
from llmpq.sizes.step_padding import cpu_padded, gpu_padded
from llmpq.workload import Dtype

MAX_S = 1e9
"""Seconds of one term: beyond it a number is a slip, and sums of many would overflow."""


class Phase(Enum):
    """Which pass is timed."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


Part = Literal["layer", "embedding", "head"]
"""What is timed of a model."""

Shares = tuple[Annotated[int, Field(ge=1, le=1024)], ...]
"""What each device of a stage in tensor parallel has of every layer, in proportion."""


class ErrorStats(FileForm):
    """Relative error of a fit on samples it has not seen."""

    mean: float
    p95: float
    samples: int


def require_curve(curve: tuple[tuple[float, float], ...], of: str) -> None:
    """Refuse points (`of` something, seconds) that are no polyline; none at all are none."""
    if len(curve) == 1 or any(a[0] >= b[0] for a, b in pairwise(curve)):
        raise ValueError(f"a curve needs at least two points of ascending {of}")
    if any(not 0 <= number <= MAX_S for point in curve for number in point):
        raise ValueError(f"a curve must be >= 0 {of}, >= 0 seconds and at most {MAX_S:g}")


class Regime(FileForm):
    """Non-negative coefficients of the shape terms, in seconds, and a polyline beside them."""

    terms: Mapping[str, float]
    curve: tuple[tuple[float, float], ...] = ()
    """(new tokens, seconds), ascending: straight between two, the last piece goes on for ever."""

    @model_validator(mode="after")
    def _curve_ascends(self) -> Self:
        require_curve(self.curve, "new tokens")
        return self

    def curve_s(self, new_tokens: float) -> float:
        """Return the polyline's value; fewer tokens than its first point cost as many as it."""
        if not self.curve or new_tokens <= self.curve[0][0]:
            return self.curve[0][1] if self.curve else 0.0
        at = min(bisect_right(self.curve, (new_tokens, float("inf"))), len(self.curve) - 1)
        (x, y), (x_next, y_next) = self.curve[at - 1], self.curve[at]
        return max(0.0, y + (y_next - y) * (new_tokens - x) / (x_next - x))


TERMS: Mapping[Phase, tuple[str, ...]] = {
    Phase.PREFILL: ("1", "v", "s", "v*s", "v*s^2", "v*s*p", "p"),
    Phase.DECODE: ("1", "v", "v*(t+s)", "t+s"),
    Phase.VERIFY: ("1", "v", "v*q", "v*(t+s)", "t+s"),
}

# Terms that grow with the keys that are read: attention's; the others are of products.
ATTENTION_TERMS = ("v*s^2", "v*s*p", "p", "v*(t+s)", "t+s")

Padding = Literal["none", "cpu", "gpu"]
"""Whether new tokens are padded: not, or as `cpu_padded` or `gpu_padded` of step_padding.py say."""


def taken_length(phase: Phase, length: float, padded_to: int) -> float:
    """Return the tokens that a row of `length` takes where longer prompts are padded."""
    if phase is not Phase.PREFILL or length < padded_to:
        return length
    return math.ceil(length / padded_to) * padded_to


def new_tokens(
    phase: Phase, *, v: int, length: float, q_len: int = 1, padding: Padding = "none"
) -> float:
    """Return the tokens that pass through a part, padding included: a product's rows."""
    tokens: float = v
    if phase is not Phase.DECODE:
        tokens *= length if phase is Phase.PREFILL else q_len
    if padding == "cpu":
        return cpu_padded(math.ceil(tokens))
    if padding == "gpu" and phase is not Phase.DECODE:
        return gpu_padded(math.ceil(tokens))
    return tokens


def term_values(
    phase: Phase,
    *,
    v: int,
    length: float,
    q_len: int = 1,
    start: float = 0,
    padding: Padding = "none",
    windows: Windows = (),
) -> dict[str, float]:
    """Return the value of each shape term; `length` is s in prefill and t+s otherwise."""
    keys = float(attended_keys(length, windows))
    tokens = new_tokens(phase, v=v, length=length, q_len=q_len, padding=padding)
    before = float(keys_before_chunk(start, length, windows))
    values = {
        "1": 1.0,
        "v": tokens if phase is Phase.DECODE else float(v),
        "v*q": tokens,
        "s": length,
        "v*s": tokens,
        "v*s^2": v * float(twice_the_pairs(length, windows)),
        "v*s*p": v * length * before,
        "p": before,
        "v*(t+s)": v * keys,
        "t+s": keys,
    }
    return {term: values[term] for term in TERMS[phase]}


class LatencyEntry(FileForm):
    """Latency of one part on one device kind at one precision and phase."""

    device_kind: str
    part: Part
    phase: Phase
    precision: Precision
    kv: KVPrecision = KVPrecision.KV16
    dtype: Dtype
    shares: Shares = ()
    """Of a layer that devices share in tensor parallel, the first one's part without its sums, by
    the shares of all; empty: the whole layer."""
    regimes: tuple[Regime, ...] = Field(min_length=1)
    padding: Padding = "none"
    """How new tokens are padded."""
    windows: Windows = ()
    """(tokens, share of the layers with a cache) of layers that see the last tokens only."""
    launch_s: float = Field(default=0.0, ge=0, le=MAX_S)
    """A floor of older profiles: the host's time to enqueue a layer. Newer ones measure what an
    uncaptured step takes as it runs."""
    padded_to: int = Field(default=1, ge=1, le=2**20)
    """In older profiles, a multiple of which prompts of so many tokens or more take."""
    mixed_attention: float = Field(default=1.0, ge=0, le=100)
    """Of a decode entry: how many times as long attention of decoding rows takes in a step with
    chunks of prompts. 1 for llmpq, which has a kernel for each; imported costs of engines with
    one kernel for both may have more."""
    alone_share: float = Field(default=1.0, gt=0, le=1)
    """Of a CPU's entry, which is that of several stages of its host at once: the share of its time
    that it takes where no other one computes; memory then is its own."""
    sampled_v: tuple[int, int] | None = None
    """Smallest and largest micro-batch that was measured; None for an estimate."""
    sampled_length: tuple[int, int] | None = None
    held_out_error: ErrorStats | None = None
    source: Literal["profile", "estimated"]

    @model_validator(mode="after")
    def _terms_are_known(self) -> Self:
        for regime in self.regimes:
            for term, value in regime.terms.items():
                if term not in TERMS[self.phase]:
                    raise ValueError(
                        f"unknown term '{term}' of {self.phase.value}: "
                        f"{nearest(term, TERMS[self.phase])}terms: {', '.join(TERMS[self.phase])}"
                    )
                if not 0 <= value <= MAX_S:
                    raise ValueError(
                        f"term '{term}' must be >= 0 seconds and at most {MAX_S:g}, got {value}"
                    )
        return self

    def seconds(self, *, v: int, length: float, q_len: int = 1) -> float:
        """Return the time of one micro-batch of v requests: the device's, or the host's."""
        return max(self.launch_s, self.device_s(v=v, length=length, q_len=q_len))

    def chunk_lines(self, *, v: int, length: float) -> list[tuple[float, float]]:
        """Return (seconds, seconds per key before it) of each regime, for a chunk of v prompts.

        Where attention to what stands before a chunk was not measured, that of s tokens that begin
        at position p takes as long as that of p + s less that of p: 2 p s more products. Of the
        `length` tokens each sees `keys_before` of those.
        """
        length = taken_length(self.phase, length, self.padded_to)
        at = self._device_s(v=v, length=length)
        before = [r.terms.get("v*s*p", 2 * r.terms.get("v*s^2", 0.0)) for r in self.regimes]
        walks = [r.terms.get("p", 0.0) for r in self.regimes]
        return [(s, c * v * length + walk) for s, c, walk in zip(at, before, walks, strict=True)]

    def keys_before(self, start: Tokens, length: float) -> Tokens:
        """Return the keys before a chunk of `length` tokens that each of them sees, on average."""
        length = taken_length(self.phase, length, self.padded_to)
        return keys_before_chunk(start, length, self.windows)

    def chunk_s(self, *, v: int, start: int, length: float) -> float:
        """Return the time of `length` tokens from position `start` on of v prompts."""
        keys = float(self.keys_before(float(start), length))
        lines = self.chunk_lines(v=v, length=length)
        return max(self.launch_s, *(base + slope * keys for base, slope in lines))

    def device_s(self, *, v: int, length: float, q_len: int = 1) -> float:
        """Return the time the device takes for one micro-batch of v requests."""
        length = taken_length(self.phase, length, self.padded_to)
        return max(self._device_s(v=v, length=length, q_len=q_len))

    def _device_s(self, *, v: int, length: float, q_len: int = 1) -> list[float]:
        """Return the time of each regime."""
        padding = self.padding
        values = term_values(
            self.phase, v=v, length=length, q_len=q_len, padding=padding, windows=self.windows
        )
        tokens = new_tokens(self.phase, v=v, length=length, q_len=q_len, padding=padding)
        return [
            regime.curve_s(tokens) + sum(c * values[t] for t, c in regime.terms.items())
            for regime in self.regimes
        ]

    def decode_lines(self, *, v: int) -> list[tuple[float, float]]:
        """Return (seconds, seconds per key in sight) of each regime of a decode entry."""
        return [
            (at_0, regime.terms.get("t+s", 0.0) + v * regime.terms.get("v*(t+s)", 0.0))
            for at_0, regime in zip(self._device_s(v=v, length=0), self.regimes, strict=True)
        ]

    def with_products(self, factor: float) -> LatencyEntry:
        """Return a layer's entry whose products take `factor` times as long; attention does not."""
        return self._scaled(factor, attention=1.0)

    def at_once(self, share: float) -> LatencyEntry:
        """Return what an entry timed alone is where others compute, of which it is a `share`."""
        entry = self._scaled(1 / share, attention=1 / share)
        return entry.model_copy(update={"alone_share": share})

    def alone(self) -> LatencyEntry:
        """Return the entry where no other stage of the host computes."""
        if self.alone_share == 1.0:
            return self
        entry = self._scaled(self.alone_share, attention=self.alone_share)
        return entry.model_copy(update={"alone_share": 1.0})

    def _scaled(self, factor: float, *, attention: float) -> LatencyEntry:
        regimes = tuple(
            regime.model_copy(
                update={
                    "terms": {
                        term: value * (attention if term in ATTENTION_TERMS else factor)
                        for term, value in regime.terms.items()
                    },
                    "curve": tuple((tokens, value * factor) for tokens, value in regime.curve),
                }
            )
            for regime in self.regimes
        )
        return self.model_copy(update={"regimes": regimes})

    def extrapolates(self, *, v: int, length: float) -> bool:
        """Whether a shape lies outside the sampled range."""
        if self.sampled_v is None or self.sampled_length is None:
            return False
        low_v, high_v = self.sampled_v
        low, high = self.sampled_length
        return not (low_v <= v <= high_v and low <= length <= high)


class SumCost(FileForm):
    """What a sum over devices of one node takes, of hidden states in tensor parallel."""

    kinds: tuple[str, ...] = Field(min_length=2)
    """Of the devices, sorted: one name for each of them."""
    times: tuple[tuple[float, float], ...] = Field(min_length=2)
    """(bytes of the step's hidden states, seconds), ascending; straight between two, the last
    piece goes on for ever."""
    gbps: float | None = Field(default=None, gt=0, le=1e9)
    """The rate of the links on the machine where others measured them; None: on one's own."""

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        require_curve(self.times, "bytes")
        if list(self.kinds) != sorted(self.kinds):
            raise ValueError(f"kinds must be sorted, got {', '.join(self.kinds)}")
        return self


class LinkCost(FileForm):
    """Time of one message: alpha_s + bytes * beta_s_per_byte, between two device kinds."""

    source_kind: str
    target_kind: str
    same_node: bool = True
    alpha_s: float = Field(ge=0, le=MAX_S)
    occupied_s: float | None = Field(default=None, ge=0, le=MAX_S)
    """What an end computes to take one message and send another, of which it has one each a step;
    None where it was not measured."""
    beta_s_per_byte: float = Field(ge=0, le=MAX_S)


class NodeLinkCost(FileForm):
    """Time of one message from a node to another one: alpha_s + bytes * beta_s_per_byte."""

    source: str
    """The sender, by its name in the cluster file."""
    target: str
    alpha_s: float = Field(ge=0, le=MAX_S)
    occupied_s: float = Field(ge=0, le=MAX_S)
    """What of alpha_s keeps the next message from its way; the rest is only delay."""
    beta_s_per_byte: float = Field(ge=0, le=MAX_S)


class CostModel(FileForm):
    """All costs of one model on a set of device kinds."""

    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    model: str
    model_fingerprint: str
    entries: tuple[LatencyEntry, ...]
    links: tuple[LinkCost, ...] = ()
    sums: tuple[SumCost, ...] = ()
    """Over devices that may share a stage."""
    node_links: tuple[NodeLinkCost, ...] = ()
    """Between nodes of a cluster, each direction; they come before those of kinds."""
    versions: Mapping[str, str] = {}
    cpu_activations: CpuActivations = "exact"
    """How activations were rounded on the CPUs among the devices (sizes/memory.py)."""

    @cached_property
    def _by_key(self) -> dict[tuple[object, ...], LatencyEntry]:
        return {
            (e.device_kind, e.part, e.phase, e.precision, e.kv, e.dtype, e.shares): e
            for e in self.entries
        }

    @property
    def device_kinds(self) -> tuple[str, ...]:
        """The device kinds that have entries, sorted."""
        return tuple(sorted({e.device_kind for e in self.entries}))

    @cached_property
    def kinds_with_parts(self) -> frozenset[str]:
        """The device kinds of which parts of layers were timed that devices share."""
        return frozenset(e.device_kind for e in self.entries if e.shares)

    @cached_property
    def kinds_measured(self) -> frozenset[str]:
        """The device kinds of which layers were measured, sums among them of groups."""
        layers = (e for e in self.entries if e.part == "layer" and e.source == "profile")
        return frozenset(e.device_kind for e in layers)

    def find(
        self,
        device_kind: str,
        *,
        part: Part = "layer",
        phase: Phase,
        precision: Precision = Precision.W16A16,
        kv: KVPrecision = KVPrecision.KV16,
        dtype: Dtype,
        shares: Shares = (),
    ) -> LatencyEntry | None:
        """Return the entry for a key, or None if it was never measured or estimated.

        Embedding and head do not touch the cache: they are stored under kv16; the embedding, which
        is looked up in, under w16a16.
        """
        if part != "layer":
            kv = KVPrecision.KV16
        if part == "embedding":
            precision = Precision.W16A16
        return self._by_key.get((device_kind, part, phase, precision, kv, dtype, shares))

    def sum_over(self, kinds: Iterable[str]) -> SumCost | None:
        """Return what sums over devices of these kinds take, None if that was not measured."""
        wanted = tuple(sorted(kinds))
        return next((one for one in self.sums if one.kinds == wanted), None)

    def link(self, source_kind: str, target_kind: str, *, same_node: bool) -> LinkCost | None:
        """Return the measured link between two device kinds, either way round."""
        for cost in self.links:
            ends = {cost.source_kind, cost.target_kind}
            if ends == {source_kind, target_kind} and cost.same_node == same_node:
                return cost
        return None

    def node_link(self, source: str, target: str) -> NodeLinkCost | None:
        """Return the measured link from a node to another one."""
        for cost in self.node_links:
            if (cost.source, cost.target) == (source, target):
                return cost
        return None

    def merged(self, other: CostModel) -> CostModel:
        """Return both models' entries and links; `other` wins where both have one."""
        if other.model_fingerprint != self.model_fingerprint:
            raise ValueError(
                f"cost files of different models cannot be merged: {self.model} and {other.model}"
            )
        if other.cpu_activations != self.cpu_activations:
            raise ValueError(
                "cost files of exact and of int8 activations (llmpq-profile --cpu-activations) "
                "cannot be merged: plan with one of them"
            )
        entries = {**self._by_key, **other._by_key}
        links = {
            (*sorted((link.source_kind, link.target_kind)), link.same_node): link
            for link in self.links + other.links
        }
        sums = {one.kinds: one for one in self.sums + other.sums}
        between = {(link.source, link.target): link for link in self.node_links + other.node_links}
        # Not a copy of this model, whose cached properties would come along.
        return type(self)(
            model=self.model,
            model_fingerprint=self.model_fingerprint,
            entries=tuple(entries.values()),
            links=tuple(links.values()),
            sums=tuple(sums.values()),
            node_links=tuple(between.values()),
            versions={**self.versions, **other.versions},
            cpu_activations=self.cpu_activations,
        )

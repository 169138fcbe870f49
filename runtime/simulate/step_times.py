"""How long a step of ragged rows takes on each stage of a plan, by the plan's own cost entries.

A step computes all its tokens' products at once, and each row's attention beside. Entries are of
equal rows; of rows of other lengths each term is the sum, or the longest, that it stands for:

    prompts   "v*s" and the curve at all tokens of the step, padded; "v*s^2" and "v*s*p" summed over
              the chunks; "v" their number; "s" the longest, "p" the most keys before one
    decoding  "v*(t+s)" the sum of the caches, "t+s" the longest; beside prompts only what the
              caches add (times the entry's `mixed_attention`): products are counted with prompts'
    head      "v" the rows that sample, nothing where none does

A CPU that is its node's only stage computes alone (`LatencyEntry.alone_share`). Between two steps a
CPU's core takes a message and sends another: it is occupied as long as the link behind its stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llmpq.costs.cost_model import LatencyEntry, Phase, new_tokens, taken_length
from llmpq.plans.plan import Plan, StagePlan
from llmpq.plans.plan_inputs import DeviceInput, LinkInput, PlanInputs
from llmpq.precision import Precision
from llmpq.sizes.attended_keys import (
    Windows,
    attended_keys,
    keys_before_chunk,
    twice_the_pairs,
)

TOKEN_BYTES = 8
"""Of a sampled token on its way back to the first stage."""


class StepRows:
    """What a step computes. Times that parts of several stages have in common are noted in it."""

    __slots__ = ("_keys", "_more", "_prompts", "caches", "chunks", "known_s", "samples", "tokens")

    def __init__(
        self, chunks: Sequence[tuple[int, int]], caches: Sequence[int], samples: int
    ) -> None:
        """`chunks`: (tokens before it, tokens) of each chunk of a prompt.

        `caches`: tokens in the cache of each decoding row, its new one included. `samples`: rows
        that bring a new token.
        """
        self.chunks, self.caches, self.samples = chunks, caches, samples
        self.tokens = len(caches)
        """New tokens of all rows."""
        for _, tokens in chunks:
            self.tokens += tokens
        self._more = 0
        self.known_s: dict[tuple[int, int], float] = {}
        """Seconds of a layer, by the `id` of its entries."""
        self._keys: dict[Windows, tuple[float, float]] = {}
        self._prompts: dict[tuple[Windows, int], tuple[float, ...]] = {}

    def later(self, rounds: int) -> StepRows:
        """Return the same rows, without chunks, so many rounds later: caches of as many more."""
        rows = StepRows([], self.caches, self.samples)
        rows._more = rounds
        if () in self._keys:
            every, most = self._keys[()]
            rows._keys[()] = every + rounds * len(self.caches), most + rounds
        return rows

    def keys(self, windows: Windows) -> tuple[float, float]:
        """Return the keys that decoding rows see: of all, and of the one that sees most."""
        if windows not in self._keys:
            self._keys[windows] = self._seen(windows)
        return self._keys[windows]

    def _seen(self, windows: Windows) -> tuple[float, float]:
        caches, more = self.caches, self._more
        if not caches:
            return 0.0, 0.0
        if not windows:
            return float(sum(caches) + more * len(caches)), float(max(caches) + more)
        keys = attended_keys(np.array(caches, dtype=np.float64) + more, windows)
        return float(keys.sum()), float(keys.max())

    def prompts(self, windows: Windows, padded_to: int) -> tuple[float, ...]:
        """Return of the chunks their tokens, the longest, twice their pairs, the sum of s p, and
        the most keys before one of them."""
        key = (windows, padded_to)
        if key not in self._prompts:
            chunks = [
                (float(at), taken_length(Phase.PREFILL, n, padded_to)) for at, n in self.chunks
            ]
            before = [float(keys_before_chunk(at, n, windows)) for at, n in chunks]
            self._prompts[key] = (
                sum(length for _, length in chunks),
                max(length for _, length in chunks),
                sum(float(twice_the_pairs(length, windows)) for _, length in chunks),
                sum(n * keys for (_, n), keys in zip(chunks, before, strict=True)),
                max(before),
            )
        return self._prompts[key]


class ChunkTimes:
    """A prefill entry's times of steps with chunks, without what caches of others add."""

    def __init__(self, entry: LatencyEntry) -> None:
        self._entry = entry
        self._terms = [
            [(_CHUNK_TERMS.index(term), c) for term, c in regime.terms.items()]
            for regime in entry.regimes
        ]
        """Of each regime: where a term's value stands, and its coefficient."""
        self._before = [
            0.0 if "v*s*p" in regime.terms else 2 * regime.terms.get("v*s^2", 0.0)
            for regime in entry.regimes
        ]
        self._curves: dict[float, list[float]] = {}

    def seconds(self, rows: StepRows) -> float:
        """Return the time of a step."""
        entry = self._entry
        length, longest, pairs, before, most = rows.prompts(entry.windows, entry.padded_to)
        whole = length + len(rows.caches)
        tokens = whole
        if entry.padding != "none":
            tokens = new_tokens(Phase.PREFILL, v=1, length=whole, padding=entry.padding)
        curves = self._curves.get(tokens)
        if curves is None:
            curves = [regime.curve_s(tokens) for regime in entry.regimes]
            self._curves[tokens] = curves
        values = (1.0, float(len(rows.chunks)), longest, tokens, pairs, before, most)
        found = entry.launch_s
        for curve, terms, per_key in zip(curves, self._terms, self._before, strict=True):
            own = 0.0
            for place, c in terms:
                own += c * values[place]
            found = max(found, curve + own + per_key * before)
        return found


_CHUNK_TERMS = ("1", "v", "s", "v*s", "v*s^2", "v*s*p", "p")
"""What `ChunkTimes` has values of, in this order."""


class DecodeTimes:
    """A decode entry's times of rows with caches of any lengths."""

    def __init__(self, entry: LatencyEntry) -> None:
        self.entry = entry
        self._lines: dict[int, list[tuple[float, float, float]]] = {}
        """Number of rows -> seconds, seconds a key of all, seconds a key of the longest, of each
        regime."""

    def seconds(self, rows: StepRows) -> float:
        """Return the time of a step of these rows alone."""
        return max(self.entry.launch_s, self._seconds(rows))

    def beside_chunks(self, rows: StepRows) -> float:
        """Return what the rows' caches add to a step with chunks."""
        products = max(line[0] for line in self._of(len(rows.caches)))
        return self.entry.mixed_attention * max(0.0, self._seconds(rows) - products)

    def _seconds(self, rows: StepRows) -> float:
        every, most = rows.keys(self.entry.windows)
        found = 0.0
        for own, per_key, per_longest in self._of(len(rows.caches)):
            found = max(found, own + every * per_key + most * per_longest)
        return found

    def _of(self, size: int) -> list[tuple[float, float, float]]:
        if size not in self._lines:
            count = new_tokens(Phase.DECODE, v=size, length=1, padding=self.entry.padding)
            self._lines[size] = [
                (
                    regime.curve_s(count)
                    + regime.terms.get("1", 0.0)
                    + count * regime.terms.get("v", 0.0),
                    regime.terms.get("v*(t+s)", 0.0),
                    regime.terms.get("t+s", 0.0),
                )
                for regime in self.entry.regimes
            ]
        return self._lines[size]


class _Part:
    """One sort of layers of a stage, or its embedding or head: entries of both phases."""

    def __init__(self, prefill: LatencyEntry, decode: LatencyEntry, count: int = 1) -> None:
        self._chunks, self._decoding = ChunkTimes(prefill), DecodeTimes(decode)
        self._count, self._alike = count, (id(prefill), id(decode))
        self._sampled_s: dict[int, float] = {}

    def seconds(self, rows: StepRows) -> float:
        """Return the time of a step; 0 where nothing is computed."""
        known = rows.known_s.get(self._alike)
        if known is None:  # stages of devices alike have the same entries
            known = rows.known_s[self._alike] = self._each_s(rows)
        return self._count * known

    def _each_s(self, rows: StepRows) -> float:
        if not rows.chunks:
            return self._decoding.seconds(rows) if rows.caches else 0.0
        own = self._chunks.seconds(rows)
        return own + self._decoding.beside_chunks(rows) if rows.caches else own

    def sampled_s(self, samples: int) -> float:
        """Return the time of so many rows of one token each."""
        if samples not in self._sampled_s:
            entry = self._decoding.entry
            self._sampled_s[samples] = entry.seconds(v=samples, length=1)
        return self._sampled_s[samples]


@dataclass(frozen=True)
class TimedStage:
    """One stage's layers, what it has of embedding and head, and the link behind it."""

    layers: tuple[_Part, ...]
    embedding: _Part | None
    head: _Part | None
    factor: float
    link: LinkInput | None
    """To the next stage, or from the last back to the first; None with a single stage."""
    row_bytes: int
    """Of a token's hidden state on its way to the next stage."""
    is_cpu: bool = False
    _hops: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)

    def seconds(self, rows: StepRows) -> float:
        """Return for how long a step occupies the stage."""
        total = 0.0
        for part in self.layers:
            total += part.seconds(rows)
        if self.embedding is not None:
            total += self.embedding.seconds(rows)
        if self.head is not None and rows.samples:
            # Only rows that sample pass the head, each with one token.
            total += self.head.sampled_s(rows.samples)
        return total * self.factor

    def hop(self, rows: StepRows) -> tuple[float, float]:
        """Return (occupied, total) seconds of the link behind the stage; tokens go back."""
        if self.link is None:
            return 0.0, 0.0
        last = self.head is not None
        sent = rows.samples * TOKEN_BYTES if last else rows.tokens * self.row_bytes
        if sent not in self._hops:
            self._hops[sent] = self.link.busy_s(sent), self.link.seconds(sent)
        return self._hops[sent]

    def host_s(self, rows: StepRows) -> float:
        """Return what a step's messages take of the core that computes; a GPU's is the host's."""
        return self.hop(rows)[0] if self.is_cpu else 0.0


def stage_times(plan: Plan) -> tuple[TimedStage, ...]:
    """Return the stages of a plan; `ValueError` if it does not carry its cost entries."""
    inputs = plan.inputs
    if inputs is None:
        raise ValueError(
            "the plan carries no cost entries (an older llmpq made it, or a hand), which predicted "
            "steps need; make it with llmpq-algo"
        )
    last = len(plan.stages) - 1
    pairs = enumerate(zip(plan.stages, inputs.devices, strict=True))
    return tuple(
        _stage(plan, inputs, stage, device, first=index == 0, last=index == last)
        for index, (stage, device) in pairs
    )


def _stage(
    plan: Plan,
    inputs: PlanInputs,
    stage: StagePlan,
    device: DeviceInput,
    *,
    first: bool,
    last: bool,
) -> TimedStage:
    kind, kv = device.profile_kind, plan.workload.kv
    alone = stage.is_cpu and sum(s.is_cpu and s.node == stage.node for s in plan.stages) == 1

    def part(name: Literal["layer", "embedding", "head"], b: Precision, count: int = 1) -> _Part:
        prefill, decode = (
            inputs.cost(kind, name, phase, b, kv) for phase in (Phase.PREFILL, Phase.DECODE)
        )
        if alone:
            prefill, decode = prefill.alone(), decode.alone()
        return _Part(prefill=prefill, decode=decode, count=count)

    link = None
    if len(plan.stages) > 1:
        names = [one.device for one in plan.stages]
        at = names.index(stage.device)
        link = inputs.link(stage.device, names[(at + 1) % len(names)])
    return TimedStage(
        layers=tuple(part("layer", b, count) for b, count in Counter(stage.precisions).items()),
        embedding=part("embedding", Precision.W16A16) if first else None,
        head=part("head", plan.settings().head(on_cpu=stage.is_cpu)) if last else None,
        factor=device.time_factor,
        link=link,
        row_bytes=inputs.model.hop_features * plan.workload.dtype_bytes,
        is_cpu=stage.is_cpu,
    )

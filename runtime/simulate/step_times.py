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
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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


@dataclass(frozen=True)
class StepRows:
    """What a step computes."""

    chunks: Sequence[tuple[int, int]]
    """(tokens before it, tokens) of each chunk of a prompt."""
    caches: Sequence[int]
    """Tokens in the cache of each decoding row, its new one included."""
    samples: int
    """Rows that bring a new token."""

    @cached_property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(tokens for _, tokens in self.chunks) + len(self.caches)

    @cached_property
    def known_s(self) -> dict[tuple[int, int], float]:
        """Seconds of a layer, by the `id` of its entries."""
        return {}

    @cached_property
    def _known(self) -> dict[tuple[object, ...], tuple[float, ...]]:
        return {}

    def keys(self, windows: Windows) -> tuple[float, ...]:
        """Return the keys that decoding rows see: of all, and of the one that sees most."""
        if ("keys", windows) not in self._known:
            keys: Sequence[float] = self.caches
            if windows:
                keys = [float(attended_keys(float(n), windows)) for n in self.caches]
            self._known["keys", windows] = float(sum(keys)), float(max(keys, default=0))
        return self._known["keys", windows]

    def prompts(self, windows: Windows, padded_to: int) -> tuple[float, ...]:
        """Return of the chunks their tokens, the longest, twice their pairs, the sum of s p, and
        the most keys before one of them."""
        key = ("prompts", windows, padded_to)
        if key not in self._known:
            chunks = [
                (float(at), taken_length(Phase.PREFILL, n, padded_to)) for at, n in self.chunks
            ]
            before = [float(keys_before_chunk(at, n, windows)) for at, n in chunks]
            self._known[key] = (
                sum(length for _, length in chunks),
                max(length for _, length in chunks),
                sum(float(twice_the_pairs(length, windows)) for _, length in chunks),
                sum(n * keys for (_, n), keys in zip(chunks, before, strict=True)),
                max(before),
            )
        return self._known[key]


@dataclass(frozen=True)
class _Part:
    """One sort of layers of a stage, or its embedding or head: entries of both phases."""

    prefill: LatencyEntry
    decode: LatencyEntry
    count: int = 1

    def seconds(self, rows: StepRows) -> float:
        """Return the time of a step; 0 where nothing is computed."""
        known, alike = rows.known_s, (id(self.prefill), id(self.decode))
        if alike not in known:  # stages of devices alike have the same entries
            known[alike] = self._each_s(rows)
        return self.count * known[alike]

    def _each_s(self, rows: StepRows) -> float:
        if not rows.chunks:
            return decode_s(self.decode, rows) if rows.caches else 0.0
        own = chunks_s(self.prefill, rows)
        if rows.caches:
            keys = _decode_s(self.decode, rows) - _decode_s(self.decode, rows, keys=False)
            own += self.decode.mixed_attention * max(0.0, keys)
        return own


def chunks_s(entry: LatencyEntry, rows: StepRows) -> float:
    """Return a prefill entry's time of a step with chunks, without what caches of others add."""
    length, longest, pairs, before, most = rows.prompts(entry.windows, entry.padded_to)
    whole = length + len(rows.caches)
    tokens = new_tokens(Phase.PREFILL, v=1, length=whole, padding=entry.padding)
    values = {
        "1": 1.0,
        "v": float(len(rows.chunks)),
        "s": longest,
        "v*s": tokens,
        "v*s^2": pairs,
        "v*s*p": before,
        "p": most,
    }
    found = entry.launch_s
    for regime in entry.regimes:
        own = regime.curve_s(tokens) + sum(c * values[t] for t, c in regime.terms.items())
        if "v*s*p" not in regime.terms:
            own += 2 * regime.terms.get("v*s^2", 0.0) * before
        found = max(found, own)
    return found


def decode_s(entry: LatencyEntry, rows: StepRows) -> float:
    """Return a decode entry's time of rows with caches of any lengths."""
    return max(entry.launch_s, _decode_s(entry, rows))


def _decode_s(entry: LatencyEntry, rows: StepRows, *, keys: bool = True) -> float:
    every, most = rows.keys(entry.windows) if keys else (0.0, 0.0)
    count = new_tokens(Phase.DECODE, v=len(rows.caches), length=1, padding=entry.padding)
    found = 0.0
    for regime in entry.regimes:
        get = regime.terms.get
        own = regime.curve_s(count) + get("1", 0.0) + count * get("v", 0.0)
        found = max(found, own + every * get("v*(t+s)", 0.0) + most * get("t+s", 0.0))
    return found


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

    def seconds(self, rows: StepRows) -> float:
        """Return for how long a step occupies the stage."""
        total = sum(part.seconds(rows) for part in self.layers)
        if self.embedding is not None:
            total += self.embedding.seconds(rows)
        if self.head is not None and rows.samples:
            # Only rows that sample pass the head, each with one token.
            total += self.head.decode.seconds(v=rows.samples, length=1)
        return total * self.factor

    def hop(self, rows: StepRows) -> tuple[float, float]:
        """Return (occupied, total) seconds of the link behind the stage; tokens go back."""
        if self.link is None:
            return 0.0, 0.0
        last = self.head is not None
        sent = rows.samples * TOKEN_BYTES if last else rows.tokens * self.row_bytes
        return self.link.busy_s(sent), self.link.seconds(sent)

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

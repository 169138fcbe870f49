"""What runs where: the features of models, and which of our ways to run know each.

One table for every refusal and for `llmpq-algo models`: a way is a sort of device, packed KV,
speculation, rounded activations. A feature that a run does not meet (a window longer than
any of its requests) does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision

Way = Literal["gpu", "packed_kv", "drafts", "rounded"]
WAYS: dict[Way, str] = {
    "gpu": "a GPU",
    "packed_kv": "a KV cache of 8, 4 or 2 bits",
    "drafts": "speculation",
    "rounded": "rounded activations (w8a8, w4a4)",
}
"""Way -> how a sentence names it. Everything runs on a CPU with 16-bit KV and w16 to w3a16."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that only some models have."""

    name: str
    met: Callable[[ModelSpec, int], bool]
    """Whether a model's requests of so many tokens meet it."""
    without: frozenset[Way]
    """The ways that do not know it."""


def _feature(name: str, met: Callable[[ModelSpec, int], bool], *without: Way) -> Feature:
    return Feature(name=name, met=met, without=frozenset(without))


def _windows(spec: ModelSpec, max_len: int) -> bool:
    return any(0 < window < max_len for window in spec.windows)


def _two_thetas(spec: ModelSpec, max_len: int) -> bool:
    return spec.window_rope_theta is not None


def _changing_rope(spec: ModelSpec, max_len: int) -> bool:
    """Whether positions depend on a request's length so far; a run decides longrope once."""
    scaling = spec.rope_scaling
    long = scaling is not None and max_len > scaling.original_max_positions
    return long and scaling is not None and scaling.kind == "dynamic"


def _larger_rope(spec: ModelSpec, max_len: int) -> bool:
    return spec.rope_scaling is not None and spec.rope_scaling.attention_factor != 1.0


FEATURES: tuple[Feature, ...] = (
    _feature("a window over the last tokens", _windows, "gpu"),
    _feature("soft caps on scores", lambda s, _: s.score_cap > 0, "gpu"),
    _feature("attention sinks", lambda s, _: s.sinks, "gpu"),
    _feature("latent attention (MLA)", lambda s, _: s.latent is not None, "gpu", "rounded"),
    _feature("two thetas of rotary positions", _two_thetas, "gpu"),
    _feature("rope frequencies that change with the length", _changing_rope, "gpu", "drafts"),
    _feature("rope with scaled cosines (yarn, longrope)", _larger_rope, "gpu"),
    _feature("heads turned in part", lambda s, _: s.rotary_dim is not None, "gpu"),
    _feature("norms behind attention and MLP", lambda s, _: s.norm_order != "pre", "gpu"),
    _feature("norms over all query or key heads", lambda s, _: s.qk_norm_whole, "gpu"),
    _feature("a factor on the residual stream", lambda s, _: s.residual_factor != 1.0, "gpu"),
    _feature("a factor on embeddings", lambda s, _: s.embedding_factor != 1.0, "gpu"),
    _feature("caps or factors on logits", lambda s, _: s.logit_cap + s.logit_factor != 1.0, "gpu"),
    _feature("gates of GELU", lambda s, _: s.gated and s.activation == "gelu_tanh", "gpu"),
    _feature("clamped gates", lambda s, _: s.activation == "clamped_silu", "gpu"),
    _feature("biases in gated MLPs", lambda s, _: s.gated and s.linear_bias, "gpu"),
    _feature("routing by sigmoid or in groups", lambda s, _: _routes(s), "gpu"),
    _feature("shared experts", lambda s, _: s.shared_ffn > 0, "gpu"),
)
"""What a GPU lacks is refused there, though planned for: its kernels are to come."""


def _routes(spec: ModelSpec) -> bool:
    return spec.router.score == "sigmoid" or spec.router.groups > 1 or spec.router.bias


def lacks(spec: ModelSpec, way: Way, *, max_len: int | None = None) -> tuple[str, ...]:
    """Return the features of a model that a way does not know; by default at its full length."""
    longest = spec.max_positions if max_len is None else max_len
    return tuple(f.name for f in FEATURES if way in f.without and f.met(spec, longest))


def ways_of(
    *, gpu: bool, kv: KVPrecision, drafts: bool, precisions: Collection[Precision] = ()
) -> tuple[Way, ...]:
    """Return which ways a run takes."""
    rounded = any(precision.activation_bits < 16 for precision in precisions)
    taken: dict[Way, bool] = {
        "gpu": gpu,
        "packed_kv": kv is not KVPrecision.KV16,
        "drafts": drafts,
        "rounded": rounded,
    }
    return tuple(way for way, is_taken in taken.items() if is_taken)


def lacking_sentence(spec: ModelSpec, ways: Collection[Way], *, max_len: int) -> str | None:
    """Return what a run cannot do and what to do about it, None where it can."""
    for way in ways:
        missing = lacks(spec, way, max_len=max_len)
        if missing:
            return (
                f"{spec.name} ({spec.family}) has {' and '.join(missing)}, which llmpq does not "
                f"run with {WAYS[way]} yet; {REMEDY[way]}. See `llmpq-algo models`"
            )
    return None


REMEDY: dict[Way, str] = {
    "gpu": "plan for CPU devices, or export the plan to another engine",
    "packed_kv": "plan with --kv 16",
    "drafts": "run without speculation, or with shorter requests",
    "rounded": "plan with weight-only precisions (w8a16, w4a16)",
}


def require(spec: ModelSpec, ways: Collection[Way], *, max_len: int) -> None:
    """Raise `ValueError` for a run that meets a feature which one of its ways does not know."""
    sentence = lacking_sentence(spec, ways, max_len=max_len)
    if sentence is not None:
        raise ValueError(sentence)

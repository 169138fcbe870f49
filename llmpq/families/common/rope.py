"""Reading a config's rotary positions: theta, scaling, and which channels are rotated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llmpq.families.common.config_values import (
    Config,
    bounded,
    flag,
    head_size,
    is_given,
    number,
    section,
    size,
)
from llmpq.families.common.spec_values import QueryGrowth, RopeScaling

THETAS = (100.0, 1e11)
"""Models in use have 10,000 (Llama 2) to 1e8 (Mistral Small); others are slips of the pen."""
FACTORS = (1.0, 1e4)
CHANGING = {
    "alpha": None,
    "extrapolation_factor": 1,
    "attn_factor": 1,
    "short_mscale": None,
    "long_mscale": None,
    "llama_4_scaling_beta": 0,
}
"""Keys that other engines or other families compute with -> the value that changes nothing."""


def rope_fields(
    config: Config, *, knows: tuple[str, ...] = (), fixed_alpha: bool = False
) -> dict[str, Any]:
    """Return the spec's rope fields; what stands inside the rope section wins over what is beside.

    As in Transformers 5, which moves what is beside it into the section where that has none.
    `knows`: keys of `CHANGING` that the family reads. `fixed_alpha`: whether a dynamic scaling's
    `alpha` stretches theta, whatever the length.
    """
    rope = rope_section(config)
    stretched = 1.0
    if fixed_alpha and is_given(rope.get("alpha")) and _kind(rope) == "dynamic":
        alpha = bounded(rope, "alpha", FACTORS, where="config.json, dynamic rope scaling")
        dim = head_size(config)
        stretched = alpha ** (dim / (dim - 2))
        kept = {key: rope[key] for key in ("rope_theta",) if key in rope}
        rope = {**kept, "rope_type": "default"}
    others = {key: value for key, value in rope.items() if key not in knows}
    scaling = scaling_of(config, others)
    return {
        "rope_theta": bounded({**_beside(config), **rope}, "rope_theta", THETAS) * stretched,
        "rope_scaling": scaling,
        "rotary_dim": _rotary_dim(config, rope),
        "max_positions": _reach(config, rope, scaling),
    }


GROWTH = "llama_4_scaling_beta"


def query_growth(config: Config) -> QueryGrowth | None:
    """Return how queries grow with their position, as Mistral's newer models say it."""
    rope = rope_section(config)
    if not is_given(rope.get(GROWTH)):
        return None
    where = "config.json, rope parameters"
    length = size(rope, "original_max_position_embeddings", where=where)
    return QueryGrowth(beta=number(rope, GROWTH, where=where), length=length)


def _beside(config: Config) -> dict[str, Any]:
    """Return what stands beside the rope section."""
    found = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return {key: value for key, value in found.items() if value is not None}


def _reach(config: Config, rope: Config, scaling: RopeScaling | None) -> int:
    """Return the positions that a model runs with: yarn and dynamic stretch the original ones.

    Cards switch them on and leave `max_position_embeddings` as it is; vLLM reads them so, too.
    Models of linear scaling mostly say there what they reach, Vicuna's and LongChat's beside it.
    """
    longest = size(config, "max_position_embeddings")
    if scaling is not None and scaling.kind == "linear":
        return max(longest, size(config, "max_sequence_length", default=longest))
    if scaling is None or scaling.kind not in ("yarn", "dynamic"):
        return longest
    original = scaling.original_max_positions
    if scaling.kind == "dynamic":
        original = size(rope, "original_max_position_embeddings", default=original)
    return round(original * scaling.factor)


def rope_section(config: Config) -> Config:
    """Return how layers of full attention rotate: `rope_scaling`, which is older, if there is one.

    A model whose layers differ gives `rope_parameters` by the kind of layer, and `rope_scaling`
    changes those of full attention.
    """
    parameters, scaling = (section(config, key) for key in ("rope_parameters", "rope_scaling"))
    if parameters is not None and isinstance(parameters.get("full_attention"), dict):
        return _without_null({**parameters["full_attention"], **(scaling or {})})
    return _without_null(scaling or parameters or {})


def _without_null(rope: Config) -> Config:
    return {key: value for key, value in rope.items() if value is not None}


def window_theta(config: Config, *, beside: str) -> float:
    """Return the theta of windowed layers: of their own parameters, or of the key `beside`."""
    own = (section(config, "rope_parameters") or {}).get("sliding_attention")
    if not isinstance(own, dict):
        return bounded(config, beside, THETAS)
    if own.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json: rope scaling '{own['rope_type']}' of windowed layers is not supported; "
            "expected 'default'"
        )
    theta = own.get("rope_theta", config.get(beside))
    return bounded({"rope_theta": theta}, "rope_theta", THETAS)


def scaling_of(config: Config, rope: Config) -> RopeScaling | None:
    """Return how the frequencies are scaled, None where they are not."""
    kind = _kind(rope)
    if kind in ("default", "mrope"):  # mrope: text counts alike in every direction of an image
        _require_no_other(rope, "default")
        return None
    kind = str(kind)
    if kind == "su":  # what Phi-3's first configs call it
        kind = "longrope"
    if kind not in READERS:
        raise ValueError(
            f"rope scaling '{kind}' is not supported; expected 'default', "
            + ", ".join(f"'{name}'" for name in sorted(READERS))
        )
    _require_no_other(rope, kind)
    return READERS[kind](config, rope, f"config.json, {kind} rope scaling")


def _kind(rope: Config) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _require_no_other(rope: Config, kind: str) -> None:
    """Refuse keys that change the frequencies elsewhere; keys that no family reads are ignored."""
    for key, neutral in CHANGING.items():
        if is_given(rope.get(key)) and rope[key] != neutral:
            raise ValueError(
                f"config.json, rope scaling '{kind}': '{key}'={rope[key]!r} changes how positions "
                "rotate, and llmpq does not compute it; remove it if the model was trained "
                "without it"
            )


def _rotary_dim(config: Config, rope: Config) -> int | None:
    """Return how many of a head's first channels are rotated, None for all."""
    if rope.get("rope_type") == "proportional":  # frequencies rest, of a whole head
        return None
    share = number({**_beside(config), **rope}, "partial_rotary_factor", default=1.0)
    if share > 1:
        raise ValueError(f"config.json: partial_rotary_factor={share} must be at most 1")
    if share == 1:
        return None
    rotated = int(head_size(config) * share)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"config.json: partial_rotary_factor={share} rotates {rotated} channels of a head of "
            f"{head_size(config)}; expected an even number"
        )
    return rotated


def _llama3(config: Config, rope: Config, where: str) -> RopeScaling:
    low, high = (number(rope, f"{end}_freq_factor", where=where) for end in ("low", "high"))
    if high < low:
        raise ValueError(
            f"{where}: high_freq_factor={high} must be at least low_freq_factor={low}; correct "
            "them or download config.json again"
        )
    return RopeScaling(
        factor=number(rope, "factor", where=where),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_original(config, rope, where),
    )


def _linear(config: Config, rope: Config, where: str) -> RopeScaling:
    factor = bounded(rope, "factor", FACTORS, where=where)
    return RopeScaling(kind="linear", factor=factor)


def _dynamic(config: Config, rope: Config, where: str) -> RopeScaling:
    return RopeScaling(
        kind="dynamic",
        factor=bounded(rope, "factor", FACTORS, where=where),
        original_max_positions=size(config, "max_position_embeddings"),
    )


def _yarn(config: Config, rope: Config, where: str) -> RopeScaling:
    original = _original(config, rope, where)
    stretched = max(1.0, size(config, "max_position_embeddings") / original)
    factor = bounded(rope, "factor", FACTORS, default=stretched, where=where)
    over = [_number_or_0(rope, key) for key in ("mscale", "mscale_all_dim")]
    if all(over):
        larger = _yarn_mscale(factor, over[0]) / _yarn_mscale(factor, over[1])
    else:
        larger = _yarn_mscale(factor, 1.0)
    fast, slow = (
        number(rope, f"beta_{end}", default=default, where=where)
        for end, default in (("fast", 32.0), ("slow", 1.0))
    )
    if fast < slow:
        raise ValueError(f"{where}: beta_fast={fast} is below beta_slow={slow}; correct them")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        attention_factor=number(rope, "attention_factor", default=larger, where=where),
        beta_fast=fast,
        beta_slow=slow,
        truncate=flag(rope, "truncate", default=True),
    )


def _longrope(config: Config, rope: Config, where: str) -> RopeScaling:
    original = _original(config, rope, where)
    stretched = size(config, "max_position_embeddings") / original
    factor = number(rope, "factor", default=stretched, where=where)
    larger = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    half = (_rotary_dim(config, rope) or head_size(config)) // 2
    short, long = (_factors(rope, f"{end}_factor", half, where) for end in ("short", "long"))
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=number(rope, "attention_factor", default=larger, where=where),
        short_factors=short,
        long_factors=long,
    )


def _proportional(config: Config, rope: Config, where: str) -> RopeScaling:
    rotated = number(rope, "partial_rotary_factor", default=1.0, where=where)
    if rotated > 1:
        raise ValueError(f"{where}: partial_rotary_factor={rotated} must be at most 1")
    factor = bounded(rope, "factor", FACTORS, default=1.0, where=where)
    return RopeScaling(kind="proportional", factor=factor, turned=rotated)


def _original(config: Config, rope: Config, where: str) -> int:
    """Return the length before stretching: beside the section, in it, or the model's own."""
    key = "original_max_position_embeddings"
    if config.get(key) is not None:
        return size(config, key)
    return size(rope, key, default=size(config, "max_position_embeddings"), where=where)


def _factors(rope: Config, key: str, count: int, where: str) -> tuple[float, ...]:
    found = rope.get(key)
    factors = found if isinstance(found, list) else []
    if len(factors) != count or not all(type(f) in (int, float) and 0 < f < 1e6 for f in factors):
        raise ValueError(
            f"{where}: '{key}' must be {count} positive numbers, one for each pair of a head's "
            "rotated channels; correct it or download config.json again"
        )
    return tuple(float(f) for f in factors)


def _number_or_0(rope: Config, key: str) -> float:
    """Return a positive number, or 0 where it is absent, null or 0 (which Transformers skips)."""
    return number({**rope, key: rope.get(key) or None}, key, default=0.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_score_factor(config: Config) -> float:
    """Return what DeepSeek multiplies the scores by beside 1 / sqrt(head size): mscale squared."""
    rope = rope_section(config)
    over = _number_or_0(rope, "mscale_all_dim")
    # What else the section says is `rope_fields`' to refuse.
    scaling = scaling_of(config, {k: v for k, v in rope.items() if k not in CHANGING})
    if scaling is None or scaling.kind != "yarn" or not over:
        return 1.0
    return _yarn_mscale(scaling.factor, over) ** 2


READERS: dict[str, Callable[[Config, Config, str], RopeScaling]] = {
    "llama3": _llama3,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}

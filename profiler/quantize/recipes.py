"""The recipe of each precision: what `llmpq-quantize --scheme` means for a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision, WeightScheme, default_outliers
from llmpq.profiler.quantize.gptq import DAMPING
from llmpq.profiler.quantize.one_layer import Recipe

SMOOTHING = 0.5
"""demo-7m with 8 outlier channels behind every norm: w4a4 +13.9 % -> +7.0 %, w8a8 +64 % -> +0.2 %;
without them w4a4 +7.0 % -> +6.9 %. Weight-only rounding loses by it (w4a16 +4.4 % -> +4.8 %)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user may choose beside the precision."""

    method: Literal["gptq", "rtn"] = "gptq"
    variant: Literal["improved", "paper"] = "improved"
    """w4a4: `paper` is Atom's recipe to the letter; `improved` searches each weight group's clip,
    gives scales a sign, rotates the input of `down` (atom_scheme.py) and balances the
    channels of norms against the weights that read them (smooth_channels.py)."""
    in_turn: bool = False
    """w4a4: every linear undoes the rounding before it (linears_in_turn). Helps some models; a
    w4a16 target of the same weights may agree less often with its w4a4 draft."""
    integer_scales: bool = False
    """w4a4: groups' scales are whole numbers times a row's, and a token's, unit (AtomScheme)."""
    group_size: int | None = 128
    symmetric: bool = True
    """Weight-only layers without zero points, as Transformers can load them."""
    outliers: int | None = None
    """w4a4: channels in 8 bits; None means hidden / 32, at most 128."""
    damping: float = DAMPING


def recipe(precision: Precision, spec: ModelSpec, settings: Settings) -> Recipe | None:
    """Return the recipe of a layer, None where it stays unquantised."""
    if precision is Precision.W16A16:
        return None
    if precision is Precision.W4A4:
        return _atom(spec, settings)
    scheme: AtomScheme | WeightScheme
    if precision is Precision.W8A8:
        scheme = W8A8
    else:
        scheme = WeightScheme(
            bits=precision.weight_bits,
            group_size=settings.group_size,
            symmetric=settings.symmetric,
        )
    return Recipe(
        scheme=scheme,
        method=settings.method,
        damping=settings.damping,
        smoothing=SMOOTHING if precision is Precision.W8A8 else None,
    )


def num_outliers(spec: ModelSpec, settings: Settings) -> int:
    """Return how many channels a w4a4 linear keeps in 8 bits."""
    if settings.outliers is not None:
        return settings.outliers
    return default_outliers(spec.hidden)


def _atom(spec: ModelSpec, settings: Settings) -> Recipe:
    improved = settings.variant == "improved"
    scheme = AtomScheme(
        group_size=settings.group_size,
        outliers=num_outliers(spec, settings),
        weight_clip=None if improved else 0.85,
        activation_clip=0.95 if improved else 0.9,
        signed_scale=improved,
        integer_scales=settings.integer_scales,
    )
    return Recipe(
        scheme=scheme,
        method=settings.method,
        damping=settings.damping,
        rotated=("down",) if improved else (),
        smoothing=SMOOTHING if improved else None,
        compensated=settings.in_turn and settings.method == "gptq",
    )

"""Atom's choices for one linear layer: bits, groups, outlier channels and clips, as data.

Zhao et al., "Atom: low-bit quantization for efficient and accurate LLM serving" (MLSys 2024). The
input channels with the largest sums of squares, the *outliers*, come last and keep 8 bits; all
others are rounded to few bits, a scale per (row, group of K). Activations get their scales when
the layer runs, weights when the model is quantised.

    weights       scale = clip * 2 max|w| / (2^b - 1)            the paper's eq. (1), clip 0.85
    activations   scale = clip * max|x| / (2^(b-1) - 1)          as the authors' code, clip 0.9
    e2m1          scale = clip * max|.| / 12                     4-bit floats, codes are twice them

    compressed    scale = max|x| / 127.5, code = round(x / scale), scale and x / scale rounded to
                  x's dtype: int8 inputs of compressed-tensors checkpoints, whose codes and scales
                  Transformers and vLLM make so

Three additions of ours, all off in the paper's recipe; the first two cost the product nothing:

    signed_scale  scale = -clip * x_max / 2^(b-1), x_max the value with max|x|: the scale takes the
                  sign that puts it on the code -2^(b-1), which a symmetric grid otherwise wastes
    rotation      normal channels are multiplied by a Hadamard matrix per 128 before rounding, the
                  weight's too, so that one large value of a token is spread over its group
    integer_scales  a group's scale is an integer to 15 times a row's unit, in products of more
                  than MANY tokens a token's unit, too: sums of int8 values, scaled once. Codes of
                  activations stay those of the unrestricted scales
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmpq.kernels.kernel_table import ATOM_INTEGER_FROM
from llmpq.precision import WeightScheme

Number = Literal["int", "e2m1"]
Rule = Literal["atom", "compressed"]

MANY = ATOM_INTEGER_FROM - 1
"""Tokens above which integer scales are used; below, activations keep the groups' own."""


@dataclass(frozen=True, kw_only=True)
class AtomScheme:
    """How a linear layer's weight and input are rounded; 16 activation bits leave the input be."""

    weight_bits: int = 4
    activation_bits: int = 4
    group_size: int | None = 128
    """Consecutive input channels that share a scale; None means one scale per row and token."""
    outliers: int = 0
    """Input channels at the end that keep `outlier_bits`."""
    outlier_bits: Literal[8, 16] = 8
    weight_clip: float | None = 0.85
    """None searches the least squared error per group."""
    activation_clip: float = 0.9
    activation_rule: Rule = "atom"
    """The definition of an 8-bit activation's scale: Atom's, or compressed-tensors'."""
    number: Number = "int"
    signed_scale: bool = False
    rotation: bool = False
    integer_scales: bool = False

    def __post_init__(self) -> None:
        if self.weight_bits not in (3, 4, 8):
            raise ValueError(f"weight bits: got {self.weight_bits}, expected 3, 4 or 8")
        if self.activation_bits not in (3, 4, 8, 16):
            raise ValueError(f"activation bits: got {self.activation_bits}, expected 3, 4, 8 or 16")
        if self.group_size not in (None, 32, 64, 128):
            raise ValueError(
                f"group size: got {self.group_size}, expected 32, 64, 128 or None (per channel)"
            )
        if self.number == "e2m1" and {self.weight_bits, self.activation_bits} - {4, 16}:
            raise ValueError("e2m1 values have 4 bits; use weight_bits=4 and activation_bits=4")
        if self.number == "e2m1" and self.signed_scale:
            raise ValueError("signed_scale uses the spare code of integers; e2m1 has none")
        if self.integer_scales and (
            (self.number, self.weight_bits, self.group_size is None) != ("int", 4, False)
            or self.activation_bits not in (4, 16)
        ):
            raise ValueError(
                "integer_scales: code * scale has 8 bits for integers of 4 bits in groups; got "
                f"{self.number}, {self.weight_bits} and {self.activation_bits} bits, groups of "
                f"{self.group_size}"
            )
        if self.activation_rule == "compressed" and not self._is_channel_int8():
            raise ValueError(
                "activation_rule 'compressed' is for 8-bit integers with one scale a row and a "
                f"token, got {self.weight_bits} and {self.activation_bits} bits, groups of "
                f"{self.group_size}, {self.outliers} outliers"
            )
        clips = (self.activation_clip, 1.0 if self.weight_clip is None else self.weight_clip)
        if self.outliers < 0 or not all(0 < clip <= 1 for clip in clips):
            raise ValueError(
                f"outliers must be >= 0 and clips in (0, 1], got {self.outliers} and {clips}"
            )

    def _is_channel_int8(self) -> bool:
        """Whether compressed-tensors has a name for it: plain int8, a scale a row and a token."""
        plain = self.weight_bits == self.activation_bits == 8 and self.group_size is None
        added = self.outliers or self.rotation or self.signed_scale or self.activation_clip != 1
        return plain and self.number == "int" and not added

    def takes_integers(self, rows: int) -> bool:
        """Whether a product of so many tokens replaces scales by integers and a unit."""
        return self.integer_scales and self.activation_bits == 4 and rows > MANY

    def normal_features(self, in_features: int) -> int:
        """Return K without the outliers."""
        if self.outliers >= in_features:
            raise ValueError(
                f"{self.outliers} outlier channels of {in_features}: no channel would be left; "
                "ask for fewer outliers"
            )
        return in_features - self.outliers


def atom_scheme(scheme: WeightScheme) -> AtomScheme:
    """Return the Atom form of a weight scheme that has rounded activations."""
    channel_int8 = scheme.bits == scheme.activation_bits == 8 and scheme.group_size is None
    return AtomScheme(
        weight_bits=scheme.bits,
        activation_bits=scheme.activation_bits,
        group_size=scheme.group_size,
        outliers=scheme.outliers,
        weight_clip=None if scheme.clip_search else 1.0,
        activation_clip=1.0 if scheme.activation_bits == 8 else 0.9,
        activation_rule="compressed" if channel_int8 and not scheme.outliers else "atom",
    )


W8A8 = AtomScheme(
    weight_bits=8,
    activation_bits=8,
    group_size=None,
    weight_clip=1.0,
    activation_clip=1.0,
    activation_rule="compressed",
)
"""Int8 weights and inputs, a scale a row and a token: compressed-tensors' "int-quantized"."""

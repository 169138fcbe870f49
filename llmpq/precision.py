"""How many bits a layer's weights, activations and KV cache have, and what that costs in bytes.

Standard library only, so that kernels can import it on any machine.
K = in_features, N = out_features of a linear layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from llmpq.errors import shortened, unknown_name

K_PADDING = 128
"""Packed weights pad K up to a multiple of this, whatever the group size (weight_layout.py)."""


MAX_OUTLIERS = 128
OUTLIER_SHARE = 32
"""Atom keeps 128 of 4096 input channels in 8 bits: one in 32."""


class Precision(Enum):
    """Bits of one decoder layer: `w4a16` is 4-bit weights, 16-bit activations."""

    W16A16 = "w16a16"
    W8A16 = "w8a16"
    W4A16 = "w4a16"
    W3A16 = "w3a16"
    W8A8 = "w8a8"
    W4A4 = "w4a4"

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Read `w4a16`, or the paper's plain weight bits `16`, `8`, `4`, `3`."""
        name = text.strip().lower()
        name = {"16": "w16a16", "8": "w8a16", "4": "w4a16", "3": "w3a16"}.get(name, name)
        try:
            return cls(name)
        except ValueError:
            raise unknown_name("precision", text, [p.typed for p in cls]) from None

    @property
    def typed(self) -> str:
        """How it is typed: `4` for weights of 4 bits met by activations of 16, else `w8a8`."""
        return str(self.weight_bits) if self.activation_bits == 16 else self.value

    @property
    def weight_bits(self) -> int:
        """Bits of one stored weight; 16 means unquantised, in the model's own dtype."""
        return int(self.value[1 : self.value.index("a")])

    @property
    def activation_bits(self) -> int:
        """Bits of one activation as the matrix product reads it."""
        return int(self.value[self.value.index("a") + 1 :])

    @property
    def title(self) -> str:
        """Return `8 bits`, or `w8a8` where activations are rounded, too."""
        return self.value if self.activation_bits < 16 else f"{self.weight_bits} bits"


def bits_of(precisions: Sequence[Precision]) -> str:
    """Return what layers have: `8 bits`, or `40 x 8 bits + 24 x 4 bits`."""
    kinds = sorted(set(precisions), key=lambda p: (-p.weight_bits, -p.activation_bits))
    if len(kinds) == 1:
        return kinds[0].title
    return " + ".join(f"{list(precisions).count(p)} x {p.title}" for p in kinds)


WEIGHT_ONLY = (Precision.W16A16, Precision.W8A16, Precision.W4A16, Precision.W3A16)
"""The paper's choices {16, 8, 4, 3}, from precise to small: what the planner may use by default."""


class KVPrecision(Enum):
    """Bits of a cached key and of a cached value: `kv8` is 8 and 8, `kv8v4` 8-bit keys and 4-bit
    values. 16 means unquantised, in the model's own dtype.

    Keys never have fewer bits than values: an error in a key moves every weight of the softmax, one
    in a value only what it adds.
    """

    KV16 = "kv16"
    KV16V8 = "kv16v8"
    KV16V4 = "kv16v4"
    KV16V2 = "kv16v2"
    KV8 = "kv8"
    KV8V4 = "kv8v4"
    KV8V2 = "kv8v2"
    KV4 = "kv4"
    KV4V2 = "kv4v2"
    KV2 = "kv2"

    @classmethod
    def parse(cls, text: str) -> KVPrecision:
        """Read `kv4`, `4`, or the servers' spelling `int4`; `fp16`/`bf16` mean kv16.

        Keys' and values' bits apart: `kv8v4`, `8v4`, `k8v4`.
        """
        name = text.strip().lower()
        aliases = {"fp16": "kv16", "bf16": "kv16", "float16": "kv16", "bfloat16": "kv16"}
        name = aliases.get(name, name)
        read = re.fullmatch(r"(?:kv|int)?(\d{1,3})|k?v?(\d{1,3})v(\d{1,3})", name)
        if read is not None:
            same, keys, values = read.groups()
            equal = same or keys == values
            name = f"kv{same or keys}" if equal else f"kv{keys}v{values}"
        try:
            return cls(name)
        except ValueError:
            raise ValueError(cls._unknown(text, name)) from None

    @classmethod
    def _unknown(cls, text: str, name: str) -> str:
        """Say what is not a KV precision, and which there are."""
        equal = [str(one.key_bits) for one in cls if not one.is_apart]
        apart = {f"{one.key_bits} {one.value_bits}": one.typed for one in cls if one.is_apart}
        numbers = re.findall(r"\d+", name)
        both = (" ".join(numbers[:2]), " ".join(numbers[1::-1]))  # or values before keys
        hints = [typed for bits, typed in apart.items() if bits in both]
        hints += [bits for bits in equal if bits in numbers[:1]]
        meant = f"did you mean {hints[0]}? " if hints else ""
        return (
            f"unknown KV cache dtype '{shortened(text)}': {meant}known bits: "
            f"{', '.join(equal)}; of keys and values apart: {', '.join(apart.values())}"
        )

    @property
    def key_bits(self) -> int:
        """Bits of one element of a cached key."""
        return int(self.value[2:].partition("v")[0])

    @property
    def value_bits(self) -> int:
        """Bits of one element of a cached value."""
        keys, _, values = self.value[2:].partition("v")
        return int(values or keys)

    @property
    def is_apart(self) -> bool:
        """Whether keys and values have different bits."""
        return self.key_bits != self.value_bits

    @property
    def mean_bits(self) -> float:
        """Bits of a cached element, keys and values together: what precisions are ordered by."""
        return (self.key_bits + self.value_bits) / 2

    @property
    def typed(self) -> str:
        """How it is typed: `8`, `8v4`."""
        return self.value.removeprefix("kv")

    @property
    def title(self) -> str:
        """Return `8 bits`, or `8-bit keys and 4-bit values`."""
        if self.is_apart:
            return f"{self.key_bits}-bit keys and {self.value_bits}-bit values"
        return f"{self.key_bits} bits"


def kv_bits_of(kvs: Sequence[KVPrecision]) -> str:
    """Return KV precisions in words: `8 or 4 bits`, `8-bit keys and 4-bit values`."""
    equal = [str(kv.key_bits) for kv in kvs if not kv.is_apart]
    words = [f"{' or '.join(equal)} bits"] if equal else []
    return " or ".join([*words, *(kv.title for kv in kvs if kv.is_apart)])


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """How a weight matrix is quantised: round-to-nearest on a grid per (row, group of K).

    `group_size` None means one group per row (per-channel). Symmetric grids store a scale,
    asymmetric ones a scale and a zero. `clip_search` shrinks each group's range to the one with
    the least squared error before rounding.

    Below 16 `activation_bits` the layer's input is rounded too, each token anew, the grid is
    symmetric, and the last `outliers` input channels keep 8 bits (kernels/formats/atom_scheme.py).
    """

    bits: int
    group_size: int | None = 128
    symmetric: bool = False
    clip_search: bool = True
    activation_bits: int = 16
    outliers: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (3, 4, 8):
            raise ValueError(f"weight bits must be 3, 4 or 8, got {self.bits}")
        if self.group_size is not None and (self.group_size <= 0 or self.group_size % 32):
            raise ValueError(f"group size must be a multiple of 32, got {self.group_size}")
        if self.activation_bits < 16 and not self.symmetric:
            raise ValueError("weights that meet rounded activations are symmetric; set symmetric")

    def of_inputs(self, start: int, stop: int, in_features: int) -> WeightScheme:
        """Return how inputs start..stop of a matrix [N, in_features] are stored: of the outliers,
        which are its last inputs, those among them."""
        kept = max(0, stop - max(start, in_features - self.outliers))
        return self if kept == self.outliers else replace(self, outliers=kept)

    def num_groups(self, in_features: int) -> int:
        """Return the number of groups along the padded K, the outliers left out."""
        padded = padded_k(in_features - self.outliers)
        return 1 if self.group_size is None else -(-padded // self.group_size)

    def nbytes(self, out_features: int, in_features: int, scale_bytes: int) -> int:
        """Return the bytes of one packed [N, K] weight with its scales (and zeros).

        `scale_bytes` is the size of one scale: the activation dtype's size.
        """
        packed = out_features * padded_k(in_features - self.outliers) * self.bits // 8
        per_group = scale_bytes * (1 if self.symmetric else 2)
        kept = out_features * (self.outliers + scale_bytes) if self.outliers else 0
        return packed + out_features * self.num_groups(in_features) * per_group + kept


def default_outliers(in_features: int) -> int:
    """Return how many of a w4a4 linear's input channels keep 8 bits unless somebody chooses."""
    return min(MAX_OUTLIERS, in_features // OUTLIER_SHARE)


def padded_k(in_features: int) -> int:
    """Round K up to `K_PADDING`."""
    return -(-in_features // K_PADDING) * K_PADDING


def default_scheme(
    precision: Precision,
    *,
    group_size: int | None = 128,
    symmetric: bool = False,
    outliers: int = 0,
) -> WeightScheme | None:
    """Return the scheme a precision's weights are stored in, or None when they stay unquantised.

    w4a4 keeps `outliers` channels in 8 bits; w8a8 needs none and has one scale per row and token.
    """
    if precision.weight_bits == 16:
        return None
    if precision is Precision.W8A8:
        return WeightScheme(bits=8, group_size=None, symmetric=True, activation_bits=8)
    if precision is Precision.W4A4:
        return WeightScheme(
            bits=4, group_size=group_size, symmetric=True, activation_bits=4, outliers=outliers
        )
    return WeightScheme(bits=precision.weight_bits, group_size=group_size, symmetric=symmetric)

"""AtomWeight: a reordered weight of few bits with 8-bit outlier channels, as it lies in memory.

    x [M, K]   gathered by index_K: normal channels | outliers
    codes      [N, Kp/128, 64] uint8   4 bit: two's complement nibbles, byte j of a k-group of 128
                                       holds [ k = j+64 | k = j ] (high | low), as weight_layout.py
               [N, Kp] int8            3 and 8 bit, and e2m1 (twice the number)
    scale      [N, G]                  G = Kp / group, 1 without groups
    outliers   [N, O] int8             one scale a row in outlier_scale [N]
    index_K    [W] int32               which channel of x stands where; None: x comes reordered

A device that has some of the inputs (tensor parallel) has W > K places where their order is not
theirs alone: those of others have codes of 0, and repeat a channel of their group, which changes
no scale of it.

Kp = W - O padded up to a multiple of 128, W = K but where said. A high nibble read alone (byte &
0xF0) and a low one shifted up (byte << 4) are signed bytes of 16 times the code: what an int8
tensor core takes.

N = out_features, K = in_features, O = outliers.

AtomTiles is the same weight as Hopper reads it, one copy for few tokens and for many:

    words    a symmetric 4-bit QuantizedWeight, FRAGMENT, of (G + 3) * 128 columns

        groups 0 .. G-1    the normal channels' codes + 8
        G, G+1, G+2        outliers w8 = 16 (h - 8) + (l - 8) + 8: high nibbles of code + 128 with
                           scale 16 s, low nibbles with scale s, the code 9 with scale 8 s

Few tokens: the weight-only kernels multiply it by restored inputs, outliers thrice: exactly Atom's
product, since (u - 8) s is the weight. Many tokens: wgmma_codes.cu takes the codes of groups 0 ..
G-1 through fp8, puts the outliers' nibbles together and takes them through int8.

`fragment_order`: which fp8 operand position p of its group a channel holds (k = where it stands in
the fragment form). A lane's words, a byte of them four neighbours of p, are then its operand:

    p = 32 s + 16 e + 4 c + b  ->  k = 64 (b % 2) + 16 s + 8 e + 2 c + b // 2

With integer scales (AtomScheme) `steps` and `unit` hold the scales of groups 0 .. G-1 once more, as
atom/int8_kernel.py reads them.

Bytes a weight: 1/2 + 2/128 (scale; integer ones 1/128 more), and 3 * 66 a row for 128 outliers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels import nvrtc
from llmpq.kernels.atom.reference import atom_linear_reference
from llmpq.kernels.formats import weight_layout as formats
from llmpq.kernels.formats.atom_rounding import (
    Codes,
    restore,
    round_weight,
    stored_integers,
)
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP, Layout
from llmpq.kernels.kernel_table import KernelForm
from llmpq.kernels.weights.quantized_weight import QuantizedWeight, from_codes
from llmpq.kernels.weights.weight import DraftMode, Weight, finer_group
from llmpq.precision import K_PADDING, WeightScheme, padded_k

OUTLIER_GROUPS = 3
"""Groups of 128 columns in `AtomTiles` that hold the outliers: high nibbles, low ones, offsets."""

GROUP_SIZES = (32, 64, 128)
"""Of groups of inputs (AtomScheme)."""

HOPPER = 9
"""Major compute capability of the GPUs that atom/wgmma_codes.cu is written for."""


@dataclass(frozen=True, kw_only=True)
class AtomWeight(Weight):
    """A weight [N, K] in Atom's form, and how its inputs are rounded."""

    scheme: AtomScheme
    out_features: int
    in_features: int
    codes: Tensor
    scale: Tensor
    outliers: Tensor
    outlier_scale: Tensor | None
    index_K: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.scale.device

    @property
    def places(self) -> int:
        """W: columns of its codes without padding."""
        return self.in_features if self.index_K is None else self.index_K.numel()

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return self.scheme.weight_bits

    @property
    def dtype(self) -> torch.dtype:
        """The scales'."""
        return self.scale.dtype

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors by name, absent ones left out."""
        names = ("codes", "scale", "outliers", "outlier_scale", "index_K")
        return {name: t for name in names if (t := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; an empty outlier block counts nothing."""
        kept = dict(self.tensors)
        if not self.scheme.outliers:
            kept.pop("outlier_scale", None)
        return sum(t.nbytes for t in kept.values())

    @property
    def kernel_form(self) -> KernelForm:
        """Whether the integer kernels compute the scheme."""
        return KernelForm.ATOM if has_kernel(self.scheme) else KernelForm.ATOM_OTHER

    @property
    def takes_rounded_tokens(self) -> bool:
        """Whether `kernels` round its inputs as they are made: on a GPU that has integer ones."""
        return self.device.type == "cuda" and self.kernel_form is KernelForm.ATOM

    @property
    def kernels(self) -> ModuleType:
        """What rounds its inputs where they are made and multiplies them: `norm_input`,
        `activation_input`, `any_input` and `product`."""
        return _module("llmpq.kernels.atom.portable")

    @property
    def is_channel_int8(self) -> bool:
        """Whether compressed-tensors can express it: w8a8, one scale per row and per token."""
        scheme = self.scheme
        plain = scheme.weight_bits == scheme.activation_bits == 8 and scheme.group_size is None
        return plain and not scheme.outliers and not scheme.rotation and not scheme.signed_scale

    @property
    def stored_scheme(self) -> dict[str, Any] | None:
        """The scheme's fields for a layer's file; None where compressed-tensors can express it."""
        return None if self.is_channel_int8 else asdict(self.scheme)

    def stored_rows(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return codes [N, K] and scales as compressed-tensors stores them; w8a8 alone."""
        codes_NK = self.unpacked().codes[:, : self.in_features]
        return {"weight": codes_NK, "weight_scale": self.scale.to(dtype)}

    def multiply(
        self, x_MK: Tensor, bias: Tensor | None, residual_MN: Tensor | None, into_residual: bool
    ) -> Tensor:
        """Multiply by the kernel that kernel_table.py names; on CPUs by the reference, which
        dequantises the rounded inputs and weights and multiplies those."""
        if x_MK.is_cuda and self.kernel_form is KernelForm.ATOM:
            return integer_linear(x_MK, self, bias, residual_MN, into_residual=into_residual)
        y_MN = atom_linear_reference(x_MK, self, bias)
        return y_MN if residual_MN is None else y_MN.add_(residual_MN)

    def packed(self) -> AtomWeight:
        """Return the weight in Hopper's form on a Hopper GPU with NVRTC, which torch brings."""
        hopper = self.device.type == "cuda" and (
            torch.cuda.get_device_capability(self.device)[0] == HOPPER and nvrtc.available()
        )
        return atom_tiles(self) if hopper and fits(self) else self

    def as_plain(self) -> AtomWeight:
        """Return the weight as an AtomWeight, packed or not."""
        return self

    def as_draft(self, mode: DraftMode) -> AtomWeight:
        """Return the same codes with inputs rounded to 4 bits, for `qspec`."""
        rounds = mode == "qspec" and self.scheme.activation_bits == 16
        return self.with_activations(4) if rounds else self

    def for_scheme(self, scheme: WeightScheme | None, name: str) -> Weight:
        """Return the weight with a plan's activation bits.

        A weight-only plan (w4a16) may run it with activations left alone: the target of a w4a4
        draft.
        """
        if scheme is None:
            return self
        if self.bits != scheme.bits:
            raise self.other_precision(scheme, name, "for rounded activations")
        return self.with_activations(scheme.activation_bits)

    def cut(self, start: int, stop: int) -> AtomWeight:
        """Return rows start..stop."""
        rows = {name: t if name == "index_K" else t[start:stop] for name, t in self.tensors.items()}
        return replace(self.with_tensors(rows), out_features=stop - start)

    @classmethod
    def stack(cls, pieces: Sequence[AtomWeight]) -> AtomWeight:
        """Return weights of one scheme and order of channels, one below the other."""
        first = pieces[0]
        rows = {
            name: t if name == "index_K" else torch.cat([piece.tensors[name] for piece in pieces])
            for name, t in first.tensors.items()
        }
        n = sum(piece.out_features for piece in pieces)
        return replace(first.with_tensors(rows), out_features=n)

    def of_columns(self, start: int, stop: int) -> AtomWeight:
        """Return inputs start..stop with the codes and scales that they have.

        Their groups are cut finer where they begin inside of one; of inputs in an order of their
        own all places stay, since a group has some of every device's.
        """
        codes, scheme = self.unpacked(), self.scheme
        if self.index_K is not None:
            return self._of_channels(start, stop)
        normal, width = scheme.normal_features(self.in_features), stop - start
        if start >= normal:
            raise ValueError(
                f"inputs {start} to {stop} of a linear are all among its {scheme.outliers} "
                "outliers; devices in tensor parallel share it with other shares"
            )
        cuts = [edge for edge in (start, stop) if edge < normal and edge % K_PADDING]
        if scheme.rotation and cuts:
            raise ValueError(
                f"input {cuts[0]} of a linear lies inside {K_PADDING} that are rotated together; "
                "devices in tensor parallel share it with other shares"
            )
        kept = max(0, stop - normal)
        few, scale_NG, size = width - kept, codes.scale, None
        if scheme.group_size is not None:
            size = finer_group(scheme.group_size, start, GROUP_SIZES)
            places = torch.arange(start, start + padded_k(few), size, device=self.device)
            places.div_(scheme.group_size, rounding_mode="floor")
            scale_NG = scale_NG[:, places.clamp_(max=scale_NG.shape[1] - 1)].contiguous()
        wide = padded_k(few)
        own_codes = codes.codes[:, start : start + wide].clone()
        if not scheme.rotation:  # which has codes of padding, too
            own_codes[:, few:] = 0
        own = replace(
            codes,
            in_features=width,
            codes=functional.pad(own_codes, (0, wide - own_codes.shape[1])),
            scale=scale_NG,
            outliers=codes.outliers[:, :kept],
        )
        return atom_weight(own, replace(scheme, group_size=size, outliers=kept))

    def _of_channels(self, start: int, stop: int) -> AtomWeight:
        """Return what x's channels start..stop meet: codes of others' places are 0."""
        assert self.index_K is not None
        if self.scheme.rotation:
            raise ValueError(
                "a linear whose channels are sorted and rotated is not cut along its inputs"
            )
        codes, index_K = self.unpacked(), self.index_K.long()
        normal = self.scheme.normal_features(self.places)
        is_own = (index_K >= start) & (index_K < stop)
        channels_K = torch.full_like(index_K, int(index_K[is_own][0]))
        size = self.scheme.group_size or normal
        for first in (*range(0, normal, size), normal):
            group = slice(first, min(first + size, normal) if first < normal else None)
            own = index_K[group][is_own[group]]
            if own.numel():
                channels_K[group] = torch.where(is_own[group], index_K[group], own[0])
        padded = functional.pad(is_own[:normal], (0, codes.codes.shape[1] - normal))
        made = replace(
            codes,
            codes=codes.codes * padded,
            outliers=codes.outliers * is_own[normal:],
        )
        whole = atom_weight(made, self.scheme, channels_K - start)
        return replace(whole, in_features=stop - start)

    def unpacked(self) -> Codes:
        """Return the int8 codes and scales, channels still in the reordered order."""
        return Codes(
            rotated=self.scheme.rotation,
            in_features=self.places,
            codes=unpack_nibbles(self.codes) if self.codes.ndim == 3 else self.codes,
            scale=self.scale,
            outliers=self.outliers,
            outlier_scale=self.outlier_scale,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return w [N, K] with channels in the order of x before the gather."""
        w_NK = self.dequantize_reordered(dtype)
        if self.index_K is None:
            return w_NK
        original = w_NK.new_zeros(self.out_features, self.in_features)
        return original.index_add_(1, self.index_K, w_NK)

    def dequantize_reordered(self, dtype: torch.dtype) -> Tensor:
        """Return w [N, K] with the outliers last, computed in float32."""
        return restore(self.unpacked()).to(dtype)

    def in_order(self, x_MK: Tensor) -> tuple[Tensor, Self]:
        """Return x with its channels where the weight has them, and the weight for such x."""
        if self.index_K is None:
            return x_MK, self
        ordered = replace(self, index_K=None, in_features=self.places)
        return x_MK.index_select(-1, self.index_K), ordered

    def with_activations(self, bits: int) -> AtomWeight:
        """Return the weight for activations of other bits (16: a weight-only product)."""
        return replace(self, scheme=replace(self.scheme, activation_bits=bits))

    def to(self, device: torch.device | str) -> AtomWeight:
        """Return the weight on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device))


@functools.cache
def _module(name: str) -> ModuleType:
    """Import what needs Triton, or Gluon, only where a weight multiplies by it."""
    return importlib.import_module(name)


def atom_weight(codes: Codes, scheme: AtomScheme, index_K: Tensor | None = None) -> AtomWeight:
    """Pack rounded rows; `index_K` is the order their channels were put in."""
    packed = codes.codes
    if scheme.weight_bits == 4 and scheme.number == "int":
        packed = pack_nibbles(packed)
    return AtomWeight(
        scheme=scheme,
        out_features=packed.shape[0],
        in_features=codes.in_features,
        codes=packed,
        scale=codes.scale,
        outliers=codes.outliers,
        outlier_scale=codes.outlier_scale,
        index_K=None if index_K is None else index_K.to(torch.int32),
    )


def quantize_atom(
    w_NK: Tensor, scheme: AtomScheme, *, dtype: torch.dtype, index_K: Tensor | None = None
) -> AtomWeight:
    """Round a weight [N, K] to nearest after putting its channels in the order `index_K`."""
    reordered = w_NK if index_K is None else w_NK[:, index_K.long()]
    return atom_weight(round_weight(reordered, scheme, scale_dtype=dtype), scheme, index_K)


def pack_nibbles(codes_NK: Tensor) -> Tensor:
    """Pack int8 codes -8..7 [N, Kp] as uint8 [N, Kp/128, 64]."""
    low, high = int(codes_NK.min()), int(codes_NK.max())
    if low < -8 or high > 7:
        raise ValueError(f"4-bit codes: got {low}..{high}, expected -8..7")
    nibbles = (codes_NK & 15).view(torch.uint8)
    (plane,) = formats.pack(nibbles, 4, Layout.ROWS)
    return plane.view(codes_NK.shape[0], -1, GROUP // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the int8 codes [N, Kp] of `pack_nibbles`."""
    halves = torch.cat((packed << 4, packed & 0xF0), dim=2).view(torch.int8)
    return (halves >> 4).view(packed.shape[0], -1)


@dataclass(frozen=True, kw_only=True)
class AtomTiles(AtomWeight):
    """An AtomWeight in Hopper's form; `codes` and `scale` are those of `words`, flat."""

    words: QuantizedWeight
    steps: Tensor | None = None
    """int8 [N / 16, G, 16]: integer scales, those of rows r and r + 8 of a block side by side."""
    unit: Tensor | None = None
    """float32 [N]: what steps are multiples of."""

    @property
    def groups(self) -> int:
        """Groups of normal channels."""
        return self.words.groups - (OUTLIER_GROUPS if self.scheme.outliers else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        more = (self.index_K, self.steps, self.unit)
        return self.words.nbytes + sum(t.nbytes for t in more if t is not None)

    def multiply(
        self, x_MK: Tensor, bias: Tensor | None, residual_MN: Tensor | None, into_residual: bool
    ) -> Tensor:
        """Round x and multiply by Hopper's kernels; one opaque operator to torch.compile."""
        if not x_MK.is_cuda:
            y_MN = atom_linear_reference(x_MK, self, bias)
        elif torch.compiler.is_compiling():
            scheme = self.scheme
            y_MN = rounded_linear(
                x_MK,
                self.codes,
                self.scale,
                self.index_K,
                bias,
                self.out_features,
                scheme.outliers,
                scheme.activation_bits,
                scheme.activation_clip,
                scheme.signed_scale,
                scheme.rotation,
                self.steps,
                self.unit,
            )
        else:
            # Triton and Gluon are not imported where there is no Hopper GPU.
            from llmpq.kernels.atom.hopper import tiles_linear

            y_MN = tiles_linear(x_MK, self, bias)
        return y_MN if residual_MN is None else y_MN.add_(residual_MN)

    @property
    def kernel_form(self) -> KernelForm:
        """The lines of the table for how inputs are rounded."""
        if self.scheme.activation_bits == 16:
            return KernelForm.ATOM_TILES_A16
        return KernelForm.ATOM_INTEGER if self.scheme.integer_scales else KernelForm.ATOM_TILES

    @property
    def takes_rounded_tokens(self) -> bool:
        """Whether `kernels` round its inputs as they are made: they do."""
        return True

    @property
    def kernels(self) -> ModuleType:
        """As of `AtomWeight`, by Hopper's."""
        return _module("llmpq.kernels.atom.hopper")

    def packed(self) -> AtomTiles:
        """Return the weight itself, which is in Hopper's form."""
        return self

    def as_plain(self) -> AtomWeight:
        """Return the weight as an AtomWeight."""
        plain = atom_weight(self.unpacked(), self.scheme, self.index_K)
        return replace(plain, in_features=self.in_features)

    def cut(self, start: int, stop: int) -> AtomTiles:
        """Return rows start..stop."""
        return atom_tiles(self.as_plain().cut(start, stop))

    @classmethod
    def stack(cls, pieces: Sequence[AtomWeight]) -> AtomTiles:
        """Return weights of one scheme, one below the other."""
        return atom_tiles(AtomWeight.stack([piece.as_plain() for piece in pieces]))

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> AtomTiles:
        """Return a weight of the same form with other tensors, by the names of `tensors`."""
        codes, scale = tensors.get("codes", self.codes), tensors.get("scale", self.scale)
        index_K = tensors.get("index_K", self.index_K)
        return from_words(codes, scale, self.scheme, self.out_features, self.in_features, index_K)

    def to(self, device: torch.device | str) -> AtomTiles:
        """Return the weight on `device`, still in this form."""
        if torch.device(device).type != self.device.type:
            raise ValueError(
                f"this form runs on {self.device.type}, got {device}; move the AtomWeight"
            )
        words = self.words.to(device)
        index_K, steps, unit = (
            None if t is None else t.to(device) for t in (self.index_K, self.steps, self.unit)
        )
        return replace(
            self,
            words=words,
            codes=words.planes[0],
            scale=words.scale,
            index_K=index_K,
            steps=steps,
            unit=unit,
        )

    def unpacked(self) -> Codes:
        """Return the int8 codes and scales, channels in the reordered order."""
        n, g, o = self.out_features, self.groups, self.scheme.outliers
        u_NGk = self.words.codes().view(n, -1, GROUP)[:, :, fragment_order(self.device)]
        scale_NG = self.words.scale_NG()
        outliers = torch.empty(n, 0, dtype=torch.int8, device=self.device)
        if o:
            outliers = ((u_NGk[:, g].int() << 4 | u_NGk[:, g + 1].int()) - 128).to(torch.int8)
        return Codes(
            rotated=self.scheme.rotation,
            in_features=self.places,
            codes=(u_NGk[:, :g].to(torch.int8) - 8).reshape(n, -1),
            scale=scale_NG[:, :g],
            outliers=outliers[:, :o],
            outlier_scale=scale_NG[:, g + 1] if o else torch.ones(n, device=self.device),
        )


def fragment_order(device: torch.device | str = "cpu") -> Tensor:
    """Return where each channel of a group of 128 stands in the fragment form, int64 [128]."""
    p = torch.arange(GROUP, device=device)
    return 64 * (p % 2) + 16 * (p // 32) + 8 * (p // 16 % 2) + 2 * (p // 4 % 4) + p % 4 // 2


def fits(weight: AtomWeight) -> bool:
    """Whether a weight has this form: INT4 in groups of 128, at most 128 outliers in 8 bits."""
    scheme = weight.scheme
    return (
        scheme.number == "int"
        and scheme.weight_bits == 4
        and scheme.activation_bits in (4, 16)
        and scheme.group_size == GROUP
        and scheme.outlier_bits == 8
        and scheme.outliers <= GROUP
        and weight.out_features % BLOCK_ROWS == 0
        and weight.scale.dtype in (torch.float16, torch.bfloat16)
    )


def atom_tiles(weight: AtomWeight) -> AtomTiles:
    """Pack an AtomWeight anew, on its device."""
    if not fits(weight):
        raise ValueError(f"no Hopper form for {weight.scheme}; use the AtomWeight")
    found = weight.unpacked()
    n = weight.out_features
    u_NGk = (found.codes + 8).to(torch.uint8).view(n, -1, GROUP)
    scale_NG = found.scale
    if weight.scheme.outliers:
        assert found.outlier_scale is not None
        w8 = functional.pad(found.outliers.int(), (0, GROUP - weight.scheme.outliers)) + 128
        digits = torch.stack((w8 >> 4, w8 & 15, torch.full_like(w8, 9)), dim=1)
        u_NGk = torch.cat((u_NGk, digits.to(torch.uint8)), dim=1)
        factors = torch.tensor([16, 1, 8], dtype=scale_NG.dtype, device=weight.device)
        scale_NG = torch.cat((scale_NG, found.outlier_scale[:, None] * factors), dim=1)
    placed_NGk = torch.empty_like(u_NGk)
    placed_NGk[:, :, fragment_order(weight.device)] = u_NGk
    words = from_codes(
        placed_NGk.view(n, -1),
        scale_NG.contiguous(),
        None,
        bits=4,
        group_size=GROUP,
        in_features=u_NGk.shape[1] * GROUP,
    )
    return from_words(
        words.planes[0],
        words.scale,
        weight.scheme,
        n,
        weight.in_features,
        weight.index_K,
    )


def from_words(
    codes: Tensor,
    scale: Tensor,
    scheme: AtomScheme,
    out_features: int,
    in_features: int,
    index_K: Tensor | None,
    steps: Tensor | None = None,
    unit: Tensor | None = None,
) -> AtomTiles:
    """Rebuild the form from its tensors; integer scales are found where they are not given."""
    columns = scale.numel() // out_features * GROUP
    words = QuantizedWeight.fragment([codes], scale, None, 4, False, out_features, columns)
    if scheme.integer_scales and steps is None:
        groups = words.groups - (OUTLIER_GROUPS if scheme.outliers else 0)
        steps, unit = placed_steps(words.scale_NG()[:, :groups])
    return AtomTiles(
        scheme=scheme,
        out_features=out_features,
        in_features=in_features,
        codes=codes,
        scale=scale,
        outliers=torch.empty(out_features, 0, dtype=torch.int8, device=codes.device),
        outlier_scale=None,
        index_K=index_K,
        words=words,
        steps=steps,
        unit=unit,
    )


def placed_steps(scale_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Return `steps` and `unit` of a weight's scales."""
    steps_NG, unit_N1 = stored_integers(scale_NG)
    n, groups = steps_NG.shape
    pairs = steps_NG.to(torch.int8).view(n // BLOCK_ROWS, 2, 8, groups).permute(0, 3, 2, 1)
    return pairs.reshape(n // BLOCK_ROWS, groups, BLOCK_ROWS), unit_N1[:, 0].contiguous()


def has_kernel(scheme: AtomScheme) -> bool:
    """Whether the integer kernels compute this scheme."""
    if scheme.number != "int" or scheme.outlier_bits != 8 or scheme.outliers > 128:
        return False
    bits = (scheme.weight_bits, scheme.activation_bits)
    return bits == (4, 4) and scheme.group_size in (64, 128, None) or bits == (8, 8)


def integer_linear(
    x_MK: Tensor,
    weight: AtomWeight,
    bias: Tensor | None = None,
    residual_MN: Tensor | None = None,
    *,
    into_residual: bool = False,
) -> Tensor:
    """Return y [M, N] by the Triton kernels, plus the residual, in its place if so asked."""
    from llmpq.kernels.atom.portable import any_input, product

    return product(
        any_input(x_MK, weight),
        weight,
        dtype=x_MK.dtype,
        bias=bias,
        residual_MN=residual_MN,
        into_residual=into_residual,
    )


@torch.library.custom_op("llmpq::rounded_linear", mutates_args=())
def rounded_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    index: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    outliers: int,
    activation_bits: int,
    activation_clip: float,
    signed_scale: bool,
    rotation: bool,
    steps: Tensor | None = None,
    unit: Tensor | None = None,
) -> Tensor:
    """Round x and multiply it by a weight in Hopper's form, given as tensors and scheme fields."""
    from llmpq.kernels.atom.hopper import tiles_linear

    scheme = AtomScheme(
        outliers=outliers,
        activation_bits=activation_bits,
        activation_clip=activation_clip,
        signed_scale=signed_scale,
        rotation=rotation,
        integer_scales=steps is not None,
    )
    weight = from_words(codes, scale, scheme, out_features, x.shape[1], index, steps, unit)
    return tiles_linear(x, weight, bias)


@rounded_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    index: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    outliers: int,
    activation_bits: int,
    activation_clip: float,
    signed_scale: bool,
    rotation: bool,
    steps: Tensor | None = None,
    unit: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)

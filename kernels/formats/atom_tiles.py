"""AtomTiles: an Atom weight as Hopper reads it, one copy for few tokens and for many.

    words    a symmetric 4-bit QuantizedWeight, FRAGMENT, of (G + 3) * 128 columns

        groups 0 .. G-1    the normal channels' codes + 8
        G, G+1, G+2        outliers w8 = 16 (h - 8) + (l - 8) + 8: high nibbles of code + 128 with
                           scale 16 s, low nibbles with scale s, the code 9 with scale 8 s

Few tokens: the weight-only kernels multiply it by restored inputs, outliers thrice: exactly Atom's
product, since (u - 8) s is the weight. Many tokens: fp8_kernel.py takes the codes of groups 0 ..
G-1 through fp8, puts the outliers' nibbles together and takes them through int8.

`fragment_order`: which fp8 operand position p of its group a channel holds (k = where it stands in
the fragment form). A lane's words, a byte of them four neighbours of p, are then its operand:

    p = 32 s + 16 e + 4 c + b  ->  k = 64 (b % 2) + 16 s + 8 e + 2 c + b // 2

With integer scales (AtomScheme) `steps` and `unit` hold the scales of groups 0 .. G-1 once more, as
atom/int8_kernel.py reads them.

Bytes a weight: 1/2 + 2/128 (scale; integer ones 1/128 more), and 3 * 66 a row for 128 outliers.
Knows no matmul.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.atom_rounding import Codes, stored_integers
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.atom_weight import AtomWeight
from llmpq.kernels.formats.quantized_weight import QuantizedWeight, from_codes
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP

OUTLIER_GROUPS = 3

HOPPER = 9
"""Major compute capability of the GPUs that atom/fp8_kernel.py is written for."""


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
            in_features=self.in_features,
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
        not isinstance(weight, AtomTiles)
        and scheme.number == "int"
        and scheme.weight_bits == 4
        and scheme.activation_bits in (4, 16)
        and scheme.group_size == GROUP
        and scheme.outlier_bits == 8
        and scheme.outliers <= GROUP
        and weight.out_features % BLOCK_ROWS == 0
        and weight.scale.dtype in (torch.float16, torch.bfloat16)
    )


def best_form(weight: AtomWeight) -> AtomWeight:
    """Return the weight in the form that its device multiplies fastest."""
    here = weight.device
    hopper = here.type == "cuda" and torch.cuda.get_device_capability(here)[0] == HOPPER
    return atom_tiles(weight) if hopper and fits(weight) else weight


def atom_tiles(weight: AtomWeight) -> AtomTiles:
    """Pack an AtomWeight anew, on its device."""
    if not fits(weight):
        raise ValueError(f"no Hopper form for {weight.scheme}; use atom_linear with the AtomWeight")
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

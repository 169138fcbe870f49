"""CodebookWeight: a weight [N, K] of 4-bit codes that stand for 16 values of a codebook.

    w[n, k] = codebook[code[n, k]] scale[n, k // group] factor[n]

ROWS       bytes as weight_layout.py draws them; scales [N, G]
FRAGMENT   (GPU) words as codebooks.py draws them

Padding behind K has code 0 of E2M1 and FP4, and scale 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.cpu.codebook_linear import codebook_linear_cpu
from llmpq.kernels.formats import weight_layout
from llmpq.kernels.formats.codebooks import (
    E4M3,
    E8M0,
    Codebook,
    folded,
    paired,
    scale_values,
    unfolded,
    unpaired,
)
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP, Layout
from llmpq.kernels.kernel_table import KernelForm
from llmpq.kernels.multiprocessors import older_than
from llmpq.kernels.weights.weight import Weight, finer_group
from llmpq.precision import WeightScheme, padded_k

BITS = 4
GROUPS = (16, 32, 64, GROUP)
"""Weights that may share a scale."""
PLAIN = (torch.float16, torch.float32)
LARGEST = 128
"""Exponent of the largest E8M0 scale in FRAGMENT: 2. What a kernel multiplies by is 2^126 of it."""
_PARTS = 4
"""Scales of a k-group of FRAGMENT."""


@dataclass(frozen=True, kw_only=True)
class CodebookWeight(Weight):
    """Packed codes, scales and, where a scale is of two values, a factor of each row."""

    codebook: Codebook
    group_size: int
    out_features: int
    in_features: int
    plane: Tensor
    """Flat uint8."""
    scale: Tensor
    """Flat, in the layout's order: E8M0, E4M3, float16 or float32."""
    factor: Tensor | None = None
    """float32 [N]."""
    layout: Layout = Layout.ROWS

    @property
    def is_mxfp4(self) -> bool:
        """Whether it is E2M1 with a power of two for 32."""
        return self.codebook is Codebook.E2M1 and self.scale.dtype is E8M0

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return BITS

    @property
    def groups(self) -> int:
        """Groups of one row."""
        return padded_k(self.in_features) // self.group_size

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.plane.device

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Codes, scales and, of NVFP4, factors."""
        found = {"plane": self.plane, "scale": self.scale}
        return found if self.factor is None else found | {"factor": self.factor}

    @property
    def dtype(self) -> torch.dtype:
        """Codes suit inputs of any type."""
        return self.scale.dtype if self.scale.dtype in PLAIN else torch.bfloat16

    @property
    def form(self) -> str:
        """What kernels call its words."""
        if self.codebook is not Codebook.E2M1:
            return self.codebook.value
        return "e2m1" if self.is_mxfp4 else "nvfp4"

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """Its codes."""
        return (self.plane,)

    @property
    def zero(self) -> None:
        """Codebooks have no zero points."""

    @property
    def symmetric(self) -> bool:
        """Codebooks have no zero points."""
        return True

    @property
    def kernel_form(self) -> KernelForm:
        """By the codebook and where the bytes lie."""
        if self.layout is Layout.FRAGMENT:
            return {"e2m1": KernelForm.MXFP4, "nvfp4": KernelForm.NVFP4}.get(
                self.form, KernelForm.LOOKED_UP
            )
        return KernelForm.E2M1_ROWS if self.codebook is Codebook.E2M1 else KernelForm.CODEBOOK_ROWS

    @property
    def needs_dtype(self) -> torch.dtype | None:
        """Words serve float16 and bfloat16."""
        return None

    @property
    def keeps_codes(self) -> bool:
        """A checkpoint's own."""
        return True

    @property
    def expert_key(self) -> tuple[object, ...] | None:
        """Of MXFP4 that kernels take: what its words have in common."""
        if not self.is_mxfp4 or not self.has_fragments():
            return None
        return ("mxfp4", self.out_features, self.in_features, self.group_size)

    def to(self, device: torch.device | str) -> CodebookWeight:
        """Return the weight on a device, in the layout that device computes with fastest."""
        moved = replace(
            self,
            plane=self.plane.to(device),
            scale=self.scale.to(device),
            factor=None if self.factor is None else self.factor.to(device),
        )
        quick = moved.plane.is_cuda and not older_than(moved.plane.device, (8, 0))
        return moved.in_fragments() if quick and moved.has_fragments() else moved

    def multiply(
        self, x_MK: Tensor, bias: Tensor | None, residual_MN: Tensor | None, into_residual: bool
    ) -> Tensor:
        """By the kernel that kernel_table.py names."""
        if x_MK.is_cuda:
            # Triton is not imported where there is no GPU.
            from llmpq.kernels.gemm.float_codes.codebook_products import codebook_linear_gpu

            return codebook_linear_gpu(x_MK, self, bias, residual_MN)
        y_MN = codebook_linear_cpu(x_MK, self, bias)
        return y_MN if residual_MN is None else y_MN + residual_MN

    def as_expert(self) -> CodebookWeight:
        """Return the weight's words."""
        return self.in_fragments()

    def for_scheme(self, scheme: WeightScheme | None, name: str) -> Weight:
        """Codes of 4 bits serve plans of 8, too: eight would say the same values."""
        return self if serves_codebooks(scheme) else super().for_scheme(scheme, name)

    def cut(self, start: int, stop: int) -> CodebookWeight:
        """Return rows start..stop, sharing memory: multiples of 16, or to the end."""

        def run(flat: Tensor) -> Tensor:
            row = flat.numel() // self.out_features
            return flat.view(-1)[start * row : stop * row]

        factor = None if self.factor is None else self.factor[start:stop]
        return replace(
            self,
            out_features=stop - start,
            plane=run(self.plane),
            scale=run(self.scale),
            factor=factor,
        )

    def of_rows(self, runs: Sequence[tuple[int, int]]) -> CodebookWeight:
        """Return some rows; of FRAGMENT, packed anew as ROWS."""
        rows = torch.cat([torch.arange(*run, device=self.device) for run in runs])
        return self._repacked(self.codes()[rows], self.scale_NG()[rows], self.group_size, rows)

    def of_columns(self, start: int, stop: int) -> CodebookWeight:
        """Return inputs start..stop; groups that they begin inside of are cut finer."""
        size = finer_group(self.group_size, start, GROUPS)
        places = torch.arange(start, stop, size, device=self.device)
        scale_NG = self.scale_NG()[:, places.div_(self.group_size, rounding_mode="floor")]
        return self._repacked(self.codes()[:, start:stop], scale_NG, size, None)

    def _repacked(
        self, codes_NK: Tensor, scale_NG: Tensor, group_size: int, rows: Tensor | None
    ) -> CodebookWeight:
        """Return the weight of other codes; `rows`: which of the factors are theirs, None: all."""
        factor = self.factor if self.factor is None or rows is None else self.factor[rows]
        k = self.in_features if rows is not None else codes_NK.shape[1]
        scale_NG = scale_NG[:, : -(-k // group_size)].contiguous()
        return codebook_weight(
            codes_NK[:, :k],
            scale_NG,
            codebook=self.codebook,
            group_size=group_size,
            factor=factor,
        )

    @classmethod
    def stack(cls, pieces: Sequence[CodebookWeight]) -> CodebookWeight:
        """Return ROWS weights of one form, one below the other."""
        first = pieces[0]
        factors = [p.factor for p in pieces if p.factor is not None]
        return replace(
            first,
            out_features=sum(piece.out_features for piece in pieces),
            plane=torch.cat([piece.plane for piece in pieces]),
            scale=torch.cat([piece.scale for piece in pieces]),
            factor=torch.cat(factors) if factors else None,
        )

    def block_words(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return codes, scales and what stands where others have zeros as int32: factors of rows
        in float32, or the scales again."""
        scale = self.scale.view(torch.int32)
        return (self.plane.view(torch.int32),), scale, scale if self.factor is None else self.factor

    def codes(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the uint8 codes [stop - start, Kp] of some rows; in FRAGMENT, of whole blocks."""
        stop = self.out_features if stop is None else stop
        row = self.plane.numel() // self.out_features
        flat = self.plane.view(-1)[start * row : stop * row]
        if self.layout is Layout.FRAGMENT:
            e2m1 = self.codebook is Codebook.E2M1
            flat = unfolded(flat) if e2m1 else unpaired(flat)
        return weight_layout.unpack((flat,), BITS, self.layout, stop - start)

    def scale_NG(self) -> Tensor:
        """Return the scales [N, G] as they are stored."""
        if self.layout is Layout.ROWS:
            return self.scale.view(self.out_features, -1)
        n, blocks = self.out_features, self.out_features // BLOCK_ROWS
        if self.is_mxfp4:
            by_lane = self.scale.view(blocks, -1, 8, _PARTS, 2)
            return by_lane.permute(0, 4, 2, 1, 3).reshape(n, -1)
        if self.codebook is Codebook.E2M1:
            by_lane = self.scale.view(blocks, -1, 8, 4, 2, 2)
            return by_lane.permute(0, 5, 2, 1, 4, 3).reshape(n, -1)
        return weight_layout.unpack_scales(self.scale, self.layout, n)

    def dequantize(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of w in float32 (float64 if asked for), rounded once to `dtype`."""
        stop = self.out_features if stop is None else stop
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        table = torch.tensor(self.codebook.values, dtype=torch.float32, device=self.device).to(wide)
        w = table[self.codes(start, stop).int()].view(stop - start, self.groups, -1)
        w *= scale_values(self.scale_NG()[start:stop]).to(wide)[:, :, None]
        if self.factor is not None:
            w *= self.factor[start:stop].to(wide)[:, None, None]
        return w.view(stop - start, -1)[:, : self.in_features].to(dtype)

    def in_fragments(self) -> CodebookWeight:
        """Return the weight in FRAGMENT, where `has_fragments`."""
        if self.layout is Layout.FRAGMENT:
            return self
        assert self.has_fragments()
        (plane,) = weight_layout.pack(self.codes(), BITS, Layout.FRAGMENT)
        if self.is_mxfp4:
            rows = self.scale_NG().view(-1, 2, 8, self.groups // _PARTS, _PARTS)
            scale = rows.permute(0, 3, 2, 4, 1).reshape(-1)
        elif self.codebook is Codebook.E2M1:
            rows = self.scale_NG().view(-1, 2, 8, self.groups // 8, 2, 4)
            scale = rows.permute(0, 3, 2, 5, 4, 1).reshape(-1)
        else:
            scale = weight_layout.pack_scales(self.scale_NG(), Layout.FRAGMENT)
        e2m1 = self.codebook is Codebook.E2M1
        plane = folded(plane) if e2m1 else paired(plane)
        return replace(self, plane=plane, scale=scale, layout=Layout.FRAGMENT)

    def has_fragments(self) -> bool:
        """Whether kernels take its words: whole blocks of rows, no MXFP4 scale above 2.

        Asks the device for the largest one.
        """
        if self.layout is Layout.FRAGMENT:
            return True
        if self.out_features % BLOCK_ROWS:
            return False
        if self.is_mxfp4:
            return self.group_size * _PARTS == GROUP and int(self.scale.max()) <= LARGEST
        if self.codebook is Codebook.E2M1:
            nvfp4 = self.group_size == 16 and self.scale.dtype is E4M3
            return nvfp4 and self.factor is not None
        return self.group_size in (32, 64) and self.scale.dtype == torch.float16


def codebook_weight(
    codes_NK: Tensor,
    scale_NG: Tensor,
    *,
    codebook: Codebook,
    group_size: int,
    factor: Tensor | None = None,
) -> CodebookWeight:
    """Pack uint8 codes [N, K], K even, as `of_pairs` does."""
    pairs = codes_NK[:, ::2] | codes_NK[:, 1::2] << 4
    return of_pairs(pairs, scale_NG, codebook=codebook, group_size=group_size, factor=factor)


def of_pairs(
    pairs_NJ: Tensor,
    scale_NG: Tensor,
    *,
    codebook: Codebook,
    group_size: int,
    factor: Tensor | None = None,
) -> CodebookWeight:
    """Return a weight of bytes [N, K / 2], each a code and, in its upper half, the next one.

    Scales are [N, ceil(K / group)]; `ValueError` for what lies.
    """
    n, k = pairs_NJ.shape[0], 2 * pairs_NJ.shape[1]
    expected = (n, -(-k // group_size))
    if group_size not in GROUPS or tuple(scale_NG.shape) != expected:
        raise ValueError(
            f"scales of groups of {group_size} have shape {list(scale_NG.shape)}, expected "
            f"{list(expected)} for codes [{n}, {k}] in groups of {', '.join(map(str, GROUPS))}"
        )
    finite = scale_NG != 255 if scale_NG.dtype is E8M0 else scale_NG.float().isfinite()
    if not bool(finite.all()) or (factor is not None and not bool(factor.isfinite().all())):
        raise ValueError("scales that are NaN or infinite; download it again")
    zero = codebook.values.index(0.0) if 0.0 in codebook.values else 0
    pairs = functional.pad(pairs_NJ, (0, (padded_k(k) - k) // 2), value=zero * 17)
    gap = padded_k(k) // group_size - expected[1]
    if gap:
        scale_NG = torch.cat((scale_NG, torch.zeros(n, gap).to(scale_NG)), dim=1)
    low, high = pairs.view(n, -1, 2, GROUP // 4).unbind(2)  # codes 0 to 63 and 64 to 127
    plane = torch.stack((low & 15 | high << 4, low >> 4 | high & 240), dim=-1)
    return CodebookWeight(
        codebook=codebook,
        group_size=group_size,
        out_features=n,
        in_features=k,
        plane=plane.view(-1),
        scale=scale_NG.reshape(-1),
        factor=factor,
    )


def serves_codebooks(scheme: WeightScheme | None) -> bool:
    """Whether a layer stored so keeps 4-bit codes: they are what it has, or say no less."""
    return scheme is None or (scheme.bits in (4, 8) and scheme.activation_bits == 16)


def ordered(weight: CodebookWeight, order: Callable[[Tensor], Tensor]) -> CodebookWeight:
    """Return a ROWS weight with its rows in another order, or with some of them."""
    n = weight.out_features
    return replace(
        weight,
        out_features=order(torch.arange(n)).shape[0],
        plane=order(weight.plane.view(n, -1)).reshape(-1),
        scale=order(weight.scale.view(n, -1)).reshape(-1),
        factor=None if weight.factor is None else order(weight.factor[:, None]).reshape(-1),
    )

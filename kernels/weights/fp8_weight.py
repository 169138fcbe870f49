"""Fp8Weight: one linear layer's weight [N, K] as a checkpoint stores it in E4M3, kept so.

    w[n, k] = e4m3(code[n, k]) scale[n // rows, k // columns]

    rows, columns      scales of
    all of N, of K     the whole tensor
    1, all of K        a channel
    128, 128           blocks (DeepSeek-V3, Qwen3-FP8)
    1, 128             blocks whose rows a stacked or rearranged linear has moved apart

Codes lie row by row, K neighbours side by side, or on GPUs (`fragment`) as weight_layout.py's
FRAGMENT does, a byte a code: in a 32-bit word two rows r3 of neighbours k0; the words of h = 0 of
all blocks and k-groups come first, then those of h = 1. E4M3 is sign, 4 bits of exponent, 3 of
mantissa:
the byte's sign to bit 15 and its other bits shifted left by 7 are a float16 of 2^-8 its value,
subnormals too, so every code is exact in 16 bits. NaN (0x7f, 0xff) is refused when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from llmpq.kernels.cpu.fp8_linear import fp8_linear_cpu
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.kernel_table import KernelForm
from llmpq.kernels.weights.quantized_weight import four_bit_copy
from llmpq.kernels.weights.weight import DraftMode, Weight, finer_group
from llmpq.precision import WeightScheme

LARGEST = 448.0
"""E4M3's largest number."""
STEP = 64
"""What the columns that share a scale are a multiple of, if not all of K: a product's step."""


class _Codes(Protocol):
    def dequantize(self, dtype: torch.dtype) -> Tensor: ...


Kept = TypeVar("Kept", bound=_Codes)


@dataclass(frozen=True, kw_only=True)
class Fp8Weight(Weight):
    """Codes, float32 scales, and how many rows and columns share one."""

    codes_NK: Tensor
    """uint8, E4M3 ("fn": no infinities)."""
    scale: Tensor
    """float32 [ceil(N / rows), ceil(K / columns)]."""
    rows: int
    columns: int
    dtype: torch.dtype
    """Of the inputs."""
    fragment: bool = False
    """Whether codes lie as tensor cores take them."""

    def __post_init__(self) -> None:
        """Refuse what does not belong together."""
        n, k = self.codes_NK.shape
        expected = (-(-n // self.rows), -(-k // self.columns))
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"FP8 weight [{n}, {k}] with scales of {self.rows} x {self.columns}: they have "
                f"shape {list(self.scale.shape)}, expected {list(expected)}"
            )
        if self.columns < k and self.columns % STEP:
            raise ValueError(
                f"FP8 weight: {self.columns} columns share a scale, expected a multiple of {STEP}"
            )

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return 8

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes_NK.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.codes_NK.shape[1]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Codes and scales: no more bytes than 8 bits in groups of 128 with zeros."""
        return {"codes_NK": self.codes_NK, "scale": self.scale}

    @property
    def keeps_codes(self) -> bool:
        """A checkpoint's own."""
        return True

    def for_scheme(self, scheme: WeightScheme | None, name: str) -> Weight:
        """Itself in layers of 8 bits, and of 4 where their integers are kept, too."""
        four = scheme is not None and (scheme.bits, scheme.activation_bits) == (4, 16)
        return self if four else super().for_scheme(scheme, name)

    @property
    def kernel_form(self) -> KernelForm:
        """By where the codes lie."""
        return KernelForm.FP8_WORDS if self.fragment else KernelForm.FP8_ROWS

    @property
    def expert_key(self) -> tuple[object, ...] | None:
        """How codes and scales lie."""
        if self.dtype not in (torch.float16, torch.bfloat16):
            return None
        shapes = (self.codes_NK.shape, self.scale.shape)
        return ("fp8", *shapes, self.rows, self.columns, self.dtype)

    def multiply(
        self, x_MK: Tensor, bias: Tensor | None, residual_MN: Tensor | None, into_residual: bool
    ) -> Tensor:
        """By the kernel that kernel_table.py names."""
        if x_MK.is_cuda:
            # Triton is not imported where there is no GPU.
            from llmpq.kernels.gemm.float_codes.fp8_products import fp8_linear_gpu

            return fp8_linear_gpu(x_MK, self, bias, residual_MN)
        y_MN = fp8_linear_cpu(x_MK, self, bias)
        return y_MN if residual_MN is None else y_MN + residual_MN

    def as_draft(self, mode: DraftMode) -> Weight:
        """Return a 4-bit copy for drafts that have one."""
        if mode != "w4kv4":
            return self
        return four_bit_copy(self.dequantize(torch.float32), self.dtype)

    def cut(self, start: int, stop: int) -> Fp8Weight:
        """Return rows start..stop; their scales are by row."""
        codes, scale = self.rows_of_codes(start, stop), self.scale_NC(start, stop)
        cut = replace(self, codes_NK=codes, scale=scale.contiguous(), rows=1, fragment=False)
        return cut.in_fragments() if self.fragment else cut

    def of_columns(self, start: int, stop: int) -> Fp8Weight:
        """Return inputs start..stop; blocks that they begin inside of are cut finer."""
        columns, scale, width = self.columns, self.scale, stop - start
        if columns < self.in_features:
            columns = finer_group(columns, start, (STEP, GROUP))
            places = torch.arange(start, stop, columns, device=scale.device)
            scale = scale[:, places.div_(self.columns, rounding_mode="floor")]
        codes = self.rows_of_codes()[:, start:stop].contiguous()
        made = replace(
            self,
            codes_NK=codes,
            scale=scale.contiguous(),
            columns=min(columns, width),
            fragment=False,
        )
        return made.in_fragments() if self.fragment else made

    @classmethod
    def stack(cls, pieces: Sequence[Fp8Weight]) -> Fp8Weight:
        """Return weights one below the other; scales stay shared where rows still line up."""
        first = pieces[0]
        if len(pieces) == 1:
            return first
        aligned = all(p.rows == first.rows and p.out_features % p.rows == 0 for p in pieces)
        shared = aligned and all(p.columns == first.columns for p in pieces)
        codes = torch.cat([piece.rows_of_codes() for piece in pieces])
        if len({piece.columns for piece in pieces}) > 1:
            raise ValueError("FP8 weights of one product have scales of different widths")
        scale = torch.cat([p.scale if shared else p.scale_NC() for p in pieces])
        rows = first.rows if shared else 1
        made = replace(first, codes_NK=codes, scale=scale, rows=rows, fragment=False)
        return made.in_fragments() if first.fragment else made

    def to(self, device: torch.device | str) -> Fp8Weight:
        """Return the weight on a device, as that computes with it fastest."""
        codes, scale = self.codes_NK.to(device), self.scale.to(device)
        moved = replace(self, codes_NK=codes, scale=scale)
        if codes.is_cuda:
            return moved.in_fragments()
        return replace(moved, codes_NK=moved.rows_of_codes(), fragment=False)

    def in_fragments(self) -> Fp8Weight:
        """Return the weight as tensor cores take it, if it has whole blocks."""
        (n, k), wide = self.codes_NK.shape, self.columns >= self.in_features
        whole = n % BLOCK_ROWS == 0 and k % GROUP == 0 and (wide or self.columns % GROUP == 0)
        if self.fragment or not whole:
            return self
        laid = self.codes_NK.reshape(_axes(n, k)).permute(_ORDER)
        return replace(self, codes_NK=laid.reshape(n, k), fragment=True)

    def rows_of_codes(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the codes of rows, one behind the other."""
        stop = self.out_features if stop is None else stop
        if not self.fragment:
            return self.codes_NK[start:stop]
        n, k = self.codes_NK.shape
        sizes = [_axes(n, k)[axis] for axis in _ORDER]
        back = sorted(range(len(_ORDER)), key=_ORDER.__getitem__)
        return self.codes_NK.view(sizes).permute(back).reshape(n, k)[start:stop]

    def scale_NC(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the scales [stop - start, ceil(K / columns)] of rows, one by one."""
        stop = self.out_features if stop is None else stop
        first = start // self.rows
        held = self.scale[first : -(-stop // self.rows)]
        return held.repeat_interleave(self.rows, 0)[start - first * self.rows :][: stop - start]

    def dequantize(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of w in float32 (float64 if asked for), rounded once to `dtype`."""
        stop = self.out_features if stop is None else stop
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        w = self.rows_of_codes(start, stop).view(torch.float8_e4m3fn).to(wide)
        scale = self.scale_NC(start, stop).to(wide)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.columns, 1)[:, : self.in_features]
        return w.mul_(scale).to(dtype)


# block, r3, r, group, h, jj/2, jj%2, k3, c, k0  ->  h | block group jj/2 r c jj%2 k3 | k0 r3
_ORDER = (4, 0, 3, 5, 2, 8, 6, 7, 9, 1)


def _axes(n: int, k: int) -> tuple[int, ...]:
    return (n // BLOCK_ROWS, 2, 8, k // GROUP, 2, 2, 2, 2, 4, 2)


def fp8_weight(
    codes: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> Fp8Weight:
    """Return a weight of float8_e4m3fn [N, K] and a checkpoint's scales; `ValueError`: they lie.

    `block`: rows and columns of a table of scales; else there is one scale, or one a row. On a CPU
    the weight is a view of `codes`, which a checkpoint maps from its file: a copy would take memory
    that mapped pages, which the system drops and reads again at need, do not.
    """
    n, k = codes.shape
    raw = codes.view(torch.uint8)
    if bool(((raw & 0x7F) == 0x7F).any()):
        raise ValueError("FP8 codes that are NaN; download the checkpoint again")
    wide = scale.float()
    if not bool(wide.isfinite().all()) or bool((wide < 0).any()):
        raise ValueError("FP8 scales that are negative, NaN or infinite; download it again")
    most = LARGEST * float(wide.max())
    if block is not None:
        made = Fp8Weight(
            codes_NK=raw, scale=wide, rows=block[0], columns=min(block[1], k), dtype=dtype
        )
        return in_range(made, dtype, most)
    if scale.numel() not in (1, n):
        raise ValueError(
            f"FP8 weight [{n}, {k}] with scales {list(scale.shape)}: expected one, {n} or blocks "
            "that config.json describes"
        )
    rows = n if scale.numel() == 1 else 1
    made = Fp8Weight(codes_NK=raw, scale=wide.reshape(-1, 1), rows=rows, columns=k, dtype=dtype)
    return in_range(made, dtype, most)


def in_range(weight: Kept, dtype: torch.dtype, most: float) -> Kept:
    """Return a weight whose values float16 has, if inputs are float16; `ValueError` else.

    `most`: what no number exceeds.
    """
    if dtype == torch.float16 and most > torch.finfo(dtype).max:
        largest = float(weight.dequantize(torch.float32).abs().max())
        if largest > torch.finfo(dtype).max:
            raise ValueError(
                f"its scales make values of up to {largest:.3g}, beyond float16's 65504; run it "
                "in bfloat16"
            )
    return weight

"""QuantizedWeight: the packed planes, scales and zeros of one linear layer's weight [N, K].

Knows where the bytes lie (weight_layout.py, cpu_layout.py); knows no matmul.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmpq.kernels.formats import cpu_layout
from llmpq.kernels.formats import weight_layout as formats
from llmpq.kernels.formats.weight_layout import GROUP, NATIVE, Layout
from llmpq.kernels.multiprocessors import older_than
from llmpq.kernels.native.library import library
from llmpq.precision import padded_k


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A quantised weight: w[n, k] ~ (code[n, k] - zero[n, g]) * scale[n, g], g = k's group.

    `planes` are the packed codes in `layout`. `scale` and `zero` are flat, in the layout's order;
    `zero` is None for a symmetric weight (its zero is 2^(bits-1)).
    """

    bits: int
    group_size: int | None
    out_features: int
    in_features: int
    planes: tuple[Tensor, ...]
    scale: Tensor
    zero: Tensor | None
    layout: Layout
    activation_bits: int = 16
    """What x is rounded to, a group of 128, where our own code multiplies on a CPU."""

    @property
    def symmetric(self) -> bool:
        """Whether codes are centred on 2^(bits-1)."""
        return self.zero is None

    @property
    def groups(self) -> int:
        """Quantisation groups of one row."""
        return self.scale.numel() // self.out_features

    @property
    def device(self) -> torch.device:
        """Where the planes are."""
        return self.scale.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; equals `WeightScheme.nbytes`."""
        tensors = (*self.planes, self.scale, *([] if self.zero is None else [self.zero]))
        return sum(t.nbytes for t in tensors)

    def codes(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the uint8 codes [stop - start, Kp] of some rows; `start` is a multiple of 64."""
        stop = self.out_features if stop is None else stop
        # Rows start on a block of every layout, so a run of rows is a run of bytes.
        rows = tuple(p.view(-1)[self._row_run(p, start, stop)] for p in self.planes)
        if self.layout is Layout.CPU:
            return cpu_layout.unpack_cpu(rows[0], self.bits, stop - start)
        if self.layout is Layout.CPU_PANELS:
            return cpu_layout.unpack_panels(rows[0], self.bits, stop - start)
        return formats.unpack(rows, self.bits, self.layout, stop - start)

    @classmethod
    def fragment(
        cls,
        planes: list[Tensor],
        scale: Tensor,
        zero: Tensor | None,
        bits: int,
        per_channel: bool,
        out_features: int,
        in_features: int,
    ) -> QuantizedWeight:
        """Rebuild a FRAGMENT weight from what a custom op can carry."""
        return cls(
            bits=bits,
            group_size=None if per_channel else GROUP,
            out_features=out_features,
            in_features=in_features,
            planes=tuple(planes),
            scale=scale,
            zero=zero,
            layout=Layout.FRAGMENT,
        )

    def row_slice(self, start: int, stop: int) -> QuantizedWeight:
        """Return rows start..stop of a ROWS or FRAGMENT weight, sharing memory.

        `start` is a multiple of 16. Rows past a FRAGMENT weight's last full block are ROWS.
        """
        full = self.out_features // formats.BLOCK_ROWS * formats.BLOCK_ROWS

        def run(flat: Tensor) -> Tensor:
            return flat[self._row_run(flat, start, stop)]

        return replace(
            self,
            out_features=stop - start,
            planes=tuple(run(plane) for plane in self.planes),
            scale=run(self.scale),
            zero=None if self.zero is None else run(self.zero),
            layout=Layout.ROWS if start >= full else self.layout,
        )

    def block_words(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return planes, scales and zeros of the full 16-row blocks of a FRAGMENT weight as int32.

        A symmetric weight has no zeros; its scales stand in, so that kernels get some pointer.
        """
        full = self.out_features // formats.BLOCK_ROWS * formats.BLOCK_ROWS

        def words(flat: Tensor) -> Tensor:
            return flat[: flat.numel() // self.out_features * full].view(torch.int32)

        planes = tuple(words(plane) for plane in self.planes)
        scale = words(self.scale)
        return planes, scale, scale if self.zero is None else words(self.zero)

    def _row_run(self, plane: Tensor, start: int, stop: int) -> slice:
        row_bytes = plane.numel() // self.out_features
        return slice(start * row_bytes, stop * row_bytes)

    def scale_NG(self) -> Tensor:
        """Return the scales [N, G]."""
        return self._unflatten(self.scale)

    def zero_NG(self) -> Tensor:
        """Return the zeros [N, G], those of a symmetric weight included."""
        if self.zero is None:
            return torch.full_like(self.scale_NG(), 2 ** (self.bits - 1))
        return self._unflatten(self.zero)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return w [N, K], computed in float32 (float64 if asked for) and rounded to `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        w = self.codes().to(wide).view(self.out_features, self.groups, -1)
        w -= self.zero_NG().to(wide)[:, :, None]
        w *= self.scale_NG().to(wide)[:, :, None]
        return w.view(self.out_features, -1)[:, : self.in_features].to(dtype)

    def dequantize_in(self, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Return rows start..stop (start a multiple of 64) of w [N, K], computed in `dtype`."""
        codes = self.codes(start, stop)
        if self.bits == 8:
            codes = codes.bitwise_xor_(128).view(torch.int8)  # code - 128 is exact in 8 signed bits
        w = codes.to(dtype).view(stop - start, self.groups, -1)
        if self.bits < 8 or not self.symmetric:
            zero = self.zero_NG()[start:stop].to(dtype) - (128 if self.bits == 8 else 0)
            w -= zero[:, :, None]
        w *= self.scale_NG()[start:stop].to(dtype)[:, :, None]
        return w.view(stop - start, -1)[:, : self.in_features]

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the weight on `device`, in the layout that device computes with fastest."""
        target = torch.device(device)
        if target.type == self.device.type and not self._better_on(target):
            return replace(
                self,
                planes=tuple(p.to(target) for p in self.planes),
                scale=self.scale.to(target),
                zero=None if self.zero is None else self.zero.to(target),
            )
        return from_codes(
            self.codes().to(target),
            self.scale_NG().to(target),
            None if self.zero is None else self.zero_NG().to(target),
            bits=self.bits,
            group_size=self.group_size,
            in_features=self.in_features,
        )

    def _better_on(self, device: torch.device) -> bool:
        """Whether a CPU is not fastest with rows of a checkpoint, or another CPU's layout."""
        if device.type != "cpu" or self.layout not in (Layout.ROWS, *NATIVE):
            return False
        best = best_layout(device, self.scale.dtype, self.group_size)
        return best in NATIVE and best is not self.layout

    def _unflatten(self, flat: Tensor) -> Tensor:
        return formats.unpack_scales(flat, self.layout, self.out_features)


def from_codes(
    codes_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    *,
    bits: int,
    group_size: int | None,
    in_features: int,
    layout: Layout | None = None,
) -> QuantizedWeight:
    """Pack uint8 codes [N, Kp], scales and zeros [N, G]; no layout means the device's best."""
    n, k_padded = codes_NK.shape
    if k_padded != padded_k(in_features):
        raise ValueError(
            f"codes: got {k_padded} columns for K = {in_features}, expected "
            f"{padded_k(in_features)} (K padded to {GROUP})"
        )
    if scale_NG.shape != (n, k_padded // (group_size or k_padded)):
        raise ValueError(
            f"scales: got {tuple(scale_NG.shape)}, expected "
            f"{(n, k_padded // (group_size or k_padded))} for group size {group_size}"
        )
    if layout is None:
        layout = best_layout(codes_NK.device, scale_NG.dtype, group_size)
    small = group_size not in (None, GROUP)
    if small and layout not in (Layout.CPU, Layout.ROWS, Layout.FRAGMENT):
        raise ValueError(
            f"weights in groups of {group_size} in layout {layout.value}: expected {GROUP} or a "
            "channel there, or rows"
        )
    if layout is Layout.CPU:
        planes: tuple[Tensor, ...] = (cpu_layout.pack_cpu(codes_NK, bits),)
    elif layout is Layout.CPU_PANELS:
        planes = (cpu_layout.pack_panels(codes_NK, bits),)
    else:
        planes = formats.pack(codes_NK, bits, layout)

    return QuantizedWeight(
        bits=bits,
        group_size=group_size,
        out_features=n,
        in_features=in_features,
        planes=planes,
        scale=formats.pack_scales(scale_NG, layout),
        zero=None if zero_NG is None else formats.pack_scales(zero_NG, layout),
        layout=layout,
    )


def native_layout(group_size: int | None) -> Layout:
    """Return which of our own layouts the library of this CPU is quickest with."""
    found = library()
    panels = found is not None and group_size in (None, GROUP) and bool(found.llmpq_panels())
    return Layout.CPU_PANELS if panels else Layout.CPU


def best_layout(device: torch.device, dtype: torch.dtype, group_size: int | None = GROUP) -> Layout:
    """Return the layout that `linear` is fastest with on this device."""
    if device.type != "cpu":
        small = group_size not in (None, GROUP)
        by_rows = dtype == torch.float32 or older_than(device, (8, 0))
        return Layout.ROWS if small and by_rows else Layout.FRAGMENT
    return Layout.ROWS if library() is None else native_layout(group_size)

"""QuantizedWeight: the packed planes, scales and zeros of one linear layer's weight [N, K].

The bytes are drawn in formats/weight_layout.py and formats/cpu_layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.atom.reference import rounded
from llmpq.kernels.cpu.native_layer import Matrix
from llmpq.kernels.cpu.native_linear import linear_cpu, multiplies, rows_at_once
from llmpq.kernels.formats import cpu_layout, weight_layout
from llmpq.kernels.formats.atom_rounding import Grid
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.weight_layout import (
    BLOCK_ROWS,
    GROUP,
    GROUPS,
    NATIVE,
    SMALL,
    Layout,
)
from llmpq.kernels.kernel_table import KernelForm
from llmpq.kernels.multiprocessors import older_than
from llmpq.kernels.native.library import DTYPE_CODES, library
from llmpq.kernels.weights.weight import DraftMode, Weight, finer_group
from llmpq.precision import padded_k


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight(Weight):
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
    """Bits that x is rounded to, in groups of 128, where llmpq's C++ multiplies; 16: it is not."""

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
        """The device of the planes."""
        return self.scale.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scales."""
        return self.scale.dtype

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Planes, scales and zeros by name; their bytes together are `WeightScheme.nbytes`."""
        planes = {f"plane{i}": plane for i, plane in enumerate(self.planes)}
        found = planes | {"scale": self.scale}
        return found if self.zero is None else found | {"zero": self.zero}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Return a weight of the same form with other tensors, by the names of `tensors`."""
        planes = tuple(tensors.get(f"plane{i}", plane) for i, plane in enumerate(self.planes))
        scale, zero = tensors.get("scale", self.scale), tensors.get("zero", self.zero)
        return replace(self, planes=planes, scale=scale, zero=zero)

    @property
    def shape(self) -> dict[str, Any]:
        """What a file has to state beside the tensors to make the weight again (`of_shape`)."""
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "out_features": self.out_features,
            "in_features": self.in_features,
            "layout": self.layout.value,
        }

    @classmethod
    def of_shape(cls, shape: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Return the weight that `shape` and `tensors` describe."""
        return cls(
            **{**shape, "layout": Layout(shape["layout"])},
            planes=tuple(tensor for name, tensor in sorted(tensors.items()) if "plane" in name),
            scale=tensors["scale"],
            zero=tensors.get("zero"),
        )

    @property
    def form(self) -> str:
        """What kernels call its words: "parts" of several scales a k-group, else ""."""
        return "parts" if self.group_size in SMALL else ""

    @property
    def kernel_form(self) -> KernelForm:
        """The form of words that kernel_table.py lists kernels for: by groups and by layout."""
        if self.group_size not in SMALL:
            return KernelForm.WORDS
        if self.layout is Layout.ROWS:
            return KernelForm.ROWS
        return KernelForm.PARTS_3 if self.bits == 3 else KernelForm.PARTS

    @property
    def needs_dtype(self) -> torch.dtype | None:
        """The dtype of the scales, which x has to have."""
        return self.scale.dtype

    @property
    def expert_key(self) -> tuple[object, ...] | None:
        """What must be equal in a stack of experts; None but for whole blocks of FRAGMENT words
        with one scale a k-group or a row."""
        whole = self.out_features % BLOCK_ROWS == 0 and self.group_size in (None, GROUP)
        if not whole or self.layout is not Layout.FRAGMENT:
            return None
        shape = (self.out_features, self.in_features, self.bits, self.group_size)
        return ("packed", *shape, self.symmetric, self.scale.dtype)

    @property
    def relocates(self) -> bool:
        """True: it was packed by llmpq, into memory of its own, not mapped from a file."""
        return True

    def multiply(
        self, x_MK: Tensor, bias: Tensor | None, residual_MN: Tensor | None, into_residual: bool
    ) -> Tensor:
        """Multiply rows [M, K] by the kernel that kernel_table.py names for device and form."""
        if not x_MK.is_cuda:
            y_MN = linear_cpu(x_MK, self, bias)
            return y_MN if residual_MN is None else y_MN + residual_MN
        # Triton is not imported where there is no GPU.
        from llmpq.kernels.gemm.linear_gpu import linear_gpu

        if not torch.compiler.is_compiling() or self.layout is not Layout.FRAGMENT or self.form:
            return linear_gpu(x_MK, self, bias, residual_MN, into_residual=into_residual)
        # Dispatching the op is host time that short prompts wait for (H200, eager, a layer of 16
        # tokens: 0.79 ms with four of them, 0.40 ms with dense weights): torch.compile's only.
        return quantized_linear(
            x_MK,
            list(self.planes),
            self.scale,
            self.zero,
            bias,
            residual_MN,
            self.bits,
            self.group_size is None,
            self.out_features,
        )

    def as_draft(self, mode: DraftMode) -> Weight:
        """Return what drafts multiply by: itself, but in two modes.

        `qspec`: a weight of 4 bits with its inputs rounded to 4 bits. `w4kv4`: a copy in 4 bits of
        one of 8.
        """
        if mode == "qspec" and self.bits == 4:
            return RoundedInputs(self)
        if mode == "w4kv4" and self.bits == 8:
            return four_bit_copy(self.dequantize(torch.float32), self.dtype)
        return self

    def with_rounded_inputs(self, bits: int) -> QuantizedWeight:
        """Return the weight that rounds x to `bits` where llmpq's C++ multiplies on a CPU."""
        return replace(self, activation_bits=bits)

    def stored_rows(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return codes [N, K], scales and zeros [N, G] for a compressed-tensors file.

        `ValueError` where a row has no whole groups.
        """
        k, size = self.in_features, self.group_size
        if size is not None and k % size:
            raise ValueError(
                f"{k} inputs do not divide into groups of {size}, which compressed-tensors needs; "
                "quantise with --group-size channel"
            )
        groups = slice(None if size is None else k // size)  # those of K's padding are not stored
        rows = {"codes_NK": self.codes()[:, :k], "scale_NG": self.scale_NG()[:, groups].to(dtype)}
        if self.zero is not None:
            rows["zero_NG"] = self.zero_NG()[:, groups].to(dtype)
        return rows

    def native_matrix(self, dtype: torch.dtype) -> Matrix | None:
        """Return the weight as a layer of llmpq's C++ takes it; None where it cannot."""
        if dtype not in DTYPE_CODES or not multiplies(self):
            return None
        return Matrix(
            n=self.out_features,
            k=self.in_features,
            codes=self.planes[0],
            most_rows=rows_at_once(self, dtype),
            bits=self.bits,
            scale=self.scale,
            zero=self.zero,
            groups=self.groups,
            panels=self.layout is Layout.CPU_PANELS,
            x_bits=self.activation_bits,
        )

    @classmethod
    def stack(cls, pieces: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return weights of one scheme as one of all their rows, with zeros if one has some."""
        symmetric = all(piece.symmetric for piece in pieces)
        return pieces[0]._repacked(
            torch.cat([piece.codes() for piece in pieces]),
            torch.cat([piece.scale_NG() for piece in pieces]),
            None if symmetric else torch.cat([piece.zero_NG() for piece in pieces]),
        )

    def _repacked(
        self, codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None
    ) -> QuantizedWeight:
        """Return a weight of the same scheme and layout with other codes, scales and zeros."""
        made = from_codes(
            codes_NK,
            scale_NG.contiguous(),
            zero_NG,
            bits=self.bits,
            group_size=self.group_size,
            in_features=self.in_features,
            layout=self.layout,
        )
        return replace(made, activation_bits=self.activation_bits)

    def of_rows(self, runs: Sequence[tuple[int, int]]) -> QuantizedWeight:
        """Return the rows of runs (first, end), packed anew."""
        rows = torch.cat([torch.arange(*run, device=self.device) for run in runs])
        zero_NG = None if self.zero is None else self.zero_NG()[rows]
        return self._repacked(self.codes()[rows], self.scale_NG()[rows], zero_NG)

    def of_columns(self, start: int, stop: int) -> QuantizedWeight:
        """Return columns (inputs) start..stop, packed anew.

        Where `start` is inside a group, all groups are cut into finer ones that keep its scale.
        """
        group, width = self.group_size, stop - start
        wide = padded_k(width)
        codes_NK = functional.pad(self.codes()[:, start:stop], (0, wide - width))
        scale_NG, zero_NG = self.scale_NG(), None if self.zero is None else self.zero_NG()
        if group is not None:
            size = finer_group(group, start, GROUPS)
            places = torch.arange(start, start + wide, size, device=self.device).div_(
                group, rounding_mode="floor"
            )
            places = places.clamp_(max=scale_NG.shape[1] - 1)
            scale_NG, group = scale_NG[:, places], size
            zero_NG = None if zero_NG is None else zero_NG[:, places]
        made = from_codes(
            codes_NK,
            scale_NG.contiguous(),
            None if zero_NG is None else zero_NG.contiguous(),
            bits=self.bits,
            group_size=group,
            in_features=width,
            layout=self.layout if group == self.group_size else None,
        )
        return replace(made, activation_bits=self.activation_bits)

    def codes(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the uint8 codes [stop - start, Kp] of some rows; `start` is a multiple of 64."""
        stop = self.out_features if stop is None else stop
        # Rows start on a block of every layout, so a run of rows is a run of bytes.
        rows = tuple(p.view(-1)[self._row_run(p, start, stop)] for p in self.planes)
        if self.layout is Layout.CPU:
            return cpu_layout.unpack_cpu(rows[0], self.bits, stop - start)
        if self.layout is Layout.CPU_PANELS:
            return cpu_layout.unpack_panels(rows[0], self.bits, stop - start)
        return weight_layout.unpack(rows, self.bits, self.layout, stop - start)

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
        """Return the FRAGMENT weight of what a custom op can carry (`quantized_linear`)."""
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

    def cut(self, start: int, stop: int) -> QuantizedWeight:
        """Return rows start..stop, sharing memory: multiples of 16, or to the end.

        Rows past a FRAGMENT weight's last full block are ROWS.
        """
        full = self.out_features // BLOCK_ROWS * BLOCK_ROWS

        def run(flat: Tensor) -> Tensor:
            return flat[self._row_run(flat, start, stop)]

        return replace(
            self,
            out_features=stop - start,
            planes=tuple(run(plane) for plane in self.planes),
            scale=run(self.scale),
            zero=None if self.zero is None else run(self.zero),
            layout=Layout.ROWS if start >= full and self.layout is Layout.FRAGMENT else self.layout,
        )

    def block_words(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return planes, scales and zeros of the full 16-row blocks of a FRAGMENT weight as int32.

        A symmetric weight has no zeros; its scales stand in, so that kernels get some pointer.
        """
        full = self.out_features // BLOCK_ROWS * BLOCK_ROWS

        def words(flat: Tensor) -> Tensor:
            return flat[: flat.numel() // self.out_features * full].view(torch.int32)

        planes = tuple(words(plane) for plane in self.planes)
        scale = words(self.scale)
        return planes, scale, scale if self.zero is None else words(self.zero)

    def _row_run(self, plane: Tensor, start: int, stop: int) -> slice:
        """Return where the rows are in a plane, or in the scales or zeros, as flat elements."""
        per_row = plane.numel() // self.out_features
        return slice(start * per_row, stop * per_row)

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
        """Whether a CPU is faster with another layout than this one, a checkpoint's or another
        CPU's."""
        if device.type != "cpu" or self.layout not in (Layout.ROWS, *NATIVE):
            return False
        best = best_layout(device, self.scale.dtype, self.group_size)
        return best in NATIVE and best is not self.layout

    def _unflatten(self, flat: Tensor) -> Tensor:
        """Return scales or zeros as [N, G]."""
        return weight_layout.unpack_scales(flat, self.layout, self.out_features)


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
        planes = weight_layout.pack(codes_NK, bits, layout)

    return QuantizedWeight(
        bits=bits,
        group_size=group_size,
        out_features=n,
        in_features=in_features,
        planes=planes,
        scale=weight_layout.pack_scales(scale_NG, layout),
        zero=None if zero_NG is None else weight_layout.pack_scales(zero_NG, layout),
        layout=layout,
    )


def native_layout(group_size: int | None) -> Layout:
    """Return which of the CPU layouts llmpq's C++ is quickest with on this CPU."""
    found = library()
    panels = found is not None and group_size in (None, GROUP) and bool(found.llmpq_panels())
    return Layout.CPU_PANELS if panels else Layout.CPU


def best_layout(device: torch.device, dtype: torch.dtype, group_size: int | None = GROUP) -> Layout:
    """Return the layout that `linear` is fastest with on this device."""
    if device.type != "cpu":
        small = group_size not in (None, GROUP)
        by_rows = dtype == torch.float32 or (older_than(device, (8, 0)) and dtype != torch.float16)
        return Layout.ROWS if small and by_rows else Layout.FRAGMENT
    return Layout.ROWS if library() is None else native_layout(group_size)


@dataclass(frozen=True, eq=False)
class RoundedInputs(Weight):
    """A 4-bit weight whose inputs are rounded to 4 bits, too, per token and group of 128: what the
    drafts of `qspec` multiply by."""

    weight: QuantizedWeight

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return self.weight.bits

    @property
    def out_features(self) -> int:
        """N, outputs."""
        return self.weight.out_features

    @property
    def in_features(self) -> int:
        """K, inputs."""
        return self.weight.in_features

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scales."""
        return self.weight.dtype

    @property
    def kernel_form(self) -> KernelForm:
        """The form of the weight's words."""
        return self.weight.kernel_form

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the weight."""
        return self.weight.tensors

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> RoundedInputs:
        """Return the same with other tensors."""
        return RoundedInputs(self.weight.with_tensors(tensors))

    def multiply(
        self, x_MK: Tensor, bias: Tensor | None, residual_MN: Tensor | None, into_residual: bool
    ) -> Tensor:
        """Round x, then multiply."""
        if x_MK.is_cuda:
            # Triton is not imported where there is no GPU.
            from llmpq.kernels.fused.round_inputs import round_restore

            x_MK = round_restore(x_MK, ROUNDED)
        else:
            x_MK = rounded(x_MK, ROUNDED)
        return self.weight.multiply(x_MK, bias, residual_MN, into_residual)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight's w [N, K]."""
        return self.weight.dequantize(dtype)

    def to(self, device: torch.device | str) -> RoundedInputs:
        """Return the weight on a device."""
        return RoundedInputs(self.weight.to(device))

    def cut(self, start: int, stop: int) -> RoundedInputs:
        """Return rows start..stop."""
        return RoundedInputs(self.weight.cut(start, stop))

    @classmethod
    def stack(cls, pieces: Sequence[RoundedInputs]) -> RoundedInputs:
        """Return weights one below the other."""
        return RoundedInputs(QuantizedWeight.stack([piece.weight for piece in pieces]))


ROUNDED = AtomScheme(weight_bits=4, activation_bits=4)
"""How inputs of `RoundedInputs` are rounded."""
_CPU_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 25
"""Weights per step of a copy: the temporaries stay in a CPU core's cache, or fill a GPU."""


def four_bit_copy(w_NK: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Return w in 4 bits without zeros, which kernels read fastest.

    Scales have a sign, so that the largest weight of a group takes the code -8 that symmetric grids
    leave unused (held-out text, `demo-7m`: 0.939 of the drafts accepted against 0.924 with plain
    symmetric grids, 0.945 with zeros, whose products take 5-10 % longer).
    """
    n, k = w_NK.shape
    grid, groups = Grid(4, "int", -8.0), padded_k(k) // GROUP
    codes = torch.empty(n, groups * GROUP, dtype=torch.uint8, device=w_NK.device)
    scale = torch.empty(n, groups, dtype=dtype, device=w_NK.device)
    chunk = max(1, (_GPU_CHUNK if w_NK.is_cuda else _CPU_CHUNK) // codes.shape[1])
    for start in range(0, n, chunk):
        rows = slice(start, min(n, start + chunk))
        wide = functional.pad(w_NK[rows].float(), (0, codes.shape[1] - k)).view(-1, GROUP)
        found = grid.search(wide, dtype)
        codes[rows] = (grid.round(wide, found) + 8).to(torch.uint8).view(-1, codes.shape[1])
        scale[rows] = found.view(-1, groups).to(dtype)
    return from_codes(codes, scale, None, bits=4, group_size=GROUP, in_features=k)


@torch.library.custom_op("llmpq::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor,
    planes: list[Tensor],
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    bits: int,
    per_channel: bool,
    out_features: int,
) -> Tensor:
    """The product with words on a GPU as one opaque operator, so that torch.compile traces past."""
    from llmpq.kernels.gemm.linear_gpu import linear_gpu

    k = x.shape[1]
    q = QuantizedWeight.fragment(planes, scale, zero, bits, per_channel, out_features, k)
    return linear_gpu(x, q, bias, residual)


@quantized_linear.register_fake
def _(
    x: Tensor,
    planes: list[Tensor],
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    bits: int,
    per_channel: bool,
    out_features: int,
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)

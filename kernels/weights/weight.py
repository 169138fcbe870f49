"""Weight: what a linear layer multiplies by, in whatever form its bytes are.

    y = x w^T + bias + residual          w [N, K], x [..., K], y [..., N]

    form                               class             file
    floats                             DenseWeight       dense_weight.py
    3, 4, 8 bits, scales of groups     QuantizedWeight   quantized_weight.py
    E4M3                               Fp8Weight         fp8_weight.py
    4 bits, 16 values of a codebook    CodebookWeight    codebook_weight.py
    W4A4, W8A8, outliers in 8 bits     AtomWeight        atom_weight.py; on Hopper its AtomTiles

Which kernel multiplies a form is kernel_table.py's to say. Callers use what is here and ask no
weight for its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from llmpq.kernels.cpu.native_layer import Matrix
from llmpq.kernels.kernel_table import KernelForm
from llmpq.precision import WeightScheme


def finer_group(group: int, start: int, sizes: Sequence[int]) -> int:
    """Return how many inputs of a group of `group` stay together, so that one begins at `start`.

    `group` itself where one does; `ValueError` where none of the `sizes` that kernels read fits.
    """
    found = [size for size in (group, *sorted(sizes, reverse=True)) if group % size == 0]
    fits = next((size for size in found if start % size == 0), None)
    if fits is None:
        raise ValueError(
            f"input {start} of a linear lies inside a group of {group} stored codes; devices in "
            f"tensor parallel can share it at multiples of {min(found)}: give them other shares"
        )
    return fits


DraftMode = Literal["qspec", "w4kv4", "kv4"]
"""How a model drafts for itself: inputs rounded to 4 bits, a 4-bit copy, its own weights."""


class Weight(ABC):
    """One linear layer's weight [N, K]."""

    if TYPE_CHECKING:  # fields of some classes, properties of others

        @property
        def bits(self) -> int:
            """Bits of a weight."""

        @property
        def out_features(self) -> int:
            """N."""

        @property
        def in_features(self) -> int:
            """K."""

        @property
        def dtype(self) -> torch.dtype:
            """Of the inputs that it is made for."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by the name of their field, those that it lacks left out."""

    @property
    @abstractmethod
    def kernel_form(self) -> KernelForm:
        """The form's lines in the table of kernels."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def symmetric(self) -> bool:
        """Whether it has no zero points."""
        return True

    @property
    def matrix(self) -> Tensor | None:
        """w [N, K] itself, where an ordinary tensor holds it."""
        return None

    @property
    def expert_key(self) -> tuple[object, ...] | None:
        """What experts' weights must have in common to be one stack; None: not in a stack.

        Its first entry names the kernels' kind: "dense", "packed", "mxfp4" or "fp8".
        """
        return None

    @property
    def keeps_codes(self) -> bool:
        """Whether its codes are a checkpoint's own, read as they are."""
        return False

    @property
    def takes_rounded_tokens(self) -> bool:
        """Whether GPU kernels round its inputs where they are made (`AtomWeight.kernels`)."""
        return False

    @property
    def relocates(self) -> bool:
        """Whether its tensors may be copied into pages of the layer's own on a CPU.

        Codes that a checkpoint maps from its file may not: mapped pages are dropped and read again.
        """
        return False

    def matmul(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        into_residual: bool = False,
    ) -> Tensor:
        """y = x w^T + bias + residual, x [..., K] in fp16, bf16 or (CPU) fp32; y [..., N] like x.

        `into_residual`: y may be written over the residual, where that saves a copy.
        """
        k = self.in_features
        if x.shape[-1] != k or x.device.type != self.device.type:
            raise ValueError(
                f"matmul: got x with K = {x.shape[-1]} on {x.device}, expected K = {k} on "
                f"{self.device}. Move one with .to(device)."
            )
        flat = None if residual is None else residual.reshape(-1, self.out_features)
        y_MN = self.multiply(x.reshape(-1, k), bias, flat, into_residual)
        return y_MN.view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def multiply(
        self, x_MK: Tensor, bias: Tensor | None, residual_MN: Tensor | None, into_residual: bool
    ) -> Tensor:
        """`matmul` of rows that belong to the weight."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return w [N, K], computed in float32 (float64 if asked for) and rounded to `dtype`."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Weight:
        """Return the weight on a device, in the layout that device computes with fastest."""

    def packed(self) -> Weight:
        """Return the weight in the form that its device multiplies fastest, which need not be its
        own: dense weights in oneDNN's layout, Atom's in Hopper's."""
        return self

    def as_expert(self) -> Weight:
        """Return the weight as it lies in a stack of experts (`expert_key`)."""
        return self

    def as_draft(self, mode: DraftMode) -> Weight:
        """Return what drafts of a mode multiply by: itself, where the mode gains nothing."""
        return self

    def for_scheme(self, scheme: WeightScheme | None, name: str) -> Weight:
        """Return a checkpoint's weight as a plan asks for it; no scheme means as it is stored.

        Weight bits cannot change: `ValueError` names what can be done.
        """
        if scheme is None:
            return self
        if self.bits != scheme.bits or scheme.activation_bits < 16:
            raise self.other_precision(scheme, name, "for 16-bit activations")
        return self

    def other_precision(self, scheme: WeightScheme, name: str, kind: str) -> ValueError:
        """Return the error of a plan that asks for other bits."""
        return ValueError(
            f"{name}: the checkpoint stores {self.bits}-bit weights {kind}, the plan asks for "
            f"w{scheme.bits}a{scheme.activation_bits}; plan with the checkpoint's precision, or "
            "run the unquantised model"
        )

    def native_matrix(self, dtype: torch.dtype) -> Matrix | None:
        """Return the weight as a layer of our own C++ takes it; None where that cannot."""
        return None

    def with_rounded_inputs(self, bits: int) -> Weight:
        """Return the weight that rounds x to `bits` on a CPU, where its kernels can."""
        return self

    @property
    def stored_scheme(self) -> dict[str, Any] | None:
        """The scheme that a layer's file has to state beside `tensors`; None: it is written as
        compressed-tensors does."""
        return None

    def stored_rows(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what compressed-tensors stores of each row [N, ...], scales in `dtype`: tensors by
        its names, or "codes_NK", "scale_NG" and "zero_NG" for interchange.pack_quantized."""
        raise ValueError(f"{type(self).__name__} is no form that llmpq-quantize writes")

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a weight of the same form with other tensors, by the names of `tensors`."""
        fields: Any = dict(tensors)
        return replace(self, **fields)  # type: ignore[type-var]

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a weight of the same form, each tensor changed."""
        return self.with_tensors({name: change(t) for name, t in self.tensors.items()})

    @abstractmethod
    def cut(self, start: int, stop: int) -> Weight:
        """Return rows start..stop (multiples of 16) as a weight of their own."""

    def of_rows(self, runs: Sequence[tuple[int, int]]) -> Weight:
        """Return some rows, in half-open runs of any bounds, as a weight of the same codes."""
        return type(self).stack([self.cut(start, stop) for start, stop in runs])

    def of_columns(self, start: int, stop: int) -> Weight:
        """Return inputs start..stop as a weight of the same codes; `ValueError` where their groups
        would be cut at what no kernel reads."""
        raise ValueError(f"a {type(self).__name__} cannot be cut along its inputs")

    @classmethod
    @abstractmethod
    def stack(cls, pieces: Sequence[Self]) -> Weight:
        """Return weights of one form, one below the other."""

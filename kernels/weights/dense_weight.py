"""DenseWeight: a weight [N, K] in floats, as it is or in the layout of oneDNN (cpu/dense.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmpq.kernels.cpu.dense import dense_linear, native_rows, pack_dense, plain_dense
from llmpq.kernels.cpu.native_layer import Matrix
from llmpq.kernels.kernel_table import KernelForm
from llmpq.kernels.weights.quantized_weight import four_bit_copy
from llmpq.kernels.weights.weight import DraftMode, Weight
from llmpq.precision import WeightScheme


@dataclass(frozen=True, eq=False)
class DenseWeight(Weight):
    """A matrix of floats."""

    values: Tensor
    """[N, K]; opaque where it is packed for oneDNN."""

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return 8 * self.values.element_size()

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.values.shape[1]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The matrix."""
        return {"values": self.values}

    @property
    def dtype(self) -> torch.dtype:
        """The matrix's."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the matrix is."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix: packing adds none."""
        return self.values.numel() * self.values.element_size()

    @property
    def matrix(self) -> Tensor | None:
        """The matrix, where it is not packed."""
        return None if self.values.is_mkldnn else self.values

    @property
    def kernel_form(self) -> KernelForm:
        """Floats."""
        return KernelForm.DENSE

    @property
    def keeps_codes(self) -> bool:
        """Its floats are as they were read."""
        return True

    @property
    def expert_key(self) -> tuple[object, ...] | None:
        """Its shape."""
        return None if self.values.is_mkldnn else ("dense", *self.values.shape)

    def matmul(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        into_residual: bool = False,
    ) -> Tensor:
        """y = x w^T + bias + residual; cuBLAS adds a residual as it stores."""
        if bias is None and self.values.is_cuda:
            # Imported here: a CPU's process has no Triton.
            from llmpq.kernels.gemm.dense_few import few_rows

            few = few_rows(x, self.values, residual, into_residual=into_residual)
            if few is not None:
                return few
        if residual is None:
            return dense_linear(x, self.values, bias)
        if bias is None and self.values.is_cuda:
            flat, x_MK = residual.reshape(-1, self.out_features), x.reshape(-1, self.in_features)
            add = flat.addmm_ if into_residual else partial(torch.addmm, flat)
            y: Tensor = add(x_MK, self.values.t())
            return y.view(residual.shape)
        return dense_linear(x, self.values, bias).add_(residual)

    def multiply(
        self, x_MK: Tensor, bias: Tensor | None, residual_MN: Tensor | None, into_residual: bool
    ) -> Tensor:
        """As `matmul`."""
        return self.matmul(x_MK, bias, residual_MN, into_residual=into_residual)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as an ordinary tensor."""
        return plain_dense(self.values).to(dtype)

    def to(self, device: torch.device | str) -> DenseWeight:
        """Return the weight on a device."""
        return DenseWeight(plain_dense(self.values).to(device))

    def packed(self) -> DenseWeight:
        """Return the weight as its device multiplies it fastest."""
        return DenseWeight(pack_dense(self.values))

    def as_draft(self, mode: DraftMode) -> Weight:
        """Return a 4-bit copy for drafts that have one."""
        if mode != "w4kv4":
            return self
        return four_bit_copy(plain_dense(self.values), self.dtype)

    def for_scheme(self, scheme: WeightScheme | None, name: str) -> DenseWeight:
        """Itself: what a checkpoint leaves in floats beside its codes stays so."""
        return self

    def native_matrix(self, dtype: torch.dtype) -> Matrix | None:
        """Return the matrix as a layer of our own C++ takes it; None where that cannot."""
        rows = native_rows(self.values) if self.dtype == dtype else 0
        if not rows:
            return None
        n, k = self.values.shape
        return Matrix(n=n, k=k, codes=self.values, most_rows=rows)

    def cut(self, start: int, stop: int) -> DenseWeight:
        """Return rows start..stop, sharing memory with an unpacked matrix."""
        return DenseWeight(plain_dense(self.values)[start:stop])

    @classmethod
    def stack(cls, pieces: Sequence[DenseWeight]) -> DenseWeight:
        """Return weights one below the other."""
        return DenseWeight(torch.cat([plain_dense(piece.values) for piece in pieces]))

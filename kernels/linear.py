"""linear(x, qweight): the one call the runtime makes. Picks the execution path by device."""

from __future__ import annotations

from torch import Tensor

from llmpq.kernels.cpu.codebook_linear import codebook_linear_cpu
from llmpq.kernels.cpu.fp8_linear import fp8_linear_cpu
from llmpq.kernels.cpu.native_linear import linear_cpu
from llmpq.kernels.formats.codebook_weight import CodebookWeight
from llmpq.kernels.formats.fp8_weight import Fp8Weight
from llmpq.kernels.formats.quantized_weight import QuantizedWeight

__all__ = ["Fp8Weight", "QuantizedWeight", "CodebookWeight", "linear"]


def linear(
    x: Tensor,
    qweight: QuantizedWeight | Fp8Weight | CodebookWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    into_residual: bool = False,
) -> Tensor:
    """y = x w^T + bias + residual, x [..., K] in fp16, bf16 or (CPU) fp32; y [..., N] like x.

    `into_residual`: y may take the residual's place, where that saves a copy.
    """
    if x.shape[-1] != qweight.in_features or x.device.type != qweight.device.type:
        raise ValueError(
            f"linear: got x with K = {x.shape[-1]} on {x.device}, expected K = "
            f"{qweight.in_features} on {qweight.device}. Move one with .to(device)."
        )
    x_MK = x.reshape(-1, qweight.in_features)
    flat = None if residual is None else residual.reshape(-1, qweight.out_features)
    if x.is_cuda and isinstance(qweight, Fp8Weight):
        # Triton is not imported where there is no GPU.
        from llmpq.kernels.gemm.float_codes.fp8_products import fp8_linear_gpu

        y = fp8_linear_gpu(x_MK, qweight, bias, flat)
    elif x.is_cuda and isinstance(qweight, CodebookWeight):
        from llmpq.kernels.gemm.float_codes.codebook_products import codebook_linear_gpu

        y = codebook_linear_gpu(x_MK, qweight, bias, flat)
    elif x.is_cuda and isinstance(qweight, QuantizedWeight):
        from llmpq.kernels.gemm.linear_gpu import linear_gpu

        y = linear_gpu(x_MK, qweight, bias, flat, into_residual=into_residual)
    else:
        if isinstance(qweight, Fp8Weight):
            y = fp8_linear_cpu(x_MK, qweight, bias)
        elif isinstance(qweight, CodebookWeight):
            y = codebook_linear_cpu(x_MK, qweight, bias)
        else:
            y = linear_cpu(x_MK, qweight, bias)
        y = y if flat is None else y + flat
    return y.view(*x.shape[:-1], qweight.out_features)

"""y = x w^T on a GPU with a weight's words: choice.py decides how, `run` launches it.

Rows of w past the last full 16 go through cuBLAS. Nothing here synchronises or allocates more than
torch's caching allocator can serve inside a CUDA graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.formats.packed_words import PackedWords
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.choice import choose_plan
from llmpq.kernels.gemm.cuda import gemv_launch, ring_launch, rows_launch
from llmpq.kernels.gemm.dequantize import dequantize_triton
from llmpq.kernels.gemm.gemv import gemv_kernel
from llmpq.kernels.gemm.gluon import gluon_launch
from llmpq.kernels.gemm.operands.linear_operands import LinearOperands, form_constants
from llmpq.kernels.gemm.ranking.config import Config, ProductPlan, make_plan, piece_rows
from llmpq.kernels.gemm.scaled import small_groups
from llmpq.kernels.gemm.scaled.scaled_dequantize import scaled_dequantize
from llmpq.kernels.gemm.splitk_gemm import splitk_gemm_kernel
from llmpq.kernels.kernel_table import Kernel, KernelForm, eligible
from llmpq.kernels.multiprocessors import device_of

_IN_PLACE = (Kernel.WGMMA_GEMM, Kernel.WGMMA_ROWS, Kernel.RING_GEMV)
"""Kernels that store y tile by tile, so that it may be the residual's memory."""


def run(
    plan: ProductPlan,
    x_MK: Tensor,
    q: PackedWords,
    bias: Tensor | None = None,
    residual_MN: Tensor | None = None,
    *,
    into_residual: bool = False,
) -> Tensor:
    """Launch the planned product: y [M, N] = x w^T (+ bias) (+ residual).

    `into_residual`: y may take the residual's place, which saves a dense product a copy of it.
    """
    own = q.needs_dtype or x_MK.dtype
    if x_MK.dtype != own or x_MK.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"linear on a GPU: got x in {x_MK.dtype}, expected {own}, the 16-bit dtype "
            "the weight was quantised for. Quantise with dtype=x.dtype."
        )
    x_MK = x_MK.contiguous()
    kernel = Kernel(plan.config.kernel)
    if kernel is Kernel.DEQUANTIZE:
        rows = piece_rows(plan.config.piece_mib, q.out_features, q.in_features)
        if rows and x_MK.shape[0]:
            y_MN = residual_MN if into_residual else None
            return _dense_by_pieces(x_MK, q, bias, residual_MN, plan.interpret, rows, y_MN)
        return _dense(x_MK, q, bias, residual_MN, plan.interpret, into_residual)
    if kernel in _IN_PLACE and into_residual and residual_MN is not None:
        y_MN = residual_MN
    else:
        y_MN = x_MK.new_empty(x_MK.shape[0], q.out_features)
    if x_MK.shape[0] == 0:
        return y_MN
    _LAUNCHES[kernel](plan, LinearOperands(x_MK, q, bias, residual_MN, y_MN))
    full = q.out_features // BLOCK_ROWS * BLOCK_ROWS
    if full < q.out_features:
        y_MN[:, full:] = _tail(x_MK, q, full, bias, residual_MN, plan.interpret)
    return y_MN


def _tail(
    x: Tensor,
    q: PackedWords,
    full: int,
    bias: Tensor | None,
    residual: Tensor | None,
    interpret: bool,
) -> Tensor:
    """Return the columns of y past the last whole block of rows of w."""
    tail = q.cut(full, q.out_features)
    part = None if bias is None else bias[full:]
    more = None if residual is None else residual[:, full:]
    if (
        tail.kernel_form is KernelForm.ROWS and interpret
    ):  # which multiplies bfloat16 as if it were integers
        y = functional.linear(x, tail.dequantize(x.dtype), part)
        return y if more is None else y + more
    if tail.kernel_form is KernelForm.ROWS:
        return small_groups.multiply(x, tail, part, more)
    return _dense(x, tail, part, more, interpret)


def _dequantized(q: PackedWords, dtype: torch.dtype, interpret: bool) -> Tensor:
    """Return w [N, K] in x's dtype."""
    if dtype == torch.float32:
        return q.dequantize(dtype)
    kernels = () if interpret else eligible(q.kernel_form, device_of(q.device), 1)
    if Kernel.CUDA_DEQUANTIZE in kernels and dtype == torch.float16 and gemv_launch.readable(q):
        return gemv_launch.dequantize(q)
    if Kernel.DEQUANTIZE_TORCH in kernels:
        return q.dequantize(dtype)
    if not q.form:
        return dequantize_triton(q, interpret=interpret)
    w = scaled_dequantize(q, dtype, interpret=interpret)
    full = q.out_features // BLOCK_ROWS * BLOCK_ROWS
    if full == q.out_features:
        return w
    return torch.cat((w, q.cut(full, q.out_features).dequantize(dtype)))


def _dense(
    x: Tensor,
    q: PackedWords,
    bias: Tensor | None,
    residual: Tensor | None,
    interpret: bool,
    into_residual: bool = False,
) -> Tensor:
    w = _dequantized(q, x.dtype, interpret)
    with _float32_sums():
        if residual is not None and bias is None and not interpret:
            return (residual.addmm_ if into_residual else partial(torch.addmm, residual))(x, w.t())
        y = functional.linear(x, w, bias)
    return y if residual is None else y + residual


def _dense_by_pieces(
    x: Tensor,
    q: PackedWords,
    bias: Tensor | None,
    residual: Tensor | None,
    interpret: bool,
    rows: int,
    y: Tensor | None,
) -> Tensor:
    """Make so many rows of w at a time, and the columns of y that are theirs; `y`: where to."""
    n = q.out_features
    y = x.new_empty(x.shape[0], n) if y is None else y
    with _float32_sums():
        for first in range(0, n, rows):
            last = min(n, first + rows)
            w, to = _dequantized(q.cut(first, last), x.dtype, interpret), y[:, first:last]
            if residual is not None:
                torch.addmm(residual[:, first:last], x, w.t(), out=to)
            elif bias is not None:
                torch.addmm(bias[first:last], x, w.t(), out=to)
            else:
                torch.mm(x, w.t(), out=to)
            del w  # the next piece takes its place, in the L2 too
    return y if bias is None or residual is None else y.add_(bias)


@contextlib.contextmanager
def _float32_sums() -> Iterator[None]:
    """cuBLAS adds the shares of a split K in float32 here, not in x's dtype as torch lets it.

    H200, float16, N = 605, K = 5604, M = 417: error 6.3e-4 without. The caller's setting returns.
    """
    settings = torch.backends.cuda.matmul
    names = [f"allow_{d}_reduced_precision_reduction" for d in ("fp16", "bf16")]
    before = []
    for name in names:  # newer torch: a pair, whose second part says whether K may be split at all
        value, split = getattr(settings, name), getattr(settings, f"{name}_split_k", None)
        before.append(value if split is None else (value, split))
    try:
        for name in names:
            setattr(settings, name, False)
        yield
    finally:
        for name, old in zip(names, before, strict=True):
            setattr(settings, name, old)


def _launch_gemv(plan: ProductPlan, operands: LinearOperands) -> None:
    config, q, x_MK = plan.config, operands.q, operands.x_MK
    planes, scale, zero = q.block_words()
    blocks, groups, k = operands.blocks, operands.groups, x_MK.shape[1]
    warps = min(config.warps, 1 << (groups.bit_length() - 1))
    gemv_kernel[(triton.cdiv(blocks, config.blocks),)](
        x_MK,
        planes[0],
        planes[-1],
        scale,
        zero,
        *operands.pointers,
        operands.y_MN,
        operands.rows,
        q.out_features,
        k,
        blocks,
        groups,
        **form_constants(q, x_MK.dtype),
        EVEN_K=k % 128 == 0,
        EVEN_G=groups % warps == 0,
        HAS_BIAS=operands.bias_N is not None,
        HAS_RESIDUAL=operands.residual_MN is not None,
        BH=config.blocks,
        WM=warps,
        STEPS=triton.cdiv(groups, warps),
        D=config.depth,
        XD=config.x_depth,
        PDL=plan.pdl,
        INTERPRET=plan.interpret,
        num_warps=warps,
        num_stages=1,
        launch_pdl=plan.pdl,
    )


def _launch_splitk(plan: ProductPlan, operands: LinearOperands) -> None:
    config, q, x_MK, m = plan.config, operands.q, operands.x_MK, operands.rows
    planes, scale, zero = q.block_words()
    blocks, groups, k = operands.blocks, operands.groups, x_MK.shape[1]
    bn = BLOCK_ROWS * config.blocks * config.warps
    m_tiles, tiles, split = (
        triton.cdiv(m, config.bm),
        triton.cdiv(blocks * BLOCK_ROWS, bn),
        config.split,
    )
    sums = m_tiles * tiles * split * bn * config.bm if split > 1 else 1
    splitk_gemm_kernel[(m_tiles, tiles, split)](
        x_MK,
        planes[0],
        planes[-1],
        scale,
        zero,
        *operands.pointers,
        operands.y_MN,
        x_MK.new_empty(sums, dtype=torch.float32),
        arrivals(x_MK.device, m_tiles * tiles),
        m,
        q.out_features,
        k,
        blocks,
        groups,
        split,
        **form_constants(q, x_MK.dtype),
        EVEN_K=k % 128 == 0,
        HAS_BIAS=operands.bias_N is not None,
        HAS_RESIDUAL=operands.residual_MN is not None,
        SPLIT=split > 1,
        SCALE_W=config.scale_w,
        BH=config.blocks,
        WM=config.warps,
        BM=config.bm,
        D=config.depth if config.stages == 1 and groups % config.depth == 0 else 1,
        STAGES=config.stages,
        XS=config.x_stages if q.group_size is not None else 1,
        PDL=plan.pdl,
        KWIDTH4=plan.kwidth4,
        INTERPRET=plan.interpret,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=plan.pdl,
        maxnreg=_register_limit(config, q.bits, m),
    )


_LAUNCHES: dict[Kernel, Callable[[ProductPlan, LinearOperands], None]] = {
    Kernel.GEMV: _launch_gemv,
    Kernel.SPLITK_GEMM: _launch_splitk,
    Kernel.CUDA_GEMV: gemv_launch.launch,
    Kernel.RING_GEMV: ring_launch.launch,
    Kernel.WGMMA_GEMM: gluon_launch.launch,
    Kernel.WGMMA_ROWS: rows_launch.launch,
}


def _register_limit(config: Config, bits: int, rows: int) -> int | None:
    """128 where it spills nothing and two programs of 8 warps can then share a multiprocessor.

    H200, gate_up, M = 64: 149 registers 41.6 us, at most 128 34.0 us. Loops without stages take
    127 registers by themselves for symmetric float16 and 176 to 179 for other weights. With several
    tiles of x the limit costs more than it brings (o, M = 256: 20.8 us without, 31.8 us with it).
    """
    if config.registers is not None:
        return config.registers
    pipelined = config.stages > 1 and config.bm <= 64
    plain = config.stages == 1 and config.bm <= 32 and config.depth <= 2 and bits < 8
    return 128 if config.warps == 8 and rows <= config.bm and (pipelined or plain) else None


def linear_gpu(
    x_MK: Tensor,
    q: PackedWords,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    *,
    into_residual: bool = False,
) -> Tensor:
    """Multiply x [M, K] by a weight in words, or in rows of small groups.

    float32 takes no packed kernel: torch makes w, cuBLAS multiplies.
    """
    if q.kernel_form is KernelForm.ROWS:
        return small_groups.multiply(x_MK, q, bias, residual_MN)
    x_MK = x_MK.contiguous()
    if x_MK.dtype == torch.float32 == (q.needs_dtype or x_MK.dtype):
        return _dense(x_MK, q, bias, residual_MN, interpret=False, into_residual=into_residual)
    if gemv_launch.serves(x_MK, q):
        chosen = make_plan(Config(kernel=Kernel.CUDA_GEMV), device_of(q.device)[1:])
    else:
        chosen = choose_plan(x_MK, q, residual_MN)
    return run(chosen, x_MK, q, bias, residual_MN, into_residual=into_residual)

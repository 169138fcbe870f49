"""y = x w^T on a GPU: `plan` decides which kernel and how, `run` launches it, one op wraps both.

    M rows of x        path
    1, 2 (to 8)        gemv_kernel: all of K in one program
    up to a crossover  splitk_gemm_kernel: BM rows of x at a time, K split over programs
    above, sm_90       wgmma_gemm_kernel: wgmma fed from registers, x by TMA
    above              dequantise, then cuBLAS
    GPU before sm_80   dequantise, then cuBLAS, always: Triton drives no older tensor core
    groups of 32, 64, codes of a table     the same, with operands that are values times scales
                                           (scaled/)

Which configuration: choice.py, by a model of the machine with measured corrections.
Rows of w past the last full 16 go through cuBLAS. Nothing here synchronises or allocates more than
torch's caching allocator can serve inside a CUDA graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
import triton
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.arrivals import arrivals
from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.choice import TENSOR_CORE_CAPABILITY, plan, rounded_rows
from llmpq.kernels.gemm.config import Config, ProductPlan
from llmpq.kernels.gemm.dequantize import dequantize_triton
from llmpq.kernels.gemm.gemv import gemv_kernel
from llmpq.kernels.gemm.gluon import gluon_launch
from llmpq.kernels.gemm.scaled import small_groups
from llmpq.kernels.gemm.scaled.choice_of_form import for_form, is_narrow
from llmpq.kernels.gemm.scaled.forms import Coded, form_constants, form_of, words_of
from llmpq.kernels.gemm.scaled.scaled_dequantize import scaled_dequantize
from llmpq.kernels.gemm.splitk_gemm import splitk_gemm_kernel

TRITON_CAPABILITY = (7, 5)
"""Oldest compute capability on which the dequantise kernel is used; torch operators below."""


def run(
    plan: ProductPlan,
    x_MK: Tensor,
    q: Coded,
    bias: Tensor | None = None,
    residual_MN: Tensor | None = None,
    *,
    into_residual: bool = False,
) -> Tensor:
    """Launch the planned product: y [M, N] = x w^T (+ bias) (+ residual).

    `into_residual`: y may take the residual's place, which saves a dense product a copy of it.
    """
    own = q.scale.dtype if isinstance(q, QuantizedWeight) else x_MK.dtype
    if x_MK.dtype != own or x_MK.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"linear on a GPU: got x in {x_MK.dtype}, expected {own}, the 16-bit dtype "
            "the weight was quantised for. Quantise with dtype=x.dtype."
        )
    x_MK = x_MK.contiguous()
    gluon = plan.config.kernel == "wgmma_gemm"
    if plan.config.kernel == "dequantize" or (
        gluon and not gluon_launch.fits(x_MK, q.out_features, residual_MN)
    ):
        return _dense(x_MK, q, bias, residual_MN, plan.interpret, into_residual)
    if gluon and into_residual and residual_MN is not None:
        y_MN = residual_MN
    else:
        y_MN = x_MK.new_empty(x_MK.shape[0], q.out_features)
    if x_MK.shape[0] == 0:
        return y_MN
    if gluon:
        gluon_launch.launch(plan.config, x_MK, q, bias, residual_MN, y_MN, arrivals)
    else:
        launch = _launch_rows if plan.config.kernel == "gemv" else _launch_tiles
        launch(plan, x_MK, q, bias, residual_MN, y_MN)
    full = q.out_features // BLOCK_ROWS * BLOCK_ROWS
    if full < q.out_features:
        y_MN[:, full:] = _tail(x_MK, q, full, bias, residual_MN, plan.interpret)
    return y_MN


def _tail(
    x: Tensor, q: Coded, full: int, bias: Tensor | None, residual: Tensor | None, interpret: bool
) -> Tensor:
    """Return the columns of y past the last whole block of rows of w."""
    assert isinstance(q, QuantizedWeight), "tables lie in whole blocks"
    tail = q.row_slice(full, q.out_features)
    part = None if bias is None else bias[full:]
    more = None if residual is None else residual[:, full:]
    if small_groups.takes(tail) and interpret:  # which multiplies bfloat16 as if it were integers
        y = functional.linear(x, tail.dequantize(x.dtype), part)
        return y if more is None else y + more
    if small_groups.takes(tail):
        return small_groups.multiply(x, tail, part, more)
    return _dense(x, tail, part, more, interpret)


def _numbers(q: Coded, dtype: torch.dtype, interpret: bool) -> Tensor:
    """Return w [N, K] in x's dtype."""
    old = (0, 0) if interpret else torch.cuda.get_device_capability(q.device)
    if form_of(q):
        if not interpret and old < TENSOR_CORE_CAPABILITY:
            return q.dequantize(dtype)
        w, full = (
            scaled_dequantize(q, dtype, interpret=interpret),
            q.out_features // BLOCK_ROWS * BLOCK_ROWS,
        )
        if full == q.out_features:
            return w
        assert isinstance(q, QuantizedWeight), "tables lie in whole blocks"
        return torch.cat((w, q.row_slice(full, q.out_features).dequantize(dtype)))
    assert isinstance(q, QuantizedWeight)
    if interpret or old >= TRITON_CAPABILITY:
        return dequantize_triton(q, interpret=interpret)
    return q.dequantize(dtype)


def _dense(
    x: Tensor,
    q: Coded,
    bias: Tensor | None,
    residual: Tensor | None,
    interpret: bool,
    into_residual: bool = False,
) -> Tensor:
    w = _numbers(q, x.dtype, interpret)
    with _float32_sums():
        if residual is not None and bias is None and not interpret:
            return (residual.addmm_ if into_residual else partial(torch.addmm, residual))(x, w.t())
        y = functional.linear(x, w, bias)
    return y if residual is None else y + residual


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


def _launch_rows(
    plan: ProductPlan,
    x: Tensor,
    q: Coded,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
) -> None:
    config, (m, k) = plan.config, x.shape
    planes, scale, zero = words_of(q)
    blocks, groups = q.out_features // BLOCK_ROWS, -(-k // 128)
    warps = min(config.warps, 1 << (groups.bit_length() - 1))
    gemv_kernel[(triton.cdiv(blocks, config.blocks),)](
        x,
        planes[0],
        planes[-1],
        scale,
        zero,
        x if bias is None else bias,
        x if residual is None else residual,
        y,
        m,
        q.out_features,
        k,
        blocks,
        groups,
        **form_constants(q, x.dtype),
        EVEN_K=k % 128 == 0,
        EVEN_G=groups % warps == 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
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


def _launch_tiles(
    plan: ProductPlan,
    x: Tensor,
    q: Coded,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
) -> None:
    config, (m, k) = plan.config, x.shape
    planes, scale, zero = words_of(q)
    blocks, groups = q.out_features // BLOCK_ROWS, -(-k // 128)
    bn = BLOCK_ROWS * config.blocks * config.warps
    m_tiles, tiles, split = (
        triton.cdiv(m, config.bm),
        triton.cdiv(blocks * BLOCK_ROWS, bn),
        config.split,
    )
    sums = m_tiles * tiles * split * bn * config.bm if split > 1 else 1
    partial = x.new_empty(sums, dtype=torch.float32)
    splitk_gemm_kernel[(m_tiles, tiles, split)](
        x,
        planes[0],
        planes[-1],
        scale,
        zero,
        x if bias is None else bias,
        x if residual is None else residual,
        y,
        partial,
        arrivals(x.device, m_tiles * tiles),
        m,
        q.out_features,
        k,
        blocks,
        groups,
        split,
        **form_constants(q, x.dtype),
        EVEN_K=k % 128 == 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
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
    """The product as one opaque operator, so that torch.compile traces past it."""
    q = QuantizedWeight.fragment(planes, scale, zero, bits, per_channel, out_features, x.shape[1])
    return run(_plan_of(x, q), x, q, bias, residual)


def _plan_of(x_MK: Tensor, q: Coded) -> ProductPlan:
    rows, k = x_MK.shape
    form = (x_MK.dtype, q.symmetric if isinstance(q, QuantizedWeight) else True)
    own = plan(q.bits, q.out_features, k, rounded_rows(rows), x_MK.device, *form)
    if not form_of(q):
        return own
    if is_narrow(own, q):
        own = plan(q.bits, q.out_features, k, 8, x_MK.device, *form)
    return for_form(own, q, rows)


def scaled_linear(
    x_MK: Tensor,
    q: Coded,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    *,
    into_residual: bool = False,
) -> Tensor:
    """Multiply by a weight whose words `scaled_operand` takes."""
    return run(_plan_of(x_MK, q), x_MK, q, bias, residual_MN, into_residual=into_residual)


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


def linear_gpu(
    x_MK: Tensor,
    q: QuantizedWeight,
    bias: Tensor | None,
    residual_MN: Tensor | None,
    *,
    into_residual: bool = False,
) -> Tensor:
    """Multiply x [M, K] by a weight; FRAGMENT ones by the custom op where torch.compile traces.

    Dispatching the op is host time that short prompts wait for (H200, eager, a layer of 16 tokens:
    0.79 ms with four of them, 0.40 ms with dense weights).
    """
    if small_groups.takes(q):
        return small_groups.multiply(x_MK, q, bias, residual_MN)
    if form_of(q):
        return scaled_linear(x_MK, q, bias, residual_MN, into_residual=into_residual)
    if not torch.compiler.is_compiling():
        return run(_plan_of(x_MK, q), x_MK, q, bias, residual_MN, into_residual=into_residual)
    return quantized_linear(
        x_MK,
        list(q.planes),
        q.scale,
        q.zero,
        bias,
        residual_MN,
        q.bits,
        q.group_size is None,
        q.out_features,
    )

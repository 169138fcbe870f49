"""Activation, rotation and rounding of many tokens on Hopper, in Gluon.

    gate, up [64 tokens, 128 channels] -> y in shared memory -> wgmma with the Hadamard matrix
    -> its sums, 32 neighbouring channels of a token a lane -> codes, scale

The matrix has its columns in the order in which the tensor cores spread sums over lanes, so that
a lane's are neighbours. The identity takes its place for outliers, and where nothing is rotated.

Bytes: x read once, one byte a channel and six a group written.

M tokens, F channels, G groups.
"""

# mypy: ignore-errors
# (Gluon bodies are not Python.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.atom.group_codes import bytes_of, codes_of
from llmpq.kernels.atom.tile_codes import thread_barrier


@gluon.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), by the approximations that the hardware has."""
    return gl.inline_asm_elementwise(
        "{.reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        "add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t;}",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit(do_not_specialize=["M"])
def act_codes_kernel(
    X,
    MATRICES,
    OUT,
    SCALES,
    OUTLIER,
    M,
    F,
    eighths,
    x_stride,
    MS,
    G: gl.constexpr,
    OUTLIERS: gl.constexpr,
    STEPS: gl.constexpr,
    SIGNED: gl.constexpr,
    CLIP: gl.constexpr,
    ACT: gl.constexpr,
    ROTATE: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """STEPS groups of 64 tokens, or their outliers; x is [M, 2F] for "silu".

    `eighths` of the normal channels: loads of 8 are aligned. ACT as in round_kernels.py, rounded to
    x's dtype. MATRICES [2, 128, 128]: signs of the Hadamard matrix or (not ROTATE) the identity,
    and the identity.
    """
    lying: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    # Column 8 j + 2 c + b of the product is channel 32 c + 2 j + b.
    run: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
    element: gl.constexpr = X.dtype.element_ty
    width: gl.constexpr = (G + (1 if OUTLIERS > 0 else 0)) * 128
    chunks: gl.constexpr = (G + STEPS - 1) // STEPS
    chunk = gl.program_id(1)
    last = chunk == chunks
    matrix_s = gl.allocate_shared_memory(element, [128, 128], swizzled)
    y_s = gl.allocate_shared_memory(element, [64, 128], swizzled)
    at = gl.arange(0, 128, layout=gl.SliceLayout(1, lying))[:, None] * 128
    at += gl.arange(0, 128, layout=gl.SliceLayout(0, lying))[None, :]
    matrix_s.store(gl.load(MATRICES + gl.where(last, 128 * 128, 0) + at))
    row = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, lying))
    j = gl.arange(0, 128, layout=gl.SliceLayout(0, lying))
    row_out = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, run))
    p = gl.arange(0, 128, layout=gl.SliceLayout(0, run))
    is_outlier = row_out * 0 + chunk == chunks
    outlier_byte = is_outlier.to(gl.int32)[:, None] + p[None, :] * 0
    normal = eighths * 8
    start = gl.where(last, normal, chunk * STEPS * 128)
    end = gl.where(last, normal + OUTLIERS, normal)
    here = X + row.to(gl.int64)[:, None] * x_stride + j[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for i in range(gl.where(last, 1, min(STEPS, G - chunk * STEPS))):
        live = (row < M)[:, None] & (start + j < end)[None, :]
        y = gl.load(here + start, mask=live, other=0.0).to(gl.float32)
        if ACT == "silu":
            y = y * _sigmoid(y) * gl.load(here + start + F, mask=live, other=0.0).to(gl.float32)
        elif ACT == "relu":
            y = gl.maximum(y, 0.0)
        elif ACT == "gelu":
            y = y * _sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
        start += 128
        y_s.store(y.to(element))
        fence_async_shared()
        thread_barrier()
        rotated = gl.zeros((64, 128), gl.float32, layout=mma)
        rotated = warpgroup_mma(y_s, matrix_s, rotated, is_async=True)
        rotated = warpgroup_mma_wait(0, deps=[rotated])
        thread_barrier()
        rotated = rotated.reshape((64, 16, 4, 2)).permute((0, 2, 1, 3)).reshape((64, 128))
        rotated = gl.convert_layout(rotated, run, assert_trivial=True)
        if ROTATE:
            rotated = rotated * gl.where(last, 1.0, 0.08838834764831845)
        q, scale = codes_of(rotated, is_outlier, SIGNED, CLIP)
        group = gl.where(last, G, chunk * STEPS + i)
        to = row_out.to(gl.int64)[:, None] * width + group * 128 + p[None, :]
        gl.store(OUT + to, bytes_of(q, outlier_byte), mask=(row_out < M)[:, None])
        if OUTLIERS > 0:
            gl.store(OUTLIER + row_out, scale, mask=(row_out < M) & is_outlier)
        gl.store(SCALES + group * MS + row_out, scale, mask=(row_out < M) & (group < G))

"""Round-to-nearest weight quantisation on a grid per (row, group of k), with an optional MSE clip.

    symmetric    w ~ (code - 2^(b-1)) * scale,  scale = clip * max|w| / (2^(b-1) - 1)
    asymmetric   w ~ (code - zero) * scale,     scale = clip * (max(w, 0) - min(w, 0)) / (2^b - 1)

Zeros are integers in 0 .. 2^b - 1. The scale is rounded to the stored dtype before the codes are
chosen. The clip search picks, per group, the `clip` of a fixed grid with the least squared error.
This file knows nothing of packing; N = out_features, K = in_features, G = groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.formats.weight_layout import GROUP, GROUPS, NATIVE, Layout
from llmpq.kernels.native import huge_pages
from llmpq.kernels.native.library import DTYPE_CODES, address, call, library
from llmpq.kernels.weights.quantized_weight import QuantizedWeight, from_codes, native_layout
from llmpq.precision import WeightScheme, padded_k

# The best clip of a Gaussian group of 128 is near 0.9 at 4 bits and 0.75 at 3; 8 bits hardly clip.
_CLIPS = {
    3: [1 - 0.025 * i for i in range(21)],
    4: [1 - 0.025 * i for i in range(17)],
    8: [1 - 0.02 * i for i in range(4)],
}

_LARGE = 1 << 26
"""Bytes of codes that are made in large pages; smaller ones are put there by layer."""

_SUM_LANES = {"AVX2": 8, "AVX512": 16}
"""Floats of the vectors that torch adds with, by what it says of the CPU."""

# Weights per step: the temporaries (5 floats a weight) stay in a CPU core's L2, or fill a GPU.
_CPU_CHUNK = 1 << 17
_GPU_CHUNK = 1 << 25


def quantize_weight(
    w_NK: Tensor,
    scheme: WeightScheme,
    *,
    dtype: torch.dtype,
    layout: Layout | None = None,
) -> QuantizedWeight:
    """Quantise w [N, K] by `scheme`; `dtype` is the activations' and the stored scales' dtype.

    `layout` defaults to the one that the weight's device computes with fastest.
    """
    if layout in (None, *NATIVE) and _native_has(w_NK, scheme, dtype):
        return _quantize_native(w_NK, scheme, dtype, layout or native_layout(GROUP))
    codes, scale, zero = quantize_codes(w_NK, scheme, scale_dtype=dtype)
    return from_codes(
        codes,
        scale,
        zero,
        bits=scheme.bits,
        group_size=scheme.group_size,
        in_features=w_NK.shape[1],
        layout=layout,
    )


def _native_has(w_NK: Tensor, scheme: WeightScheme, dtype: torch.dtype) -> bool:
    """Whether the C++ search takes it: groups of a weight on a CPU whose sums we know to repeat."""
    return (
        w_NK.device.type == "cpu"
        and w_NK.ndim == 2
        and scheme.group_size == GROUP
        and w_NK.dtype in DTYPE_CODES
        and dtype in DTYPE_CODES
        and torch.backends.cpu.get_cpu_capability() in _SUM_LANES
        and library() is not None
    )


def _quantize_native(
    w_NK: Tensor, scheme: WeightScheme, dtype: torch.dtype, layout: Layout
) -> QuantizedWeight:
    """Search in C++ (kernels/native/search.h): what `quantize_codes` finds, ten times faster."""
    w_NK = w_NK.contiguous()
    n, k = w_NK.shape
    groups = padded_k(k) // GROUP
    # An output matrix would be the most host memory there is, were it moved afterwards.
    size = n * groups * 16 * scheme.bits
    far = size >= _LARGE and huge_pages.are_here()
    codes = huge_pages.room(size) if far else torch.empty(size, dtype=torch.uint8)
    scale = torch.empty(n * groups, dtype=dtype)
    zero = None if scheme.symmetric else torch.empty_like(scale)
    levels = 2 ** (scheme.bits - 1) - 1 if scheme.symmetric else 2**scheme.bits - 1
    clips = _CLIPS[scheme.bits] if scheme.clip_search else [1.0]
    tried = torch.tensor(clips, dtype=torch.float64)
    clip, factor = tried.float(), torch.tensor([c / levels for c in clips], dtype=torch.float32)
    least = torch.tensor(float(torch.finfo(dtype).tiny))
    call(
        "llmpq_quantize",
        address(w_NK),
        address(codes),
        address(scale),
        address(zero),
        n,
        k,
        groups,
        scheme.bits,
        int(layout is Layout.CPU_PANELS),
        int(scheme.symmetric),
        DTYPE_CODES[w_NK.dtype],
        DTYPE_CODES[dtype],
        address(clip),
        address(factor),
        len(clips),
        address(least),
        _SUM_LANES[torch.backends.cpu.get_cpu_capability()],
        torch.get_num_threads(),
    )
    return QuantizedWeight(
        bits=scheme.bits,
        group_size=GROUP,
        out_features=n,
        in_features=k,
        planes=(codes,),
        scale=scale,
        zero=zero,
        layout=layout,
    )


def quantize_codes(
    w_NK: Tensor, scheme: WeightScheme, *, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes uint8 [N, Kp], scales [N, G] and, if asymmetric, zeros [N, G]."""
    if w_NK.ndim != 2 or not w_NK.is_floating_point():
        raise ValueError(
            f"weight: got {w_NK.dtype} of shape {tuple(w_NK.shape)}, expected floats [N, K]"
        )
    if scheme.group_size not in (None, *GROUPS):
        raise ValueError(
            f"group size: got {scheme.group_size}, expected {', '.join(map(str, GROUPS))} or None "
            "(per channel): the packed kernels know no other"
        )
    clips = _CLIPS[scheme.bits] if scheme.clip_search else [1.0]
    if scheme.group_size is not None and _has_triton(w_NK.device):
        # Imported here: it takes Triton along, half a second that a CPU's process does without.
        from llmpq.kernels.fused.search_grid import search_grid

        return search_grid(
            w_NK,
            bits=scheme.bits,
            group=scheme.group_size,
            symmetric=scheme.symmetric,
            clips=clips,
            scale_dtype=scale_dtype,
        )
    n, k = w_NK.shape
    k_padded = padded_k(k)
    group = scheme.group_size or k_padded
    codes = torch.empty(n, k_padded, dtype=torch.uint8, device=w_NK.device)
    scale = torch.empty(n, k_padded // group, dtype=scale_dtype, device=w_NK.device)
    zero = None if scheme.symmetric else torch.empty_like(scale)
    chunk = max(1, (_GPU_CHUNK if w_NK.is_cuda else _CPU_CHUNK) // k_padded)
    for start in range(0, n, chunk):
        rows = slice(start, min(n, start + chunk))
        w = torch.nn.functional.pad(w_NK[rows].float(), (0, k_padded - k)).view(-1, group)
        s, z = _search_grid(w, scheme, scale_dtype)
        codes[rows] = _round(w, s, z, scheme.bits).to(torch.uint8).view(-1, k_padded)
        scale[rows] = s.view(-1, k_padded // group).to(scale_dtype)
        if zero is not None:
            zero[rows] = z.view(-1, k_padded // group).to(scale_dtype)
    return codes, scale, zero


def _has_triton(device: torch.device) -> bool:
    """Whether Triton compiles for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 5)


def _search_grid(
    w: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale and zero [groups, 1] of each group of w [groups, size]; the best clip if searched."""
    best_s, best_z = _grid(w, scheme, 1.0, scale_dtype)
    if not scheme.clip_search:
        return best_s, best_z
    best_error = torch.full_like(best_s, float("inf"))
    for clip in _CLIPS[scheme.bits]:
        s, z = _grid(w, scheme, clip, scale_dtype)
        error = _round(w, s, z, scheme.bits).sub_(z).mul_(s).sub_(w).square_().sum(1, keepdim=True)
        better = error < best_error
        best_s = torch.where(better, s, best_s)
        best_z = torch.where(better, z, best_z)
        best_error = torch.where(better, error, best_error)
    return best_s, best_z


def _grid(
    w: Tensor, scheme: WeightScheme, clip: float, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    levels = 2**scheme.bits - 1
    low, high = w.aminmax(dim=1, keepdim=True)
    if scheme.symmetric:
        s = torch.maximum(low.abs(), high.abs()) * (clip / (2 ** (scheme.bits - 1) - 1))
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        s = (high - low) * (clip / levels)
    # A group of zeros, or one whose scale underflows the stored dtype, gets the least usable scale.
    s = s.to(scale_dtype).float().clamp(min=float(torch.finfo(scale_dtype).tiny))
    if scheme.symmetric:
        return s, torch.full_like(s, 2 ** (scheme.bits - 1))
    return s, (-low * clip / s).round_().clamp_(0, levels)


def _round(w: Tensor, s: Tensor, z: Tensor, bits: int) -> Tensor:
    return torch.div(w, s).round_().add_(z).clamp_(0, 2**bits - 1)

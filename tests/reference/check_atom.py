"""`kernel_bench.py check atom`: W4A4 and W8A8 products and roundings against their twins.

On a GPU: Llama-3.1-8B's shapes with 128 outliers, channel orders and the rotation before `down`,
at every way that a number of tokens may take; odd shapes; then planted faults, each of which must
show. Without one: the CPU's way on small shapes. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from llmpq.kernels.atom.reference import atom_linear_reference, codes_for
from llmpq.kernels.formats.atom_rounding import restore, round_activations
from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.kernels.weights.atom_weight import AtomTiles, AtomWeight, quantize_atom
from reference.atom_twins import activation_reference, integer_product, norm_reference
from reference.gemm_twins import relative_error
from reference.kernel_commands import CheckAtom, share

LIMITS = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 2e-3}
"""Relative Frobenius error allowed: rounding a 16-bit output, and inputs that lie on an edge."""

W4A4 = AtomScheme(outliers=128, signed_scale=True, activation_clip=0.95)
SCHEMES = {
    "w4a4": W4A4,
    "w4a4-paper": replace(W4A4, signed_scale=False, activation_clip=0.9),
    "w4a16": replace(W4A4, activation_bits=16),
    "w4a4-g64": replace(W4A4, group_size=64),
    "w4a4-int": replace(W4A4, integer_scales=True),
    "w8a8": W8A8,
}
# K, N
LAYER = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
ODD = {"odd": (1000, 400), "narrow": (392, 48), "ragged": (4104, 1040)}
ROWS = (1, 2, 3, 16, 33, 64, 65, 130, 257, 1024)
INTEGERS = SCHEMES["w4a4-int"]


def main(asked: CheckAtom) -> int:
    """Check, print one line per case that fails and a summary; 0 if none did."""
    torch.manual_seed(asked.seed)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    wrong = checked = 0
    worst = 0.0
    for shown, error, limit in (*products(asked, device), *(fused(device) if gpu else ())):
        checked += 1
        worst = max(worst, error / limit)
        if not error < limit:
            wrong += 1
            sys.stdout.write(f"WRONG {shown}: error {error:.1e}, limit {limit:.0e}\n")
    missed = 0
    for fault, error, limit in faults(device):
        checked += 1
        if not error > 3 * limit:
            missed += 1
            sys.stdout.write(f"MISSED {fault}: error {error:.1e} would pass {limit:.0e}\n")
    sys.stdout.write(
        f"{checked} checked on {device}, {wrong} wrong, {missed} planted faults missed; worst "
        f"{worst:.2f} of its limit\n"
    )
    return 1 if wrong or missed else 0


def _schemes(asked: CheckAtom) -> list[str]:
    return asked.scheme.split(",") if asked.scheme else list(SCHEMES)


def products(asked: CheckAtom, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Yield every product's name, error and limit."""
    gpu = device.type == "cuda"
    shapes = (LAYER if asked.shapes != "odd" else {}) | (ODD if asked.shapes != "layer" else {})
    if not gpu:
        shapes = {name: shape for name, shape in shapes.items() if shape[0] * shape[1] < 1 << 20}
    rows = ROWS if asked.m is None else tuple(int(m) for m in asked.m.split(","))
    names = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtypes = [names[name] for name in asked.dtype.split(",")] if gpu else [torch.float32]
    weights = [
        (name, key, dtype)
        for name, key, dtype in itertools.product(shapes, _schemes(asked), dtypes)
        # of float16 other shapes take the same ways
        if dtype != torch.float16 or name not in ("qkv", "gate_up")
    ]
    for name, key, dtype in share(weights, asked.part):
        k, n = shapes[name]
        weight = random_weight(name, k, n, SCHEMES[key], dtype, device)
        fast = weight.packed()
        for m in rows:
            x = tokens(m, k, dtype, device)
            error = _error(x, fast, weight)
            yield f"{name} {key} m={m} {dtype}", error, LIMITS[dtype]


def random_weight(
    name: str, k: int, n: int, scheme: AtomScheme, dtype: torch.dtype, device: torch.device
) -> AtomWeight:
    """Return a weight with a channel order, or for `down` a rotation."""
    scheme = replace(scheme, outliers=min(scheme.outliers, k // 4))
    w_NK = torch.randn(n, k, device=device) / k**0.5
    if name == "down" and scheme.group_size == 128:
        return quantize_atom(w_NK, replace(scheme, rotation=True), dtype=dtype)
    return quantize_atom(w_NK, scheme, dtype=dtype, index_K=torch.randperm(k, device=device))


def tokens(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return inputs, some channels much larger than the others."""
    x_MK = torch.randn(m, k, device=device)
    x_MK[:, -8:] *= 30
    return x_MK.to(dtype)


def _error(x_MK: Tensor, fast: AtomWeight, weight: AtomWeight) -> float:
    """Return the error against the twin; the CPU runs the twin, so against integer products."""
    if x_MK.is_cuda or weight.scheme.activation_bits == 16:
        exact = atom_linear_reference(x_MK, weight, exact=True)
    else:
        index_K = weight.index_K
        exact = integer_product(x_MK if index_K is None else x_MK[:, index_K.long()], weight)
    return relative_error(fast.matmul(x_MK), exact)


def fused(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Yield what the fused roundings lose of the values that their twins restore."""
    from llmpq.kernels.atom.hopper import activation_input, norm_input, product

    hidden, ffn, n = 4096, 14336, 256
    norm_K = 1 + torch.randn(hidden, device=device) * 0.1
    for (kind, scheme), m in itertools.product(
        (("", W4A4), (", integer scales", INTEGERS)), (1, 64, 65, 300, 2050)
    ):
        order = torch.randperm(hidden, device=device)
        w_NK = torch.randn(n, hidden, device=device) / hidden**0.5
        qkv = quantize_atom(w_NK, scheme, dtype=torch.bfloat16, index_K=order).packed()
        w_NK = torch.randn(n, ffn, device=device) / ffn**0.5
        rotated = replace(scheme, rotation=True)
        down = quantize_atom(w_NK, rotated, dtype=torch.bfloat16).packed()
        if not isinstance(qkv, AtomTiles) or not isinstance(down, AtomTiles):
            return
        x = tokens(m, hidden, torch.bfloat16, device)
        got = norm_input(x, qkv, norm="rms", weight_K=norm_K, eps=1e-5)
        exact = norm_reference(x, "rms", norm_K, None, 1e-5)[:, order]
        y = product(got, qkv, dtype=torch.bfloat16)
        error = relative_error(y, _product(exact, qkv))
        yield f"norm + order + rounding{kind} m={m}", error, 5e-3
        x = torch.randn(m, 2 * ffn, device=device, dtype=torch.bfloat16)
        got = activation_input(x, down, "silu")
        exact = activation_reference(x, "silu").to(torch.bfloat16).float()
        y = product(got, down, dtype=torch.bfloat16)
        error = relative_error(y, _product(exact, down))
        yield f"silu + rotation + rounding{kind} m={m}", error, 5e-3


def _product(x_MK: Tensor, weight: AtomWeight) -> Tensor:
    """Return what the values that rounding leaves make, of channels in order."""
    w_NK = restore(codes_for(weight, x_MK.shape[0]))
    return restore(round_activations(x_MK, weight.scheme)) @ w_NK.t()


def faults(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Yield planted faults with the error they make and the limit that must catch them."""
    k, n = (1024, 256) if device.type == "cuda" else (520, 48)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    outliers = 128 if device.type == "cuda" else 8
    for scheme, rows in ((W4A4, (3, 200)), (INTEGERS, (3, 300))):
        right = random_weight("fault", k, n, replace(scheme, outliers=outliers), dtype, device)
        assert right.index_K is not None
        planted = {
            "channel order off by one": replace(right, index_K=right.index_K.roll(1)),
            "scale of the neighbour group": replace(right, scale=right.scale.roll(1, dims=1)),
            "outliers dropped": replace(right, outliers=torch.zeros_like(right.outliers)),
            "one nibble's row swapped": replace(right, codes=_swapped(right.codes)),
        }
        wrong = {fault: weight.packed() for fault, weight in planted.items()}
        fast = right.packed()
        for m in rows:
            if isinstance(fast, AtomTiles) and scheme.takes_integers(m):
                assert fast.steps is not None and fast.unit is not None
                wrong["steps of the neighbour group"] = replace(fast, steps=fast.steps.roll(1, 1))
                wrong["unit of the row above"] = replace(fast, unit=fast.unit.roll(1))
            x = tokens(m, k, dtype, device)
            kind = "integer scales, " if scheme.integer_scales else ""
            for fault, weight in wrong.items():
                yield f"{fault} {kind}m={m}", _error(x, weight, right), LIMITS[dtype]


def _swapped(codes: Tensor) -> Tensor:
    other = codes.clone()
    other[0::2], other[1::2] = codes[1::2], codes[0::2]
    return other

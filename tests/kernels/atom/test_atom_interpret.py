"""Atom's Triton kernels, in the interpreter, against their plain-torch twins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from triton import knobs

from llmpq.kernels.atom import portable
from llmpq.kernels.atom.portable import (
    GemmPlan,
    RoundedInput,
    activation_input,
    norm_input,
    round_input,
)
from llmpq.kernels.atom.reference import atom_linear_reference
from llmpq.kernels.formats.atom_rounding import round_activations
from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.kernels.fused.gated_mlp import gate_mul
from llmpq.kernels.fused.layer_norm import layer_norm
from llmpq.kernels.fused.rms_norm import rms_norm
from llmpq.kernels.weights.atom_weight import AtomWeight, integer_linear, quantize_atom
from reference.atom_twins import integer_product, rounded_layout

pytestmark = [
    pytest.mark.thin(2),
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

PAPER = AtomScheme(outliers=8)
SIGNED = replace(PAPER, group_size=64, signed_scale=True, activation_clip=0.95)
CHANNEL4 = AtomScheme(group_size=None)
SMALL = GemmPlan(block_m=16, block_n=16, warps=1, stages=1, group_n=2)


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def assert_same_rounding(got: RoundedInput, exact: torch.Tensor, scheme: AtomScheme) -> None:
    """Scales agree to float32; a code may differ by one where a value lies on an edge."""
    codes, scales = rounded_layout(round_activations(exact, scheme))
    used = slice(None) if scheme.outliers else slice(0, scales.shape[1] - 1)
    assert torch.allclose(got.scales[:, used], scales[:, used], rtol=1e-5)
    off = (got.codes.int() - codes.int()).abs()
    assert int(off.max()) <= 1 and float((off > 0).float().mean()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_inputs_are_rounded_as_compressed_tensors_does(dtype: torch.dtype) -> None:
    """Bit for bit; the twin is held against the library itself in test_atom_weight.py."""
    x = (seeded(64, 300) * 10.0 ** seeded(64, 1)).to(dtype)
    x[1], x[2] = 0, seeded(300).to(dtype) * torch.finfo(dtype).tiny * 512
    got = round_input(x, W8A8)
    codes, scales = rounded_layout(round_activations(x, W8A8))
    assert torch.equal(got.codes, codes)
    assert torch.equal(got.scales[:, 0], scales[:, 0])


@pytest.mark.parametrize(("bits", "dtype"), [(8, "bfloat16"), (11, "float16")])
def test_a_reciprocal_gives_16_bit_quotients(bits: int, dtype: str) -> None:
    """Every pair of significands: `_compressed` divides by no number but 1."""
    every = np.arange(1 << (bits - 1), 1 << bits, dtype=np.float32)
    y, scale = np.meshgrid(every, every)
    rounded = getattr(torch, dtype)
    got = torch.from_numpy(y * (np.float32(1) / scale)).to(rounded)
    assert torch.equal(got, torch.from_numpy(y / scale).to(rounded))


def two_passes(making: str, x: torch.Tensor, weight_K: torch.Tensor) -> torch.Tensor:
    """What a pass of its own makes of x, for another to round."""
    if making == "rms":
        return rms_norm(x, weight_K, 1e-5)
    if making == "layer":
        return layer_norm(x, weight_K, weight_K - 1, 1e-5)
    if making == "relu":
        return functional.relu(x)
    return gate_mul(x) if making == "silu" else functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("making", ["rms", "layer", "silu", "relu", "gelu"])
@pytest.mark.parametrize("scheme", [W8A8, PAPER, replace(SIGNED, rotation=True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_rounded_as_they_are_made_are_those_of_two_passes(
    making: str, scheme: AtomScheme, dtype: torch.dtype
) -> None:
    """Bit for bit: what stands before rounds to 16 bits all the same."""
    k, order = 264, torch.randperm(264, generator=torch.Generator().manual_seed(1)).int()
    norms = making in ("rms", "layer")
    if norms:
        scheme = replace(scheme, rotation=False)
    index_K = order if scheme.outliers and norms else None
    weight = quantize_atom(seeded(16, k), scheme, dtype=torch.float16, index_K=index_K)
    x = (seeded(5, 2 * k if making == "silu" else k) * 3).to(dtype)
    weight_K = (1 + seeded(k) * 0.1).to(dtype)
    if norms:
        bias_K = weight_K - 1 if making == "layer" else None
        got = norm_input(x, weight, norm=making, weight_K=weight_K, bias_K=bias_K, eps=1e-5)  # type: ignore[arg-type]
    else:
        got = activation_input(x, weight, making)  # type: ignore[arg-type]
    want = portable.any_input(two_passes(making, x, weight_K), weight)
    used = slice(None) if scheme.outliers else slice(0, -1)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales[:, used], want.scales[:, used])
    other = portable.any_input(two_passes(making, x.flip(0), weight_K.flip(0)), weight)
    assert float((got.codes != other.codes).float().mean()) > 0.1


@pytest.mark.parametrize("scheme", [W8A8, PAPER])
def test_products_add_the_residual_as_a_pass_of_its_own(scheme: AtomScheme) -> None:
    x, weight = (
        seeded(17, 300).bfloat16(),
        quantize_atom(seeded(40, 300), scheme, dtype=torch.bfloat16),
    )
    bias, more = seeded(40).bfloat16(), (seeded(17, 40) * 30).bfloat16()
    want = integer_linear(x, weight, bias) + more
    assert torch.equal(integer_linear(x, weight, bias, more), want)
    into = integer_linear(x, weight, bias, more, into_residual=True)
    assert into.data_ptr() == more.data_ptr() and torch.equal(into, want)


@pytest.mark.parametrize("scheme", [PAPER, SIGNED, W8A8, replace(PAPER, outliers=0)])
@pytest.mark.parametrize("k", [256, 300])
def test_order_and_rounding_in_one(scheme: AtomScheme, k: int) -> None:
    x = seeded(3, k) * 3
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1)).int()
    got = round_input(x, scheme, index_K=order)
    assert_same_rounding(got, x[:, order.long()], scheme)


def product(x: torch.Tensor, weight: AtomWeight, **options: object) -> torch.Tensor:
    rounded = round_input(x, weight.scheme)
    return portable.product(rounded, weight, dtype=torch.float32, tiles=SMALL, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", [PAPER, SIGNED, W8A8, CHANNEL4, replace(PAPER, outliers=0)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 256), (17, 40, 300), (33, 24, 520)])
def test_product_is_exact(scheme: AtomScheme, m: int, n: int, k: int) -> None:
    x, bias = seeded(m, k), seeded(n)
    weight = quantize_atom(seeded(n, k, seed=1), scheme, dtype=torch.float16)
    exact = integer_product(x, weight)
    assert error(product(x, weight), exact) < 1e-6
    assert error(product(x, weight, bias=bias), exact + bias) < 1e-6


@pytest.mark.parametrize("m", [1, 16, 17, 50, 100, 130])
def test_products_of_one_scale_a_channel_in_the_tiles_of_their_rows(m: int) -> None:
    weight = quantize_atom(seeded(136, 300, seed=1), W8A8, dtype=torch.float16)
    x = seeded(m, 300)
    got = portable.product(round_input(x, W8A8), weight, dtype=torch.float32)
    assert error(got, integer_product(x, weight)) < 1e-6


@pytest.mark.parametrize(
    "fault", ["scale of the next group", "outliers dropped", "channels shifted by one"]
)
def test_planted_faults_are_caught(fault: str) -> None:
    x = seeded(5, 264)
    x[:, -8:] *= 30
    weight = quantize_atom(seeded(16, 264), PAPER, dtype=torch.float32)
    exact = integer_product(x, weight)
    if fault == "scale of the next group":
        broken = product(x, replace(weight, scale=weight.scale.roll(1, dims=1)))
    elif fault == "outliers dropped":
        broken = product(x, replace(weight, outliers=torch.zeros_like(weight.outliers)))
    else:
        broken = product(x.roll(1, dims=1), weight)
    assert error(product(x, weight), exact) < 1e-6 < 1e-3 < error(broken, exact)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("scheme", [replace(SIGNED, group_size=128), SIGNED, W8A8])
def test_parts_of_the_inputs(scheme: AtomScheme, ordered: bool) -> None:
    """What devices in tensor parallel multiply by: groups of 64 where 128 are cut."""
    x, w = seeded(6, 400), seeded(24, 400, seed=2)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(5)) if ordered else None
    weight = quantize_atom(w, scheme, dtype=torch.float32, index_K=order)
    for start, stop in ((0, 192), (192, 400)):
        piece, own = weight.of_columns(start, stop), x[:, start:stop].contiguous()
        assert error(integer_linear(own, piece), atom_linear_reference(own, piece)) < 3e-3
        assert error(integer_linear(own.roll(1, dims=1), piece), own @ w[:, start:stop].t()) > 0.5


@pytest.mark.parametrize("rotation", [False, True])
def test_the_whole_linear_matches_the_integer_product(rotation: bool) -> None:
    x, w = seeded(6, 300), seeded(24, 300, seed=2)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(5))
    scheme = replace(SIGNED, rotation=rotation, group_size=128)
    weight = quantize_atom(w, scheme, dtype=torch.float32, index_K=order)
    # An edge value rounded the other way moves one code: 2e-3 of a token's norm at most.
    assert error(integer_linear(x, weight), atom_linear_reference(x, weight)) < 3e-3
    unordered = replace(weight, index_K=torch.arange(300).int())
    assert error(integer_linear(x, unordered), atom_linear_reference(x, weight)) > 0.1

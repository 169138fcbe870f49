"""Atom's Triton kernels, in the interpreter, against their plain-torch twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton import knobs

from llmpq.kernels.atom.portable import GemmPlan, RoundedInput, atom_gemm, round_input
from llmpq.kernels.atom.reference import atom_linear_reference
from llmpq.kernels.formats.atom_rounding import round_activations
from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
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


@pytest.mark.parametrize("scheme", [PAPER, SIGNED, W8A8, replace(PAPER, outliers=0)])
@pytest.mark.parametrize("k", [256, 300])
def test_order_and_rounding_in_one(scheme: AtomScheme, k: int) -> None:
    x = seeded(3, k) * 3
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1)).int()
    got = round_input(x, scheme, index_K=order)
    assert_same_rounding(got, x[:, order.long()], scheme)


def product(x: torch.Tensor, weight: AtomWeight, **options: object) -> torch.Tensor:
    rounded = round_input(x, weight.scheme)
    return atom_gemm(rounded, weight, dtype=torch.float32, tiles=SMALL, **options)  # type: ignore[arg-type]


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
    got = atom_gemm(round_input(x, W8A8), weight, dtype=torch.float32)
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

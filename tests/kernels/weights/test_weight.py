"""What every form of weight can do: multiply, count its bytes, be cut and stacked, draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.codebooks import E8M0, Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights.atom_weight import quantize_atom
from llmpq.kernels.weights.codebook_weight import codebook_weight
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.fp8_weight import fp8_weight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.kernels.weights.weight import Weight
from llmpq.precision import WeightScheme
from reference.gemm_twins import relative_error

pytestmark = pytest.mark.cpu
N, K = 80, 384


def matrix() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 0.1


def integers(bits: int, layout: Layout | None, **scheme: object) -> Callable[[], Weight]:
    rounding = WeightScheme(bits=bits, clip_search=False, **scheme)  # type: ignore[arg-type]
    return lambda: quantize_weight(matrix(), rounding, dtype=torch.float32, layout=layout)


def codes(codebook: Codebook) -> Weight:
    found = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(2))
    scale = torch.full((N, K // 32), 124, dtype=E8M0)
    if codebook is not Codebook.E2M1:
        scale = torch.rand(N, K // 32) / 100
    return codebook_weight(found.to(torch.uint8), scale, codebook=codebook, group_size=32)


def fp8(block: tuple[int, int] | None) -> Weight:
    shape = (1,) if block is None else (-(-N // block[0]), K // block[1])
    return fp8_weight(matrix().to(torch.float8_e4m3fn), torch.rand(shape), block, torch.float32)


FORMS: dict[str, Callable[[], Weight]] = {
    "dense": lambda: DenseWeight(matrix()),
    "4 bits": integers(4, None, symmetric=False),
    "4 bits, rows": integers(4, Layout.ROWS),
    "3 bits, words": integers(3, Layout.FRAGMENT, symmetric=False),
    "8 bits, groups of 32": integers(8, None, group_size=32),
    "4 bits, inputs too": lambda: integers(4, None)().as_draft("qspec"),
    "fp8": lambda: fp8(None),
    "fp8 blocks": lambda: fp8((16, 128)),
    "mxfp4": lambda: codes(Codebook.E2M1),
    "nf4": lambda: codes(Codebook.NF4),
    "w4a4": lambda: quantize_atom(matrix(), AtomScheme(outliers=16), dtype=torch.float32),
    "w8a8": lambda: quantize_atom(
        matrix(),
        AtomScheme(weight_bits=8, activation_bits=8, group_size=None),
        dtype=torch.float32,
    ),
}
ROUNDS_INPUTS = {"4 bits, inputs too": 0.15, "w4a4": 0.15, "w8a8": 0.03}
"""What inputs of few bits cost, relative to the product of the dequantised weight."""


@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_dequantised_weight(form: str) -> None:
    weight = FORMS[form]()
    torch.manual_seed(0)
    x, bias, residual = torch.randn(2, 3, K), torch.randn(N), torch.randn(2, 3, N)
    w = weight.dequantize(torch.float64)
    assert (weight.out_features, weight.in_features) == (N, K) == tuple(w.shape)
    exact = x.double() @ w.t() + bias.double() + residual.double()
    got = weight.matmul(x, bias, residual)
    assert relative_error(got, exact) < ROUNDS_INPUTS.get(form, 1e-4)
    assert torch.equal(weight.matmul(x, bias) + residual, got)
    with pytest.raises(ValueError, match=f"expected K = {K} on cpu"):
        FORMS["4 bits"]().matmul(x[..., 1:])


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_cut_and_stacked(form: str) -> None:
    weight = FORMS[form]()
    w = weight.dequantize(torch.float32)
    pieces = [weight.cut(0, 32), weight.cut(32, 64), weight.cut(64, N)]
    for piece, rows in zip(pieces, (slice(32), slice(32, 64), slice(64, N)), strict=True):
        assert torch.equal(piece.dequantize(torch.float32), w[rows])
    whole = type(weight).stack(pieces)
    assert torch.equal(whole.dequantize(torch.float32), w) and whole.bits == weight.bits
    assert abs(whole.nbytes - weight.nbytes) <= 4 * N * 3, "scales of FP8 are by row now"
    x = torch.randn(5, K)
    assert relative_error(whole.matmul(x), weight.matmul(x).double()) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_tensors_are_all_that_it_holds(form: str) -> None:
    weight = FORMS[form]()
    moved = weight.map_tensors(torch.clone)
    assert type(moved) is type(weight) and moved.nbytes == weight.nbytes
    held = {t.data_ptr() for t in weight.tensors.values() if t.numel()}
    assert not held & {t.data_ptr() for t in moved.tensors.values()}
    assert torch.equal(moved.dequantize(torch.float32), weight.dequantize(torch.float32))
    if "w" not in form:  # Atom's outlier scales count nothing where there are none
        assert weight.nbytes == sum(t.nbytes for t in weight.tensors.values())


@pytest.mark.parametrize("form", FORMS)
def test_drafts(form: str) -> None:
    """`kv4` drafts with the same weights; a 4-bit copy is made of what has 8 bits and more."""
    weight = FORMS[form]()
    assert weight.as_draft("kv4") is weight
    copy = weight.as_draft("w4kv4")
    atom = form.startswith("w")
    assert (copy is weight) == (weight.bits < 8 or atom)
    if copy is not weight:
        assert copy.bits == 4 and copy.nbytes < weight.nbytes
        wanted = weight.dequantize(torch.float32)
        assert relative_error(copy.dequantize(torch.float32), wanted.double()) < 0.15


def test_a_plan_of_other_bits_is_refused() -> None:
    four, eight = WeightScheme(bits=4), WeightScheme(bits=8)
    assert FORMS["4 bits"]().for_scheme(None, "qkv") is not None
    with pytest.raises(ValueError, match="qkv: the checkpoint stores 4-bit weights for 16-bit"):
        FORMS["4 bits"]().for_scheme(eight, "qkv")
    assert FORMS["nf4"]().for_scheme(eight, "qkv").bits == 4, "8 bits say the same values"
    unrounded = FORMS["w4a4"]().for_scheme(four, "qkv")
    x = torch.randn(3, K)
    assert (
        relative_error(unrounded.matmul(x), x.double() @ unrounded.dequantize(torch.double).t())
        < 1e-5
    )
    with pytest.raises(ValueError, match="for rounded activations"):
        FORMS["w4a4"]().for_scheme(eight, "qkv")

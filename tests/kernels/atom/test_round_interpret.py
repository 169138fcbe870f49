"""The roundings that ride on norms and activations, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs

from llmpq.kernels.atom import hopper as atom_hopper
from llmpq.kernels.atom import hopper_inputs
from llmpq.kernels.atom.hopper import RoundedTokens, activation_input, norm_input
from llmpq.kernels.formats import atom_scheme
from llmpq.kernels.formats.atom_rounding import integer_scales, restore, round_activations
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights import quantized_weight
from llmpq.kernels.weights.atom_weight import AtomTiles, atom_tiles, quantize_atom
from reference.atom_twins import activation_reference, norm_reference
from reference.gemm_twins import relative_error

pytestmark = [
    pytest.mark.thin(2),
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

SIGNED = AtomScheme(outliers=8, signed_scale=True, activation_clip=0.95)
PAPER = AtomScheme(outliers=8)


@pytest.fixture(autouse=True)
def fragment_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack as a GPU does. (Gluon, kernels/atom/round_norm.py, has no interpreter.)"""
    monkeypatch.setattr(quantized_weight, "best_layout", lambda *_: Layout.FRAGMENT)


def as_words(monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """Have inputs restored, as of few tokens, or not."""
    monkeypatch.setattr(hopper_inputs, "ATOM_FEW", 64 if few else 0)
    monkeypatch.setattr(hopper_inputs, "is_few", lambda _, bits: few or bits == 16)


def tiles_of(scheme: AtomScheme, k: int, order: torch.Tensor | None) -> AtomTiles:
    w = torch.randn(32, k, generator=torch.Generator().manual_seed(3))
    return atom_tiles(quantize_atom(w, scheme, dtype=torch.float16, index_K=order))


def assert_restores(
    got: RoundedTokens, tiles: AtomTiles, exact: torch.Tensor, limit: float = 1e-3
) -> None:
    """The values, times the words, are the product of what rounding leaves."""
    bits = tiles.scheme.activation_bits
    wanted = exact if bits == 16 else restore(round_activations(exact, tiles.scheme))
    y = got.values.float() @ tiles.words.dequantize(torch.float32).t()
    product = wanted.float() @ tiles.dequantize_reordered(torch.float32).t()
    assert relative_error(y, product) < limit
    shifted = got.values.roll(1, dims=1).float() @ tiles.words.dequantize(torch.float32).t()
    assert relative_error(shifted, product) > 0.1


def assert_codes(got: RoundedTokens, tiles: AtomTiles, exact: torch.Tensor) -> None:
    """Codes * 2^-9 as e4m3, outliers as int8, scales in float32."""
    wanted, m, g = round_activations(exact, tiles.scheme), exact.shape[0], tiles.groups
    assert got.scales is not None and got.outlier_scale is not None
    codes = got.values[:, : g * 128].view(torch.float8_e4m3fn).float() * 512
    off = (codes - wanted.codes.float()).abs()
    assert float(off.max()) <= 1 and float((off > 0).float().mean()) < 2e-3
    scales = got.scales[:g, :m].t()
    assert torch.allclose(scales, wanted.scale, rtol=1e-6)
    outliers = tiles.scheme.outliers
    assert torch.equal(got.values[:, g * 128 : g * 128 + outliers], wanted.outliers)
    if outliers:
        assert wanted.outlier_scale is not None
        assert torch.allclose(got.outlier_scale[:m], wanted.outlier_scale, rtol=1e-6)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("scheme", [SIGNED, PAPER, replace(SIGNED, outliers=0)])
def test_norm_order_and_rounding(
    scheme: AtomScheme, norm: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_words(monkeypatch, few)
    k, generator = 264, torch.Generator().manual_seed(4)
    order = torch.randperm(k, generator=generator)
    tiles = tiles_of(scheme, k, order)
    x = torch.randn(5, k, generator=generator).half() * 3
    weight_K, bias_K = 1 + torch.randn(k, generator=generator) * 0.1, torch.randn(k) * 0.1
    bias = {"bias_K": bias_K} if norm == "layer" else {}
    got = norm_input(x, tiles, norm=norm, weight_K=weight_K, eps=1e-5, **bias)  # type: ignore[arg-type]
    exact = norm_reference(x, norm, weight_K, bias.get("bias_K"), 1e-5)[:, order]
    (assert_restores if few else assert_codes)(got, tiles, exact)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("rotation", [True, False])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "none"])
def test_activation_rotation_and_rounding(
    activation: str, rotation: bool, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_words(monkeypatch, few)
    k = 264
    tiles = tiles_of(replace(SIGNED, rotation=rotation), k, None)
    wide = 2 * k if activation == "silu" else k
    x = torch.randn(5, wide, generator=torch.Generator().manual_seed(5)).half()
    got = activation_input(x, tiles, activation)  # type: ignore[arg-type]
    exact = (x if activation == "none" else activation_reference(x, activation)).half().float()
    (assert_restores if few else assert_codes)(got, tiles, exact)


@pytest.mark.parametrize("few", [True, False])
def test_inputs_of_a_device_of_several(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part of sorted channels: as those that it has, others' places repeat one of them."""
    as_words(monkeypatch, few)
    k, generator = 520, torch.Generator().manual_seed(8)
    order = torch.randperm(k, generator=generator)
    w = torch.randn(32, k, generator=generator)
    piece = quantize_atom(w, SIGNED, dtype=torch.float16, index_K=order).of_columns(130, 390)
    x = torch.randn(5, 260, generator=generator).half()
    ordered, tiles = atom_tiles(piece).in_order(x)
    assert ordered.shape == (5, k) and tiles.index_K is None
    got = atom_hopper.any_input(x, atom_tiles(piece))
    (assert_restores if few else assert_codes)(got, tiles, ordered)


@pytest.mark.parametrize("outliers", [0, 8])
@pytest.mark.parametrize("rotation", [True, False])
def test_codes_times_integer_scales(
    rotation: bool, outliers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_words(monkeypatch, False)
    monkeypatch.setattr(atom_scheme, "MANY", 4)
    k, generator = 1160, torch.Generator().manual_seed(7)
    scheme = replace(SIGNED, rotation=rotation, outliers=outliers, integer_scales=True)
    tiles = tiles_of(scheme, k, None)
    x = torch.randn(19, k, generator=generator).bfloat16().half()  # half way between steps, often
    x[::2, :128] *= 9  # other groups' scales are small
    x[3] = 0
    got, wanted, g = atom_hopper.any_input(x, tiles), round_activations(x, scheme), tiles.groups
    assert got.unit is not None and got.scales is None and got.outlier_scale is not None
    steps, unit = integer_scales(round_activations(x, replace(scheme, integer_scales=False)).scale)
    assert torch.allclose(got.unit[:19], unit[:, 0], rtol=1e-6)
    values = got.values[:, : g * 128].view(19, g, 128)
    right = wanted.codes.view(19, g, 128).int() * steps.int()[:, :, None]
    off = float((values != right).float().mean())
    assert off == 0 or (rotation and off < 2e-3)  # a rotation's sums differ in their last bits
    assert torch.equal(got.values[:, g * 128 : g * 128 + outliers], wanted.outliers)
    assert float((values - right.roll(1, dims=1) != 0).float().mean()) > 0.5
    few = atom_hopper.any_input(x[:4], tiles)
    assert few.unit is None and few.scales is not None


@pytest.mark.parametrize("rotation", [True, False])
def test_sixteen_bit_inputs_are_only_put_in_order(rotation: bool) -> None:
    scheme = replace(SIGNED, activation_bits=16, rotation=rotation)
    tiles = tiles_of(scheme, 264, None)
    x = torch.randn(3, 264, generator=torch.Generator().manual_seed(6)).half()
    assert_restores(atom_hopper.any_input(x, tiles), tiles, x.float())


def test_a_rotation_needs_an_activation_and_an_order_a_norm() -> None:
    x = torch.zeros(1, 264).half()
    with pytest.raises(ValueError, match="norm_input does not rotate"):
        norm_input(x, tiles_of(replace(SIGNED, rotation=True), 264, None))
    with pytest.raises(ValueError, match="folded into the rows"):
        activation_input(x, tiles_of(SIGNED, 264, torch.arange(264)), "relu")


def test_torch_compile_sees_one_operator_of_the_right_shape() -> None:
    tiles = tiles_of(SIGNED, 264, None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(7, 264, dtype=torch.float16)
        y = torch.ops.llmpq.rounded_linear(
            x, tiles.codes, tiles.scale, None, None, 32, 8, 4, 0.95, True, False
        )
    assert y.shape == (7, 32) and y.dtype == torch.float16


def test_plans_fill_the_multiprocessors() -> None:
    plan = atom_hopper.plan
    assert plan(64, 4096, 31).bm is None
    assert plan(4096, 4096, 31, activation_bits=16).bm is None
    assert plan(4096, 28672, 31).bm == 160
    # 128 tiles of 132: what sharing takes is saved where K is long.
    assert not plan(333, 4096, 31).shares and plan(333, 4096, 111).shares
    assert plan(333, 28672, 31).shares  # 600 tiles: a fifth wave of 72
    assert not plan(1500, 4096, 31).shares

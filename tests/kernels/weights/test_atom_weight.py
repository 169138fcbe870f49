"""Atom's rounding and packing: what the formulas say, what memory holds, what the products give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.formats.atom_rounding import (
    hadamard,
    restore,
    rotate,
    round_activations,
    round_weight,
)
from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.kernels.weights.atom_weight import (
    AtomWeight,
    pack_nibbles,
    quantize_atom,
    unpack_nibbles,
)
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision, default_scheme
from llmpq.sizes.memory import Quantization, layer_weight_bytes
from reference.atom_twins import integer_product

pytestmark = pytest.mark.cpu

PAPER = AtomScheme(outliers=8)
SCHEMES = {
    "paper": PAPER,
    "group 64": replace(PAPER, group_size=64),
    "per channel": replace(PAPER, group_size=None),
    "no outliers": replace(PAPER, outliers=0),
    "signed": replace(PAPER, signed_scale=True, activation_clip=1.0, weight_clip=None),
    "rotated": replace(PAPER, rotation=True),
    "w3a3": replace(PAPER, weight_bits=3, activation_bits=3),
    "e2m1": replace(PAPER, number="e2m1"),
    "w8a8": W8A8,
    "w8a8 of atom's rule": replace(W8A8, activation_rule="atom"),
}


def tensors(k: int = 300, n: int = 24, m: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(k)
    w, x = torch.randn(n, k, generator=seeded), torch.randn(m, k, generator=seeded)
    x[:, -8:] *= 40
    return w, x


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def test_formulas_of_the_paper() -> None:
    x = torch.tensor([[0.0] * 126 + [1.0, -2.0, 100.0, 3.0]])
    found = round_activations(x, AtomScheme(outliers=2))
    assert found.scale.item() == pytest.approx(0.9 * 2 / 7)
    assert found.codes[0, 126:128].tolist() == [4, -8]
    assert found.outlier_scale is not None and found.outlier_scale.item() == pytest.approx(
        100 / 127
    )
    assert found.outliers[0].tolist() == [127, 4]
    w = round_weight(x, AtomScheme(outliers=2), scale_dtype=torch.float32)
    assert w.scale.item() == pytest.approx(0.85 * 2 * 2 / 15)


def test_signed_scale_reaches_the_spare_code() -> None:
    x = torch.zeros(1, 128)
    x[0, :3] = torch.tensor([2.0, 1.0, -1.75])
    found = round_activations(x, AtomScheme(signed_scale=True, activation_clip=1.0))
    assert found.scale.item() == pytest.approx(-2 / 8)
    assert found.codes[0, :3].tolist() == [-8, -4, 7]


def test_e2m1_takes_the_nearest_value() -> None:
    x = torch.zeros(1, 128)
    x[0, :8] = torch.tensor([6.0, 0.24, 0.26, 1.24, -1.26, 2.6, 4.9, 5.1])
    scheme = AtomScheme(number="e2m1", activation_clip=1.0)
    values = restore(round_activations(x, scheme))[0, :8].tolist()
    assert values == pytest.approx([6.0, 0.0, 0.5, 1.0, -1.5, 3.0, 4.0, 6.0])


def test_rotation_is_its_own_inverse() -> None:
    h = hadamard(torch.device("cpu"))
    assert torch.allclose(h @ h, torch.eye(128), atol=1e-6) and torch.equal(h, h.t())
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotate(rotate(x)), x, atol=1e-5)


def test_rotation_spreads_a_single_large_value() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    x[torch.arange(64), torch.arange(64)] *= 20
    plain = relative(restore(round_activations(x, AtomScheme())), x)
    rotated = relative(restore(round_activations(x, AtomScheme(rotation=True))), x)
    assert rotated < 0.7 * plain


def test_nibbles_come_back_and_are_read_as_signed_bytes_of_16_times() -> None:
    codes = torch.randint(-8, 8, (5, 256), generator=torch.Generator().manual_seed(2)).to(
        torch.int8
    )
    packed = pack_nibbles(codes)
    assert packed.shape == (5, 2, 64) and torch.equal(unpack_nibbles(packed), codes)
    low, high = (packed << 4).view(torch.int8), (packed & 0xF0).view(torch.int8)
    assert torch.equal(low[:, 0].int(), codes[:, :64].int() * 16)
    assert torch.equal(high[:, 1].int(), codes[:, 192:].int() * 16)
    with pytest.raises(ValueError, match="4-bit codes: got -9"):
        pack_nibbles(codes - 1)


@pytest.mark.parametrize("name", [n for n in SCHEMES if n != "rotated"])
@pytest.mark.parametrize("k", [256, 300])
def test_product_equals_the_integer_product(name: str, k: int) -> None:
    w, x = tensors(k)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(3))
    weight = quantize_atom(w[:, order.argsort()], SCHEMES[name], dtype=torch.float32, index_K=order)
    y = weight.matmul(x[:, order.argsort()])
    assert relative(y, integer_product(x, weight)) < 1e-6


@pytest.mark.parametrize(
    "fault", ["index off by one", "scale of the next group", "outliers dropped"]
)
def test_planted_faults_are_far_beyond_that_tolerance(fault: str) -> None:
    w, x = tensors(256)
    weight = quantize_atom(w, PAPER, dtype=torch.float32, index_K=torch.arange(256))
    exact = integer_product(x, weight)
    broken: AtomWeight
    if fault == "index off by one":
        broken = replace(weight, index_K=torch.arange(256).roll(1).int())
    elif fault == "scale of the next group":
        broken = replace(weight, scale=weight.scale.roll(1, dims=1))
    else:
        broken = replace(weight, outliers=torch.zeros_like(weight.outliers))
    assert relative(weight.matmul(x), exact) < 1e-6
    assert relative(broken.matmul(x), exact) > 1e-3


def test_outliers_and_sixteen_bit_activations_reduce_the_error() -> None:
    w, x = tensors(256)
    exact = x @ w.t()

    def error(scheme: AtomScheme) -> float:
        return relative(quantize_atom(w, scheme, dtype=torch.float32).matmul(x), exact)

    assert error(PAPER) < 0.3 * error(replace(PAPER, outliers=0))
    kept16 = quantize_atom(w, replace(PAPER, outlier_bits=16), dtype=torch.float32)
    assert torch.equal(kept16.dequantize(torch.float32)[:, -8:], w[:, -8:])
    weight = quantize_atom(w, PAPER, dtype=torch.float32)
    a16 = weight.with_activations(16).matmul(x)
    assert relative(a16, x @ weight.dequantize(torch.float32).t()) < 1e-6


def test_dequantised_columns_are_in_the_order_of_x() -> None:
    w, _ = tensors(256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4))
    weight = quantize_atom(w, PAPER, dtype=torch.float32, index_K=order)
    assert relative(weight.dequantize(torch.float32), w) < 0.15


@pytest.mark.parametrize("precision", [Precision.W4A4, Precision.W8A8])
@pytest.mark.parametrize("outliers", [0, 8])
def test_bytes_are_those_the_planner_counts(precision: Precision, outliers: int) -> None:
    stored = default_scheme(precision, outliers=outliers)
    assert stored is not None
    scheme = AtomScheme(
        weight_bits=stored.bits,
        activation_bits=stored.activation_bits,
        group_size=stored.group_size,
        outliers=stored.outliers,
    )
    for k in (256, 300):
        weight = quantize_atom(torch.randn(24, k), scheme, dtype=torch.float16)
        assert weight.nbytes == stored.nbytes(24, k, 2)


def test_a_layer_counts_its_channel_orders() -> None:
    spec = ModelSpec.by_name("llama-3.1-8b")
    plain, kept = (
        layer_weight_bytes(spec, Precision.W4A4, Quantization(outliers=o), 2) for o in (0, 128)
    )
    rows = sum(s.out_features for s in spec.linears())
    assert kept - plain == rows * (128 // 2 - 2 + 2) + 4 * 3 * 4096


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_bits": 5}, "weight bits: got 5"),
        ({"group_size": 100}, "group size: got 100"),
        ({"number": "e2m1", "weight_bits": 8}, "e2m1 values have 4 bits"),
        ({"activation_clip": 0.0}, "clips in"),
    ],
)
def test_bad_schemes_say_what_is_wrong(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AtomScheme(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_inputs_have_the_codes_and_scales_of_compressed_tensors(dtype: torch.dtype) -> None:
    """Bit for bit, for tokens of any size: zeros, single outliers, scales that underflow."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    seeded = torch.Generator().manual_seed(5)
    x = torch.randn(400, 384, generator=seeded) * 10.0 ** (
        2 * torch.randn(400, 1, generator=seeded)
    )
    x[::3, 7] *= 50
    x[1], x[2], x[4] = 0, x[2] * 1e-30, x[4] * torch.finfo(dtype).tiny
    x = x.clamp(-6e4, 6e4).to(dtype)
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Module())
    codes = quantize(x[None], scale, zero, args)[0]
    ours = round_activations(x, W8A8)
    assert scale.dtype == dtype and not zero.any()
    assert torch.equal(ours.scale, scale[0].float())
    assert torch.equal(ours.codes.to(dtype), codes)
    atoms = round_activations(x, replace(W8A8, activation_rule="atom"))
    assert not torch.equal(atoms.scale, scale[0].float())


def test_the_rule_of_compressed_tensors_is_for_its_format_only() -> None:
    for changed in ({"group_size": 128}, {"outliers": 4}, {"activation_clip": 0.9}):
        with pytest.raises(ValueError, match="activation_rule 'compressed' is for 8-bit"):
            replace(W8A8, **changed)

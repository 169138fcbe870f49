"""Packing, quantisation and the CPU paths of quantised linear layers."""

import itertools

import pytest
import torch

from llmpq.kernels.formats import cpu_layout
from llmpq.kernels.formats import weight_layout as formats
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights.quantized_weight import best_layout
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from reference.gemm_twins import linear_reference, relative_error

pytestmark = pytest.mark.cpu

SCHEMES = list(itertools.product((3, 4, 8), (128, None), (True, False)))
# float32 sums of 384 products; bfloat16 operands, output and, for grouped int8, partial products.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def _weight(n, k, bits, group=128, symmetric=False, dtype=torch.float32, layout=None, clip=False):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=clip)
    return w, scheme, quantize_weight(w, scheme, dtype=dtype, layout=layout)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.FRAGMENT])
def test_codes_survive_packing(bits, layout):
    codes = torch.randint(0, 2**bits, (37, 256), dtype=torch.uint8)
    planes = formats.pack(codes, bits, layout)
    assert sum(p.numel() for p in planes) == 37 * 256 * bits // 8
    assert torch.equal(formats.unpack(planes, bits, layout, 37), codes)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("rows", [5, 37, 48])
def test_codes_and_scales_survive_panels(bits, rows):
    codes = torch.randint(0, 2**bits, (rows, 256), dtype=torch.uint8)
    flat = cpu_layout.pack_panels(codes, bits)
    assert flat.numel() == rows * 256 * bits // 8
    assert torch.equal(cpu_layout.unpack_panels(flat, bits, rows), codes)
    scale = torch.randn(rows, 2)
    stored = formats.pack_scales(scale, Layout.CPU_PANELS)
    assert torch.equal(formats.unpack_scales(stored, Layout.CPU_PANELS, rows), scale)
    if rows >= 16:
        assert torch.equal(stored[:16], scale[:16, 0])


def test_panels_lie_as_drawn():
    """Word by word of 16 rows; a code's place p among 4-bit words is k in another order."""
    codes = torch.randint(0, 8, (19, 256), dtype=torch.uint8)
    kept = {bits: cpu_layout.pack_panels(codes, bits) for bits in (3, 4, 8)}
    bytes_of = {b: flat[: 16 * 32 * b].view(2, -1, 16, 4) for b, flat in kept.items()}
    for p, r in itertools.product(range(128), (0, 5, 15)):
        k = p // 64 * 32 + p % 64 // 2 + p % 2 * 64
        j, field, code = p % 32, p // 32, codes[r, 128 + k]
        assert bytes_of[8][1, k // 4, r, k % 4] == codes[r, 128 + k]
        assert bytes_of[4][1, p % 64 // 4, r, p % 4] >> (p // 64 * 4) & 15 == code
        low = bytes_of[3][1, j // 4, r, j % 4] >> (2 * field) & 3
        third = bytes_of[3][1, 8 + j % 16 // 4, r, j % 4] >> (2 * field + j // 16) & 1
        assert low | third << 2 == code
    assert torch.equal(kept[8][16 * 256 :].view(3, 256), codes[16:])


def test_fragment_words_lie_as_drawn():
    """Row 8*r3 + r, k = 64*h + 16*jj + 8*k3 + 2*c + k0: the drawing, spelt out."""
    codes = torch.randint(0, 8, (16, 256), dtype=torch.uint8)
    words4 = formats.pack(codes, 4, Layout.FRAGMENT)[0].view(torch.int32).view(2, 256)
    words3 = formats.pack(codes, 3, Layout.FRAGMENT)[0].view(torch.int32).view(2, 3, 64)
    for r3, r, h, jj, k3, c, k0 in itertools.product(*(range(s) for s in (2, 8, 2, 4, 2, 4, 2))):
        code = codes[8 * r3 + r, 128 + 64 * h + 16 * jj + 8 * k3 + 2 * c + k0]
        lane, pair = 4 * r + c, 4 * jj + 2 * k3 + r3
        word = words4[1, (jj // 2 * 32 + lane) * 4 + jj % 2 * 2 + k3]
        assert word >> (16 * k0 + 4 * (2 * h + r3)) & 15 == code
        halves = words3[1, :, 2 * lane + h] >> (16 * k0)
        if pair < 15:
            assert halves[pair // 5] >> (3 * (pair % 5)) & 7 == code
        else:
            assert (halves >> 15 & 1) @ torch.tensor([1, 2, 4], dtype=torch.int32) == code


def test_8_bits_are_two_planes_of_4():
    codes = torch.randint(0, 256, (16, 128), dtype=torch.uint8)
    high, low = formats.pack(codes, 8, Layout.FRAGMENT)
    assert torch.equal(high, formats.pack(codes >> 4, 4, Layout.FRAGMENT)[0])
    assert torch.equal(low, formats.pack(codes & 15, 4, Layout.FRAGMENT)[0])


@pytest.mark.parametrize("bits,group,symmetric", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_equal_the_planners_formula(bits, group, symmetric, dtype):
    for n, k in [(80, 256), (33, 200)]:
        _, scheme, q = _weight(n, k, bits, group, symmetric, dtype)
        assert q.nbytes == scheme.nbytes(n, k, dtype.itemsize)
        assert q.symmetric == symmetric and q.groups == scheme.num_groups(k)


@pytest.mark.parametrize("bits,group,symmetric", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_on_cpu_matches_its_twin(bits, group, symmetric, dtype):
    torch.manual_seed(bits)
    for (n, k), m in itertools.product([(80, 256), (33, 200), (192, 384)], (1, 20, 70)):
        _, _, q = _weight(n, k, bits, group, symmetric, dtype)
        x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
        exact = linear_reference(x, q, bias, exact=True)
        y = q.matmul(x, bias)
        assert y.dtype == dtype
        assert relative_error(y, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planted_bugs_exceed_the_tolerance(dtype):
    _, _, q = _weight(80, 256, 4, dtype=dtype)
    x = torch.randn(3, 256).to(dtype)
    exact = linear_reference(x, q, exact=True)
    q.scale[5] *= 1.5
    assert relative_error(q.matmul(x), exact) > TOLERANCE[dtype]
    q.scale[5] /= 1.5
    q.planes[0].view(-1)[64] = ~q.planes[0].view(-1)[64] & 255
    assert relative_error(q.matmul(x), exact) > TOLERANCE[dtype]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_large_weights_dequantise_in_pieces(bits, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.cpu.dense.CHUNK_WEIGHTS", 64 * 256)
    _, _, q = _weight(200, 256, bits)
    x, bias = torch.randn(100, 256), torch.randn(200)
    exact = linear_reference(x, q, bias, exact=True)
    assert relative_error(q.matmul(x, bias), exact) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_clip_search_lowers_the_error(bits, symmetric):
    w, _, plain = _weight(64, 512, bits, symmetric=symmetric)
    _, _, clipped = _weight(64, 512, bits, symmetric=symmetric, clip=True)
    error = relative_error(plain.dequantize(torch.float32), w)
    searched = relative_error(clipped.dequantize(torch.float32), w)
    assert searched <= error * (0.97 if bits < 8 else 1.0)
    # Rounding error of b bits over a Gaussian group of 128 (range near 5.4 sigma).
    assert searched < {3: 0.22, 4: 0.105, 8: 0.0065}[bits]


def test_extreme_groups_stay_finite():
    w = torch.zeros(4, 128)
    w[1], w[2, 3], w[3] = 1e-9, -1e4, torch.linspace(5, 6, 128)
    for symmetric, dtype in itertools.product((True, False), (torch.float32, torch.float16)):
        q = quantize_weight(w, WeightScheme(bits=4, symmetric=symmetric), dtype=dtype)
        dense = q.dequantize(torch.float32)
        assert torch.isfinite(dense).all() and torch.equal(dense[0], w[0])
        assert abs(dense[2, 3] + 1e4) < 1e3


def test_layouts_agree_and_cpu_ones_are_chosen():
    for bits in (3, 4, 8):
        _, _, rows = _weight(80, 256, bits, layout=Layout.ROWS, dtype=torch.bfloat16)
        _, _, fragment = _weight(80, 256, bits, layout=Layout.FRAGMENT, dtype=torch.bfloat16)
        _, _, best = _weight(80, 256, bits, dtype=torch.bfloat16)
        assert best.layout is best_layout(torch.device("cpu"), torch.bfloat16)
        for other in (fragment, best):
            assert torch.equal(other.codes(), rows.codes())
            assert torch.equal(other.dequantize(torch.float32), rows.dequantize(torch.float32))


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="expected 32, 64, 128 or None"):
        quantize_weight(
            torch.randn(8, 128), WeightScheme(bits=4, group_size=96), dtype=torch.float32
        )
    with pytest.raises(ValueError, match="expected floats"):
        quantize_weight(
            torch.ones(8, 128, dtype=torch.int8), WeightScheme(bits=4), dtype=torch.half
        )
    _, _, q = _weight(16, 128, 4)
    with pytest.raises(ValueError, match="expected K = 128"):
        q.matmul(torch.randn(2, 64))

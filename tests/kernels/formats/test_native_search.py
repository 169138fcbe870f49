"""The C++ search for scales, zeros and codes finds what the plain one does, bit for bit."""

import itertools

import pytest
import torch

from llmpq.kernels.native import library
from llmpq.kernels.weights import round_to_nearest
from llmpq.kernels.weights.quantized_weight import from_codes, native_layout
from llmpq.kernels.weights.round_to_nearest import quantize_codes, quantize_weight
from llmpq.precision import WeightScheme

pytestmark = [pytest.mark.cpu, pytest.mark.native]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _weights():
    random = torch.Generator().manual_seed(3)
    yield torch.randn(24, 500, generator=random)
    heavy = torch.randn(9, 384, generator=random) ** 3
    heavy[3], heavy[4, :200], heavy[5] = 0, 1e-9, heavy[5].abs() + 1
    yield heavy
    yield torch.randn(1, 5, generator=random)


def _same(w, scheme, dtype):
    codes, scale, zero = quantize_codes(w, scheme, scale_dtype=dtype)
    twin = from_codes(
        codes, scale, zero, bits=scheme.bits, group_size=128, in_features=w.shape[1],
        layout=native_layout(128),
    )  # fmt: skip
    found = quantize_weight(w, scheme, dtype=dtype)
    assert found.layout is twin.layout
    same = torch.equal(found.planes[0], twin.planes[0]) and torch.equal(found.scale, twin.scale)
    return same and (zero is None or torch.equal(found.zero, twin.zero))


@pytest.mark.parametrize("level", [level.name for level in library.usable_levels()])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_codes_scales_and_zeros_are_those_of_the_plain_search(bits, level, monkeypatch):
    monkeypatch.setattr(library, "best_level", lambda: library.LEVELS[level])
    for symmetric, clip, dtype in itertools.product((True, False), (True, False), DTYPES):
        scheme = WeightScheme(bits=bits, symmetric=symmetric, clip_search=clip)
        for w in _weights():
            assert _same(w.to(dtype), scheme, dtype), (symmetric, clip, dtype, tuple(w.shape))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_another_grid_of_clips_is_noticed(bits, monkeypatch):
    """Planted: the C++ search tries other clips, each a hundredth larger."""
    scheme = WeightScheme(bits=bits)
    w = next(_weights())
    assert _same(w, scheme, torch.bfloat16)
    native = round_to_nearest._quantize_native

    def misled(*arguments):
        clips = round_to_nearest._CLIPS
        with monkeypatch.context() as patch:
            patch.setitem(clips, bits, [clip + 0.01 for clip in clips[bits]])
            return native(*arguments)

    monkeypatch.setattr(round_to_nearest, "_quantize_native", misled)
    assert not _same(w, scheme, torch.bfloat16)

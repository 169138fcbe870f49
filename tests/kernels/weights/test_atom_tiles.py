"""Hopper's form of Atom weights, on the CPU: the same numbers, one copy, outliers as nibbles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights import atom_weight, quantized_weight
from llmpq.kernels.weights.atom_weight import (
    AtomTiles,
    AtomWeight,
    fits,
    fragment_order,
    quantize_atom,
)

pytestmark = pytest.mark.cpu

SCHEME = AtomScheme(outliers=8, signed_scale=True, activation_clip=0.95)


@pytest.fixture(autouse=True)
def fragment_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack as a GPU does."""
    monkeypatch.setattr(quantized_weight, "best_layout", lambda *_: Layout.FRAGMENT)


def weight(scheme: AtomScheme, n: int = 32, k: int = 264) -> AtomWeight:
    generator = torch.Generator().manual_seed(1)
    order = None if scheme.rotation else torch.randperm(k, generator=generator)
    w = torch.randn(n, k, generator=generator)
    return quantize_atom(w, scheme, dtype=torch.float16, index_K=order)


@pytest.mark.parametrize(
    "scheme", [SCHEME, replace(SCHEME, outliers=0), replace(SCHEME, rotation=True)]
)
def test_the_form_holds_the_same_numbers(scheme: AtomScheme) -> None:
    plain = weight(scheme)
    tiles = atom_weight.atom_tiles(plain)
    assert torch.equal(tiles.dequantize(torch.float32), plain.dequantize(torch.float32))
    broken = replace(tiles, words=replace(tiles.words, scale=tiles.words.scale.roll(1)))
    assert not torch.equal(broken.dequantize(torch.float32), plain.dequantize(torch.float32))


def test_words_times_inputs_with_outliers_thrice_is_the_product() -> None:
    plain = weight(SCHEME)
    tiles = atom_weight.atom_tiles(plain)
    x = torch.randn(5, 264, generator=torch.Generator().manual_seed(2))
    padded = torch.zeros(5, 3, 128)
    padded.view(5, -1)[:, :256] = x[:, :256]
    padded[:, 2, :8] = x[:, 256:]
    placed = torch.zeros(5, 5, 128)
    placed[:, :, fragment_order()] = padded[:, [0, 1, 2, 2, 2]]
    y = placed.view(5, -1) @ tiles.words.dequantize(torch.float32).t()
    assert torch.allclose(y, x @ plain.dequantize_reordered(torch.float32).t(), atol=1e-4)
    once = placed.clone()
    once[:, 4] = 0
    assert not torch.allclose(once.view(5, -1) @ tiles.words.dequantize(torch.float32).t(), y)


def test_a_lanes_bytes_are_neighbours_of_its_operand() -> None:
    """Byte b of word (jj, k3) of lane (r, c): rows r, r + 8 at p = 32 jj + 16 k3 + 4 c + b."""
    plain = weight(SCHEME)
    tiles = atom_weight.atom_tiles(plain)
    words = tiles.words.planes[0].view(2, 5, 2, 32, 4, 4)  # block, group, jj/2, lane, word, byte
    codes = plain.unpacked().codes
    for block, group, j2, lane, word, byte in ((0, 0, 0, 0, 0, 0), (1, 1, 1, 14, 3, 2)):
        r, c = divmod(lane, 4)
        p = 128 * group + 32 * (2 * j2 + word // 2) + 16 * (word % 2) + 4 * c + byte
        pair = int(words[block, group, j2, lane, word, byte])
        row = 16 * block + r
        assert (pair & 15) - 8 == int(codes[row, p])
        assert (pair >> 4) - 8 == int(codes[row + 8, p])


def test_integer_scales_lie_beside_the_words() -> None:
    plain = weight(replace(SCHEME, integer_scales=True), k=1032)
    tiles = atom_weight.atom_tiles(plain)
    assert tiles.steps is not None and tiles.unit is not None
    assert tiles.steps.shape == (2, 8, 16) and tiles.steps.dtype == torch.int8
    for row, group in ((0, 0), (9, 3), (21, 7)):
        block, r = divmod(row, 16)
        step = int(tiles.steps[block, group, r % 8 * 2 + r // 8])
        assert 1 <= abs(step) <= 15
        assert step * float(tiles.unit[row]) == pytest.approx(
            float(plain.scale[row, group]), rel=2e-3
        )
    assert tiles.nbytes == 32 * 11 * (64 + 2) + 4 * 1032 + 32 * (8 + 4)
    again = atom_weight.from_words(
        tiles.codes, tiles.scale, tiles.scheme, 32, 1032, None, tiles.steps, tiles.unit
    )
    assert again.steps is tiles.steps
    assert atom_weight.atom_tiles(weight(SCHEME)).steps is None


def test_bytes_are_half_a_weight_and_the_scales() -> None:
    tiles = atom_weight.atom_tiles(weight(SCHEME, k=1032))
    groups = 8 + 3
    assert tiles.nbytes == 32 * groups * (64 + 2) + 4 * 1032


def test_what_has_no_such_form_keeps_its_own() -> None:
    assert fits(weight(SCHEME))
    for scheme in (replace(SCHEME, group_size=64), replace(SCHEME, weight_bits=3)):
        assert not fits(weight(scheme))
        with pytest.raises(ValueError, match="no Hopper form for"):
            atom_weight.atom_tiles(weight(scheme))
    assert not fits(weight(SCHEME, n=40))
    assert not isinstance(weight(SCHEME).packed(), AtomTiles)  # no GPU here


def test_weight_only_products_share_the_tensors() -> None:
    tiles = atom_weight.atom_tiles(weight(SCHEME))
    other = tiles.with_activations(16)
    assert isinstance(other, AtomTiles) and other.words is tiles.words
    assert other.scheme.activation_bits == 16

"""What devices in tensor parallel take of weights: codes as they are, of every form."""

from __future__ import annotations

import pytest
import torch

from llmpq.kernels.atom.reference import rounded
from llmpq.kernels.formats.atom_scheme import W8A8, AtomScheme
from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights import quantized_weight
from llmpq.kernels.weights.atom_weight import AtomWeight, atom_tiles, quantize_atom
from llmpq.kernels.weights.codebook_weight import codebook_weight
from llmpq.kernels.weights.fp8_weight import fp8_weight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member, PartSlice
from llmpq.precision import WeightScheme
from llmpq.runtime.weights.cut_parts import cut_pieces, cut_tensor
from llmpq.runtime.weights.sources import CheckpointSource, RandomSource

pytestmark = pytest.mark.cpu
N, K = 80, 320
RUNS = ((0, 5), (16, 37), (64, 80))
DTYPE = torch.float32


def quantized(bits: int, group: int | None, *, symmetric: bool, layout: Layout | None) -> Weight:
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric)
    generator = torch.Generator().manual_seed(bits)
    w_NK = torch.randn(N, K, generator=generator)
    return quantize_weight(w_NK, scheme, dtype=DTYPE, layout=layout)


def fp8(block: tuple[int, int] | None) -> Weight:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
    shape = (N, 1) if block is None else (-(-N // block[0]), -(-K // block[1]))
    return fp8_weight(codes, torch.rand(shape, generator=generator) + 0.5, block, DTYPE)


def codebook(group: int) -> Weight:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(N, K // group, generator=generator) + 0.5).to(torch.float16)
    factor = torch.rand(N, generator=generator)
    return codebook_weight(codes, scale, codebook=Codebook.NF4, group_size=group, factor=factor)


WEIGHTS = {
    **{
        f"{bits} bits, group {group}, {layout}": (bits, group, layout)
        for bits in (3, 4, 8)
        for group, layout in ((32, None), (64, Layout.ROWS), (128, None), (128, Layout.FRAGMENT),
                              (128, Layout.ROWS), (None, Layout.ROWS))
    },
    "fp8 rows": None,
    "fp8 blocks": (64, 64),
    "fp8 blocks of 128": (128, 128),
    "nf4 32": 32,
    "nf4 64": 64,
}  # fmt: skip


def made(name: str, *, symmetric: bool) -> Weight:
    how = WEIGHTS[name]
    if isinstance(how, tuple) and len(how) == 3:
        return quantized(how[0], how[1], symmetric=symmetric, layout=how[2])
    return codebook(how) if isinstance(how, int) else fp8(how)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_and_inputs_keep_their_values(name, symmetric):
    weight = made(name, symmetric=symmetric)
    whole = weight.dequantize(DTYPE)
    rows = torch.cat([torch.arange(*run) for run in RUNS])
    assert torch.equal(weight.of_rows(RUNS).dequantize(DTYPE), whole[rows])
    pieces = [weight.of_columns(*run) for run in ((0, 128), (128, 192), (192, 320))]
    assert [piece.in_features for piece in pieces] == [128, 64, 128]
    assert torch.equal(torch.cat([p.dequantize(DTYPE) for p in pieces], 1), whole)
    # The sum of their products is the whole's.
    x_MK = torch.randn(3, K, generator=torch.Generator().manual_seed(5))
    starts = (0, 128, 192, 320)
    parts = [
        piece.to("cpu").matmul(x_MK[:, start:stop].contiguous())
        for piece, start, stop in zip(pieces, starts, starts[1:], strict=False)
    ]
    assert torch.allclose(sum(parts), x_MK @ whole.t(), rtol=1e-4, atol=1e-3)


ATOM = {
    "w8a8": W8A8,
    "w8a8, a scale of 64": AtomScheme(weight_bits=8, activation_bits=8, group_size=64),
    "w4a4": AtomScheme(group_size=128),
    "w4a4, outliers": AtomScheme(group_size=64, outliers=24),
    "w4a4, signed": AtomScheme(group_size=32, outliers=8, signed_scale=True, weight_clip=None),
    "w4a4, rotated": AtomScheme(group_size=128, outliers=40, rotation=True),
    "w4a4, whole scales": AtomScheme(group_size=128, outliers=8, integer_scales=True),
    "w3a3": AtomScheme(weight_bits=3, activation_bits=3, outliers=16),
    "e2m1": AtomScheme(number="e2m1", group_size=32),
}
ATOM_CUTS = ((0, 128), (128, 256), (256, 320))


def atom(name: str, *, ordered: bool = False) -> tuple[AtomWeight, torch.Tensor]:
    """Return a weight and inputs; `ordered`: its inputs in an order of their own."""
    generator = torch.Generator().manual_seed(len(name))
    w_NK, x_MK = (torch.randn(rows, K, generator=generator) for rows in (N, 4))
    order = torch.randperm(K, generator=generator) if ordered else None
    return quantize_atom(w_NK, ATOM[name], dtype=DTYPE, index_K=order), x_MK


@pytest.mark.parametrize("name", ATOM)
def test_rounded_inputs_of_parts_are_rounded_by_themselves(name):
    """Codes are the whole's; a scale of inputs is that of the device's own."""
    weight, x_MK = atom(name)
    whole = weight.dequantize(DTYPE)
    rows = torch.cat([torch.arange(*run) for run in RUNS])
    assert torch.equal(weight.of_rows(RUNS).dequantize(DTYPE), whole[rows])
    for start, stop in ATOM_CUTS:
        piece = weight.of_columns(start, stop)
        # A rotation's sums are of other sizes of matrices.
        near = {"rtol": 1e-5, "atol": 1e-6} if weight.scheme.rotation else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(piece.dequantize(DTYPE), whole[:, start:stop], **near)
        own = rounded(x_MK[:, start:stop], piece.scheme)
        expected = own @ whole[:, start:stop].t()
        assert torch.allclose(piece.matmul(x_MK[:, start:stop]), expected, rtol=1e-4, atol=1e-3)
        if weight.scheme.group_size is not None and not weight.scheme.outliers:
            # Groups are whole, so their scales are those of one device.
            alone = rounded(x_MK, weight.scheme)[:, start:stop]
            assert torch.equal(own, alone)


@pytest.mark.parametrize("name", [name for name in ATOM if name != "w4a4, rotated"])
def test_sorted_inputs_are_cut_by_the_channels_they_are(name):
    """Heads of devices lie in all groups: codes of others' channels are zeros."""
    weight, x_MK = atom(name, ordered=True)
    whole = weight.dequantize(DTYPE)
    assert weight.index_K is not None
    summed = torch.zeros(len(x_MK), N)
    for start, stop in ((0, 96), (96, 100), (100, 320)):
        piece = weight.of_columns(start, stop)
        assert piece.in_features == stop - start
        assert torch.equal(piece.dequantize(DTYPE), whole[:, start:stop])
        # As on one device whose other channels are zeros.
        alone = torch.zeros_like(x_MK)
        alone[:, start:stop] = x_MK[:, start:stop]
        got = piece.matmul(x_MK[:, start:stop].contiguous())
        assert torch.allclose(got, weight.matmul(alone), rtol=1e-5, atol=1e-5)
        summed += x_MK[:, start:stop] @ piece.dequantize(DTYPE).t()
    assert torch.allclose(summed, x_MK @ whole.t(), rtol=1e-4, atol=1e-3)


def test_a_part_of_the_words_of_hopper_is_the_plain_one(monkeypatch):
    """What a device computes with is packed from its part."""
    monkeypatch.setattr(quantized_weight, "best_layout", lambda *_: Layout.FRAGMENT)
    scheme = AtomScheme(group_size=128, outliers=40, signed_scale=True)
    w_NK = torch.randn(64, K, generator=torch.Generator().manual_seed(6))
    order = torch.randperm(K, generator=torch.Generator().manual_seed(7))
    x_MK = torch.randn(3, 192, generator=torch.Generator().manual_seed(8)).half()
    for index in (None, order):
        weight = quantize_atom(w_NK, scheme, dtype=torch.float16, index_K=index)
        piece = weight.of_columns(128, 320)
        tiles = atom_tiles(piece)
        assert torch.equal(tiles.dequantize(DTYPE), piece.dequantize(DTYPE))
        assert torch.equal(tiles.matmul(x_MK), piece.matmul(x_MK))
        assert tiles.as_plain().in_features == 192


@pytest.mark.parametrize(
    ("name", "ordered", "cut", "said"),
    [
        ("w4a4, outliers", False, (300, 320), "are all among its 24 outliers"),
        ("w4a4, rotated", False, (64, 320), "input 64 .* inside 128 that are rotated together"),
        ("w4a4, rotated", True, (0, 128), "sorted and rotated is not cut along its inputs"),
        ("w4a4", False, (40, 320), "input 40 of a linear lies inside a group of 128"),
    ],
)
def test_cuts_that_rounded_inputs_do_not_allow_are_refused(name, ordered, cut, said):
    with pytest.raises(ValueError, match=said):
        atom(name, ordered=ordered)[0].of_columns(*cut)


def test_a_cut_inside_a_group_that_no_kernel_reads_is_refused():
    with pytest.raises(ValueError, match="input 40 of a linear lies inside a group of 128"):
        quantized(4, 128, symmetric=True, layout=None).of_columns(40, 320)


def test_stacked_pieces_are_cut_where_they_lie():
    pieces = [torch.arange(12.0).view(4, 3), torch.arange(12.0, 30.0).view(6, 3)]
    whole = torch.cat(pieces)
    cut = PartSlice(rows=((1, 3), (3, 7), (9, 10)), columns=(1, 3))
    assert torch.equal(torch.cat(cut_pieces(pieces, cut)), whole[[1, 2, 3, 4, 5, 6, 9], 1:3])
    assert not cut_tensor(whole, PartSlice(zeros=True)).any()


@pytest.mark.usefixtures("with_new_parts")
def test_members_read_what_they_hold(family_kind, models):
    """Every part, beside every other: what a device reads is its part of the whole, and no more."""
    directory = models.directory(family_kind)
    spec = ModelSpec.from_directory(directory)
    whole, random = CheckpointSource(directory, spec), RandomSource(spec)
    for index in range(3):
        member = Member(spec=spec, shares=(2, 1, 1), index=index)
        source, made_up = CheckpointSource(directory, spec), RandomSource(spec)
        source.take_member(member)
        made_up.take_member(member)
        for layer in range(spec.num_layers):
            cuts = member.cuts(layer)
            for got, all_of_it in (
                (source.layer(layer, DTYPE), whole.layer(layer, DTYPE)),
                (made_up.layer(layer, DTYPE), random.layer(layer, DTYPE)),
            ):
                assert got.keys() == all_of_it.keys()
                for name, part in got.items():
                    expected = all_of_it[name]
                    expected = cut_tensor(expected, cuts[name]) if name in cuts else expected
                    assert torch.equal(part, expected), name


def test_only_the_pages_of_a_device_are_read(tmp_path, monkeypatch):
    """What is cut off a mapped tensor is never copied."""
    from safetensors.torch import save_file

    wide = torch.arange(4096.0 * 256).view(4096, 256)
    save_file({"w": wide}, tmp_path / "model.safetensors")
    source = CheckpointSource.__new__(CheckpointSource)
    source.directory, source._open, source.file_of = tmp_path, {}, {"w": "model.safetensors"}
    copied = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: copied.append(empty(*a, **k)) or copied[-1])
    got = source._stack(("w",), (4096, 256), torch.float32, PartSlice(rows=((1024, 3072),)))
    assert torch.equal(got, wide[1024:3072]) and not copied, "a run of rows is mapped"
    got = source._stack(("w",), (4096, 256), torch.float32, PartSlice(columns=(64, 128)))
    assert torch.equal(got, wide[:, 64:128]) and [t.numel() for t in copied] == [4096 * 64]

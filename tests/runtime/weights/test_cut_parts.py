"""What devices in tensor parallel take of weights: codes as they are, of every form."""

from __future__ import annotations

import pytest
import torch

from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights.codebook_weight import codebook_weight
from llmpq.kernels.weights.fp8_weight import fp8_weight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.kernels.weights.weight import Weight
from llmpq.model_spec import ModelSpec
from llmpq.precision import WeightScheme
from llmpq.runtime.weights.cut_parts import cut_pieces, cut_tensor
from llmpq.runtime.weights.sources import CheckpointSource, RandomSource
from llmpq.tensor_parallel import Member, PartSlice

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

"""GPTQ, AWQ and compressed-tensors weights come in and go out bit for bit."""

import itertools

import pytest
import torch

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights import interchange
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from reference.interchange import to_awq, to_compressed_tensors, to_gptq

pytestmark = pytest.mark.cpu


def _weight(n, k, bits, symmetric, group=128, layout=Layout.FRAGMENT):
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=False)
    return quantize_weight(torch.randn(n, k), scheme, dtype=torch.float16, layout=layout)


def _same(a, b):
    assert torch.equal(a.codes(), b.codes())
    assert torch.equal(a.scale_NG(), b.scale_NG()) and torch.equal(a.zero_NG(), b.zero_NG())
    assert (a.bits, a.group_size, a.symmetric) == (b.bits, b.group_size, b.symmetric)


@pytest.mark.parametrize("bits,symmetric", itertools.product((3, 4, 8), (True, False)))
@pytest.mark.parametrize("group", [128, None])
def test_round_trips(bits, symmetric, group):
    q = _weight(96, 256, bits, symmetric, group)
    for v2 in (False, True):
        tensors = to_gptq(q, v2=v2)
        _same(interchange.from_gptq(tensors, bits=bits, v2=v2, layout=Layout.FRAGMENT), q)
    _same(interchange.from_compressed_tensors(to_compressed_tensors(q), bits=bits), q)
    if bits == 4:
        _same(interchange.from_awq(to_awq(q)), q)


def test_gptq_words_as_published():
    """qweight word [i, n], bits 4j: the code of k = 8i + j; qzeros: zero - 1 of column 8i + j."""
    q = _weight(32, 128, 4, False)
    tensors, codes, zero = to_gptq(q), q.codes(), q.zero_NG()
    assert tensors["qweight"].shape == (16, 32) and tensors["qzeros"].shape == (1, 4)
    for i, j, n in itertools.product((0, 7, 15), range(8), (0, 31)):
        assert tensors["qweight"][i, n] >> 4 * j & 15 == codes[n, 8 * i + j]
    for i, j in itertools.product(range(4), range(8)):
        assert tensors["qzeros"][0, i] >> 4 * j & 15 == (int(zero[8 * i + j, 0]) - 1) % 16


def test_gptq_3_bits_straddle_words_as_published():
    """32 codes in 3 words: code 10 splits 2 + 1 bits, code 21 splits 1 + 2."""
    codes = torch.randint(0, 8, (1, 32), dtype=torch.uint8)
    c = [int(v) for v in codes[0]]
    words = [int(w) & 0xFFFFFFFF for w in interchange.pack_stream(codes, 3)[0]]
    expected = [
        sum(c[i] << 3 * i for i in range(10)) | (c[10] & 3) << 30,
        c[10] >> 2 | sum(c[11 + i] << 3 * i + 1 for i in range(10)) | (c[21] & 1) << 31,
        c[21] >> 1 | sum(c[22 + i] << 3 * i + 2 for i in range(10)),
    ]
    assert words == expected


def test_awq_words_as_published():
    q = _weight(32, 128, 4, False)
    tensors, codes = to_awq(q), q.codes()
    assert tensors["qweight"].shape == (128, 4)
    for k, word, (i, column) in itertools.product(
        (0, 100), range(4), enumerate((0, 2, 4, 6, 1, 3, 5, 7))
    ):
        assert tensors["qweight"][k, word] >> 4 * i & 15 == codes[8 * word + column, k]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compressed_tensors_agrees_with_its_own_packer(bits):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    q = _weight(48, 200, bits, False)
    ours = to_compressed_tensors(q)
    signed = (q.codes()[:, :200].int() - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(ours["weight_packed"], pack_to_int32(signed, bits))
    zero = (q.zero_NG().int() - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(ours["weight_zero_point"], pack_to_int32(zero, bits, packed_dim=0))
    assert interchange.from_compressed_tensors(ours, bits=bits).in_features == 200


def test_what_cannot_be_converted_is_refused():
    q = _weight(32, 256, 4, False)
    tensors = to_gptq(q)
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    with pytest.raises(ValueError, match="desc_act=False"):
        interchange.from_gptq(tensors, bits=4)
    tensors = to_gptq(q)
    tensors["scales"] = tensors["scales"].repeat(3, 1)
    with pytest.raises(ValueError, match="groups of 128"):
        interchange.from_gptq(tensors, bits=4)
    with pytest.raises(ValueError, match="expected 4 bits"):
        to_awq(_weight(32, 128, 8, False))

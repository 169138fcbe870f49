"""Low-bit KV: where packed keys end, and what a block holds."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import (
    KVFormat,
    pack_keys,
    pack_values,
    quantize,
    to_thread_order,
    unpack_keys,
    unpack_values,
)
from llmpq.kernels.kv.storage import allocate_layer
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import (
    BLOCK_TOKENS,
    HOLDBACK_TOKENS,
    RING_TOKENS,
    kv_cache_bytes,
    packed_blocks,
    packed_end,
)

pytestmark = pytest.mark.cpu
LOW_BIT = [KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2]


def test_the_newest_tokens_are_never_packed_and_the_ring_holds_the_rest():
    for position in range(3000):
        line = packed_end(position)
        assert line % BLOCK_TOKENS == 0
        assert line == 0 or position - line >= HOLDBACK_TOKENS
        for q_len in range(1, HOLDBACK_TOKENS + 2):
            assert position + q_len - line <= RING_TOKENS
        assert packed_blocks(position + 1) * BLOCK_TOKENS == line


@pytest.mark.parametrize("kv", LOW_BIT)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_allocated_bytes_are_the_planners(kv, head_dim):
    fmt = KVFormat(precision=kv, head_dim=head_dim)
    shape = {"kv_heads": 2, "head_dim": head_dim}
    for max_len in (1, 144, 145, 1000):
        want = kv_cache_bytes(kv, slots=3, max_len=max_len, dtype_bytes=2, **shape)
        layer = allocate_layer(
            fmt,
            pages=3 * packed_blocks(max_len),
            slots=3,
            kv_heads=2,
            dtype=torch.bfloat16,
            device="cpu",
        )
        assert layer.nbytes == want


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("channels", [32, 64, 96, 128])
def test_packing_inverts(bits, channels):
    torch.manual_seed(0)
    codes = torch.randint(0, 2**bits, (2, 3, 128, channels), dtype=torch.uint8)
    for pack, unpack in ((pack_keys, unpack_keys), (pack_values, unpack_values)):
        words = pack(codes, bits)
        assert words.shape == (2, 3, 128 * channels * bits // 32)
        assert torch.equal(unpack(words, bits, channels), codes)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_drawing_is_the_layout(bits):
    """One code at a time is found where the docstring of kv_formats says."""
    channels, planes = 128, 8 // bits
    torch.manual_seed(1)
    for _ in range(20):
        token, channel = (int(torch.randint(128, ())) for _ in range(2))
        codes = torch.zeros(128, channels, dtype=torch.uint8)
        codes[token, channel] = 2**bits - 1
        tile, in_tile = divmod(token, 64)
        # keys: token 16m + 2g + r, channel t*D/4 + 2o + h
        m, g, r = in_tile // 16, in_tile % 16 // 2, in_tile % 2
        assert to_thread_order(torch.arange(128))[tile * 64 + 8 * g + 2 * m + r] == token
        t, octet, h = channel // 32, channel % 32 // 2, channel % 2
        key = (tile, 4, channels // 8, m, octet, g, t, h, r)
        # values: channel g*D/8 + 2m + r, token 16m + 2(2t + h) + r of octet 2m + r
        octet, t, h = 2 * m + r, g // 2, g % 2
        g, m, r = channel // 16, channel % 16 // 2, channel % 2
        value = (tile, channels // 16, 8, m, octet, g, t, h, r)
        for pack, (tile, rows, octets, m, octet, g, t, h, r) in (
            (pack_keys, key),
            (pack_values, value),
        ):
            word, plane = divmod(octet, planes)
            word += m * (octets // planes)
            address = tile * rows * octets // planes * 32
            address += word // 4 * 128 + (4 * g + t) * 4 + word % 4
            got = pack(codes, bits).view(torch.uint8).reshape(-1, 4)
            want = torch.zeros_like(got)
            want[address, 2 * h + r] = (2**bits - 1) << (plane * bits)
            assert torch.equal(got, want)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_error_is_half_a_step(bits):
    torch.manual_seed(2)
    x = torch.randn(7, 64) * torch.logspace(-3, 2, 7)[:, None]
    codes, scale, zero = quantize(x, bits, -1)
    back = codes.float() * scale.float() + zero.float()
    slack = scale.float() / 2 + x.abs().amax(-1, keepdim=True) * 2**-10
    assert ((back - x).abs() <= slack).all()
    assert not ((back + scale.float() - x).abs() <= slack).all()
    assert torch.equal(
        quantize(torch.full((1, 4), 3.0), bits, -1)[2], torch.full((1, 1), 3.0).half()
    )


def test_bad_formats_are_refused():
    with pytest.raises(ValueError, match="kv16"):
        KVFormat(precision=KVPrecision.KV16, head_dim=128)

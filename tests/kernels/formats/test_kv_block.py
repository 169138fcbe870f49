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
from llmpq.kernels.kv.reference import pack_block, unpack_key_block, unpack_value_block
from llmpq.kernels.kv.storage import allocate_layer
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import (
    BLOCK_TOKENS,
    HOLDBACK_TOKENS,
    RING_TOKENS,
    block_bytes,
    kv_cache_bytes,
    packed_blocks,
    packed_end,
)

pytestmark = pytest.mark.cpu
LOW_BIT = [kv for kv in KVPrecision if kv is not KVPrecision.KV16]


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


def test_a_token_takes_the_bytes_of_keys_and_of_values():
    """Llama-3.1-8B's layer, by hand: 8 heads of 128; a token's share of a block of 128."""
    shape = {"kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
    scales = 8 * (4 * 128 + 4 * 128)
    for kv, keys, values in (("kv8v4", 128, 64), ("kv4v2", 64, 32), ("kv8v2", 128, 32)):
        want = 8 * 128 * (keys + values) + scales
        assert block_bytes(KVPrecision(kv), **shape) == want
    whole = 8 * 128 * (256 + 128) + scales // 2  # keys as they are have no scales
    assert block_bytes(KVPrecision.KV16V8, **shape) == whole


@pytest.mark.parametrize("kv", ["kv8v4", "kv4v2", "kv16v4"])
def test_keys_and_values_are_rounded_to_their_own_bits(kv):
    fmt = KVFormat(precision=KVPrecision(kv), head_dim=40)
    k, v = torch.randn(2, 1, 2, 128, 40, generator=torch.Generator().manual_seed(0))
    layer = allocate_layer(fmt, pages=1, slots=1, kv_heads=2, dtype=torch.float32, device="cpu")
    pools = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
    for pool, block in zip(pools, pack_block(fmt, k, v), strict=True):
        assert pool.shape == block.shape and pool.dtype == block.dtype
        pool.copy_(block)
    page = torch.tensor([0])
    for unpack, x, bits, dim in (
        (unpack_key_block, k, fmt.key_bits, -2), (unpack_value_block, v, fmt.value_bits, -1)
    ):  # fmt: skip
        got = unpack(fmt, layer, page, torch.float64)
        if bits == 16:
            assert torch.equal(got.float(), x)
            continue
        step = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / (2**bits - 1)
        off = (got - x).abs() / step
        assert off.max() < 0.51 and off.mean() > 0.2


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

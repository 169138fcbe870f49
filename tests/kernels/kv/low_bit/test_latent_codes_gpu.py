"""Attention over packed latents on a GPU, against the kernel for heads of any size and the twin."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.precision import KVPrecision
from reference.kv_history import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
P = KVPrecision


@pytest.mark.parametrize("kv", [P.KV8, P.KV4, P.KV2], ids=lambda p: p.value)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (16, 3), (40, 1)])
def test_latents(kv, dtype, heads, q_len):
    from llmpq.kernels.kv.low_bit import any_size_attend, latent_codes

    torch.manual_seed(0)
    fmt = KVFormat(precision=kv, head_dim=576)
    lengths = torch.tensor([900, 129, 20, 512, 1331])
    cache = QuantizedKVCache(
        fmt, num_layers=1, kv_heads=1, slots=5, max_len=1400, dtype=dtype, device="cuda"
    )
    slots, zero = torch.arange(5, device="cuda"), torch.zeros(5, dtype=torch.long, device="cuda")
    counts = lengths.cuda()
    told = {"q_len": 1331, "fresh": True, "max_end": 1331}
    k = torch.randn(5, 1331, 1, 576, device="cuda").to(dtype)
    cache.append(cache.plan(slots, zero, counts, **told), 0, k, k)
    new = torch.full_like(counts, q_len)
    plan = cache.plan(slots, counts, new, q_len=q_len, fresh=False, max_end=1331 + q_len)
    k = torch.randn(5, q_len, 1, 576, device="cuda").to(dtype)
    cache.append(plan, 0, k, k)
    q = 2 * torch.randn(5, q_len, heads, 576, device="cuda").to(dtype)
    given = (fmt, cache.layers[0], cache.table_SN, q, plan.device_rows)
    own = {"max_end": plan.max_end, "scale": 576**-0.5}
    assert latent_codes.takes(fmt, cache.layers[0], q)
    want = any_size_attend.attend_any_size(*given, **own)
    for splits in (None, 1, 4):
        got = latent_codes.attend_latent_codes(*given, **own, splits=splits)
        assert relative_error(got, want) < 8e-3

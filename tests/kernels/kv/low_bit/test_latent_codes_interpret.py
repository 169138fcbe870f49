"""Latents of few bits by their own kernel in the interpreter, against the plain-torch cache."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.precision import KVPrecision
from reference.kv_history import relative_error

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from triton import language as tl  # noqa: E402

from llmpq.kernels.kv.low_bit import latent_codes  # noqa: E402

pytestmark = [pytest.mark.interpret, pytest.mark.thin(2)]
P = KVPrecision
STEPS = [
    [(0, 269), (0, 20), (0, 141)],
    [(269, 1), (20, 1), (141, 1)],
    [(270, 4), (21, 2), (142, 4)],
]
"""Of three requests: a prompt, a token, a verify that completes blocks at 272 and 144."""


def run(own, fmt, *, heads, dtype, splits, monkeypatch):
    """Return the outputs of a cache's steps; the twin computes in float32."""
    kind = dtype if own else torch.float32
    monkeypatch.setattr(QuantizedKVCache, "gathers", property(lambda self: own))
    torch.manual_seed(fmt.head_dim)
    cache = QuantizedKVCache(
        fmt, num_layers=1, kv_heads=1, slots=3, max_len=400, dtype=kind, exact_prompt=False
    )
    outs, ran = [], []
    whole = latent_codes.attend_latent_codes

    def counted(*given, **options):
        ran.append(given[3].shape)
        return whole(*given, **options, splits=splits)

    monkeypatch.setattr(latent_codes, "attend_latent_codes", counted)
    for step in STEPS:
        start, count = (torch.tensor(x) for x in zip(*step, strict=True))
        rows, q_len = (torch.tensor([2, 0, 1]), start, count), int(count.max())
        q = 3 * torch.randn(3, q_len, heads, fmt.head_dim).to(dtype).to(kind)
        k = torch.randn(3, q_len, 1, fmt.head_dim).to(dtype).to(kind)
        plan = cache.plan(*rows, q_len=q_len, fresh=False, max_end=int((start + count).max()))
        out = cache.run(plan, 0, q, k, k, scale=fmt.head_dim**-0.5)
        outs += [out[i, :n].clone() for i, n in enumerate(count.tolist())]
    monkeypatch.setattr(latent_codes, "attend_latent_codes", whole)
    assert len(ran) == 2 * own
    return outs


@pytest.mark.thin
@pytest.mark.parametrize("kv", [P.KV8, P.KV4, P.KV2], ids=lambda p: p.value)
@pytest.mark.parametrize("dim", [320, 576])
@pytest.mark.parametrize("splits", [1, 3])
def test_latents(monkeypatch, kv, dim, splits):
    fmt = KVFormat(precision=kv, head_dim=dim)
    told = {"heads": 6, "dtype": torch.float16, "splits": splits, "monkeypatch": monkeypatch}
    want, got = run(False, fmt, **told), run(True, fmt, **told)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 2e-3


@pytest.mark.parametrize("width", [2, 4])
def test_either_order_of_columns(monkeypatch, width):
    monkeypatch.setattr(latent_codes, "WORD_K_WIDTH", width)
    fmt = KVFormat(precision=P.KV4, head_dim=320)
    told = {"heads": 3, "dtype": torch.bfloat16, "splits": 2, "monkeypatch": monkeypatch}
    want, got = run(False, fmt, **told), run(True, fmt, **told)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 8e-3


def test_a_fault_is_seen(monkeypatch):
    """Planted: channels of one order with codes of the other."""
    fmt = KVFormat(precision=P.KV4, head_dim=320)
    told = {"heads": 3, "dtype": torch.float16, "splits": 1, "monkeypatch": monkeypatch}
    want = run(False, fmt, **told)
    channels = latent_codes.key_channel
    monkeypatch.setattr(latent_codes, "key_channel", _rolled)
    got = run(True, fmt, **told)
    monkeypatch.setattr(latent_codes, "key_channel", channels)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) > 0.05


@triton.jit
def _rolled(i, C, WIDE):
    t = tl.arange(0, 4)[:, None]
    return t * (C // 4) + WIDE // 4 * i + (tl.arange(0, WIDE // 4)[None, :] + 2) % 16

"""Packed caches of heads of any size in the interpreter, against the plain-torch cache."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.precision import KVPrecision
from reference.kv_history import relative_error

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from llmpq.kernels.kv.low_bit import any_size_attend  # noqa: E402

pytestmark = pytest.mark.interpret
P = KVPrecision
STEPS = [
    [(0, 269), (0, 20), (0, 140)],
    [(269, 1), (20, 1), (140, 1)],
    [(270, 4), (21, 2), (141, 4)],
]
"""Of three requests: a prompt, a token, a verify that completes blocks at 272 and 144."""


def run(gathers, fmt, steps, monkeypatch, *, heads, groups, dtype, options):
    """Return the outputs of a cache's steps, and the cache; the twin computes in float32."""
    kind = dtype if gathers else torch.float32
    monkeypatch.setattr(QuantizedKVCache, "gathers", property(lambda self: gathers))
    torch.manual_seed(fmt.head_dim)
    cache = QuantizedKVCache(
        fmt, num_layers=1, kv_heads=groups, slots=3, max_len=400, dtype=kind, exact_prompt=False
    )
    outs = []
    for step in steps:
        start, count = (torch.tensor(x) for x in zip(*step, strict=True))
        rows, q_len = (torch.tensor([2, 0, 1]), start, count), int(count.max())
        q = 3 * torch.randn(3, q_len, heads, fmt.head_dim).to(dtype).to(kind)
        k, v = torch.randn(2, 3, q_len, groups, fmt.head_dim).to(dtype).to(kind)
        plan = cache.plan(*rows, q_len=q_len, fresh=False, max_end=int((start + count).max()))
        out = cache.run(plan, 0, q, k, v, scale=fmt.head_dim**-0.5, **options)
        outs += [out[i, :n].clone() for i, n in enumerate(count.tolist())]
    return outs, cache.layers[0]


def check(monkeypatch, fmt, *, heads=4, groups=2, dtype=torch.float32, splits=None, **options):
    if splits is not None:
        monkeypatch.setattr(any_size_attend, "choose_splits", lambda *_, **__: splits)
    shape = {"heads": heads, "groups": groups, "dtype": dtype, "options": options}
    want, twin = run(False, fmt, STEPS, monkeypatch, **shape)
    got, layer = run(True, fmt, STEPS, monkeypatch, **shape)
    bound = 2e-6 if dtype is torch.float32 else 2e-3
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < bound
    for name, part in vars(layer).items():
        assert torch.equal(part.to(vars(twin)[name].dtype), vars(twin)[name]), name
    return got


@pytest.mark.thin
@pytest.mark.parametrize("kv", [P.KV8, P.KV4, P.KV2], ids=lambda p: p.value)
@pytest.mark.parametrize("key_group", [128, 64, 32, None])
def test_every_format(monkeypatch, kv, key_group):
    check(monkeypatch, KVFormat(precision=kv, head_dim=48, key_group=key_group))


@pytest.mark.parametrize("dim", [8, 80, 96, 192, pytest.param(576, marks=pytest.mark.seldom)])
def test_sizes(monkeypatch, dim):
    fmt = KVFormat(precision=P.KV4, head_dim=dim)
    check(monkeypatch, fmt, heads=2, groups=1, dtype=torch.float16, splits=2)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"rule": ScoreRule(window=37)},
        {"rule": ScoreRule(window=150, cap=3.0, sinks_H=torch.linspace(-2, 4, 6))},
        {"alibi_slopes_H": torch.linspace(0.01, 0.1, 6)},
    ],
    ids=["window", "all", "alibi"],
)
def test_rules_and_slopes(monkeypatch, options, splits):
    fmt = KVFormat(precision=P.KV4, head_dim=24)
    check(monkeypatch, fmt, heads=6, groups=2, splits=splits, **options)


def test_a_fault_is_seen(monkeypatch):
    """Planted: sinks left out."""
    fmt = KVFormat(precision=P.KV8, head_dim=24)
    rule = ScoreRule(sinks_H=torch.linspace(-2, 4, 4))
    got, _ = run(
        True, fmt, STEPS, monkeypatch, heads=4, groups=2, dtype=torch.float32,
        options={"rule": EVERYTHING},
    )  # fmt: skip
    want, _ = run(
        False, fmt, STEPS, monkeypatch, heads=4, groups=2, dtype=torch.float32,
        options={"rule": rule},
    )  # fmt: skip
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) > 0.02

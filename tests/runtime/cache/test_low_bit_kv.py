"""The low-bit cache behind the runtime's protocol, on a CPU."""

from dataclasses import fields

import pytest
import torch

from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.dual_kv import DualKV
from llmpq.runtime.cache.kv_by_precision import make_kv_cache
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.runtime.step import Step
from llmpq.sizes.kv_format import kv_cache_bytes
from reference.kv_history import attend_from_history, relative_error
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
LOW_BIT = [KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2]


def spec_of(tiny_models, kind="llama"):
    return ModelSpec.from_directory(tiny_models.directory(kind))


@pytest.mark.parametrize("kv", [KVPrecision.KV16, *LOW_BIT])
def test_bytes_are_the_planners(tiny_models, kv):
    spec = spec_of(tiny_models)
    cache = make_kv_cache(
        spec, kv, num_layers=3, slots=2, max_len=400, dtype=torch.bfloat16, device="cpu"
    )
    one_layer = kv_cache_bytes(
        kv, slots=2, max_len=400, kv_heads=spec.kv_heads, head_dim=spec.head_dim, dtype_bytes=2
    )
    assert cache.nbytes == 3 * one_layer
    assert isinstance(cache, PlainKVCache) == (kv is KVPrecision.KV16)


@pytest.mark.parametrize("exact_prompt", [True, False])
def test_a_prompt_sees_itself_in_16_bits_or_as_decoding_would(tiny_models, exact_prompt):
    """Alone or beside a decoding request, the prompt's outputs are the same."""
    spec = spec_of(tiny_models)
    heads, groups, dim = spec.heads, spec.kv_heads, spec.head_dim
    cache = LowBitKV(
        spec,
        KVPrecision.KV2,
        num_layers=1,
        slots=2,
        max_len=400,
        dtype=torch.float32,
        exact_prompt=exact_prompt,
    )
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 300, heads, dim), *torch.randn(2, 2, 300, groups, dim)
    alone = cache.attend(0, q[:1], k[:1], v[:1], Step.of([0], [0], [300]), scale=0.3)
    beside = cache.attend(0, q, k, v, Step.of([0, 1], [0, 5], [300, 1]), scale=0.3)
    assert relative_error(beside[:1], alone) < 1e-5
    fmt = cache.cache.fmt
    want = attend_from_history(
        fmt, q[0], k[0], v[0], start=0, scale=0.3, quantised=not exact_prompt
    )
    assert relative_error(alone[0], want) < 1e-5
    other = attend_from_history(fmt, q[0], k[0], v[0], start=0, scale=0.3, quantised=exact_prompt)
    assert relative_error(alone[0], other) > 1e-3


def test_tokens_beyond_the_slot_are_refused(tiny_models):
    cache = LowBitKV(
        spec_of(tiny_models),
        KVPrecision.KV4,
        num_layers=1,
        slots=1,
        max_len=10,
        dtype=torch.float32,
    )
    with pytest.raises(ValueError, match="holds 10 a request"):
        cache.cache.plan(*torch.tensor([[0], [8], [4]]), q_len=4, fresh=False, max_end=12)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_greedy_tokens_survive_8_bits(tiny_models, kind):
    """A whole model decodes over a low-bit cache; at 8 bits its logits stay close to kv16's."""
    pipeline = ReferencePipeline.from_directory(tiny_models.directory(kind))
    spec = pipeline.spec
    torch.manual_seed(1)
    length = min(200, spec.max_positions - 4)
    tokens = torch.randint(spec.vocab, (1, length))
    logits = {}
    for kv in (KVPrecision.KV16, KVPrecision.KV8, KVPrecision.KV2):
        cache = make_kv_cache(
            spec,
            kv,
            num_layers=spec.num_layers,
            slots=1,
            max_len=length + 2,
            dtype=torch.float32,
            device="cpu",
        )
        pipeline.logits(tokens[:, :-1], Step.of([0], [0], [length - 1]), [cache])
        logits[kv] = pipeline.logits(tokens[:, -1:], Step.of([0], [length - 1], [1]), [cache])
    assert relative_error(logits[KVPrecision.KV8], logits[KVPrecision.KV16]) < 0.01
    if length > 145:
        assert not torch.equal(logits[KVPrecision.KV2], logits[KVPrecision.KV16])


def dual_caches(spec, max_len=400):
    """A 16-bit cache with a 4-bit copy, one layer, two slots."""
    shape = {"num_layers": 1, "slots": 2, "max_len": max_len, "dtype": torch.float32}
    inner = make_kv_cache(spec, KVPrecision.KV16, **shape, device="cpu")
    return DualKV(inner, LowBitKV(spec, KVPrecision.KV4, **shape))


@pytest.mark.parametrize("verified", [True, False])
def test_a_dual_cache_answers_in_16_bits_and_keeps_its_copy_fresh(tiny_models, verified):
    """Drafts on the copy leave no trace once verified; unverified (planted bug) they do."""
    spec = spec_of(tiny_models)
    plain, clean, drafted = (dual_caches(spec) for _ in range(3))
    torch.manual_seed(0)

    def step(start, count):
        q = torch.randn(2, count, spec.heads, spec.head_dim)
        kv = torch.randn(2, 2, count, spec.kv_heads, spec.head_dim)
        return q, *kv, Step.of([0, 1], [start, max(0, start - 30)], [count, count])

    prompt = (*step(0, 170)[:3], Step.of([0, 1], [0, 0], [170, 140]))
    for cache in (plain.inner, clean, drafted):
        cache.attend(0, *prompt, scale=0.3)
    for start in range(170, 290, 5):
        draft, verify = step(start, 4), step(start, 5)
        drafted.copy.attend(0, *draft, scale=0.3)
        want = plain.inner.attend(0, *verify, scale=0.3)
        assert torch.equal(clean.attend(0, *verify, scale=0.3), want)
        if verified:
            assert torch.equal(drafted.attend(0, *verify, scale=0.3), want)
    ours, theirs = drafted.copy.cache.layers[0], clean.copy.cache.layers[0]
    same = [torch.equal(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(type(ours))]
    assert all(same) is verified
    assert clean.nbytes == clean.inner.nbytes + clean.copy.nbytes

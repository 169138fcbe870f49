"""What queries see of packed keys and values, on a CPU."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.kernels.kv.reference import Scoring
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.kv_cache import AttentionInputs
from llmpq.runtime.steps.step import Step
from reference.contiguous_kv import make_kv_cache
from reference.kv_history import attend_from_history, relative_error
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu


def test_a_prompt_sees_itself_as_decoding_would(tiny_models):
    """Alone or beside a decoding request, the prompt's outputs are the same."""
    spec = ModelSpec.from_directory(tiny_models.directory("llama"))
    heads, groups, dim = spec.heads, spec.kv_heads, spec.head_dim
    shape = {"num_layers": 1, "slots": 2, "max_len": 400, "dtype": torch.float32}
    cache = make_kv_cache(spec, KVPrecision.KV2, **shape)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 300, heads, dim), *torch.randn(2, 2, 300, groups, dim)
    alone = cache.attend(
        0, AttentionInputs(q[:1], k[:1], v[:1], Scoring(0.3)), Step.of([0], [0], [300])
    )
    beside = cache.attend(
        0, AttentionInputs(q, k, v, Scoring(0.3)), Step.of([0, 1], [0, 5], [300, 1])
    )
    assert relative_error(beside[:1], alone) < 1e-5
    seen = {
        quantised: attend_from_history(
            KVFormat(precision=KVPrecision.KV2, head_dim=dim),
            *(q[0], k[0], v[0]),
            start=0,
            scale=0.3,
            quantised=quantised,
        )
        for quantised in (True, False)
    }
    assert (
        relative_error(alone[0], seen[True]) < 1e-5 < 1e-3 < relative_error(alone[0], seen[False])
    )


def test_tokens_beyond_a_request_are_refused():
    cache = QuantizedKVCache(
        KVFormat(precision=KVPrecision.KV4, head_dim=32),
        num_layers=1,
        kv_heads=1,
        slots=1,
        max_len=10,
        dtype=torch.float32,
    )
    with pytest.raises(ValueError, match="holds 10 a request"):
        cache.plan(*torch.tensor([[0], [8], [4]]), q_len=4, max_end=12)


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

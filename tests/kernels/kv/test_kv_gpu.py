"""Every low-bit KV variant on a GPU, against its twin and the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.precision import KVPrecision

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.fused import rope_append
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.model_spec import ModelSpec
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.step import Step
from reference.check_kv import (
    TOLERANCE,
    WORDS_EQUAL,
    KvCase,
    cases,
    describe,
    random_steps,
    run_case,
)
from reference.kv_history import relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", list(cases()), ids=describe)
def test_variant(case):
    outcome = run_case(case, torch.device("cuda"))
    assert outcome.error < TOLERANCE[case.dtype]
    assert outcome.words_equal > WORDS_EQUAL


LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
FORMATS = [
    KVFormat(precision=KVPrecision.KV4, head_dim=128),
    KVFormat(precision=KVPrecision.KV2, head_dim=64, key_group=None),
]
LENGTH = st.sampled_from([0, 1, 127, 128, 143, 144, 145, 271, 272, 273, 2063, 2064, 2065])


@settings(max_examples=30)
@given(
    lengths=st.tuples(LENGTH, LENGTH, LENGTH),
    moves=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=3, max_size=3),
        min_size=1,
        max_size=8,
    ),
    fmt=st.sampled_from(FORMATS),
    paged=st.booleans(),
)
def test_random_drafts_and_truncations(lengths, moves, fmt, paged):
    """Prompts, then steps of 1 to 4 tokens of which some are forgotten again."""
    steps = random_steps(lengths, moves)
    case = KvCase(
        fmt=fmt, heads=8, kv_heads=2, dtype=torch.float16, steps=steps, paged=paged, width=4
    )
    outcome = run_case(case, torch.device("cuda"))
    assert outcome.error < TOLERANCE[case.dtype]
    assert outcome.words_equal > WORDS_EQUAL


def test_a_captured_step_serves_other_lengths():
    """A graph captured at the longest step gives what eager launches give at a shorter one."""
    fmt = KVFormat(precision=KVPrecision.KV4, head_dim=128)
    shape = {"num_layers": 1, "kv_heads": 2, "slots": 2, "max_len": 1000}
    cache = QuantizedKVCache(fmt, **shape, dtype=torch.float16, device="cuda")
    slots = torch.arange(2, device="cuda")
    start, count = torch.tensor([900, 900], device="cuda"), torch.ones_like(slots)
    prompt = torch.randn(2, 2, 900, 2, 128, device="cuda").half()
    fill = cache.plan(slots, 0 * slots, start, q_len=900, fresh=True, max_end=900)
    cache.append(fill, 0, *prompt)
    q, kv = torch.randn(2, 1, 8, 128).cuda().half(), torch.randn(2, 2, 1, 2, 128).cuda().half()

    def step(plan):
        return cache.run(plan, 0, q, *kv, scale=0.1)

    plan = cache.plan(slots, start, count, q_len=1, fresh=False, max_end=901)
    step(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(plan)
    plan.device_rows.starts.copy_(torch.tensor([300, 899]))
    graph.replay()
    fresh = cache.plan(
        slots, torch.tensor([300, 899]).cuda(), count, q_len=1, fresh=False, max_end=900
    )
    assert torch.allclose(out, step(fresh), atol=2e-3)


def test_a_captured_decode_rotates_appends_and_draws():
    """One graph of append and attention, replayed step by step, equals eager rotated steps."""
    spec = ModelSpec.from_config(LLAMA, name="llama")
    shape = {"num_layers": 1, "slots": 2, "max_len": 4200, "dtype": torch.float16, "device": "cuda"}
    fused, plain = (LowBitKV(spec, KVPrecision.KV4, **shape) for _ in range(2))
    inv_freq = 1e4 ** (-torch.arange(0, 128, 2, device="cuda") / 128)
    prompt = torch.randn(2, 2, 4000, 2, 128, device="cuda").half()
    lengths = [4000, 140]
    for cache in (fused, plain):
        cache.append(0, *prompt, Step.of([0, 1], [0, 0], lengths, device="cuda"))

    def inputs():
        q, kv = torch.randn(2, 1, 8, 128), torch.randn(2, 2, 1, 2, 128)
        return [x.cuda().half() for x in (q, *kv)]

    step = Step.of([0, 1], lengths, [1, 1], device="cuda")
    static = inputs()
    fused.attend(0, *static, step, scale=0.1, inv_freq=inv_freq)
    plan = fused.cache.plan(step.slots_B, step.start_B, step.num_new_B, q_len=1, fresh=False,
                            max_end=4100)  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused.cache.run(plan, 0, *static, scale=0.1, inv_freq=inv_freq)
    for i in range(24):
        q, k, v = inputs()
        for to, x in zip(static, (q, k, v), strict=True):
            to.copy_(x)
        plan.device_rows.starts.copy_(torch.tensor([n + i for n in lengths]))
        graph.replay()
        now = Step.of([0, 1], [n + i for n in lengths], [1, 1], device="cuda")
        q, k = rope_append.rope_reference(q, k, now.start_B, inv_freq)
        want = plain.attend(0, q, k, v, now, scale=0.1)
        assert relative_error(out, want) < 2e-3
    words = "k_words_PGW"
    ours, theirs = (getattr(c.cache.layers[0], words) for c in (fused, plain))
    assert (ours == theirs).float().mean() > WORDS_EQUAL

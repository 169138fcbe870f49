"""Sampling on a GPU: the kernel draws what its twin allows, and the host does not wait."""

import pytest
import torch

from llmpq.runtime.models.sampling import SamplerConfig, sample, sampling_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
WAYS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 1000, "top_p": 0.95},
    {"temperature": 5.0, "top_p": 0.98},
    {"temperature": 0.0},
]
CLOSE = 1e-4
"""Of a row's whole weight: what sums of 128 thousand float32 numbers may be off by."""


def allowed(logits_V: torch.Tensor, temperature: float, k: float, p: float) -> torch.Tensor:
    """Return the kept weights [V] in float64, in the columns' order; they add up to 1."""
    sorted_V, order = logits_V.double().sort(descending=True, stable=True)
    weight = torch.exp((sorted_V - sorted_V[0]) / temperature)
    weight[int(k) :] = 0
    weight *= weight.cumsum(0) - weight < p * weight.sum()
    return torch.zeros_like(weight).scatter_(0, order, weight / weight.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [4096, 128_256])
def test_tokens_are_those_of_their_numbers(dtype, vocab):
    params = [SamplerConfig(**way, seed=seed) for way in WAYS for seed in range(6)]
    steps = list(range(len(params)))
    logits = (torch.randn(len(params), vocab, device="cuda") * 3).to(dtype)
    got = sample(logits, params, steps).tolist()
    rows = zip(*sampling_rows(params, steps, vocab=vocab), strict=True)
    for token, row, (temperature, k, p, number) in zip(got, logits.cpu(), rows, strict=True):
        up_to = allowed(row, temperature, k, p).cumsum(0)
        before = float(up_to[token - 1]) if token else 0.0
        assert before - CLOSE <= number <= float(up_to[token]) + CLOSE
    assert got[-6:] == logits[-6:].float().argmax(dim=-1).tolist()
    assert got != sample(logits, params, [step + 1 for step in steps]).tolist()


def test_the_host_does_not_wait():
    params = [SamplerConfig(temperature=1.0, top_p=0.9, top_k=50), SamplerConfig(temperature=2.0)]
    logits = torch.randn(2, 5000, device="cuda", dtype=torch.bfloat16)
    want = sample(logits, params, [3, 4])
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = sample(logits, params, [3, 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)

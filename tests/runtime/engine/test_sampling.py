"""Sampling: the right distribution, independent of batch-mates, steps and stages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmpq.runtime.models.sampling import (
    SamplerConfig,
    draw,
    probabilities,
    sample,
    uniform,
    uniforms,
)
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def histogram(params: SamplerConfig, draws: int = 4000, shift: float = 0.0) -> torch.Tensor:
    """Return how often each token is drawn over the steps of one request."""
    many = [params] * draws
    tokens = sample((LOGITS + shift).expand(draws, -1), many, range(draws))
    return torch.bincount(tokens, minlength=len(LOGITS)).double() / draws


def chi_square(got: torch.Tensor, expected: torch.Tensor, draws: int = 4000) -> float:
    kept = expected > 0
    return float(draws * ((got - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(
    "params",
    [
        SamplerConfig(temperature=1.0, seed=1),
        SamplerConfig(temperature=0.7, top_k=3, seed=2),
        SamplerConfig(temperature=1.3, top_p=0.8, seed=3),
        SamplerConfig(temperature=1.0, top_k=4, top_p=0.9, seed=4),
    ],
)
def test_draws_follow_the_stated_distribution(params):
    probs = torch.softmax(LOGITS.double() / params.temperature, dim=-1)
    ranked = probs.sort(descending=True)
    kept = torch.arange(len(LOGITS)) < (params.top_k or len(LOGITS))
    values = ranked.values * kept / (ranked.values * kept).sum()
    values *= (values.cumsum(0) - values) < params.top_p
    expected = torch.zeros_like(probs).scatter_(0, ranked.indices, values / values.sum())
    got = histogram(params)
    limit = 20.5  # chi-square, 5 degrees of freedom, one chance in a thousand
    assert chi_square(got, expected) < limit
    assert not got[expected == 0].any()
    hotter = torch.softmax(LOGITS.double() / (params.temperature * 1.2), dim=-1)
    assert chi_square(got, hotter) > limit, "a wrong temperature must not pass"


def test_greedy_takes_the_most_likely_and_is_one_hot():
    assert sample(LOGITS[None], [SamplerConfig()], [0]).tolist() == [0]
    assert probabilities(LOGITS[None], [SamplerConfig()]).tolist() == [[1, 0, 0, 0, 0, 0]]


def test_a_row_does_not_depend_on_its_mates():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    params = [
        SamplerConfig(temperature=t, seed=seed, top_k=k)
        for seed, (t, k) in enumerate([(1.0, None), (0.0, None), (0.5, 7), (2.0, None)] * 2)
    ][:6]
    steps = [0, 3, 7, 1, 2, 9]
    together = sample(logits, params, steps)
    alone = [sample(logits[i : i + 1], [params[i]], [steps[i]]).item() for i in range(6)]
    assert together.tolist() == alone


@pytest.mark.parametrize("flat", [0.02, 3.0])
@pytest.mark.parametrize(
    "top_k, top_p", [(None, 0.9), (50, 1.0), (50, 0.7), (300, 0.95), (300, 1.0), (None, 0.3)]
)
def test_large_vocabularies_are_cut_where_a_full_sort_cuts(flat, top_k, top_p):
    """Rows decided by their likely tokens and rows that need them all, side by side."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 1000, generator=generator) * torch.tensor([[flat], [3.0], [8.0], [1.0]])
    params = [SamplerConfig(temperature=1.0, top_k=top_k, top_p=top_p)] * 4
    got = probabilities(logits, params)
    for row in range(4):
        probs, order = torch.softmax(logits[row].double(), dim=-1).sort(descending=True)
        probs[top_k or 1000 :] = 0
        probs /= probs.sum()
        probs[(probs.cumsum(0) - probs) >= top_p] = 0
        expected = torch.zeros(1000, dtype=torch.float64).scatter_(0, order, probs / probs.sum())
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=1e-9)
        assert torch.equal(got[row], probabilities(logits[row : row + 1], params[:1])[0])


def test_numbers_are_uniform_and_differ_by_seed_step_and_stream():
    numbers = torch.tensor([uniform(seed, step) for seed in range(40) for step in range(100)])
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert float(((counts - 400) ** 2 / 400).sum()) < 27.9  # 9 degrees of freedom, 0.001
    pairs = numbers.view(40, 100)
    assert abs(float(torch.corrcoef(torch.stack([pairs[:, 0], pairs[:, 1]]))[0, 1])) < 0.4
    assert len({uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(0, 0, 1)}) == 4
    assert uniform(7, 3) == uniform(7, 3)


def test_random_numbers_of_many_rows_are_those_of_each():
    seeds, steps = [0, 7, 2**63 - 1, 12345678901234567, 7], [0, 3, 10**6, 1, 4]
    rows = uniforms(np.array(seeds, dtype=np.uint64), steps)
    assert rows.tolist() == [uniform(*row) for row in zip(seeds, steps, strict=True)]


def test_the_extreme_number_never_picks_an_impossible_token():
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    assert draw(probs, torch.tensor([1.0, 1.0])).tolist() == [1, 1]
    assert draw(probs, torch.tensor([0.0, 0.0])).tolist() == [0, 1]


def test_sampled_tokens_do_not_depend_on_the_number_of_stages(tiny_models, random_prompts):
    directory = tiny_models.directory("llama")
    prompts = random_prompts(4, 9)
    params = [SamplerConfig(temperature=1.0, seed=5), SamplerConfig(temperature=1.5, seed=6)]
    outputs = [
        ReferencePipeline.from_directory(directory, splits=splits).generate(
            prompts, max_new=12, params=params
        )
        for splits in ((), (1,), (1, 2))
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    one = ReferencePipeline.from_directory(directory)
    assert one.generate(prompts[1:], max_new=12, params=params[1:]) == outputs[0][1:]
    other = [SamplerConfig(temperature=1.0, seed=7), params[1]]
    assert one.generate(prompts, max_new=12, params=other)[0] != outputs[0][0]


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"top_k": 0}, r"top_k must be between 1 and 2\^31 - 1"),
        ({"top_k": 2**31}, r"got 2147483648"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_impossible_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        SamplerConfig(**bad)


@pytest.mark.parametrize(
    "params",
    [SamplerConfig(temperature=1e-37), SamplerConfig(temperature=5e-324),
     SamplerConfig(temperature=1.0, top_p=1e-46)],
)  # fmt: skip
def test_what_is_next_to_nothing_takes_the_most_likely(params):
    assert probabilities(LOGITS[None], [params]).tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_top_k_are_the_largest_logits_at_any_temperature():
    logits = torch.arange(200.0)[None] / 10
    for k in (1, 3, 150):
        for temperature in (1.0, 1e30):
            params = [
                SamplerConfig(temperature=temperature, top_k=k, seed=seed) for seed in range(9)
            ]
            tokens = sample(logits.expand(9, -1), params, [0] * 9)
            assert tokens.min() >= 200 - k, (k, temperature)

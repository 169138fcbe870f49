"""`LLM` on a GPU, in fp32: the CPU's tokens."""

import pytest
import torch

from llmpq import LLM, SamplingParams
from reference.pipeline import ReferencePipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NEW = 24


@pytest.fixture(scope="module")
def wanted(demo_model, random_prompts):
    """Return prompts, some of which begin alike, and the tokens a CPU answers them with."""
    trunk, *tails = random_prompts(200, 3, 40, 1)
    prompts = [*random_prompts(5, 300, 30, 129), *(trunk + tail for tail in tails)]
    torch.set_num_threads(2)
    return prompts, ReferencePipeline.from_directory(demo_model).generate(prompts, max_new=NEW)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 100},
        {"speculate": "ngram", "gamma": 3},
    ],
)
def test_tokens_equal_the_cpus(options, wanted, demo_model):
    prompts, tokens = wanted
    greedy = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(demo_model, dtype="float32", backend="threads", **options) as llm:
        answers = [list(one.outputs[0].token_ids) for one in llm.generate(asked, greedy)]
        again = [list(one.outputs[0].token_ids) for one in llm.generate(asked, greedy)]
        gauges = llm.stats()["gauges"]
    assert answers == tokens and again == tokens
    assert gauges["prefix_hits"] > 0

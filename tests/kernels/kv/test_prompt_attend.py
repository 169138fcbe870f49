"""Attention of whole prompts: which steps are such, and what comes out of their rows."""

import pytest
import torch
from torch.nn import functional

from llmpq.kernels.kv import prompt_attend as prompts
from llmpq.kernels.kv.prompt_attend import prompt_attend, prompt_runs

H, G, D = 6, 2, 16


@pytest.mark.parametrize(
    "starts,counts,runs",
    [
        ([0] * 3, [512] * 3, ((3, 512),)),
        ([0] * 4, [600, 600, 700, 600], ((2, 600), (1, 700), (1, 600))),
        ([0, 128], [512, 512], ()),  # what was found again is seen, too
        ([0, 700], [900, 1], ()),
        ([0] * 3, [500, 501, 502], ()),
    ],
)
def test_steps_of_whole_prompts(starts, counts, runs):
    assert prompt_runs(starts, counts) == runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_prompt_sees_itself_alone(dtype):
    runs, padding = ((2, 5), (1, 9), (1, 1)), 3
    count = sum(rows * tokens for rows, tokens in runs)
    qkv = torch.randn(count + padding, H + 2 * G, D, generator=torch.manual_seed(0)).to(dtype)
    got = prompt_attend(*qkv.split([H, G, G], dim=1), runs, scale=0.3)
    first = 0
    for tokens in (5, 5, 9, 1):
        own = qkv[None, first : first + tokens].double().transpose(1, 2)
        q, k, v = own.split([H, G, G], dim=1)
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
        want = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        mine = got[first : first + tokens].double().transpose(0, 1)
        limit = 1e-6 if dtype == torch.float32 else 1e-2
        assert (mine - want[0]).norm() / want.norm() < limit
        first += tokens
    assert got.shape == (count + padding, H, D) and not got[count:].any()


def test_the_least_a_run_may_have(monkeypatch):
    monkeypatch.setattr(prompts, "LEAST_TOKENS", 3)
    assert prompt_runs([0, 0], [2, 4]) == ((1, 2), (1, 4))
    assert prompt_runs([0, 0], [1, 4]) == ()

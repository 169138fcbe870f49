"""Penalties, biases and bans: against transformers' processors and numpy, a row at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmpq.runtime.models.ruled_sampling import ConstrainedSampler, scores
from llmpq.runtime.models.sampling import probabilities, sample
from llmpq.runtime.requests.request import RowSampling, StepKind
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.requests.token_rules import LogitsConstraints, LogprobOutput, Thought
from llmpq.runtime.steps.step import message_of_rows

pytestmark = pytest.mark.cpu
VOCAB = 40
GREEDY = SamplerConfig()


def message(step: int, requests, sampling=None, kind=StepKind.DECODE, starts=None, num_new=None):
    rows = len(requests)
    made = message_of_rows(kind, range(rows), starts or [step] * rows, num_new or [1] * rows)
    return replace(
        made,
        sample_steps_B=np.full(rows, step),
        sampling=RowSampling(sampling or [GREEDY] * rows),
        rules_B=np.array(requests),
    )


def answer(sampler, number, logits_SV, sampling=GREEDY):
    """Return the tokens of one request whose logits at each step are given."""
    return [
        int(sampler.pick(row[None], message(step, [number], [sampling])))
        for step, row in enumerate(logits_SV)
    ]


def changed_logits(prompt, chosen, logits, rules):
    """The rules' formulas, on numpy: what the engine's logits must become."""
    out = np.array(logits, dtype=np.float64)
    for token in {*prompt, *chosen} if rules.repetition_penalty != 1 else ():
        factor = rules.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(chosen):
        out[token] -= rules.frequency_penalty * chosen.count(token) + rules.presence_penalty
    for token, bias in rules.logit_bias.items():
        out[token] += bias
    if len(chosen) < rules.min_tokens:
        out[list(rules.end_ids)] = -math.inf
    for *before, last in rules.bad_tokens:
        if list(chosen[len(chosen) - len(before) :]) == before:
            out[last] = -math.inf
    budget = rules.thinking
    opened = budget is not None and (budget.is_open or budget.begin in chosen)
    if opened and len(chosen) >= budget.tokens and budget.end not in chosen:
        out[:] = -math.inf
        out[budget.end] = 0
    return out


RULES = [
    LogitsConstraints(repetition_penalty=1.7, prompt=(3, 5, 5)),
    LogitsConstraints(frequency_penalty=1.5),
    LogitsConstraints(presence_penalty=2.0),
    LogitsConstraints(frequency_penalty=-0.5, presence_penalty=-0.3),
    LogitsConstraints(logit_bias={7: 3.5, 8: -100.0}),
    LogitsConstraints(min_tokens=6, end_ids=tuple(range(8))),
    LogitsConstraints(bad_tokens=((4,), (6, 7), (9, 9, 9))),
    LogitsConstraints(thinking=Thought(tokens=2, begin=4, end=15, is_open=True)),
    LogitsConstraints(thinking=Thought(tokens=0, begin=4, end=15, is_open=False)),
    LogitsConstraints(
        repetition_penalty=0.8,
        prompt=(1, 2),
        frequency_penalty=0.4,
        presence_penalty=0.2,
        logit_bias={2: 1.0},
        min_tokens=3,
        end_ids=(2,),
        bad_tokens=((5, 6),),
    ),
]


@pytest.mark.parametrize("rules", RULES)
def test_every_rule_is_its_formula_at_every_step(rules):
    rng = np.random.default_rng(7)
    logits_SV = rng.normal(size=(60, VOCAB)) * 1.5  # flat: penalties decide
    logits_SV[:, :10] += 2.5  # few tokens, chosen again and again
    sampler = ConstrainedSampler()
    sampler.take_rules(5, rules)
    got = answer(sampler, 5, torch.tensor(logits_SV, dtype=torch.float32))
    plain = logits_SV.argmax(axis=1).tolist()
    wanted: list[int] = []
    for logits in logits_SV:
        wanted.append(int(changed_logits(rules.prompt, wanted, logits, rules).argmax()))
    assert got == wanted
    assert got != plain, "a rule without effect shows nothing"


def test_rules_are_those_of_transformers():
    from transformers import generation

    rng = torch.Generator().manual_seed(3)
    prompt, chosen = (3, 5, 9), [4, 4, 6]
    logits = torch.randn(1, VOCAB, generator=rng) * 4
    ids = torch.tensor([[*prompt, *chosen]])
    cases = [
        (
            LogitsConstraints(repetition_penalty=1.3, prompt=prompt),
            generation.RepetitionPenaltyLogitsProcessor(1.3),
        ),
        (
            LogitsConstraints(min_tokens=5, end_ids=(0, 2)),
            generation.MinNewTokensLengthLogitsProcessor(3, 5, [0, 2], device="cpu"),
        ),
        (
            LogitsConstraints(bad_tokens=((7,), (6, 8), (4, 9))),
            generation.NoBadWordsLogitsProcessor([[7], [6, 8], [4, 9]]),
        ),
        (
            LogitsConstraints(logit_bias={11: -2.5, 12: 4.0}),
            generation.SequenceBiasLogitsProcessor({(11,): -2.5, (12,): 4.0}),
        ),
    ]
    for rules, processor in cases:
        wanted = processor(ids, logits.clone())[0]
        ours = changed_logits(prompt, chosen, logits[0].numpy(), rules)
        np.testing.assert_allclose(ours, wanted.double().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", [(0.9, None, 1.0, 0.2), (1.5, 12, 0.8, 0.1), (0.7, 5, 1.0, 0.9)])
def test_min_p_is_transformers_after_top_k_and_top_p(choice):
    from transformers import generation

    temperature, top_k, top_p, min_p = choice
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    steps = [generation.TemperatureLogitsWarper(temperature)]
    steps += [generation.TopKLogitsWarper(top_k)] if top_k else []
    steps += [generation.TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [generation.MinPLogitsWarper(min_p)]
    wanted = logits.clone()
    for step in steps:
        wanted = step(torch.zeros(8, 1, dtype=torch.long), wanted)
    params = SamplerConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = probabilities(logits, [params] * 8)
    torch.testing.assert_close(got, wanted.softmax(-1), rtol=1e-4, atol=1e-6)
    assert (got > 0).sum() < (probabilities(logits, [SamplerConfig(temperature=1.0)] * 8) > 0).sum()


def test_a_ruled_row_neither_changes_others_nor_depends_on_them():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    sampling = [SamplerConfig(temperature=1.0, seed=seed) for seed in range(4)]
    sampler = ConstrainedSampler()
    rules = LogitsConstraints(presence_penalty=1.0, logit_bias={1: 2.0}, logprobs=1)
    alone = []
    for number, mates in ((8, [8, -1, -1, -1]), (9, [9, -1, 4, -1])):
        sampler.take_rules(number, rules)
        sampler.take_rules(4, LogitsConstraints(logit_bias={2: 50.0}))
        tokens = sampler.pick(logits, message(0, mates, sampling)).tolist()
        alone.append(tokens[0])
        assert tokens[3] == sample(logits[3:], sampling[3:], [0]).tolist()[0]
    assert alone[0] == alone[1]


def test_a_step_done_again_gives_the_same_and_is_noted_once():
    rules = LogitsConstraints(frequency_penalty=2.0, logprobs=2)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2))
    sampler = ConstrainedSampler()
    sampler.take_rules(1, rules)
    first = answer(sampler, 1, logits)
    again = [int(sampler.pick(logits[3][None], message(3, [1]))) for _ in range(2)]
    assert again == [first[3]] * 2
    assert len(sampler.noted(1).output) == 6 and sampler.noted(1) == LogprobOutput()
    sampler.forget(1)
    assert sampler.noted(1) == LogprobOutput()
    # Steps under way for a request that has ended bring tokens that nobody wants.
    assert int(sampler.pick(logits[0][None], message(0, [1]))) == int(logits[0].argmax())


def test_scores_are_log_softmax_and_ranks():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [5.0, 5.0, 0.0, 0.0]])
    wanted = torch.log_softmax(logits.double(), -1)
    (first, second) = scores(logits, torch.tensor([2, 1]), 2)
    assert [(s.token, s.rank) for s in first] == [(2, 2), (1, 1), (2, 2)]
    assert first[0].logprob == pytest.approx(float(wanted[0, 2]), abs=1e-6)
    assert second[0].rank == 1  # of equals none is likelier


@pytest.mark.parametrize("chunks", [[7], [3, 4], [1, 1, 5], [4, 1, 2]])
def test_prompts_are_scored_once_whatever_their_chunks(chunks):
    prompt = (3, 1, 4, 1, 5, 9, 2)
    torch.manual_seed(0)
    hidden, matrix = torch.randn(1, len(prompt), 8), torch.randn(8, VOCAB)
    wanted = scores(hidden[0, :-1] @ matrix, torch.tensor(prompt[1:]), 1)
    sampler, start = ConstrainedSampler(), 0
    sampler.take_rules(0, LogitsConstraints(prompt_logprobs=1, prompt=prompt))
    for count in [*chunks, 0]:
        # A chunk may be computed twice: its request was set aside in between.
        for _ in range(2):
            step = message(0, [0], kind=StepKind.PREFILL, starts=[start], num_new=[count])
            if count and sampler.scores_prompts(step):
                part = hidden[:, start : start + count]
                sampler.score_prompts(lambda x: x @ matrix, part, step)
        start += count
    got = sampler.noted(0).prompt
    assert [[(s.token, s.rank) for s in row] for row in got] == [
        [(s.token, s.rank) for s in row] for row in wanted
    ]
    flat = [[s.logprob for row in part for s in row] for part in (got, wanted)]
    assert flat[0] == pytest.approx(flat[1], abs=1e-5)


def test_rules_and_scores_travel_as_json():
    import json

    from llmpq.runtime.requests.token_rules import Guide, TokenScore

    rules = LogitsConstraints(
        logit_bias={3: 1.5}, bad_tokens=((1, 2), (3,)), guide=Guide(kind="regex", text="a+"),
        end_ids=(0,), prompt=(1, 2), logprobs=3,
    )  # fmt: skip
    assert LogitsConstraints.from_data(json.loads(json.dumps(rules.to_data()))) == rules
    noted = LogprobOutput(
        output=[(TokenScore(1, -0.5, 1),)], prompt=[(TokenScore(2, -1.0, 3),) * 2]
    )
    assert LogprobOutput.from_data(json.loads(json.dumps(noted.to_data()))) == noted

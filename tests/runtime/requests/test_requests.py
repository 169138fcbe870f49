"""What requests may ask, through the front door: against transformers, over one stage and two."""

from __future__ import annotations

import pytest
import torch

from llmpq import LLM, SamplingParams

pytestmark = pytest.mark.cpu
PROMPTS = ["def main():\n    import", "class Stack:", "for i in range(10):\n    print("]
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=2)
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def hf(demo_model):
    """Return transformers' model in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


@pytest.fixture(scope="module", params=[1, 2], ids=["one stage", "two stages"])
def llm(request, hf, demo_model, make_plan):
    """Return the model in float32 over one stage or two.

    After `hf`: it reads its tokenizer in a thread, and two threads must not import transformers.
    """
    cuts = () if request.param == 1 else (3,)
    plan = make_plan(demo_model, cuts, batch=4, prompt_len=110, gen_len=12, dtype="float32")
    with LLM(demo_model, plan=plan, backend="threads") as made:
        yield made


def test_a_prompt_of_one_token_has_no_token_before_it_that_could_score_it(llm):
    (answer,) = llm.generate([[5]], SCORE)
    assert answer.prompt_logprobs == [None]


def test_prompts_are_scored_as_transformers_scores_them(llm, hf):
    for answer in llm.generate(PROMPTS, SCORE):
        tokens = list(answer.prompt_token_ids)
        wanted = hf(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        assert answer.outputs[0].token_ids == [] and answer.text == ""
        assert answer.prompt_logprobs[0] is None
        for place, likely in enumerate(answer.prompt_logprobs[1:]):
            own = likely[tokens[place + 1]]
            row = wanted[place]
            assert own.logprob == pytest.approx(float(row[tokens[place + 1]]), abs=2e-4)
            assert next(iter(likely)) == tokens[place + 1]
            best = {token for token, other in likely.items() if other.rank <= 2}
            assert set(row.topk(2).indices.tolist()) <= best | {tokens[place + 1]}


def test_rules_give_the_tokens_of_transformers(llm, hf):
    tokens = llm.generate(PROMPTS, SCORE)
    prompts = [list(answer.prompt_token_ids) for answer in tokens]
    cases = [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"logit_bias": {14: 9.0, 272: -100}}, {"sequence_bias": {(14,): 9.0, (272,): -100.0}}),
        ({}, {}),
    ]
    plain = None
    for ours, theirs in reversed(cases):
        got = llm.generate(prompts, SamplingParams(**GREEDY, **ours))
        for prompt, answer in zip(prompts, got, strict=True):
            whole = hf.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, **theirs
            )[0].tolist()
            assert list(answer.outputs[0].token_ids) == whole[len(prompt) :]
        texts = [answer.text for answer in got]
        plain = plain or texts
        assert (texts != plain) == bool(ours)


def test_logprobs_tell_each_token_and_change_none(llm, hf):
    plain = llm.generate(PROMPTS, SamplingParams(temperature=0.9, seed=4, max_tokens=8))
    scored = llm.generate(
        PROMPTS, SamplingParams(temperature=0.9, seed=4, max_tokens=8, logprobs=3)
    )
    for before, after in zip(plain, scored, strict=True):
        own = after.outputs[0]
        assert before.outputs[0].logprobs is None and own.token_ids == before.outputs[0].token_ids
        assert len(own.logprobs) == len(own.token_ids)
        whole = torch.tensor([[*after.prompt_token_ids, *own.token_ids]])
        rows = hf(whole).logits[0].log_softmax(-1)[len(after.prompt_token_ids) - 1 : -1]
        wanted = [float(row[t]) for row, t in zip(rows, own.token_ids, strict=True)]
        got = [row[t].logprob for row, t in zip(own.logprobs, own.token_ids, strict=True)]
        assert got == pytest.approx(wanted, abs=2e-3)
        assert own.cumulative_logprob == pytest.approx(sum(got))
        assert all(3 <= len(row) <= 4 for row in own.logprobs)


def test_a_seed_gives_its_tokens_whatever_else_is_in_the_batch(llm):
    asked = SamplingParams(
        temperature=1.1, top_k=50, min_p=0.02, seed=11, max_tokens=10, presence_penalty=0.7
    )
    alone = llm.generate(PROMPTS[0], asked)[0].outputs[0].token_ids
    others = SamplingParams(temperature=1.4, max_tokens=14, logit_bias={5: 3.0}, logprobs=1)
    mixed = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[2]], [others, asked, others])
    assert mixed[1].outputs[0].token_ids == alone


def test_ends_wait_for_min_tokens(llm):
    text = llm.generate(PROMPTS[0], SamplingParams(**GREEDY))[0].text
    stop = text[2:4]
    cut = llm.generate(PROMPTS[0], SamplingParams(**GREEDY, stop=stop))[0].outputs[0]
    assert cut.text == text[: text.index(stop)] and cut.stop_reason == stop
    kept = SamplingParams(**GREEDY, stop=stop, include_stop_str_in_output=True)
    assert llm.generate(PROMPTS[0], kept)[0].text == text[: text.index(stop) + 2]
    late = llm.generate(PROMPTS[0], SamplingParams(**GREEDY, stop=stop, min_tokens=12))[0]
    assert late.text == text and late.outputs[0].finish_reason == "length"
    first = cut.token_ids[0]
    ended = SamplingParams(**GREEDY, stop_token_ids=[first])
    one = llm.generate(PROMPTS[0], ended)[0].outputs[0]
    assert len(one.token_ids) == 1 and one.stop_reason == first
    never = SamplingParams(**GREEDY, stop_token_ids=[first], min_tokens=3)
    assert first not in llm.generate(PROMPTS[0], never)[0].outputs[0].token_ids[:3]


def test_no_end_is_chosen_before_min_tokens_where_ends_are_ignored(llm):
    (end,) = llm.model_spec.eos_token_ids
    likely = {"ignore_eos": True, "logit_bias": {end: 100}, "max_tokens": 5, "temperature": 0}
    (ends,) = llm.generate(PROMPTS[0], SamplingParams(**likely))
    assert ends.outputs[0].token_ids == [end] * 5
    (late,) = llm.generate(PROMPTS[0], SamplingParams(**likely, min_tokens=3))
    assert end not in late.outputs[0].token_ids[:3]
    assert late.outputs[0].token_ids[3:] == [end] * 2


def test_prompts_are_truncated_on_the_left_and_bad_tokens_refused(llm):
    tokens = list(llm.generate(PROMPTS[2], SCORE)[0].prompt_token_ids)
    short = SamplingParams(**GREEDY, truncate_prompt_tokens=3)
    answer = llm.generate([tokens], short)[0]
    assert list(answer.prompt_token_ids) == tokens[-3:]
    whole = llm.generate([tokens * 30], SamplingParams(**GREEDY, truncate_prompt_tokens=-1))[0]
    assert whole.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="logit_bias names token 4096"):
        llm.generate(PROMPTS[0], SamplingParams(logit_bias={4096: 1}))
    words = SamplingParams(**GREEDY, bad_words=["import", "os"])
    assert "import" not in llm.generate(PROMPTS[0], words)[0].text


def test_a_request_with_rules_is_not_drafted_for_and_others_are(demo_model, make_plan):
    plan = make_plan(demo_model, (), batch=4, prompt_len=64, gen_len=64)
    asked = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.2),
        SamplingParams(temperature=0.8, seed=3, max_tokens=24),
        SamplingParams(temperature=0, max_tokens=24, logprobs=1),
    ]
    prompts = [PROMPTS[0]] * len(asked)
    texts = []
    for options in ({}, {"speculate": "ngram", "gamma": 3}):
        with LLM(demo_model, plan=plan, backend="threads", **options) as made:
            answers = made.generate(prompts, asked)
            texts.append([answer.text for answer in answers])
            assert len(answers[3].outputs[0].logprobs) == 24
            report = made.engine.client.speculation()
    assert texts[0][0] == texts[1][0] and texts[0][1:2] == texts[1][1:2]
    assert texts[0][3] == texts[1][3] == texts[0][0]
    assert report is not None and report["verifies"] > 0

"""When a thought is closed: the budget of a request, in tokens of its model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.requests.token_rules import LogitsConstraints, Thought
from llmpq.runtime.text.request_factory import RequestFactory, _marks_of, logits_constraints

pytestmark = pytest.mark.pure
TOKENS = {"<think>": [7], "</think>": [8], "[THINK]": [7], "[/THINK]": [8, 9]}


def budget(prompt, template="{{ '<think>' }}", marks=None, **params):
    tokenizer = SimpleNamespace(
        chat_template=lambda: template,
        has_token=lambda text: False,
        encode=lambda text, special: TOKENS[text],
    )
    own = SamplingParams(**{"thinking_token_budget": 5, **params})
    return logits_constraints(
        own, prompt, frozenset(), SimpleNamespace(vocab=16), lambda: tokenizer, marks
    )


def test_marks_that_come_with_the_prompt_go_before_the_models_template():
    rules = budget((1, 7), template="[THINK]", marks=("<think>", "</think>"))
    assert rules.thinking == Thought(tokens=5, begin=7, end=8, is_open=True)
    with pytest.raises(ValueError, match="needs a model that thinks"):
        budget((1, 7), marks=())


@pytest.mark.parametrize(
    ("prompt", "marks"),
    [
        ("a", None),
        ({"prompt": "a"}, None),
        ({"prompt": "a", "thinking_marks": ["<t>", "</t>"]}, ("<t>", "</t>")),
        ({"prompt": "a", "thinking_marks": ()}, ()),
    ],
)
def test_a_prompt_may_have_marks_of_its_own(prompt, marks):
    assert _marks_of(prompt) == marks


@pytest.mark.parametrize("marks", ["ab", ["a"], ["a", ""], [1, 2], None])
def test_odd_marks_are_refused(marks):
    with pytest.raises(ValueError, match="'thinking_marks' must be two texts or none, got"):
        _marks_of({"prompt": "a", "thinking_marks": marks})


def test_a_conversation_comes_with_the_marks_of_its_own_template():
    tokenizer = SimpleNamespace(
        chat_template=lambda *, tools: "[THINK]",
        has_token=lambda text: False,
        render_chat=lambda messages, **how: "a",
        encode=lambda text, **how: [1],
    )
    factory = SimpleNamespace(tokenizer=tokenizer, max_model_len=9)
    for template, marks in ((None, ("[THINK]", "[/THINK]")), ("<think>", ("<think>", "</think>"))):
        made = RequestFactory.conversation(factory, [], template=template)
        assert _marks_of(made) == marks
    assert _marks_of(RequestFactory.conversation(factory, [], template="{{ x }}")) == ()


@pytest.mark.parametrize(
    ("prompt", "is_open"), [((1, 7), True), ((1, 7, 2), True), ((7, 1, 8, 2), False), ((1,), False)]
)
def test_a_budget_knows_whether_the_prompt_has_opened_a_thought(prompt, is_open):
    rules = budget(prompt)
    assert rules.thinking == Thought(tokens=5, begin=7, end=8, is_open=is_open)
    assert rules.changes_logits and LogitsConstraints.from_data(rules.to_data()) == rules


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"template": "{{ x }}"}, "needs a model that thinks"),
        ({"template": "[THINK]"}, "one token"),
        ({"structured_outputs": {"regex": "a"}}, "allow none"),
    ],
)
def test_what_cannot_be_closed_is_refused(more, said):
    from llmpq.runtime.requests.sampling_params import StructuredOutputsParams

    if guided := more.get("structured_outputs"):
        more = {"structured_outputs": StructuredOutputsParams(**guided)}
    with pytest.raises(ValueError, match=said):
        budget((1,), **more)
    with pytest.raises(ValueError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-1)


@pytest.mark.parametrize(
    ("prompt", "template", "waits"),
    [((1, 7), "<think>", True), ((7, 8), "<think>", False), ((1,), "x", False)],
)
def test_a_guide_waits_for_a_thought_that_the_prompt_has_opened(prompt, template, waits):
    from llmpq.runtime.requests.sampling_params import StructuredOutputsParams

    guide = StructuredOutputsParams(regex="a", after_thought=True)
    both = budget(prompt, structured_outputs=guide) if waits else None
    alone = budget(prompt, template, structured_outputs=guide, thinking_token_budget=None)
    expected = Thought(tokens=None, begin=7, end=8, is_open=True) if waits else None
    assert alone.thinking == expected and alone.guide == guide.guide()
    assert not alone.weighs_tokens
    assert both is None or (both.weighs_tokens and both.thinking.tokens == 5)

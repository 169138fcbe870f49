"""What requests may ask: every bad value is refused in one sentence that names it."""

from __future__ import annotations

import math
import re
from enum import Enum

import numpy as np
import pytest

from llmpq.runtime.requests.sampling_params import SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.pure

BAD = [
    ({"n": 0}, "n must be a whole number from 1 on, got 0"),
    ({"n": 1.5}, "n must be"),
    ({"n": 10**6}, "n must be at most 16,384, got 1,000,000"),
    ({"stop": "\ud800"}, "a text of stop has half a character (a lone surrogate) at position 0"),
    ({"bad_words": ["a", "b\udfff"]}, "a text of bad_words has half a character"),
    ({"n": None}, "n must be"),
    ({"n": 2, "temperature": 0}, "n=2 greedy answers"),
    ({"max_tokens": -1}, "max_tokens must be"),
    ({"max_tokens": 0}, "max_tokens=0 asks for nothing"),
    ({"temperature": -0.1}, "temperature must be"),
    ({"temperature": math.nan}, "temperature must be"),
    ({"temperature": math.inf}, "temperature must be"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"temperature": True}, "temperature must be a number"),
    ({"top_p": 0}, "top_p must be"),
    ({"top_p": 1.01}, "top_p must be"),
    ({"top_k": -2}, "top_k must be"),
    ({"top_k": 2.5}, "top_k must be"),
    ({"top_k": 2**40}, "top_k must be"),
    ({"min_p": -0.1}, "min_p must be from 0 to 1"),
    ({"min_p": 1.5}, "min_p must be from 0 to 1"),
    ({"min_p": None}, "min_p must be a number"),
    ({"presence_penalty": math.nan}, "presence_penalty must be from -2 to 2"),
    ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty must be from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty must be positive"),
    ({"repetition_penalty": -1}, "repetition_penalty must be"),
    ({"repetition_penalty": math.inf}, "repetition_penalty must be"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias must map token ids"),
    ({"logit_bias": {5: 101}}, "from -100 to 100, got 5: 101"),
    ({"logit_bias": {5: math.nan}}, "from -100 to 100"),
    ({"logit_bias": [5]}, "logit_bias must map"),
    ({"stop": 5}, "stop must be a text or several, none empty, got 5"),
    ({"stop": b"a"}, "stop must be a text"),
    ({"stop": {"a": 1}}, "stop must be a text"),
    ({"bad_words": 5}, "bad_words must be a text"),
    ({"bad_words": ["a" * 40_000, "b" * 30_000]}, "65536 characters together, got 70000"),
    ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, got 3"),
    ({"stop_token_ids": "a"}, "stop_token_ids must be a list of token ids, got 'a'"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids must be a list of token ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids"),
    ({"allowed_token_ids": 3}, "allowed_token_ids must be a list of token ids"),
    ({"include_stop_str_in_output": "no"}, "must be True or False, got 'no'"),
    ({"skip_special_tokens": 0}, "skip_special_tokens must be True or False, got 0"),
    ({"ignore_eos": None}, "ignore_eos must be True or False, got None"),
    ({"max_tokens": "3"}, "max_tokens must be a whole number"),
    ({"max_tokens": np.float32(3)}, "max_tokens must be a whole number"),
    ({"max_tokens": np.array([3, 4])}, "max_tokens must be a whole number"),
    ({"n": np.int64(0)}, "n must be a whole number from 1 on, got 0"),
    ({"temperature": np.array([0.5, 0.7])}, "temperature must be a number"),
    ({"temperature": np.float32("nan")}, "temperature must be 0 (greedy) or positive, got nan"),
    ({"top_p": math.nan}, "top_p must be in (0, 1], got nan"),
    ({"timeout_s": "soon"}, "timeout_s must be"),
    ({"seed": 1.5}, "seed must be a whole number"),
    ({"stop": ""}, "stop must be"),
    ({"stop": ["a", ""]}, "stop must be"),
    ({"stop": [3]}, "stop must be"),
    ({"bad_words": "word"}, "bad_words must be a list of texts"),
    ({"bad_words": [""]}, "bad_words must be a text or several"),
    ({"logprobs": -1}, "logprobs must be"),
    ({"logprobs": True}, "logprobs must be"),
    ({"logprobs": 101}, "logprobs must be at most 100, got 101"),
    ({"prompt_logprobs": 101}, "prompt_logprobs must be at most 100"),
    ({"min_tokens": -1}, "min_tokens must be"),
    ({"min_tokens": 17}, "min_tokens=17 is more than max_tokens=16"),
    ({"truncate_prompt_tokens": 0}, "leaves no prompt"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be"),
    ({"structured_outputs": {"json": {}}}, "must be a StructuredOutputsParams"),
]


@pytest.mark.parametrize(("options", "said"), BAD)
def test_bad_values_are_refused_in_one_sentence(options, said):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "one of json, regex, choice, grammar, json_object, calls, got none"),
        ({"json": {}, "regex": "a"}, "got ['json', 'regex']"),
        ({"json_object": False}, "got none"),
        ({"json_object": "yes"}, "json_object must be True or False"),
        ({"json_object": True, "regex": "a"}, "got ['regex', 'json_object']"),
        ({"json": "{"}, "the JSON schema is not JSON"),
        ({"json": "3"}, "an object or a boolean"),
        ({"json": {"a": {1, 2}}}, "cannot be written as JSON"),
        ({"regex": 3}, "regex must be a text"),
        ({"grammar": 3}, "grammar must be a text"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "none empty"),
    ],
)
def test_guides_are_checked(options, said):
    with pytest.raises(ValueError) as caught:
        StructuredOutputsParams(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 2}, {"bad_words": ["a"]}])
def test_what_could_leave_a_guide_no_token_is_refused(options):
    guide = StructuredOutputsParams(choice=["yes", "no"])
    with pytest.raises(ValueError, match="may forbid what structured_outputs demand"):
        SamplingParams(structured_outputs=guide, **options)


def test_neutral_values_are_taken():
    params = SamplingParams(
        min_p=0, presence_penalty=0, repetition_penalty=1, logit_bias={}, stop=[], bad_words=[],
        logprobs=None, min_tokens=0, max_tokens=None, seed=-5,
    )  # fmt: skip
    assert params.sampler_config(-5).seed == 2**63 - 5


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=np.int64(-1)).seed is None
    assert SamplingParams(seed=-5).seed == -5


def test_numbers_of_arrays_are_pythons_own():
    given = {"max_tokens": 3, "n": 2, "seed": 7, "logprobs": 1, "min_tokens": 2, "top_k": 5}
    values = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "timeout_s": 2.0}
    ids = {"stop_token_ids": [3, 4]}
    whole = given | values | ids
    params = SamplingParams(**{name: np.array(value) for name, value in whole.items()})
    assert params == SamplingParams(**given, **values, **ids)
    for name in (*given, *values):
        assert type(getattr(params, name)) in (int, float)
    assert all(type(token) is int for token in params.stop_token_ids)
    bias = SamplingParams(logit_bias={np.int64(3): np.float32(0.5)}).logit_bias
    assert bias == {3: 0.5} and all(type(part) in (int, float) for part in (*bias, *bias.values()))
    assert SamplingParams(ignore_eos=np.True_).ignore_eos is True


def test_a_clone_is_equal_and_json_object_is_a_schema():
    params = SamplingParams(stop=["a"], logit_bias={3: 1.0})
    assert params.clone() == params and params.clone() is not params
    whole = StructuredOutputsParams(json={"type": "object"})
    assert StructuredOutputsParams(json_object=True).guide() == whole.guide()


class Answer(Enum):
    """An enum as people give it for a choice."""

    YES = "yes"


class Model:
    """A class as pydantic's: its schema is what a method returns."""

    @classmethod
    def model_json_schema(cls):
        """Return the schema."""
        return {"type": "object"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json": Model}, "give its .model_json_schema()"),
        ({"choice": list(Answer)}, "an enum's texts are"),
        ({"choice": Answer}, "an enum's texts are"),
        ({"choice": ["a", "\ud800"]}, "a choice has half a character"),
        ({"regex": "\ud800"}, "the regex has half a character"),
        ({"grammar": "\ud800"}, "the grammar has half a character"),
        ({"json": {"enum": ["\ud800"]}}, "the JSON schema has half a character"),
        ({"json": '{"enum": ["\\ud800"]}'}, "the JSON schema has half a character"),
        ({"calls": []}, "calls must be a list of tools, at least one, got []"),
        ({"calls": "find"}, "calls must be a list of tools"),
        ({"calls": ["find"]}, "a tool of calls is as OpenAI's API has it"),
        ({"calls": [{"function": {"parameters": {}}}]}, "a tool of calls is as"),
    ],
)
def test_guides_that_are_none_are_refused_by_what_was_given(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        StructuredOutputsParams(**given)


def test_tools_are_taken_as_openais_api_has_them_and_as_pairs():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "find", "parameters": schema}
    forms = [("find", schema), function, {"type": "function", "function": function}]
    guides = [StructuredOutputsParams(calls=[form]).guide() for form in forms]
    assert guides[0] == guides[1] == guides[2]
    assert StructuredOutputsParams(calls=[{"name": "now"}]).guide() == (
        StructuredOutputsParams(calls=[("now", {"type": "object"})]).guide()
    )


def test_pairs_of_half_characters_in_a_schema_are_a_character():
    text = '{"enum": ["\\ud83d\\ude00"]}'
    assert StructuredOutputsParams(json=text).guide().text == text

"""Which prompts are read in an event loop itself."""

from __future__ import annotations

import pytest

from llmpq import SamplingParams
from llmpq.runtime.sampling_params import StructuredOutputsParams
from llmpq.runtime.text.prompts import _QUICK_LENGTH, Prompts

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("prompt", "options", "quick"),
    [
        ("def f(x):", {}, True),
        ("", {}, True),
        ([1, 2, 3], {"logprobs": 2, "stop": ["\n"], "n": 3}, True),
        ("a" * _QUICK_LENGTH, {}, True),
        ("a" * (_QUICK_LENGTH + 1), {}, False),
        ([1] * (_QUICK_LENGTH + 1), {}, False),
        ({"prompt": "a"}, {}, False),
        (5, {}, False),
        ("a", {"bad_words": ["b"]}, False),
        ("a", {"structured_outputs": StructuredOutputsParams(choice=["b"])}, False),
    ],
)
def test_short_prompts_without_a_grammar_are_quick(prompt, options, quick):
    prompts = object.__new__(Prompts)  # asks nothing of the model
    assert prompts.is_quick(prompt, SamplingParams(**options)) is quick

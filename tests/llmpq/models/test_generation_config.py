"""generation_config.json: which tokens end an answer, how it is sampled, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmpq.models.generation_config import read_generation_config
from llmpq.models.model_spec import ModelSpec

pytestmark = pytest.mark.pure


@pytest.fixture
def spec(demo_model: Path) -> ModelSpec:
    return ModelSpec.from_directory(demo_model)


@pytest.mark.parametrize(
    "said, ends, sampling",
    [
        ({"eos_token_id": [0, 9]}, (0, 9), {}),
        ({"eos_token_id": 7}, (0, 7), {}),
        ({"eos_token_id": None, "do_sample": True}, (0,), {}),
        ({"eos_token_id": [9, 10**6, -1]}, (0, 9), {}),  # no such tokens
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "transformers_version": "4.51.0"},
            (0,),
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 2048}, (0,),
         {"min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 2048}),
        ({"temperature": None, "max_length": 20, "num_beams": 4}, (0,), {}),
    ],
)  # fmt: skip
def test_ends_and_sampling(spec, tmp_path, said, ends, sampling):
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    for source in ("auto", str(tmp_path)):
        found = read_generation_config(tmp_path, source)
        assert found.applied_to(spec).eos_token_ids == ends
        assert found.sampling == sampling
    ignored = read_generation_config(tmp_path, "vllm")
    assert ignored.applied_to(spec) == spec and ignored.sampling == {}
    assert ignored.applied_to(spec).eos_token_ids == spec.eos_token_ids


@pytest.mark.parametrize(
    "said, suppressed, others",
    [
        ({"suppress_tokens": [7, 9, 7, -1, 10**6]}, (7, 9), {}),
        ({"suppress_tokens": 7, "no_repeat_ngram_size": 0, "num_beams": 1}, (7,), {}),
        ({"suppress_tokens": None, "stop_strings": [], "typical_p": 1.0}, (), {}),
        (
            {"no_repeat_ngram_size": 3, "bad_words_ids": [[5]], "forced_bos_token_id": 2},
            (),
            {"no_repeat_ngram_size": 3, "bad_words_ids": [[5]], "forced_bos_token_id": 2},
        ),
        ({"begin_suppress_tokens": [5], "min_new_tokens": 4}, (),
         {"begin_suppress_tokens": [5], "min_new_tokens": 4}),
    ],
)  # fmt: skip
def test_what_is_suppressed_is_obeyed_and_other_rules_are_named(
    spec, tmp_path, said, suppressed, others
):
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    found = read_generation_config(tmp_path)
    assert found.applied_to(spec).suppressed == suppressed
    assert found.not_obeyed == others
    ignored = read_generation_config(tmp_path, "vllm")
    assert ignored.applied_to(spec).suppressed == () and ignored.not_obeyed == {}


def test_a_model_without_the_file_says_nothing(spec, tmp_path):
    assert read_generation_config(tmp_path).applied_to(spec).eos_token_ids == spec.eos_token_ids
    with pytest.raises(ValueError, match=r"no generation_config.json in .* expected a directory"):
        read_generation_config(tmp_path, str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        '{"eos_token_id": "x"}',
        '{"eos_token_id": [1.5]}',
        '{"suppress_tokens": ["a"]}',
        *("[]", "{", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config.json'.*--generation-config vllm"):
        read_generation_config(tmp_path)

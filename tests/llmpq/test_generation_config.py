"""generation_config.json: which tokens end an answer, how it is sampled, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmpq.checkpoints.generation_config import read_generation_config
from llmpq.model_spec import ModelSpec

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
        assert found.with_ends(spec).eos_token_ids == ends
        assert found.sampling == sampling
    ignored = read_generation_config(tmp_path, "vllm")
    assert ignored.with_ends(spec) == spec and ignored.sampling == {}
    assert ignored.with_ends(spec).eos_token_ids == spec.eos_token_ids


def test_a_model_without_the_file_says_nothing(spec, tmp_path):
    assert read_generation_config(tmp_path).with_ends(spec).eos_token_ids == spec.eos_token_ids
    with pytest.raises(ValueError, match=r"no generation_config.json in .* expected a directory"):
        read_generation_config(tmp_path, str(tmp_path))


@pytest.mark.parametrize(
    "text", ['{"eos_token_id": "x"}', '{"eos_token_id": [1.5]}', "[]", "{", ""]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config.json'.*--generation-config vllm"):
        read_generation_config(tmp_path)

"""Reading config.json: every value the code relies on is checked, and refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.families.common.class_defaults import config_class
from llmpq.models.model_spec import ModelSpec, RopeScaling, builtin_configs

pytestmark = pytest.mark.pure

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ABSENT = object()
"""Stands for a key that is taken out."""
INTEGER, NUMBER = "must be a positive integer, got", "must be a positive number, got"


def spec_of(model: str, change: dict[str, Any]) -> ModelSpec:
    """Return the spec of a built-in config with some keys changed or taken out."""
    config = {**builtin_configs()[model], **change}
    return ModelSpec.from_config(
        {key: value for key, value in config.items() if value is not ABSENT}, name="changed"
    )


@pytest.mark.parametrize("value", [0, -1, 3.5, 4096.0, "4096", True, [4096], {}])
@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("llama-3.1-8b", "hidden_size"),
        ("llama-3.1-8b", "num_hidden_layers"),
        ("llama-3.1-8b", "num_attention_heads"),
        ("llama-3.1-8b", "num_key_value_heads"),
        ("llama-3.1-8b", "intermediate_size"),
        ("llama-3.1-8b", "vocab_size"),
        ("llama-3.1-8b", "max_position_embeddings"),
        ("qwen3-8b", "head_dim"),
        ("mixtral-8x7b", "num_local_experts"),
        ("opt-125m", "ffn_dim"),
        ("bloom-560m", "n_layer"),
        ("bloom-560m", "seq_length"),
    ],
)
def test_a_size_is_a_positive_integer(model: str, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"config.json: '{key}' {INTEGER}"):
        spec_of(model, {key: value})


@pytest.mark.parametrize(
    "value", [0, -1e-6, float("nan"), float("inf"), 10**400, "1e-6", True, [1e-6]]
)
@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("llama-3.1-8b", "rms_norm_eps"),
        ("llama-3.1-8b", "rope_theta"),
        ("bloom-560m", "layer_norm_epsilon"),
    ],
)
def test_a_constant_is_a_positive_number(model: str, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"config.json: '{key}' {NUMBER}"):
        spec_of(model, {key: value})


@pytest.mark.parametrize(
    ("key", "field"),
    [("intermediate_size", "ffn"), ("hidden_size", "hidden"), ("vocab_size", "vocab")],
)
@pytest.mark.parametrize("value", [ABSENT, None])
def test_a_missing_size_is_that_of_the_config_class(key: str, field: str, value: object) -> None:
    own = getattr(spec_of("llama-3.1-8b", {key: value}), field)
    assert own == config_class("llama").defaults[key]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters", "quantization_config"])
@pytest.mark.parametrize("value", [5, [1, 2], "linear", True, 0])
def test_a_section_is_an_object(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"config.json: '{key}' must be an object, got"):
        spec_of("llama-3.1-8b", {key: value})


@pytest.mark.parametrize("key", [key for key in LLAMA3 if key != "rope_type"])
@pytest.mark.parametrize("value", [ABSENT, "8", float("nan"), 0, -2])
def test_llama3_scaling_names_the_value_it_lacks(key: str, value: object) -> None:
    if value is ABSENT and key == "original_max_position_embeddings":  # the model's own
        scaling = {k: v for k, v in LLAMA3.items() if k != key}
        found = spec_of("llama-3.1-8b", {"rope_scaling": scaling}).rope_scaling
        assert found is not None and found.original_max_positions == 131072
        return
    scaling = {k: v for k, v in {**LLAMA3, key: value}.items() if v is not ABSENT}
    problem = "is missing" if value is ABSENT else "must be a positive"
    with pytest.raises(ValueError, match=f"config.json, llama3 rope scaling: '{key}' {problem}"):
        spec_of("llama-3.1-8b", {"rope_scaling": scaling})


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_values_are_read_from_either_place(place: str) -> None:
    other = {"rope_scaling", "rope_parameters"} - {place}
    change = {place: {**LLAMA3, "rope_theta": 20000}, other.pop(): None, "rope_theta": ABSENT}
    spec = spec_of("llama-3.1-8b", change)
    assert spec.rope_theta == 20000.0 and spec.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            "llama-3.1-8b",
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 1.0}},
            "high_freq_factor=1.0 must be at least low_freq_factor=2.0",
        ),
        ("llama-3.1-8b", {"rope_scaling": {"rope_type": "ntk"}}, "rope scaling 'ntk' is not"),
        ("llama-3.1-8b", {"rope_scaling": {"rope_type": []}}, "is not supported"),
        ("llama-3.1-8b", {"num_key_value_heads": 5}, "do not share 5 key/value heads"),
        ("llama-3.1-8b", {"hidden_size": 4097}, "hidden_size=4097 is not a multiple of"),
        ("opt-125m", {"hidden_size": 769}, "hidden_size=769 is not a multiple of"),
        ("qwen3-8b", {"head_dim": 127}, "head_dim=127 is odd"),
        ("llama-3.1-8b", {"tie_word_embeddings": "false"}, "must be true or false, got 'false'"),
        ("opt-125m", {"enable_bias": "no"}, "must be true or false, got 'no'"),
        ("llama-3.1-8b", {"eos_token_id": "2"}, "must be a token id or a list of them, got '2'"),
        ("llama-3.1-8b", {"eos_token_id": [2, None]}, "must be a token id or a list of them"),
        ("llama-3.1-8b", {"eos_token_id": {"a": 1}}, "must be a token id or a list of them"),
        ("llama-3.1-8b", {"model_type": ["llama"]}, "is not supported: llmpq lacks"),
        ("llama-3.1-8b", {"torch_dtype": 16}, "model dtype '16' is not supported"),
    ],
)
def test_other_bad_values_are_named(model: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(model, change)


@pytest.mark.parametrize("bound", [2**31 - 1, 10**18])
def test_a_bound_beyond_all_texts_is_none(bound: int) -> None:
    """What a plan counts is smaller: of positions and windows, but of no other size."""
    spec = spec_of("llama-3.1-8b", {"max_position_embeddings": bound})
    assert spec.max_positions == 2**24
    spec = spec_of("mistral-7b", {"max_position_embeddings": bound, "sliding_window": bound})
    assert set(spec.windows) == {2**24}
    for key, name in (("vocab_size", "vocab"), ("intermediate_size", "ffn")):
        with pytest.raises(ValueError, match=f"config.json: {name}={bound:,}, expected 16,777,216"):
            spec_of("llama-3.1-8b", {key: bound})


def test_absent_and_null_values_have_their_defaults() -> None:
    change = {"num_key_value_heads": None, "rms_norm_eps": ABSENT, "rope_scaling": None}
    spec = spec_of("llama-3.1-8b", {**change, "rope_theta": None, "tie_word_embeddings": None})
    assert (spec.kv_heads, spec.norm_eps, spec.rope_theta) == (32, 1e-6, 10000.0)
    assert spec.rope_scaling is None and not spec.tied_embeddings
    assert spec_of("llama-3.1-8b", {"rope_theta": 20000}).rope_theta == 20000.0
    assert spec_of("llama-3.1-8b", {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)


def test_the_whole_models_word_on_a_tied_head_counts() -> None:
    text = {**builtin_configs()["mistral-small-24b"], "tie_word_embeddings": False}
    whole = {"model_type": "mistral3", "text_config": text}
    for tied in (True, False):
        config = {**whole, "tie_word_embeddings": tied}
        assert ModelSpec.from_config(config, name="m").tied_embeddings is tied
    assert not ModelSpec.from_config(whole, name="m").tied_embeddings


def test_the_sentence_names_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**builtin_configs()["llama-3.1-8b"], "rms_norm_eps": float("nan")})
    )
    with pytest.raises(ValueError, match=f"^'{tmp_path}': config.json: 'rms_norm_eps' .*got nan"):
        ModelSpec.from_directory(tmp_path)


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model", "change", "expected"),
    [
        (
            "llama-3.1-8b",
            {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 4.0}},
            {"factor": 2.0, "kind": "linear"},
        ),
        (
            "llama-3.1-8b",
            {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 4.0}},
            {"factor": 4.0, "kind": "dynamic"},
        ),
        ("llama-3.1-8b", {"rope_theta": 5e5, "rope_scaling": LINEAR}, {"rope_theta": 1e4}),
        ("llama-3.1-8b", {"dtype": "float16", "torch_dtype": "bfloat16"}, {"dtype": "float16"}),
        (
            "qwen2.5-7b",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 2,
                "layer_types": ["full_attention"] * 28,
            },
            {"windows": ()},
        ),
    ],
)
def test_what_is_said_twice_goes_by_transformers_rule(
    model: str, change: dict[str, Any], expected: dict[str, Any]
) -> None:
    """As its config classes have it, of which the values were read (5.23)."""
    spec = spec_of(model, change)
    found = {**vars(spec), **(vars(spec.rope_scaling) if spec.rope_scaling else {})}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("model", ["mistral-7b", "phi-4", "mixtral-8x7b"])
def test_a_window_of_all_layers_counts_more_than_their_types(model: str) -> None:
    """As in Transformers, whose code of these families reads no `layer_types` (5.23)."""
    count = spec_of(model, {}).num_layers
    for kind in ("full_attention", "sliding_attention"):
        expected = {"sliding_window": 9, "layer_types": [kind] * count}
        assert spec_of(model, expected).windows == (9,) * count
    mixed = ["full_attention", "sliding_attention"] * (count // 2)
    assert spec_of(model, {"sliding_window": None, "layer_types": mixed}).windows == ()
    with pytest.raises(ValueError, match="'layer_types' are of both kinds"):
        spec_of(model, {"sliding_window": 9, "layer_types": mixed})
    own = spec_of(
        "mistral-7b",
        {"model_type": "ministral", "sliding_window": 9}
        | {"layer_types": ["full_attention", "sliding_attention"] * 16},
    )
    assert own.windows == (0, 9) * 16


def test_a_language_models_own_words_are_those_inside() -> None:
    inner = {**builtin_configs()["qwen2.5-7b"], "model_type": "qwen2_5_vl_text", "dtype": "float16"}
    inner |= {"eos_token_id": [3, 4], "vocab_size": 500}
    outer = {"vocab_size": 9, "dtype": "bfloat16", "eos_token_id": 7, "rope_theta": 5.0}
    whole = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}, "text_config": inner}
    spec = ModelSpec.from_config({**outer, **whole}, name="whole")
    assert (spec.vocab, spec.dtype, spec.eos_token_ids) == (500, "float16", (3, 4))
    assert spec.rope_theta == inner["rope_theta"]

"""Arguments of vLLM's `LLM` that ours does not have: neutral ones are taken, others explained."""

from __future__ import annotations

import copy
import inspect
import re
import shutil

import pytest
import torch

from llmpq import LLM, EngineOptions, SamplingParams, StructuredOutputsParams, make_plan
from llmpq.planner.__main__ import main as plan_main
from llmpq.runtime.cli.vllm_flags import IDLE_FLAGS, VLLM_FLAGS
from llmpq.runtime.options.vllm_options import (
    OTHER_OPTIONS,
    VLLM_CALLS,
    VLLM_GUIDES,
    VLLM_METHODS,
    VLLM_OPTIONS,
    VLLM_SAMPLING,
    without_neutral,
)

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pipeline_parallel_size": True}, "cluster='cluster.yaml', as a plan says"),
        ({"pipeline_parallel_size": 4}, "plan='plan.json'"),
        ({"seed": 3}, r"SamplingParams\(seed=...\)"),
        ({"tokenizer": "gpt2"}, "files are read from the model's directory"),
        ({"block_size": 16}, "has 128 tokens"),
        ({"quantization_config": {}}, "own form is found in its files"),
        ({"enable_lora": True}, "merge them into the model"),
        ({"device": "cuda"}, "runs over all devices"),
        ({"speculative_config": {}}, "drafts are speculate="),
        ({"cpu_offload_gb": 4}, "layers run on the CPU"),
        ({"no_such_thing": 1}, "see EngineOptions"),
        ({"torch_dtype": "float16"}, "it is dtype"),
        ({"load_in_4bit": True}, "fewer bits are a plan's"),
        ({"n_ctx": 512}, "it is max_model_len"),
        ({"n_gpu_layers": 20}, "as a plan says"),
    ],
)
def test_what_stands_for_an_argument_is_said(demo_model, given, said):
    with pytest.raises(TypeError, match=f"LLM has no option '{next(iter(given))}'.*{said}"):
        LLM(demo_model, start=False, **given)


def test_values_that_change_nothing_are_taken(demo_model):
    neutral = {name: (other.neutral or (4,))[0] for name, other in VLLM_OPTIONS.items()}
    assert without_neutral(neutral) == {}
    LLM(demo_model, start=False, **neutral).close()
    LLM(demo_model, start=False, disable_log_stats=True, trust_remote_code=True, seed=0).close()


@pytest.mark.parametrize("given", [{"quantization": "awq"}, {"load_format": "bitsandbytes"}])
def test_a_form_that_the_model_is_not_in_is_refused(demo_model, given):
    (form,) = given.values()
    with pytest.raises(ValueError, match=f"demo-7m' is not quantised, quantization='{form}' asks"):
        LLM(demo_model, start=False, **given)
    with pytest.raises(ValueError, match=f"'opt-125m' is not quantised, quantization='{form}'"):
        LLM("opt-125m", start=False, load_format="dummy", quantization=form)
    LLM(demo_model, start=False, quantization=None, load_format="safetensors").close()


def test_a_tokenizer_that_is_the_models_own_is_taken(demo_model, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(demo_model)
    monkeypatch.chdir(demo_model.parent)
    for same in (demo_model, str(demo_model), f"{demo_model}/", demo_model.name, link):
        LLM(demo_model, start=False, tokenizer=same).close()
        LLM(str(same), start=False, tokenizer=demo_model).close()
    copied = shutil.copytree(demo_model, tmp_path / "copied")
    for other in (copied, demo_model.parent, "gpt2", 5):
        with pytest.raises(TypeError, match="LLM has no option 'tokenizer'"):
            LLM(demo_model, start=False, tokenizer=other)


def test_a_command_takes_the_values_that_the_library_takes():
    """An option is said once: a flag with a value is taken just where the argument is."""
    for name, other in VLLM_OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        idle = IDLE_FLAGS.get(flag)
        assert idle is not None or flag in VLLM_FLAGS
        for value in ("1", "0", "auto", "4", "awq", "hf"):
            given = int(value) if value.isdigit() else value
            taken = idle is not None and (idle.values is None or value in idle.values)
            assert taken is other.is_neutral(given), (flag, value)
        assert (idle is not None and idle.values == ()) is (
            other.neutral is not None and other.is_neutral(True)
        )


@pytest.mark.parametrize("name", VLLM_METHODS)
def test_a_method_of_vllms_is_answered_with_ours(demo_model, name):
    llm = LLM(demo_model, start=False)
    assert not hasattr(LLM, name) and not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"'LLM' has no attribute '{name}': .*[a-z]"):
        getattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'$"):
        llm.no_such_thing  # noqa: B018 (it is looked up)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"detokenize": False}, "have their text and token_ids"),
        ({"best_of": 2}, "ask for n answers"),
        ({"logits_processors": [print]}, "use logit_bias"),
        ({"guided_decoding": {}}, "StructuredOutputsParams"),
        ({"use_beam_search": True}, "no beam search"),
        ({"guided_json": {}}, r"StructuredOutputsParams\(json="),
        ({"response_format": {"type": "json_object"}}, "structured_outputs="),
        ({"max_new_tokens": 8}, "it is max_tokens"),
        ({"do_sample": True}, "temperature=0 is greedy"),
    ],
)
def test_parameters_of_vllms_are_taken_or_answered(given, said):
    with pytest.raises(TypeError, match=f"SamplingParams has no '{next(iter(given))}'.*{said}"):
        SamplingParams(**given)
    neutral = {name: other.neutral[0] for name, other in VLLM_SAMPLING.items()}
    assert SamplingParams(max_tokens=3, **neutral) == SamplingParams(max_tokens=3)
    assert not {*VLLM_SAMPLING} & {*SamplingParams.__dataclass_fields__}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_token", r"did you mean 'max_tokens'\? see help\(SamplingParams\)$"),
        ("Temprature", "did you mean 'temperature'"),
        ("no_such_thing", r"see help\(SamplingParams\)$"),
    ],
)
def test_a_parameter_that_is_none_is_answered_with_the_nearest(name, said):
    with pytest.raises(TypeError, match=f"SamplingParams has no '{name}': .*{said}"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"structural_tag": "{}"}, "calls=TOOLS"),
        ({"whitespace_pattern": " "}, "without further white space"),
        ({"disable_additional_properties": True}, "additionalProperties"),
        ({"jsn": {}}, r"did you mean 'json'\? see help\(StructuredOutputsParams\)"),
    ],
)
def test_forms_of_vllms_guides_are_taken_or_answered(given, said):
    with pytest.raises(TypeError, match=f"StructuredOutputsParams has no '{next(iter(given))}'.*"):
        StructuredOutputsParams(**given)
    with pytest.raises(TypeError, match=said):
        StructuredOutputsParams(**given)
    neutral = {name: other.neutral[0] for name, other in VLLM_GUIDES.items()}
    plain = StructuredOutputsParams(regex="a")
    assert StructuredOutputsParams(regex="a", **neutral) == plain
    assert not {*VLLM_GUIDES} & {*StructuredOutputsParams.__dataclass_fields__}


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_what_samples_is_an_argument_of_sampling_params(demo_model, method):
    llm = LLM(demo_model, start=False)
    for name, said in (("max_tokens", r"SamplingParams\(max_tokens=...\)"), ("num_beams", "beam")):
        with pytest.raises(TypeError, match=f"LLM.{method} has no argument '{name}': .*{said}"):
            getattr(llm, method)("a", **{name: 3})


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_arguments_of_vllms_calls_are_taken_or_answered(demo_model, method):
    llm = LLM(demo_model, start=False)
    call = getattr(llm, method)
    for name, other in VLLM_CALLS.items():
        with pytest.raises(TypeError, match=f"LLM.{method} has no argument '{name}'.*: "):
            call("a", **{name: object()})
        assert other.neutral
    where = rf"see help\(LLM.{method}\)$"
    with pytest.raises(TypeError, match=f"LLM.{method} has no argument 'no_such_thing': {where}"):
        call("a", no_such_thing=1)
    with pytest.raises(TypeError, match=f"'use_tdqm': did you mean 'use_tqdm'\\? {where}"):
        call("a", use_tdqm=False)


def test_arguments_that_are_not_there_are_named_before_those_that_lack(demo_model):
    llm = LLM(demo_model, start=False)
    with pytest.raises(TypeError, match=r"no argument 'prompt': did you mean 'prompts'\?"):
        llm.generate(prompt="a")
    with pytest.raises(TypeError, match="no argument 'prompt_token_ids' .*: token ids are prompts"):
        llm.generate(prompt_token_ids=[[1]])
    with pytest.raises(ValueError, match="a prompt is a text or a list of token ids, got None"):
        llm.generate()
    with pytest.raises(ValueError, match="a conversation is a list of messages .*, got None"):
        llm.chat()


def test_what_only_make_plan_takes_is_answered(demo_model):
    known = {*EngineOptions.__dataclass_fields__, *inspect.signature(LLM).parameters}
    others = [name for name in inspect.signature(make_plan).parameters if name not in known]
    assert {"devices", "bits", "batch", "kv"} <= {*others}
    for name in others:
        with pytest.raises(TypeError, match=f"no option '{name}' .*: it is "):
            LLM(demo_model, start=False, **{name: "4"})


def test_none_of_them_is_an_option_of_ours():
    others = {*VLLM_OPTIONS, *OTHER_OPTIONS}
    assert not others & {*EngineOptions.__dataclass_fields__}
    assert not {*VLLM_OPTIONS} & {*OTHER_OPTIONS}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(
            ({name: value}, f"{name} must be True or False, got {value!r}")
            for name, value in (
                ("enable_prefix_caching", "no"),
                ("enforce_eager", "false"),
                ("profile", None),
                ("offline", 1.0),
            )
        ),
        ({"kv_cache_dtype": 5}, "unknown KV cache dtype '5'"),
        ({"deadlines": {"step": 3}}, "deadlines must be Deadlines"),
        ({"trace": 5}, "trace must be a text, got 5"),
        ({"cluster": {}}, "cluster must be a file's path or a Cluster, got {}"),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        EngineOptions(**given)


def test_options_are_taken_as_people_write_them():
    options = EngineOptions(kv_cache_dtype=8, deadlines="step=3", enable_prefix_caching=0)
    assert options.kv_cache_dtype == "8" and options.deadlines.step_s == 3
    assert options.enable_prefix_caching is False
    with pytest.raises(TypeError, match="options must be EngineOptions"):
        LLM("DIR", options={"max_model_len": 5})


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("half", "float16"),
        ("float", "float32"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        ("auto", "auto"),
    ],
)
def test_dtypes_have_torchs_names(given, dtype):
    assert EngineOptions(dtype=given).dtype == dtype


def test_other_dtypes_are_refused_by_all_that_there_are():
    with pytest.raises(ValueError, match="dtype must be auto, .*got 'int8'"):
        EngineOptions(dtype=torch.int8)
    with pytest.raises(ValueError, match="'fp8'.*16, 8, 4, 2;.*, or auto"):
        EngineOptions(kv_cache_dtype="fp8")


def test_an_llm_says_what_it_is_and_cannot_be_pickled(demo_model):
    llm = LLM(demo_model, start=False, max_model_len=64)
    assert "demo-7m" in repr(llm) and "64 tokens, not started" in repr(llm)
    for made in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="an LLM cannot be pickled"):
            made(llm)
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("import os") == llm.tokenizer.encode("import os")
    assert hasattr(tokenizer, "apply_chat_template")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("adapter_model.safetensors", "", "an adapter beside the model ({}), which is not applied"),
        ("adapter_config.json", "{}", "an adapter beside the model ({}), which is not applied"),
        (
            "adapter_config.json",
            '{"peft_type": "LORA"}',
            "a LoRA adapter beside the model ({}), which is not applied: merge it",
        ),
        (
            "adapter_config.json",
            '{"peft_type": "PREFIX_TUNING"}',
            "a PREFIX_TUNING adapter beside the model ({}), which is not applied: it stands beside",
        ),
    ],
)
def test_an_adapter_beside_the_model_is_named_once_by_every_door(
    demo_model, tmp_path, caplog, capsys, name, content, said
):
    folder = shutil.copytree(demo_model, tmp_path / "model")
    LLM(folder, start=False).close()
    assert "adapter" not in caplog.text
    (folder / name).write_text(content)
    LLM(folder, start=False).close()
    assert caplog.text.count("left out: " + said.format(name)) == 1
    words = ["fits", "--model", str(folder), "--devices", "3090", "--context", "256"]
    assert plan_main(words) == 0
    assert " ".join(capsys.readouterr().out.split()).count(said.format(name)) == 1

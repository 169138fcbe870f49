"""Every word of an exported command is one that the engine's version, as listed, accepts."""

from __future__ import annotations

import itertools
import shlex

import pytest

from llmpq.models.model_spec import ModelSpec, builtin_configs, builtin_ids
from llmpq.planner.export import WRITERS
from llmpq.planner.export.result import engine_flags
from llmpq.plans.plan import Plan

pytestmark = pytest.mark.pure

PROGRAMS = {"vllm serve": "serve", "sglang.launch_server": "launch_server"}
MODELS = ["opt-125m", "bloom-560m", "llama-2-7b", "qwen3-8b", "mixtral-8x7b"]


def _plan(model: str, kv: str, dtype: str, where: str) -> Plan:
    """Return a plan of two stages: on one node, on two, or with the CPU first; or of one stage that
    two GPUs share."""
    spec = ModelSpec.by_name(model)
    half = spec.num_layers // 2
    kinds = ["CPU" if where == "cpu" else "A100-40GB", "A100-40GB"]
    stages = [
        {"device": f"{kinds[j]}-{j}", "node": "ab"[j] if where == "two" else "a", "kind": kinds[j],
         "device_index": j, "profile_kind": kinds[j], "layers": [start, end],
         "precisions": [bits] * (end - start)}
        for j, (start, end, bits) in enumerate(
            [(0, half, "w4a16"), (half, spec.num_layers, "w16a16")]
        )
    ]  # fmt: skip
    if where == "shared":
        both = {"devices": ["A100-40GB-0", "A100-40GB-1"], "shares": [1, 1]}
        bits = stages[0]["precisions"] + stages[1]["precisions"]
        stages = [{**stages[0], **both, "layers": [0, spec.num_layers], "precisions": bits}]
    data = {
        "model": {"name": model, "num_layers": spec.num_layers, "fingerprint": spec.fingerprint()},
        "cluster": {"name": "box", "fingerprint": "0"},
        "workload": {"batch": 8, "prompt_len": 512, "gen_len": 100, "kv": kv, "dtype": dtype},
        "prefill_microbatch": 2,
        "decode_microbatch": 4,
        "stages": stages,
    }
    return Plan.parse_data(data, where="test")


def _check(line: str, listed: dict[str, object]) -> int:
    """Check one line of shell; return how many flags it has."""
    words = shlex.split(line)
    if words[0] == "export":
        name = words[1].partition("=")[0]
        assert (
            name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES") or name in listed["environment"]
        )  # type: ignore[operator]
        return 0
    if words[0].startswith("CUDA_VISIBLE_DEVICES="):
        words = words[1:]
    programs = [key for key in listed if key in words]
    program = programs[0] if programs else next(v for k, v in PROGRAMS.items() if k in line)
    values = listed.get("values", {})
    flags = [word for word in words if word.startswith("-") and word not in ("-m", "--")]
    for flag in flags:
        assert flag in listed[program], f"{program} has no {flag}"  # type: ignore[operator]
        if flag in values:  # type: ignore[operator]
            assert words[words.index(flag) + 1] in values[flag]  # type: ignore[index]
    if program == "llama-quantize":
        assert words[-1] in values["file types"]  # type: ignore[index]
    return len(flags)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_commands_have_flags_that_the_listed_version_has(engine: str) -> None:
    seen = refused = 0
    kinds = itertools.product(
        MODELS, ["kv16", "kv8", "kv8v4", "kv16v4", "kv4", "kv2"], ["float16", "bfloat16"]
    )
    for (model, kv, dtype), where in itertools.product(kinds, ["one", "two", "cpu", "shared"]):
        try:
            text = WRITERS[engine](_plan(model, kv, dtype, where), ModelSpec.by_name(model)).text
        except ValueError:
            refused += 1
            continue
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        seen += sum(_check(line, engine_flags()[engine]) for line in lines)
    assert seen > 450 and refused < 150


def test_a_flag_that_is_not_listed_is_noticed() -> None:
    listed = engine_flags()["vllm"]
    with pytest.raises(AssertionError, match="serve has no --pipeline-size"):
        _check("vllm serve facebook/opt-125m --pipeline-size 2", listed)
    with pytest.raises(AssertionError):
        _check("vllm serve facebook/opt-125m --kv-cache-dtype int8", listed)
    with pytest.raises(AssertionError):
        _check("export VLLM_LAYERS=7,5", listed)


def test_lists_name_their_version_and_source() -> None:
    assert set(engine_flags()) == {"vllm", "sglang", "llamacpp"}
    for listed in engine_flags().values():
        assert listed["version"] and listed["source"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_models_are_named_as_hugging_face_spells_them(engine: str) -> None:
    for name in builtin_configs():
        plan = _plan(name, "kv16", "float16", "one")
        if engine == "sglang" and name.startswith("bloom"):
            continue
        words = WRITERS[engine](plan, ModelSpec.by_name(name)).text.split()
        assert builtin_ids()[name][0] in words and "/" in builtin_ids()[name][0]


def test_a_model_directory_is_named_as_it_is(tmp_path: object) -> None:
    plan = _plan("qwen3-8b", "kv16", "float16", "one")
    ref = plan.model.model_copy(update={"path": "/models/my qwen"})
    text = WRITERS["vllm"](plan.model_copy(update={"model": ref}), ModelSpec.by_name("qwen3-8b"))
    assert "vllm serve '/models/my qwen' " in text.text

"""What a person types that is nearly right is taken, or answered in the words that were typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.errors import nearest
from llmpq.models.model_spec import ModelSpec, builtin_configs
from llmpq.planner.__main__ import main
from llmpq.planner.cli.arguments import (
    ENGINE_FLAGS,
    export_parser,
    fits_parser,
    plan_parser,
    plan_request,
)
from llmpq.planner.cli.report import headline, loss_lines, stage_table
from llmpq.planner.make import make_plan
from llmpq.planner.problem.requests import ExportRequest
from llmpq.plans.plan import Plan
from llmpq.units import shown_loss

pytestmark = pytest.mark.pure
CARD = "--devices 4090 --model llama-3.1-8b --batch 1"

ANSWERS = {
    "--what-if +3060:0": "--what-if +3060:0: expected 1 to 1,000 devices, got 0",
    "--kv q8_0": "unknown KV cache dtype 'q8_0': did you mean 8? known bits: 16, 8, 4, 2",
    "--bits q4_k_m": "unknown precision 'q4_k_m': did you mean '4'? known: 16, 3, 4, 8, w4a4, w8a8",
    "--bits 8bit": "unknown precision '8bit': did you mean '8'? known: 16, 3, 4, 8, w4a4, w8a8",
    "--kv fp4": "unknown KV cache dtype 'fp4': did you mean 4? known bits: 16, 8, 4, 2",
    "--kv ,": "--kv is empty; expected bits such as 8 or 16,8, or leave it out",
    "--what-if +3060:2:3": "expected NAME:COUNT, such as 3090:2, got '2:3' for a count",
    "--kv 3": "unknown KV cache dtype '3': known bits: 16, 8, 4, 2",
    "--ctx-size 8k --prompt-len 5": "--prompt-len has no effect with --ctx-size: leave --ctx-size "
    "out, or leave --prompt-len out",
    "--prefer speed --quality-budget 5": "--prefer has no effect with --quality-budget: leave "
    "--quality-budget out, or leave --prefer out",
    "--context 32kb": "expected a number of tokens such as 512, 32k or 1M, got '32kb'",
}


@pytest.mark.parametrize("words", ANSWERS)
def test_answers_are_in_the_words_that_were_typed(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert main([*CARD.split(), *words.split()]) == 2
    assert ANSWERS[words] in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["fits"]])
def test_flags_of_other_programs_are_answered_with_ours(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    parser = fits_parser() if command else plan_parser()
    known = set(parser._parser._option_string_actions)
    for flag, answer in ENGINE_FLAGS.items():
        assert flag not in known
        assert set(re.findall(r"--[a-z-]+", answer)) <= known
        assert main([*command, *CARD.split(), flag, "2"]) == 2
        assert f"this command has no '{flag}': {answer}\n" in capsys.readouterr().err


def test_lengths_have_the_names_of_other_programs() -> None:
    for flag in ("--context", "--ctx-size", "--max-model-len"):
        assert plan_request([*CARD.split(), flag, "1M"]).context == 1 << 20
    assert plan_request([*CARD.split(), "--context", "1.5m"]).context == 3 << 19


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("qwen3-coder-30b", "qwen3-30b-a3b"),
        ("deepseek-r1-distill-llama-70b", "llama-3.3-70b"),
        ("mistral-small-3.1-24b", "mistral-small-24b"),
        ("gema-3-27b", "gemma-3-27b"),
    ],
)
def test_a_model_s_nearest_name_shares_its_words(typed: str, found: str) -> None:
    known = ["qwen3-32b", "qwen3-30b-a3b", "llama-3.3-70b", "mistral-small-24b", "gemma-3-27b"]
    assert nearest(typed, known) == f"did you mean '{found}'? "
    assert nearest("nothing-like-it", known) == ""


def test_engines_are_read_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama.cpp", "llamacpp", "LLaMA.cpp"):
        assert export_parser().read_as(ExportRequest, ["p.json", "--to", name]).to == "llamacpp"
    assert main(["export", "p.json", "--to", "ollama"]) == 2
    assert "'ollama' loads GGUF files: those that `--to llamacpp` says" in capsys.readouterr().err
    assert main(["export", "p.json", "--to", "vlm"]) == 2
    assert "unknown engine 'vlm': did you mean 'vllm'? known: " in capsys.readouterr().err


def test_a_card_of_digits_needs_no_quotes() -> None:
    data = {"name": "x", "nodes": [{"name": "a", "devices": [{"kind": 3060, "count": 2}]}]}
    cluster = Cluster.parse_data(data, where="x")
    assert [device.kind for device in cluster.devices] == ["RTX-3060"] * 2


def test_a_change_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CARD.split(), "--what-if", "+cpu"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("what if +cpu")]
    assert re.match(r"what if \+cpu \(.*assumed: cpu has \d+ threads", line)


def test_a_change_says_in_which_machine_a_device_is_put(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "two.yaml"
    nodes = "[{name: a, devices: [{kind: 4090}]}, {name: b, devices: [{kind: 3090}]}]"
    path.write_text(f"{{name: two, nodes: {nodes}}}")
    words = ["--cluster", str(path), "--model", "opt-1.3b", "--batch", "1", "--gen-len", "5"]
    assert main([*words, "--what-if", "+5090", "--what-if", "+3090", "--what-if", "-3090"]) == 0
    lines = [one for one in capsys.readouterr().out.splitlines() if one.startswith("what if ")]
    assert lines[0].startswith("what if +5090 (assumed: in a machine of its own): ")
    assert lines[1].startswith("what if +3090 (assumed: in b): ")
    assert lines[2].startswith("what if -3090: ")


def test_a_copied_loss_is_a_budget_that_its_plan_keeps() -> None:
    for loss in (0.0034602, 6.53350001, 1.0, 1.0000000001, 0.99995, 4.5e-7, 12345.6, 9.9999):
        shown = shown_loss(loss)
        assert loss <= float(shown) * (1 + 5e-10) and float(shown) <= loss * 1.0011
        assert len(shown.replace(".", "").strip("0").split("e")[0]) <= 5
    assert (shown_loss(0.0), shown_loss(1.0), shown_loss(0.25)) == ("0", "1", "0.25")
    card = {"model": "opt-1.3b", "devices": "4090", "batch": 1, "gen_len": 5}
    for bits in ("8", "4", "3"):
        said = re.match(r"quality loss: (\S+) ", loss_lines(make_plan(bits=bits, **card))[0])
        assert said is not None
        again = make_plan(bits=bits, quality_budget=float(said[1]), **card)
        assert {choice.typed for choice in again.precisions} == {bits}


def test_the_slowest_stages_are_marked_by_phase() -> None:
    plan = make_plan("llama-3.1-8b", devices="4090,3090", batch=8, prompt_len=512, gen_len=50)
    times = {"prefill_s": (0.5, 0.1), "decode_s": (0.1, 0.5)}
    assert marks(plan, times) == ["<- slowest of prompts", "<- slowest of tokens"]
    assert marks(plan, {**times, "decode_s": (0.5, 0.1)})[0] == "<- slowest of prompts and tokens"
    assert marks(plan, {**times, "prefill_s": (0.5, 0.499)}) == ["", "<- slowest of tokens"]


def marks(plan: Plan, times: dict[str, tuple[float, float]]) -> list[str]:
    stages = [
        stage.model_copy(update={name: values[k] for name, values in times.items()})
        for k, stage in enumerate(plan.stages)
    ]
    table = stage_table(plan.model_copy(update={"stages": tuple(stages)}))
    return [str(cell) for cell in table.columns[-1].cells]


def test_the_cache_is_named_as_it_is() -> None:
    plan = make_plan("opt-125m", devices="4090", batch=1, dtype="float32", bits="16")
    assert headline(plan)[0].endswith(" tokens, float32, KV in float32")
    packed = make_plan("llama-3.1-8b", devices="4090", batch=1, context=32768, kv="8", bits="8")
    assert ", and the newest 128 of each in 16 bits; " in "\n".join(headline(packed))


def test_a_gap_says_where_it_comes_from() -> None:
    plan = make_plan("llama-3.1-8b", devices="4090", batch=1)
    note = "the time is predicted step by step, 4.2% more than the search counts: why"
    solver = plan.solver.model_copy(
        update={"status": "feasible", "gap": 0.0424, "bound": 5.6, "value": 5.87, "note": note}
    )
    (line,) = [one for one in headline(replace_solver(plan, solver)) if one.startswith("exact:")]
    assert line.endswith(
        "(bound 5.6): the bound takes a stage's mean time over all chunks and tokens"
    )


def replace_solver(plan: Plan, solver: object) -> Plan:
    return plan.model_copy(update={"solver": solver})


def test_an_unknown_model_gets_near_names_and_where_all_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, near in {
        "mistral-large": ["mistral-7b", "mistral-nemo-12b"],
        "deepseek-r1-distill-llama-70b": ["llama-3-70b", "llama-3.3-70b"],
        "gemma": ["gemma-2-9b"],
        "qwen3.6": ["qwen3.6-27b", "qwen3.6-35b-a3b"],
        "zzzz": [],
    }.items():
        assert main(["--devices", "4090", "--model", name]) == 2
        line = capsys.readouterr().err
        assert all(f"'{one}'" in line for one in near) and "llmpq-algo models lists the" in line
        assert len(re.findall(r"'[^ ']+'", line)) <= 1 + 3 and ("did you mean" in line) == bool(
            near
        )


def test_models_of_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "Llama 3"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows[1:] if row} == {
        name for name in builtin_configs() if name.startswith("llama-3")
    }
    for word, names in {
        "qwen3.6": {"qwen3.6-27b", "qwen3.6-35b-a3b"},
        "GLM-4.5": {"glm-4.5", "glm-4.5-air"},
        "deepseek-r1": {"deepseek-v3"},  # by its name on the hub
    }.items():
        assert main(["models", word]) == 0
        rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
        assert {row.split()[0] for row in rows} == names
        assert all(ModelSpec.by_name(name).name == name for name in names)
    assert main(["models", "qwen3-33b"]) == 2
    assert "did you mean 'qwen3-32b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "got"),
    [("--quality-budget 10%", "10%"), ("--ttft 3s", "3s"), ("--batch 4x", "4x")],
)
def test_a_number_that_is_none_is_a_sentence(
    capsys: pytest.CaptureFixture[str], flags: str, got: str
) -> None:
    assert main(["--devices", "4090", "--model", "qwen3-8b", *flags.split()]) == 2
    line = capsys.readouterr().err
    assert "number" in line and f"got '{got}'" in line and "invalid" not in line


def test_changes_with_a_comma_are_one_change(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--model llama-3.1-8b --batch 2 --bits 8 --engines 1 --tensor-parallel 1"
    for change, devices, flags in (
        ("-3090,+5090", "4090,3090,5090", ""),
        ("+5090,-3090:2,batch=4,bits=4,8", "4090,5090", "--batch 4 --bits 4,8"),
    ):
        assert main(["--devices", "4090,3090:2", *job.split(), "--what-if", change]) == 0
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("what if")]
        assert main(["--devices", devices, *job.split(), *flags.split(), "--json"]) == 0
        plan = Plan.parse_data(json.loads(capsys.readouterr().out), where="test")
        assert plan.predicted is not None
        assert line.startswith(f"what if {change}: {plan.predicted.total_s:.3f} s")


def test_of_methods_with_one_plan_the_exact_one_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*CARD.split(), "--bits", "8", "--method", "all", "--time-limit", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("exact: ") for line in lines)
    assert not any(line.startswith("ilp: ") for line in lines)

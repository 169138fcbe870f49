"""Flags of vLLM that a command does not have are answered with what stands for them here."""

from __future__ import annotations

import io
import re

import pytest

from llmpq.planner.cli.arguments import plan_parser
from llmpq.runtime.cli.main import COMMANDS, main
from llmpq.runtime.cli.vllm_flags import IDLE_FLAGS, LENGTH_FLAGS, PLAN_FLAGS, VLLM_FLAGS

pytestmark = pytest.mark.cpu


def flags_of(parser) -> set[str]:
    return set(parser._parser._option_string_actions)


@pytest.mark.parametrize("command", ["run", "serve", "chat", "bench"])
def test_a_flag_of_vllms_is_answered_with_ours(command, capsys):
    known = flags_of(COMMANDS[command].parser())
    answered = [flag for flag in VLLM_FLAGS if flag not in known]
    assert {"--pipeline-parallel-size", "--tokenizer"} <= set(answered)
    assert "--enforce-eager" in known
    for flag in answered:
        assert main([command, flag, "2"]) == 2
        said = capsys.readouterr().err
        assert f"has no '{flag}': " in said and said.count("\n") == 1
    assert main([command, "--pipeline_parallel_size=4"]) == 2
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "serve", "chat", "bench"])
@pytest.mark.parametrize("flag", ["--quantization", "-q"])
def test_a_form_that_the_model_is_not_in_is_refused(command, flag, demo_model, tmp_path, capsys):
    (tmp_path / "prompts").write_text("a\n")
    files = ["-i", str(tmp_path / "prompts"), "-o", str(tmp_path / "out")]
    words = [command, "--model", str(demo_model), *(files if command == "run" else [])]
    assert main([*words, flag, "awq"]) == 2
    said = capsys.readouterr().err
    assert "demo-7m' is not quantised, --quantization awq asks for a model that is: leave" in said


@pytest.mark.parametrize("command", ["run", "serve", "chat", "bench"])
@pytest.mark.parametrize("flag", LENGTH_FLAGS)
def test_a_context_is_answered_with_the_command_s_own_flag(command, flag, capsys):
    assert main([command, flag, "8192"]) == 2
    own = "--max-model-len" in flags_of(COMMANDS[command].parser())
    assert own == (command in ("serve", "chat"))
    said = "the longest request is --max-model-len N" if own else "llmpq-algo --prompt-len"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "serve", "chat", "bench"])
def test_a_flag_that_plans_is_answered_with_the_way_to_plan(command, capsys):
    assert set(PLAN_FLAGS) <= flags_of(plan_parser())
    known = flags_of(COMMANDS[command].parser())
    answered = [flag for flag in PLAN_FLAGS if flag not in known | set(VLLM_FLAGS)]
    assert {"--engines", "--devices"} <= set(answered)
    assert ("--gen-len" in known) == (command == "bench")
    for flag in answered:
        assert main([command, flag, "2"]) == 2
        said = capsys.readouterr().err
        assert f"has no '{flag}': " in said and said.count("\n") == 1
        assert f"llmpq-algo {flag}" in said or flag == "--kv" and "--kv-cache-dtype" in said


def test_answers_name_flags_that_exist():
    """What is named is a flag of llmpq-algo or of run, serve or bench."""
    every = {name: flags_of(command.parser()) for name, command in COMMANDS.items()}
    for flag, text in VLLM_FLAGS.items():
        named = re.findall(r"(?:(llmpq-[a-z]+(?: [a-z]+)?) )?(?:[\w,]+ )?(--[a-z-]+)", text)
        for _, other in named:
            owners = [name for name, flags in every.items() if other in flags]
            assert owners or other in flags_of(plan_parser()), (flag, other)
            if "llmpq-algo" in text:
                continue
            assert set(owners) & {"run", "serve", "bench"}, (flag, other)


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
def test_flags_that_change_nothing_are_taken_with_a_line(command, capsys):
    """Charts and scripts have them fixed; each ends where the command has nothing else to do."""
    files = ["-i", "nowhere.jsonl", "-o", "x"] if command == "run" else []
    words = [command, "--model", "nowhere", *files]
    words += ["--trust-remote-code", "--enable-prefix-caching", "--disable_log_requests"]
    words += ["-tp", "1", "--pipeline-parallel-size=1", "--swap-space", "4", "--seed", "0"]
    assert main(words) == 2
    *said, refusal = capsys.readouterr().err.splitlines()
    assert "unknown flag" not in refusal and "has no" not in refusal and "nowhere" in refusal
    own = flags_of(COMMANDS[command].parser())
    asked = ["--trust-remote-code", "--enable-prefix-caching", "--disable_log_requests"]
    asked += ["-tp 1", "--pipeline-parallel-size 1", "--swap-space", "--seed 0"]
    expected = [word for word in asked if word.partition(" ")[0] not in own]
    assert [line.partition(": ")[2].partition(" changes nothing: ")[0] for line in said] == expected
    assert main([command, "--model", "nowhere", "-pp", "2"]) == 2
    assert "has no '-pp'" in capsys.readouterr().err


def test_a_flag_is_either_taken_or_answered():
    both = VLLM_FLAGS.keys() & {flag for flag, idle in IDLE_FLAGS.items() if idle.values is None}
    assert not both


SERVED = """--async-scheduling --scheduling-policy=priority --enable-prompt-tokens-details
--enable-server-load-tracking --enable-request-id-headers --language-model-only
--api-server-count=1 --stream-interval=1 --response-role=assistant --logprobs-mode=raw_logprobs"""


def test_what_deployments_of_vllm_have_fixed_is_taken_by_a_server(capsys):
    assert main(["serve", "nowhere", *SERVED.split()]) == 2
    *said, refusal = capsys.readouterr().err.splitlines()
    assert "no such model directory" in refusal and len(said) == len(SERVED.split())
    assert all(" changes nothing: " in line for line in said)


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--allowed-origins", "--cors-origin"),
        ("--enable-log-requests", "--log-prompts"),
        ("--otlp-traces-endpoint", "--trace"),
        ("--nnodes", "--cluster"),
        ("--api-server-count=2", "--replicas"),
        ("--no-async-scheduling", "leave it out"),
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        ("--parallel", "--max-num-seqs"),
    ],
)
def test_a_server_names_what_stands_for_a_flag(flag, ours, capsys):
    assert main(["serve", "nowhere", flag, "2"]) == 2
    said = capsys.readouterr().err
    assert f"has no '{flag.partition('=')[0]}': " in said and ours in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--served-model-name a b", "'b' belongs to no flag: write --served-model-name b;"),
        ("--api-key=a b", "'b' belongs to no flag: write --api-key b;"),
        ("b", "'b' belongs to no flag; see"),
        ("--host a b", "'b' belongs to no flag; see"),
        ("--ssl-key-file k", "did you mean '--ssl-keyfile'?"),
        ("--ssl-cert-file c", "did you mean '--ssl-certfile'?"),
        ("--temp 0.2", "generation_config.json's (--generation-config DIR)"),
        ("--batch-size 512", "llmpq-dist serve --max-num-batched-tokens N"),
    ],
)
def test_what_a_server_has_otherwise_is_named(words, said, capsys):
    assert main(["serve", "nowhere", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_as_many_tokens_as_fit_are_what_is_so_without_the_flag():
    parser = COMMANDS["serve"].parser()
    for value in ("auto", "-1"):
        assert parser.read(["DIR", "--max-model-len", value]).max_model_len is None
    assert parser.read(["DIR", "--max-model-len", "2k"]).max_model_len == 2048


def test_chat_runs_what_its_messages_name(demo_model, monkeypatch, capsys):
    """Rounded output matrices, and the pages on drafts, name flags of every command that runs."""
    assert {"--head-bits", "--speculate", "--gamma", "--prefer"} <= flags_of(
        COMMANDS["chat"].parser()
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n"))
    words = ["--max-tokens", "3", "--speculate", "ngram", "--gamma", "2", "--head-bits", "16"]
    assert main(["chat", str(demo_model), *words]) == 0
    assert capsys.readouterr().out.strip()

"""Flags of vLLM that a command does not have are answered with what stands for them here."""

from __future__ import annotations

import re

import pytest

from llmpq.planner.cli.arguments import plan_parser
from llmpq.runtime.cli.main import COMMANDS, main
from llmpq.runtime.cli.vllm_flags import VLLM_FLAGS

pytestmark = pytest.mark.cpu


def flags_of(parser) -> set[str]:
    return set(parser._parser._option_string_actions)


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
def test_a_flag_of_vllms_is_answered_with_ours(command, capsys):
    known = flags_of(COMMANDS[command].parser())
    answered = [flag for flag in VLLM_FLAGS if flag not in known]
    assert {"--tensor-parallel-size", "--quantization", "--trust-remote-code"} <= set(answered)
    for flag in answered:
        assert main([command, flag, "2"]) == 2
        said = capsys.readouterr().err
        assert f"has no '{flag}': " in said and said.count("\n") == 1
    assert main([command, "--tensor_parallel_size=4"]) == 2
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err


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

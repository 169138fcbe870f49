"""Errors of the Python API name arguments, those of the commands flags."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

import llmpq
from llmpq.python_names import in_python, python_door

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("give another folder or leave --layer-cache out", "or leave layer_cache out"),
        ("--gamma must be between 1 and 8", "gamma must be"),
        ("plan with --kv 16", "plan with kv_cache_dtype=16"),
        ("plan with --kv 8v4", "plan with kv_cache_dtype='8v4'"),
        ("re-plan with llmpq-algo --kv 8; drop --kv", "llmpq-algo --kv 8; drop kv_cache_dtype"),
        ("ignore it: --layer-cache vllm", "ignore it: layer_cache='vllm'"),
        ("with --no-stages-apart", "with stages_apart=False"),
        ("or give --copy-weights", "or give llmpq-dist run --copy-weights"),
        ("ray start --address A:1 there) and --ray-address A:1", "--address A:1 there) and ray_ad"),
        ("a well-known--dash, and -- two", "a well-known--dash, and -- two"),
    ],
)
def test_flags_become_arguments(text, said):
    options = {"layer_cache", "gamma", "kv_cache_dtype", "stages_apart", "ray_address"}
    assert said in in_python(text, options, "LLM")


def test_the_front_door_spells_and_what_is_behind_it_does_not():
    from llmpq.planner.make import make_plan

    wrong = {"model": "qwen3-8b", "devices": "4090", "batch": 0}
    with pytest.raises(ValueError, match="--batch"):
        make_plan(**wrong)
    with pytest.raises(ValueError, match="batch") as error:
        llmpq.make_plan(**wrong)
    assert "--" not in str(error.value)
    assert inspect.signature(llmpq.make_plan) == inspect.signature(make_plan)


@dataclass
class Options:
    stages_apart: bool = False


def test_a_class_stays_one():
    class LLM:
        """A model."""

        def __init__(self, model: str, *, options: Options | None = None, **more: object) -> None:
            if more:
                raise ValueError("leave --stages-apart out, or --model-name")
            self.model = model

        def generate(self, n: int) -> None:
            raise ValueError("a smaller --n, or another --model DIR")

    door = python_door(LLM)
    assert issubclass(door, LLM) and door.__doc__ == LLM.__doc__
    with pytest.raises(
        ValueError, match=r"^leave stages_apart out, or llmpq-dist run --model-name$"
    ):
        door("x", stages_apart=True)
    with pytest.raises(ValueError, match=r"^a smaller n, or another model=DIR$"):
        door("x").generate(3)

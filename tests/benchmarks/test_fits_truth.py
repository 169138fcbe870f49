"""`llmpq-algo fits` against truth, a few seeds of `benchmarks/memory_fidelity.py fits`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def truth() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))  # as for a script: its folder comes first
        yield importlib.import_module("lib.fits_truth")
    for name in ("lib.fits_truth", "lib.published_configs", "lib.rows"):
        sys.modules.pop(name, None)


def test_draws_are_of_many_kinds_and_the_same_again(truth: ModuleType) -> None:
    drawn = [truth.draw(seed) for seed in range(128)]
    kinds = {str(one.config["model_type"]) for one in drawn}
    assert {"qwen3_5", "nemotron_h", "gemma3", "deepseek_v3", "gpt_oss", "qwen3_moe"} <= kinds, (
        kinds
    )
    assert len(kinds) >= 25 and {len(one.shares) for one in drawn} == {1, 2, 3}
    assert truth.draw(7) == truth.draw(7)


@pytest.mark.parametrize("kind", ["deepseek_v3", "nemotron_h", "gemma2", "gpt_oss"])
def test_what_is_said_of_a_model_is_true(truth: ModuleType, kind: str) -> None:
    seed = next(i for i, c in enumerate(truth.configs()) if c["model_type"] == kind)
    found = truth.tried(truth.draw(seed))
    assert not found.wrong, found
    assert all(abs(error) <= 0.01 for error in found.errors)


def test_a_wrong_answer_is_noticed(truth: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = next(s for s in range(40) if max(truth.draw(s).shares) > 1.2)
    asked = truth.asked
    calls = []

    def lies(folder: str, drawn: object, memories: object) -> object:
        calls.append(memories)
        answer = asked(folder, drawn, memories)
        return (
            answer if len(calls) == 1 else type(answer)(report=answer.report, plan=None, refusal="")
        )

    monkeypatch.setattr(truth, "asked", lies)
    assert "said not to fit" in truth.tried(truth.draw(fits)).wrong

"""The checkpoint whose head agrees in a known share: as many tokens a verify as predicted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmpq import LLM, SamplingParams
from llmpq.plans.speculation import expected_tokens

pytestmark = pytest.mark.cpu
HIDDEN, TOKENS, GAMMA = 256, 256, 2
"""A cycle through all tokens."""


@pytest.fixture(scope="module")
def mtp_drafts() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("mtp_drafts")
    sys.modules.pop("mtp_drafts", None)


@pytest.mark.parametrize(
    ("agreement", "off"),
    [
        pytest.param(1.0, 0.03, marks=pytest.mark.seldom),
        (0.8, 0.2),
        pytest.param(0.0, 0.0, marks=pytest.mark.seldom),
    ],
)
def test_a_verify_yields_as_many_tokens_as_predicted(
    mtp_drafts: ModuleType, make_plan: Any, tmp_path: Path, agreement: float, off: float
) -> None:
    mtp_drafts.write_model(tmp_path, 2, agreement, hidden=HIDDEN)
    plan = make_plan(tmp_path, (1,), batch=1, prompt_len=8, gen_len=TOKENS)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with LLM(plan=plan, backend="threads", speculate="mtp", gamma=GAMMA) as llm:
        (answer,) = llm.generate([list(range(5, 13))], params, use_tqdm=False)
        report = llm.job_report([answer])
    assert len(set(answer.outputs[0].token_ids)) == TOKENS, "the whole cycle"
    seen = report["speculation"]
    predicted = expected_tokens(agreement, GAMMA)
    assert seen["tokens_per_verify"] == pytest.approx(predicted, abs=off)
    assert len(seen["acceptance_by_place"]) == GAMMA

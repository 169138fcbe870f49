"""What the summary of a run says of its drafts."""

from __future__ import annotations

from typing import Any

import pytest

from llmpq.runtime.report.job_report import speculation_lines

pytestmark = pytest.mark.quick


def _seen(acceptance: float, verifies: int = 3) -> dict[str, Any]:
    shares = {"prefill": 0.25, "verify": 0.75}
    return {
        "mode": "ngram",
        "gamma": 3,
        "verifies": verifies,
        "acceptance": acceptance,
        "tokens_per_verify": 2.5,
        "time_share": shares,
        "plain": None,
    }


def test_one_engine_has_a_line_without_its_number() -> None:
    (line,) = speculation_lines({"speculation": _seen(0.5)})
    assert line.startswith("speculation ngram, gamma 3: 50% of drafted tokens accepted")
    assert speculation_lines({"speculation": None}) == []


def test_each_of_several_engines_has_its_own() -> None:
    parts = [{"speculation": _seen(0.5)}, None, {"speculation": None}, {"speculation": _seen(0, 0)}]
    engines = [{"engine": number, "report": part} for number, part in enumerate(parts)]
    first, last = speculation_lines({"speculation": None, "engines": engines})
    assert first.startswith("engine 0: speculation ngram, gamma 3: 50%")
    assert last == "engine 3: speculation ngram: off throughout, it would not have paid"

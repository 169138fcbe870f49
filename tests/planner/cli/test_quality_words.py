"""A plan's quality loss is said beside uniform precisions; three bits are taken only when asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmpq.planner.__main__ import main
from llmpq.plans.plan import Plan
from llmpq.precision import Precision

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
JOB = ["--global_bz", "1", "--s", "64", "--n", "8"]
WARNING = "warning: the plan loses more quality than all layers at 4 bits; less is lost with "


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def _loss(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("quality loss: "))


def test_three_bits_are_taken_only_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Quality is worth nothing here, so that the fewest bits allowed are the quickest."""
    words = ["--devices", "t4", "--model", "opt-1.3b", *JOB, "--theta", "0"]
    out = tmp_path / "plan.json"
    assert _run(capsys, *words, "-o", str(out))[0] == 0
    assert set(Plan.load(out).precisions) == {Precision.W4A16}
    assert _run(capsys, *words, "--bits", "3,4", "-o", str(out))[0] == 0
    assert set(Plan.load(out).precisions) == {Precision.W3A16}


def test_what_fits_at_three_bits_alone_is_offered_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--devices", "t4=7GB", "--model", "opt-13b", *JOB]
    code, _, err = _run(capsys, *words)
    assert code == 5 and "what fits: --bits 3,4" in err
    assert _run(capsys, *words, "--bits", "3")[0] == 0


def test_the_loss_stands_beside_that_of_uniform_bits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--devices", "t4", "--model", "opt-1.3b", *JOB]
    code, text, _ = _run(capsys, *words, "--bits", "8")
    assert code == 0 and WARNING not in text
    assert _loss(text) == (
        "quality loss: 0.003461 (all layers at 8 bits 0.003461, at 4 bits 1); indicator generic, a "
        "guess from the variance of rounding, equal for all layers"
    )
    assert "note: the quality loss is a guess, by the generic indicator" in text


def test_worse_than_four_bits_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--devices", "t4", "--model", "opt-1.3b", *JOB]
    rest = "more memory or a shorter context\n"
    asked = f"{WARNING}more bits (--bits) or --prefer quality or {rest}"
    assert asked in _run(capsys, *words, "--bits", "3")[1]
    already = [*words, "--bits", "3", "--prefer", "quality"]
    assert f"{WARNING}more bits (--bits) or {rest}" in _run(capsys, *already)[1]
    assert WARNING not in _run(capsys, *words, "--bits", "4")[1]
    words[1] = "3060"  # which reads a cache of fewer bits
    assert WARNING not in _run(capsys, *words, "--bits", "4", "--kv", "8")[1], "a thousandth"
    cached = f"{WARNING}more KV bits (--kv) or --prefer quality or {rest}"
    assert cached in _run(capsys, *words, "--bits", "4", "--kv", "4")[1], "the cache counts too"


def test_a_measured_indicator_is_named_and_is_no_guess(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layers = 24
    table = {"w8a16": [0.5] * layers, "w4a16": [2.0] * layers}
    omega = {"indicator": "variance", "model": "opt-1.3b", "num_layers": layers, "weights": table}
    path = tmp_path / "omega.json"
    path.write_text(json.dumps(omega))
    words = ["--devices", "t4", "--model", "opt-1.3b", *JOB, "--omega-file", str(path)]
    code, text, _ = _run(capsys, *words, "--bits", "8")
    assert code == 0
    assert _loss(text) == (
        "quality loss: 12 (all layers at 8 bits 12, at 4 bits 48); indicator variance, measured"
    )
    assert "guess" not in text
    del table["w8a16"]
    path.write_text(json.dumps(omega))
    text = _run(capsys, *words, "--bits", "4")[1]
    assert _loss(text).startswith("quality loss: 48 (all layers at 4 bits 48); ")


def test_paper_omegas_are_not_called_measured(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = str(ROOT / "clusters" / "paper" / "01.yaml")
    code, text, _ = _run(capsys, "--cluster", cluster, "--model", "opt-13b", "--time-limit", "5")
    assert code == 0
    assert "indicator synthetic, made up for the model, not measured" in _loss(text)

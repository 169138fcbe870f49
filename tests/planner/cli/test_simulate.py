"""`llmpq-algo simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.cli import long_search

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    words = ["--devices", "t4:2", "--model", "opt-1.3b", "--batch", "8", "--engines", "1"]
    assert main([*words, "--prompt-len", "256", "--gen-len", "32", "-o", str(path)]) == 0
    return str(path)


class Terminal(io.StringIO):
    """Standard error at a terminal."""

    def isatty(self) -> bool:
        return True


DRAWN = ["--prompt", "64,256", "--gen", "8", "--requests", "30"]


def _json(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main(["simulate", *words, "--json"]) == 0
    data: dict[str, object] = json.loads(capsys.readouterr().out)
    return data


def test_a_trace_is_simulated_at_its_rate_or_another(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"at_s": n * 0.5, "prompt_tokens": 64, "output_tokens": 8} for n in range(12)]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = _json([plan, "--trace", str(trace)], capsys)
    assert own["rate_per_s"] == 2.0 and own["requests"] == 12
    often = _json([plan, "--trace", str(trace), "--rate", "40"], capsys)
    assert often["rate_per_s"] == 40.0
    assert often["ttft_s"]["mean"] > own["ttft_s"]["mean"]  # type: ignore[index]
    assert main(["simulate", plan, "--trace", str(trace), "--ttft", "2"]) == 0
    text = capsys.readouterr().out
    assert "12 requests at 2/s, predicted:" in text and "first token (TTFT)" in text
    assert "within TTFT 2 s: 100.0% of the requests" in text


@pytest.mark.parametrize(("rate", "said"), [("2", ""), ("max", " at several rates")])
def test_a_terminal_is_kept_informed(
    rate: str, said: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(long_search, "AFTER_S", 0.001)
    assert main(["simulate", plan, *DRAWN, "--rate", rate, "--ttft", "1"]) == 0
    assert terminal.getvalue() == f"llmpq-algo: simulating 30 requests{said}\n"


def test_the_highest_rate_keeps_the_limits_and_a_higher_one_does_not(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--ttft", "0.2", "--tpot", "0.05"]
    found = _json([plan, *DRAWN, "--rate", "max", *limits], capsys)
    assert found["attained"] >= 0.9  # type: ignore[operator]
    rate = float(found["rate_per_s"])  # type: ignore[arg-type]
    above = _json([plan, *DRAWN, "--rate", str(rate * 1.5), *limits], capsys)
    assert above["attained"] < 0.9  # type: ignore[operator]
    none = _json([plan, *DRAWN, "--rate", "max", "--ttft", "1e-6"], capsys)
    assert none["rate_per_s"] == 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to simulate: give --trace FILE, or --prompt, --gen and --rate"),
        (["--rate", "2"], "--rate needs requests: give --trace FILE, or --prompt and --gen"),
        (["--prompt", "64"], "--prompt needs --gen beside it"),
        (["--gen", "64"], "--gen needs --prompt beside it"),
        (DRAWN, "give --rate, in requests a second, or --rate max"),
        ([*DRAWN, "--rate", "0"], "--rate must be requests a second, above 0, or max, got '0'"),
        ([*DRAWN, "--rate", "1", "--ttft", "0"], "--ttft must be seconds above 0"),
        (["--prompt", "1,x", "--gen", "8", "--rate", "1"], "--prompt must be numbers of tokens"),
        (["--trace", "no.csv", "--prompt", "5"], "leave --prompt and --gen out"),
        (["--trace", "no.csv"], "cannot read the trace 'no.csv'"),
        ([*DRAWN[:4], "--requests", "1", "--rate", "1"], "--requests must be 2 to"),
        (["--prompt", "9000", "--gen", "8", "--rate", "1"], "request 0 of the traffic: the prompt"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    plan: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["simulate", plan, *words]) == 2
    assert said in capsys.readouterr().err

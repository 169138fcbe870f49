"""What stands beside a plan: several engines, and what a device that is left out would cost."""

from __future__ import annotations

import re

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.make import make_plan

pytestmark = pytest.mark.pure

ENGINES = re.compile(
    r"several engines: (\d+), each on (\S+) with (\d+) requests at once: ([\d.]+) instead of "
    r"([\d.]+) tokens/s, no more quality loss; this plan is of one engine"
)
JOB = ["--prompt-len", "512", "--gen-len", "256"]


def _lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([*words]) == 0
    return capsys.readouterr().out.splitlines()


def _rate(devices: str, model: str, batch: int, bits: str) -> float:
    plan = make_plan(
        model, devices=devices, batch=batch, prompt_len=512, gen_len=256, bits=bits, prefer="speed"
    )
    assert plan.predicted is not None
    return plan.predicted.output_tokens_per_s


@pytest.mark.parametrize(
    ("devices", "model", "batch", "engines", "each"),
    [
        ("3090:4", "llama-3.1-8b", 256, 4, "RTX-3090"),
        ("t4:3", "opt-1.3b", 96, 3, "T4"),
        ("a100:2,3090:2", "llama-3.1-8b", 256, 2, "RTX-3090,A100-80GB"),
    ],
)
def test_several_engines_are_named_where_they_are_faster(
    capsys: pytest.CaptureFixture[str],
    devices: str,
    model: str,
    batch: int,
    engines: int,
    each: str,
) -> None:
    words = ["--devices", devices, "--model", model, "--bits", "4", "--batch", str(batch), *JOB]
    (line,) = [line for line in _lines(capsys, *words) if line.startswith("several engines: ")]
    found = ENGINES.fullmatch(line)
    assert found is not None, line
    assert int(found[1]) == engines and int(found[3]) == -(-batch // engines)
    assert sorted(found[2].split(",")) == sorted(each.split(","))
    one = _rate(each, model, int(found[3]), "4")
    assert float(found[4]) == pytest.approx(engines * one, rel=0.011)
    assert float(found[4]) > float(found[5])


@pytest.mark.parametrize("devices", ["3090", "4090,3090", "3090:2"])
def test_no_engines_where_none_are_faster(capsys: pytest.CaptureFixture[str], devices: str) -> None:
    """One device, no equal shares, or one request alone."""
    words = ["--devices", devices, "--model", "opt-1.3b", "--batch", "1", *JOB]
    assert not any("several engines" in line for line in _lines(capsys, *words))


def test_what_is_left_out_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--devices", "5090,3090", "--model", "qwen3-14b", "--bits", "4", "--batch", "1", *JOB]
    lines = _lines(capsys, *words, "--explain")
    assert "- left out, faster without: RTX-3090-0" in lines
    (line,) = [line for line in lines if line.startswith("- with a layer on RTX-3090-0 as well: ")]
    found = re.search(r": ([\d.]+) s instead of ([\d.]+) s \(\+([\d.]+)%\)", line)
    assert found is not None
    slower, faster, share = map(float, found.groups())
    assert slower > faster and share == pytest.approx(100 * (slower / faster - 1), abs=0.1)
    alone = make_plan("qwen3-14b", devices="5090", batch=1, prompt_len=512, gen_len=256, bits="4")
    assert alone.predicted is not None
    assert faster == pytest.approx(alone.predicted.total_s, abs=1e-3)
    together = _rate("5090,3090", "qwen3-14b", 64, "4")
    assert together >= _rate("5090", "qwen3-14b", 64, "4") * (1 - 1e-6)

"""What stands beside a plan: what a device that is left out would cost."""

from __future__ import annotations

import re

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.make import make_plan

pytestmark = pytest.mark.pure

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

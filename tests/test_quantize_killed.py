"""llmpq-quantize killed in the middle: what is there stays, the rest comes as in one run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmpq.runtime.quantized_writer import layer_file

pytestmark = pytest.mark.cpu
TEXT = Path(__file__).parents[1] / "examples" / "heldout.txt"


def command(model: Path, target: Path) -> list[str]:
    words = f"{model} {target} --scheme w4a4 --text {TEXT} --windows 4 --window 512"
    return [sys.executable, "-m", "llmpq.profiler.quantize_command", *words.split()]


def test_a_killed_run_continues(demo_model: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = subprocess.Popen(
        command(demo_model, killed), stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[1]
    )
    deadline = time.monotonic() + 60
    while not (killed / layer_file(2)).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    done = sorted(path.name for path in killed.glob("model-layer-*.safetensors"))
    assert 3 <= len(done) < 8 and not (killed / "config.json").exists()
    before = {name: (killed / name).stat().st_mtime_ns for name in done}
    for target in (killed, whole):
        run = subprocess.run(command(demo_model, target), capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        if target is killed:
            assert f"layer {len(done)} of 8 already there" in run.stderr
            assert "layer 8 of 8 quantised" in run.stderr
    assert before == {name: (killed / name).stat().st_mtime_ns for name in done}
    for index in range(8):
        expected, found = (load_file(path / layer_file(index)) for path in (whole, killed))
        assert expected.keys() == found.keys()
        assert all(expected[name].equal(found[name]) for name in expected), index
    for name in ("config.json", "model.safetensors.index.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()

"""llmpq-quantize killed in the middle: what is there stays, the rest comes as in one run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmpq.runtime.weights.quantized_writer import layer_file

pytestmark = pytest.mark.cpu
TEXT = Path(__file__).parents[2] / "examples" / "heldout.txt"
COMMAND = ("-m", "llmpq.profiler.cli.quantize")
KILLED = """
import os, signal, sys
from llmpq.profiler.cli.quantize import main
from llmpq.runtime.weights import written_whole as whole_files

save_file = whole_files.save_file

def killed(tensors, path, metadata):
    save_file(tensors, path, metadata=metadata)
    if path.name.startswith("model-layer-0003"):
        os.kill(os.getpid(), signal.SIGKILL)

whole_files.save_file = killed
main(sys.argv[1:])
"""
"""Dies when layer 3 is written, before the file has its name."""


def run(model: Path, target: Path, how: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    words = f"{model} {target} --scheme w4a4 --text {TEXT} --windows 2 --window 256"
    return subprocess.run(
        [sys.executable, *how, *words.split()],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_a_killed_run_continues(demo_model: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(demo_model, killed, ("-c", KILLED)).returncode == -signal.SIGKILL
    done = sorted(path.name for path in killed.glob("model-layer-*.safetensors"))
    assert done == [layer_file(i) for i in range(3)] and not (killed / "config.json").exists()
    before = {name: (killed / name).stat().st_mtime_ns for name in done}
    for target in (killed, whole):
        ended = run(demo_model, target, COMMAND)
        assert ended.returncode == 0, ended.stderr
        if target is killed:
            assert "layer 3 of 8 already there" in ended.stderr
            assert "layer 4 of 8 quantised" in ended.stderr
    assert before == {name: (killed / name).stat().st_mtime_ns for name in done}
    for index in range(8):
        expected, found = (load_file(path / layer_file(index)) for path in (whole, killed))
        assert expected.keys() == found.keys()
        assert all(expected[name].equal(found[name]) for name in expected), index
    for name in ("config.json", "model.safetensors.index.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()

"""llmpq-quantize killed in the middle: what is there stays, the rest comes as in one run."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmpq.profiler.cli.quantize import main
from llmpq.runtime.weights.quantized_writer import layer_file

pytestmark = pytest.mark.cpu
TEXT = Path(__file__).parents[3] / "examples" / "heldout.txt"
KILLED = """
import os, signal, sys
from llmpq.profiler.cli.quantize import main
from llmpq.runtime.weights import atomic_write as whole_files

save_file = whole_files.save_file

def killed(tensors, path, metadata):
    save_file(tensors, path, metadata=metadata)
    if path.name.startswith("model-layer-0003"):
        os.kill(os.getpid(), signal.SIGKILL)

whole_files.save_file = killed
main(sys.argv[1:])
"""
"""Dies when layer 3 is written, before the file has its name."""


def words(model: Path, target: Path) -> list[str]:
    return f"{model} {target} --scheme w4a4 --text {TEXT} --windows 1 --window 128".split()


def test_a_killed_run_continues(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended = subprocess.run([sys.executable, "-c", KILLED, *words(demo_model, killed)])
    assert ended.returncode == -signal.SIGKILL
    done = sorted(path.name for path in killed.glob("model-layer-*.safetensors"))
    assert done == [layer_file(i) for i in range(3)] and not (killed / "config.json").exists()
    before = {name: (killed / name).stat().st_mtime_ns for name in done}
    for target in (killed, whole):
        caplog.clear()
        assert main(words(demo_model, target)) == 0
        if target is killed:
            assert "layer 3 of 8 already there" in caplog.text
            assert "layer 4 of 8 quantised" in caplog.text
    assert before == {name: (killed / name).stat().st_mtime_ns for name in done}
    for index in range(8):
        expected, found = (load_file(path / layer_file(index)) for path in (whole, killed))
        assert expected.keys() == found.keys()
        assert all(expected[name].equal(found[name]) for name in expected), index
    for name in ("config.json", "model.safetensors.index.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()

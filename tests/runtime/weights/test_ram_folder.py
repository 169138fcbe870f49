"""Quantised layers in this host's memory: a lost stage reads them, and they go with their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmpq import LLM, SamplingParams
from llmpq.errors import DoesNotFitError
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.weights.ram_folder import SHARED_MEMORY, ram_folder

OWNER = """
import sys, time
from llmpq.runtime.weights.ram_folder import ram_folder
with ram_folder(1000) as folder:
    (folder / "layer").write_bytes(b"a")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.pure
def test_it_is_gone_with_its_owner_even_if_that_is_killed():
    with ram_folder(1000) as folder:
        (folder / "layer").write_bytes(b"a")
    assert folder.parent == SHARED_MEMORY and not folder.exists()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    left = Path(owner.stdout.readline().strip())
    assert (left / "layer").exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    end_s = time.monotonic() + 60
    while left.exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not left.exists()


@pytest.mark.pure
def test_what_is_short_is_said():
    with pytest.raises(
        DoesNotFitError, match=r"quantised layers take 1048576.0 TiB, .* free; make"
    ):
        ram_folder(2**60).__enter__()
    with pytest.raises(ValueError, match=r"keep_layers_in='ram' and layer_cache both say"):
        EngineOptions(keep_layers_in="ram", layer_cache="x")


@pytest.mark.cluster
def test_a_stage_that_is_lost_reads_its_layers_from_memory(demo_model, make_plan):
    plan = make_plan(demo_model, (3,), batch=4, prompt_len=64, gen_len=96, bits="w4a16")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=90, ignore_eos=True)
    prompts = ["def f(x):\n    return", "import"]
    before = set(SHARED_MEMORY.glob("llmpq-layers-*"))
    with LLM(demo_model, plan=plan, backend="processes", keep_layers_in="ram") as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        (folder,) = set(SHARED_MEMORY.glob("llmpq-layers-*")) - before
        files = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
        assert len(files) == llm.model_spec.num_layers
        had = llm.stats()["generated_tokens"]

        def kill() -> None:
            while llm.stats()["generated_tokens"] < had + 20:
                time.sleep(0.002)
            os.kill(llm.stages_started.stage_pids()[1], signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        again = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        assert again == expected and len(llm.recoveries) == 1
        # Layers that are quantised again would be written again.
        assert {p: p.stat().st_mtime_ns for p in folder.rglob("*.safetensors")} == files
    assert not folder.exists()
    with pytest.raises(ValueError, match=r"keep_layers_in='ram' is for stages of this host"):
        LLM(demo_model, plan=plan, backend="ray", keep_layers_in="ram", start=False)

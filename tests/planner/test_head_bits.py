"""`--head-bits 8`: the plan says so, and memory, times and the check all count it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.plan import Plan
from llmpq.planner.__main__ import main

pytestmark = pytest.mark.pure


def planned(folder: Path, bits: int, model: str, devices: str) -> Plan:
    path = folder / f"head-{bits}.json"
    job = ["--global-bz", "4", "--s", "128", "--n", "64", "--bits", "4", "--head-bits", str(bits)]
    assert main(["--model", model, "--devices", devices, *job, "-o", str(path)]) == 0
    assert main(["check", str(path)]) == 0
    return Plan.load(path)


@pytest.mark.parametrize(
    "model, devices", [("llama-3.1-8b", "3060"), ("llama-3.2-1b", "3060,3060"), ("qwen3-8b", "cpu")]
)
def test_it_is_read_in_half_the_time_and_held_in_half_the_bytes(tmp_path, model, devices):
    wide, narrow = (planned(tmp_path, bits, model, devices) for bits in (16, 8))
    assert (wide.quantization.head_bits, narrow.quantization.head_bits) == (16, 8)
    assert wide.predicted is not None and narrow.predicted is not None
    assert narrow.predicted.decode_s < wide.predicted.decode_s
    assert narrow.predicted.sum_omega == wide.predicted.sum_omega
    held = [plan.stages[-1].memory for plan in (wide, narrow)]
    assert held[0] is not None and held[1] is not None
    spec = narrow.inputs.model if narrow.inputs is not None else None
    assert spec is not None
    saved = held[0].embedding_bytes - held[1].embedding_bytes
    both = len(narrow.stages) == 1 and spec.tied_embeddings
    fewer = -1 if both else narrow.workload.dtype_bytes - 1  # tied: held a second time, in 8 bits
    assert saved == pytest.approx(fewer * spec.vocab * spec.hidden, rel=0.05)

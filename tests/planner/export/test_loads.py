"""What an export must say so that the engine loads: forms that exist, room for KV, hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.plan import Plan
from llmpq.planner.__main__ import main
from llmpq.planner.export import WRITERS
from llmpq.planner.problem.named_inputs import read_model
from llmpq.planner.problem.requests import ModelRequest

pytestmark = pytest.mark.pure


def exported(tmp_path: Path, engine: str, model: str, *words: str) -> str:
    out = tmp_path / "plan.json"
    assert main([*words, "--model", model, "--batch", "2", "-o", str(out)]) == 0
    spec = read_model(ModelRequest(model=model, model_name=None, model_size=None)).spec
    return WRITERS[engine](Plan.load(out), spec).text


@pytest.mark.parametrize(
    ("model", "bits", "has", "lacks"),
    [
        ("gpt-oss-20b", "4", "llama-server -m model-bf16.gguf", "llama-quantize"),
        ("gpt-oss-20b", "8", "llama-server -m model-bf16.gguf", "llama-quantize"),
        ("qwen2.5-0.5b", "8", "q8_0", "q4_k"),
        ("qwen3-8b", "4", "q4_k", "q4_0"),
    ],
)
def test_llamacpp_gets_types_that_the_rows_can_have(tmp_path, model, bits, has, lacks) -> None:
    text = exported(tmp_path, "llamacpp", model, "--devices", "a6000", "--bits", bits)
    assert has in text and lacks not in text


def test_vllm_is_told_the_memory_and_the_order_of_the_gpus(tmp_path: Path) -> None:
    text = exported(
        tmp_path, "vllm", "qwen3-8b", "--devices", "4060", "--bits", "4", "--reserve", "1GiB"
    )
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0" in text
    assert "--gpu-memory-utilization 0.87" in text, "6.75 of 7.75 GiB"


def test_llamacpp_calls_gpus_by_their_makers_backend(tmp_path: Path) -> None:
    for devices, name in (("m4-max=64GB", "MTL0"), ("b580", "SYCL0"), ("7900xtx", "ROCm0")):
        text = exported(tmp_path, "llamacpp", "qwen3-8b", "--devices", devices, "--bits", "4")
        assert f"--device {name} " in text

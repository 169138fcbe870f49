"""What an export must say so that the engine loads: forms that exist, room for KV, hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.planner.__main__ import main
from llmpq.planner.export import WRITERS
from llmpq.planner.export.gguf_memory import BITS
from llmpq.planner.problem.named_inputs import read_model
from llmpq.planner.problem.requests import ModelRequest
from llmpq.plans.plan import Plan
from llmpq.units import format_size

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


def test_llamacpp_memory_is_that_of_its_own_types(tmp_path: Path) -> None:
    """Llama 2 7B by hand: 32 layers of 202,375,168 weights and 4,096,000 x 32 of the output."""
    words = ("--devices", "4090", "--bits", "4", "--prompt-len", "896", "--gen-len", "128")
    text = exported(tmp_path, "llamacpp", "llama-2-7b", *words)
    stage = Plan.load(tmp_path / "plan.json").stages[0]
    assert stage.memory is not None
    weights = 32 * (202_375_168 * 4.5 / 8 + 2 * 4096 * 4) + 32_000 * 4096 * 2
    cache = 2 * 1024 * 32 * 2 * 4096 * 2
    total = weights + cache + stage.memory.workspace_bytes + stage.memory.context_bytes
    assert f"RTX-4090-0 {format_size(int(total))} of " in text
    assert "export CUDA_DEVICE_ORDER=PCI_BUS_ID\nllama-server" in text
    assert "--output-tensor-type f16 --token-embedding-type f16" in text


def test_llamacpp_says_which_gpu_is_short_and_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 bits of ours in groups of 128 are fewer than q4_k's 4.5; in groups of 32 they are more."""
    out = tmp_path / "plan.json"
    words = "--devices 3060,cpu=64GB+16threads --model qwen3-32b --bits 4 --batch 1 --engines 1"
    assert main([*words.split(), "-o", str(out)]) == 0
    assert main(["export", str(out), "--to", "llamacpp"]) == 0
    said = capsys.readouterr().err
    assert "warning: RTX-3060-0 is short by " in said and "--weight-group-size 32" in said
    assert main([*words.split(), "--weight-group-size", "32", "-o", str(out)]) == 0
    assert main(["export", str(out), "--to", "llamacpp"]) == 0
    found = capsys.readouterr()
    assert "memory in llama.cpp's forms: RTX-3060-0 " in found.out and "short" not in found.err


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "accelerate"])
def test_every_export_of_gpus_says_their_order(tmp_path: Path, engine: str) -> None:
    words = ("--devices", "4090:2", "--bits", "16", "--batch", "8", "--engines", "1")
    text = exported(tmp_path, engine, "llama-2-7b", *words)
    plan = Plan.load(tmp_path / "plan.json")
    spec = read_model(ModelRequest(model="llama-2-7b", model_name=None, model_size=None)).spec
    said = " ".join([text, *WRITERS[engine](plan, spec).not_expressed])
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in said


def test_types_have_the_bits_that_ggml_says() -> None:
    gguf = pytest.importorskip("gguf")
    for name, bits in BITS.items():
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
        assert bits == 8 * size / block, name

"""A GGUF file loses nothing where its codes are kept, and what is rounded again is counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmpq.planner.__main__ import main

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.pure
HIDDEN, LAYERS = 256, 2
CPU = "cpu=16GB+60GB/s+8threads"
SHAPES = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (HIDDEN, HIDDEN)),
}


def _written(path: Path, forms: dict[str, str], usual: str) -> Path:
    """Write a file of the Llama family whose linears have a type each, all numbers 0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(512)

    def add(name: str, shape: tuple[int, ...], form: str) -> None:
        kind = gguf.GGMLQuantizationType[form]
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.zeros((*shape[:-1], shape[-1] // weights * size), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)

    for name in ("token_embd", "output"):
        add(name, (512, HIDDEN), usual)
    writer.add_tensor("output_norm.weight", np.zeros(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.zeros(HIDDEN, np.float32))
        for name, shape in SHAPES.items():
            add(f"blk.{layer}.{name}", shape, forms.get(name, usual))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _loss(path: Path, devices: str, *words: str) -> float:
    plan = path.with_suffix(".json")
    job = ["--batch", "1", "--prompt-len", "64", "--gen-len", "8", "-o", str(plan)]
    assert main(["--model", str(path), "--devices", devices, *job, *words]) == 0
    loss: float = json.loads(plan.read_text())["predicted"]["sum_omega"]
    return loss


@pytest.mark.parametrize(
    ("usual", "forms", "rounded"),
    [
        ("Q4_K", {}, 0.0),
        pytest.param("Q4_0", {}, 0.0, marks=pytest.mark.seldom),
        pytest.param("Q4_K", {"ffn_down": "Q6_K"}, 1 / 7, marks=pytest.mark.seldom),
        ("Q4_K", {"ffn_down": "Q6_K", "attn_v": "Q6_K"}, 2 / 7),
        pytest.param("Q4_K", {"attn_v": "Q5_K"}, 1 / 7, marks=pytest.mark.seldom),
        pytest.param("Q3_K", {}, 1.0, marks=pytest.mark.seldom),
        ("Q2_K", {"attn_v": "Q4_K"}, 6 / 7),
    ],
)
def test_what_a_grid_cannot_hold_is_lost(
    usual: str, forms: dict[str, str], rounded: float, tmp_path: Path
) -> None:
    """1 is all layers at 4 bits: on GPUs codes go to groups of 128, on CPUs groups of 32 stay."""
    path = _written(tmp_path / "m.gguf", forms, usual)
    assert _loss(path, CPU) == pytest.approx(rounded)
    assert _loss(path, "4090") == pytest.approx(1.0)
    assert _loss(path, "4090", "--weight-group-size", "32") == pytest.approx(rounded)
    assert _loss(path, "4090", "--bits", "16") == 0


def test_codes_of_8_bits(tmp_path: Path) -> None:
    path = _written(tmp_path / "m.gguf", {}, "Q8_0")
    assert _loss(path, CPU) == 0
    assert 0 < _loss(path, "4090") < 0.01


def test_codes_of_mxfp4_stay_everywhere(tmp_path: Path) -> None:
    path = _written(tmp_path / "m.gguf", {}, "MXFP4")
    assert _loss(path, CPU) == _loss(path, "4090") == 0

"""FP8 beside integers of fewer bits."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from llmpq.model_spec import ModelSpec
from llmpq.planner.problem.stored_precisions import fp8_note, stored_layers
from llmpq.precision import Precision

pytestmark = pytest.mark.cpu


def test_fp8_beside_integers_of_four_bits_is_named(tmp_path):
    part = "model.layers.{}.self_attn.q_proj"
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "compressed-tensors"}})
    )
    tensors = {}
    for layer in range(2):
        name = part.format(layer)
        tensors[f"{name}.weight_packed"] = torch.zeros(8, 16, dtype=torch.int32)
        tensors[f"{name}.weight_shape"] = torch.tensor([8, 128])
        tensors[f"{name}.weight_scale"] = torch.ones(8, 1)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    layers = stored_layers(tmp_path, replace(ModelSpec.by_name("opt-125m"), num_layers=2))
    assert layers is not None and [layer.stored for layer in layers] == [Precision.W4A16] * 2
    assert fp8_note(layers[:1]) is None
    note = fp8_note(layers)
    assert note is not None and note.startswith("layers 1 hold FP8 linears beside integers")

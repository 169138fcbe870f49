"""Plans count the bytes of 4-bit codes of a table: grids that say less are refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from llmpq.kernels.formats.table_weight import Values, table_weight
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.planner.inputs.kept_grid import require_counted
from llmpq.planner.inputs.stored_precisions import fp8_note, stored_layers
from llmpq.precision import Precision, WeightScheme

pytestmark = pytest.mark.cpu
GRIDS = [(128, False), (128, True), (64, True), (32, True), (64, False), (None, False)]


def written(folder, described, name="mlp.up_proj.weight_packed"):
    (folder / "config.json").write_text(json.dumps({"quantization_config": described}))
    tensors = {f"model.layers.0.{name}": torch.zeros(8, 64, dtype=torch.uint8)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("size", "symmetric"), GRIDS)
@pytest.mark.parametrize(
    ("described", "name"),
    [
        ({"quant_method": "compressed-tensors"}, "mlp.up_proj.weight_packed"),
        (
            {"quant_method": "bitsandbytes"},
            "mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
        ),
    ],
)
def test_a_grid_counts_what_codes_take_or_is_refused(tmp_path, size, symmetric, described, name):
    grid = Quantization(group_size=size, symmetric=symmetric)
    scheme = WeightScheme(bits=4, group_size=size, symmetric=symmetric)
    codes = torch.randint(0, 16, (64, 512), dtype=torch.uint8)
    mxfp4, nf4 = (
        table_weight(codes, torch.ones(64, 512 // g, dtype=kind), values=values, group_size=g)
        for values, g, kind in ((Values.E2M1, 32, torch.uint8), (Values.NF4, 64, torch.float16))
    )
    taken = max(mxfp4.nbytes, nf4.nbytes)
    directory = written(tmp_path, described, name)
    if scheme.nbytes(64, 512, 2) < taken:
        with pytest.raises(ValueError, match="would count less: leave it out"):
            require_counted(directory, grid)
    else:
        require_counted(directory, grid)


def test_other_codes_may_have_any_grid(tmp_path):
    directory = written(tmp_path, {"quant_method": "gptq"}, "mlp.up_proj.qzeros")
    require_counted(directory, Quantization(group_size=None, symmetric=True))


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

"""Linears beside a layer's codes: floats stay, codes that no kernel takes are a loss, and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.make_problem import BuiltProblem, ProblemInputs, build_problem
from llmpq.precision import Precision
from llmpq.workload import Workload

pytestmark = pytest.mark.cpu
HIDDEN, FFN = 128, 256
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def built(folder: Path, group: int, plain: str, kind: torch.dtype, device: str) -> BuiltProblem:
    """Plan a model of which layer 1 has one linear of its own: floats, or integers in order."""
    tensors = {"model.embed_tokens.weight": torch.zeros(64, HIDDEN)}
    for layer in range(2):
        for name, (n, k) in LINEARS.items():
            stem = f"model.layers.{layer}.{name}"
            if layer == 1 and name == plain and kind is torch.int32:
                tensors[f"{stem}.weight_g_idx"] = torch.zeros(k, dtype=kind)
            elif layer == 1 and name == plain:
                tensors[f"{stem}.weight"] = torch.zeros(n, k).to(kind)
                if kind is torch.float8_e4m3fn:
                    tensors[f"{stem}.weight_scale"] = torch.ones(1)
                continue
            tensors[f"{stem}.weight_packed"] = torch.zeros(n, k // 8, dtype=torch.int32)
            tensors[f"{stem}.weight_shape"] = torch.tensor([n, k])
            tensors[f"{stem}.weight_scale"] = torch.ones(n, k // group)
    save_file(tensors, folder / "model.safetensors")
    described = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (folder / "config.json").write_text(json.dumps(CONFIG | described))
    inputs = ProblemInputs(
        spec=ModelSpec.from_directory(folder),
        cluster=Cluster.from_counts([device], [1]),
        workload=Workload(batch=1, prompt_len=16, gen_len=4),
        source=folder,
    )
    return build_problem(inputs)


FLOATS = [("mlp.down_proj", torch.float16), ("self_attn.o_proj", torch.float8_e4m3fn)]


@pytest.mark.parametrize("device", ["CPU", "T4"])
@pytest.mark.parametrize(
    ("group", "plain", "kind"),
    [
        *((group, *one) for group in (32, 64, 128) for one in FLOATS),
        (128, "self_attn.o_proj", torch.int32),
    ],
)
def test_other_codes_are_a_loss_and_named_and_floats_stay(
    tmp_path: Path, group: int, plain: str, kind: torch.dtype, device: str
) -> None:
    found = built(tmp_path, group, plain, kind, device)
    omega = [found.problem.sensitivity.omega(layer, Precision.W4A16) for layer in range(2)]
    n, k = LINEARS[plain]
    grid = found.problem.quantization
    taken = [
        grid.of_layer(layer).linear_bytes(linear, Precision.W4A16, 2)
        for layer in range(2)
        for linear in found.problem.spec.linears()
        if linear.name == plain.split(".")[1].removesuffix("_proj")
    ]
    if kind is not torch.int32:
        width = {torch.float16: 2, torch.float8_e4m3fn: 1}[kind]
        assert n * k * width <= taken[1] < n * k * width * 1.1 and taken[0] < 0.7 * n * k
        assert omega == [0, 0] and found.notes == ()
        return
    share = n * k / sum(rows * columns for rows, columns in LINEARS.values())
    whole = found.problem.spec.num_layers  # 1 is all layers at 4 bits
    assert omega[0] == 0 and omega[1] == pytest.approx(share / whole)
    assert max(taken) < 0.7 * n * k
    assert found.notes[0] == (
        "layers 1 hold linears in other codes beside their own, which are rounded to as many bits "
        "as those have"
    )


@pytest.mark.parametrize("device", ["CPU", "T4"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_integers_run_as_they_are_stored_on_every_device(
    tmp_path: Path, group: int, device: str
) -> None:
    found = built(tmp_path, group, "", torch.float16, device)
    assert found.problem.offered == ((Precision.W4A16,),) * 2
    assert found.problem.quantization.group_size == group
    assert found.notes == ()

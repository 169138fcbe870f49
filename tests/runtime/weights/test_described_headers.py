"""What a config alone says of a quantised checkpoint is what its files' headers say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.checkpoint_codes import checkpoint_codes, with_checkpoint_codes
from llmpq.planner.problem.stored_precisions import kept_grid, stored_layers
from llmpq.precision import Precision
from llmpq.sizes.memory import Quantization
from tests.profiler.quantize import test_quantized_checkpoint as quantised
from tests.runtime.weights import test_codebook_forms as codebooks
from tests.runtime.weights import test_fp8_kept as fp8
from tests.runtime.weights import test_small_groups as integers

pytestmark = pytest.mark.cpu

CPUS, GPUS = (Cluster.from_counts([kind], [2]).devices for kind in ("CPU", "T4"))


def seen(source: Any, spec: ModelSpec) -> list[object]:
    """Return all that the planner reads of a checkpoint."""
    grids = [kept_grid(source, spec, devices) for devices in (CPUS, GPUS)]
    choices = (Precision.W8A16, Precision.W4A16)
    return [
        *(stored_layers(source, spec, kept=grid) for grid in (None, *grids)),
        *grids,
        *(
            with_checkpoint_codes(
                grid or Quantization(), checkpoint_codes(source, spec), spec, choices, 2
            )
            for grid in (None, *grids)
        ),
    ]


def require_described(form: Path) -> None:
    """Require the same of a directory's files, of its config.json, and of the config as a value."""
    spec = ModelSpec.from_directory(form)
    want = seen(form, spec)
    assert any(want)
    config = json.loads((form / "config.json").read_text())
    for file in form.glob("*.safetensors"):
        file.unlink()
    assert seen(form, spec) == want
    for file in form.glob("*.index.json"):
        file.unlink()
    assert seen(form, spec) == want
    assert seen(config, spec) == want


def with_config(form: Path, **more: Any) -> None:
    """Have the config say more of how a model is quantised, as published ones do."""
    config = json.loads((form / "config.json").read_text())
    config["quantization_config"] |= more
    (form / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", fp8.KINDS)
def test_fp8(tmp_path: Path, kind: str) -> None:
    form, _ = fp8.write(fp8.llama(), tmp_path, kind)
    if fp8.KINDS[kind][0]["quant_method"] == "compressed-tensors":
        weights = {"num_bits": 8, "type": "float", "strategy": kind}
        with_config(form, config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    require_described(form)


@pytest.mark.parametrize("form", ["gptq", "awq"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_integers(tiny_models: Any, tmp_path: Path, form: str, group: int) -> None:
    source = tiny_models.directory("llama")
    require_described(integers.write(source, tmp_path / "q", form, group, symmetric=True))


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_bitsandbytes(tiny_models: Any, tmp_path: Path, name: str) -> None:
    form, _ = codebooks.write(tiny_models.directory("llama"), tmp_path, name)
    with_config(form, bnb_4bit_quant_type=name)
    require_described(form)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w3a16", "w8a8"])
def test_what_quantize_writes(tiny_models: Any, tmp_path: Path, family: str, scheme: str) -> None:
    target = tmp_path / "q"
    group = None if scheme == "w8a8" else 32
    quantised.write(tiny_models.directory(family), target, scheme, group_size=group)
    require_described(target)


def test_what_only_files_say_is_asked_for(tiny_models: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny_models.directory("llama"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    (tmp_path / "m" / "model.safetensors").unlink()
    for described in ({"format": "llmpq"}, {"quant_method": "compressed-tensors"}):
        config = json.loads(path.read_text()) | {"quantization_config": described}
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match="get its weights, or say it with --bits"):
            stored_layers(path.parent, ModelSpec.from_directory(path.parent))


@pytest.mark.parametrize("root", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("way", ["modelopt", "ignored", "gptq"])
def test_modules_are_found_under_the_names_of_a_wrapper(
    tiny_models: Any, root: str, way: str
) -> None:
    """Qwen3.6's and Gemma 4's configs name modules as the whole model does."""
    config = json.loads((tiny_models.directory("llama") / "config.json").read_text())
    first = [f"{root}layers.0.{part}" for part in ("self_attn.q_proj", "mlp")]
    described = {
        "modelopt": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {name: {"quant_algo": "W4A16_NVFP4"} for name in first},
        },
        "ignored": {
            "quant_method": "fp8",
            "modules_to_not_convert": [f"{root}layers.{i}" for i in range(1, 9)],
        },
        "gptq": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "dynamic": {rf"-:{root}layers\.[1-9]\.": {}},
        },
    }[way]
    form = {**config, "quantization_config": described}
    layers = stored_layers(form, ModelSpec.from_config(form, name="m"))
    assert layers is not None and len(layers) > 1
    coded = Precision.W8A16 if way == "ignored" else Precision.W4A16
    assert [layer.stored for layer in layers] == [coded, *[Precision.W16A16] * (len(layers) - 1)]

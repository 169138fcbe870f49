"""Loading weights: only the stage's slice, any layout of the checkpoint, and clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.generate import LocalPipeline, pad
from llmpq.runtime.loader import CheckpointSource, RandomSource
from llmpq.runtime.stage_model import StageModel
from llmpq.runtime.step import Step

pytestmark = pytest.mark.cpu
W16 = Precision.W16A16


@pytest.fixture
def copy(tiny_models, tmp_path):
    """Return a maker of a private copy of a tiny model's directory."""

    def make(kind: str) -> Path:
        return Path(shutil.copytree(tiny_models.directory(kind), tmp_path / kind))

    return make


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors")


def build(directory: Path, layers: range, precision: Precision = W16) -> StageModel:
    spec = ModelSpec.from_directory(directory)
    return StageModel.build(
        spec,
        layers,
        [precision] * len(layers),
        first=layers.start == 0,
        last=layers.stop == spec.num_layers,
        dtype=torch.float32,
        device="cpu",
        scheme=Quantization().scheme,
        source=CheckpointSource(directory, spec),
    )


def logits_of(directory: Path) -> torch.Tensor:
    pipeline = LocalPipeline.from_directory(directory)
    tokens = [5, 6, 7, 8]
    step = Step.of([0], [0], [4])
    return pipeline.logits(pad([tokens]), step, pipeline.caches(1, 4), all_positions=True)


@pytest.mark.parametrize(
    "kind, root", [("opt", "decoder."), ("opt", ""), ("bloom", ""), ("llama", ""), ("qwen3", "")]
)
def test_checkpoints_without_the_usual_prefix_load(tiny_models, copy, kind, root):
    directory = copy(kind)
    usual = {"opt": "model.decoder.", "bloom": "transformer."}.get(kind, "model.")
    rewrite(
        directory,
        lambda ts: {
            (root + name.removeprefix(usual) if name.startswith(usual) else name): tensor
            for name, tensor in ts.items()
        },
    )
    assert torch.equal(logits_of(directory), logits_of(tiny_models.directory(kind)))


def test_shards_equal_one_file(tiny_models, copy):
    directory = copy("llama")
    reference = tiny_models.reference("llama")
    (directory / "model.safetensors").unlink()
    reference.save_pretrained(directory, max_shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(directory), logits_of(tiny_models.directory("llama")))


def test_a_stage_reads_only_its_own_tensors(copy):
    directory = copy("llama")

    def without_others(tensors):
        drop = (".layers.0.", ".layers.2.", "lm_head", "model.norm")
        kept = {n: t for n, t in tensors.items() if not any(d in n for d in drop)}
        kept["model.embed_tokens.weight"] = torch.zeros(1)  # never read by a middle stage
        return kept

    rewrite(directory, without_others)
    assert len(build(directory, range(1, 2)).layers) == 1
    with pytest.raises(ValueError, match=r"'model\.layers\.0\..*' is missing"):
        build(directory, range(1))


def test_a_layer_is_quantised_before_the_layer_after_next_is_read(tiny_models):
    """At most two unquantised layers are alive: the one being quantised and the one being read."""
    directory = tiny_models.directory("opt")
    spec = ModelSpec.from_directory(directory)
    events: list[tuple[str, int]] = []

    class Recorded(CheckpointSource):
        def layer(self, index, dtype):
            events.append(("read", index))
            return super().layer(index, dtype)

    StageModel.build(
        spec,
        range(3),
        [Precision.W4A16] * 3,
        first=True,
        last=True,
        dtype=torch.float32,
        device="cpu",
        scheme=Quantization().scheme,
        source=Recorded(directory, spec),
        on_layer=lambda index: events.append(("built", index)),
    )
    assert events.index(("built", 0)) < events.index(("read", 2))
    assert [index for event, index in events if event == "built"] == [0, 1, 2]


def test_weights_do_not_depend_on_the_file_after_loading(copy):
    directory = copy("llama")
    stage = build(directory, range(1, 2))
    before = stage.layers[0].attn_norm.weight.clone()
    path = directory / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(stage.layers[0].attn_norm.weight, before)


def test_truncated_file(copy):
    directory = copy("bloom")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"truncated or not a safetensors.*Download it again"):
        build(directory, range(1))


def test_missing_tensor(copy):
    directory = copy("opt")
    name = "model.decoder.layers.1.fc2.bias"
    rewrite(directory, lambda ts: {n: t for n, t in ts.items() if n != name})
    with pytest.raises(ValueError, match=rf"'{name}' is missing.*check config.json"):
        build(directory, range(2))


def test_wrong_shape(copy):
    directory = copy("llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(directory, lambda ts: {**ts, name: ts[name][:-16].contiguous()})
    with pytest.raises(ValueError, match=r"must have shape \[128, 64\] together"):
        build(directory, range(1))


def test_another_family(copy):
    directory = copy("llama")
    rewrite(directory, lambda ts: {f"gpt.{n}": t for n, t in ts.items()})
    with pytest.raises(ValueError, match="is this a llama checkpoint"):
        build(directory, range(1))


def test_a_missing_shard(copy):
    directory = copy("llama")
    names = load_file(directory / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="00001-of-00002.safetensors' is missing"):
        build(directory, range(3))


def test_a_directory_with_pickled_weights_says_what_to_run(copy):
    directory = copy("opt")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="Run: llmpq-dist convert"):
        build(directory, range(1))
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        build(directory, range(1))


@pytest.mark.parametrize("kind", ["opt", "bloom", "llama", "qwen3"])
def test_random_weights_are_the_same_whatever_the_split(tiny_models, kind):
    spec = ModelSpec.from_directory(tiny_models.directory(kind))
    tokens, step = pad([[5, 6, 7, 8]]), Step.of([0], [0], [4])

    def logits(seed: int, splits: tuple[int, ...]) -> torch.Tensor:
        pipeline = LocalPipeline.build(spec, RandomSource(spec, seed=seed), splits=splits)
        return pipeline.logits(tokens, step, pipeline.caches(1, 4))

    assert torch.equal(logits(1, ()), logits(1, (1, 2)))
    assert not torch.equal(logits(1, ()), logits(2, ()))

"""Loading weights: only the stage's slice, any layout of the checkpoint, and clear refusals."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.checkpoints.tensor_names import index_of, tensor_names
from llmpq.models.model_spec import ModelSpec
from llmpq.models.stored_head import has_further_layers, has_mtp_head
from llmpq.planner.cli.report import mtp_notes
from llmpq.planner.make import make_plan
from llmpq.precision import Precision
from llmpq.runtime.launch.nodes.node_report import report as node_report
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.steps.step import Step
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.weights.sources import CheckpointSource, RandomSource
from llmpq.sizes.memory import Quantization
from reference.pipeline import ReferencePipeline, pad

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
    pipeline = ReferencePipeline.from_directory(directory)
    tokens = [5, 6, 7, 8]
    step = Step.of([0], [0], [4])
    return pipeline.logits(pad([tokens]), step, pipeline.caches(1, 4), all_positions=True)


@pytest.mark.parametrize(
    "kind, root",
    [
        ("opt", "decoder."),
        pytest.param("opt", "", marks=pytest.mark.seldom),
        ("bloom", ""),
        ("llama", ""),
        pytest.param("qwen3", "", marks=pytest.mark.seldom),
    ],
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
    assert [i for event, i in events if event == "built" and i is not None] == [0, 1, 2]


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


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_said_to_be_one(demo_model, tmp_path, name):
    directory = Path(shutil.copytree(demo_model, tmp_path / "model"))
    (directory / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 12\n")
    with pytest.raises(ValueError, match=f"{name}' is a pointer of Git LFS, .*git lfs pull"):
        if name == "tokenizer.json":
            Tokenizer(directory)
        else:
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
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="00001-of-00002.safetensors' is missing"):
        build(directory, range(3))


def write_index(directory: Path, content: object) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "'weight_map' must be an object, got None"),
        ([], "got list, expected an object"),
        ({"weight_map": None}, "'weight_map' must be an object, got None"),
        ({"weight_map": [["a", "b"]]}, "'weight_map' must be an object, got "),
        ({"weight_map": {}}, "'model.embed_tokens.weight' is missing.* It has no tensors"),
    ],
)
def test_an_index_without_a_map_is_refused(copy, content, message):
    path = write_index(copy("llama"), content)
    with pytest.raises(ValueError, match=message) as refused:
        build(path.parent, range(1))
    assert str(path.parent) in str(refused.value)


@pytest.mark.parametrize(
    "file", [5, None, ["model.safetensors"], "", ".", "..", "../x/model.safetensors", "/etc/passwd"]
)
def test_an_index_names_files_of_its_own_directory_only(copy, file):
    directory = copy("llama")
    names = load_file(directory / "model.safetensors")
    weight_map = {**dict.fromkeys(names, "model.safetensors"), "model.norm.weight": file}
    write_index(directory, {"weight_map": weight_map})
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is said to be in .*, expected a"):
        build(directory, range(1))


def test_a_tensor_that_its_shard_does_not_hold(copy):
    directory = copy("llama")
    names = [*load_file(directory / "model.safetensors")]
    rewrite(directory, lambda ts: {n: t for n, t in ts.items() if n != "model.norm.weight"})
    write_index(directory, {"weight_map": dict.fromkeys(names, "model.safetensors")})
    with pytest.raises(ValueError, match=r"does not give tensor 'model\.norm\.weight', which"):
        build(directory, range(3))


def test_shards_may_lie_in_a_folder_of_the_directory(tiny_models, copy):
    directory = copy("llama")
    (directory / "shards").mkdir()
    (directory / "model.safetensors").rename(directory / "shards" / "all.safetensors")
    names = load_file(directory / "shards" / "all.safetensors")
    write_index(directory, {"weight_map": dict.fromkeys(names, "shards/all.safetensors")})
    assert torch.equal(logits_of(directory), logits_of(tiny_models.directory("llama")))


def test_one_file_counts_more_than_an_index_of_others(tiny_models, copy):
    """As in Transformers; a plan and a look at a node read the same files."""
    directory = copy("llama")
    stored = load_file(directory / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in stored.items()}, directory / "old.safetensors")
    write_index(directory, {"weight_map": dict.fromkeys(stored, "old.safetensors")})
    want = logits_of(tiny_models.directory("llama"))
    assert torch.equal(logits_of(directory), want)
    assert index_of(directory) is None and stored.keys() <= tensor_names(directory)
    (directory / "old.safetensors").unlink()
    assert node_report(str(directory))["problem"] is None
    write_index(directory, {"weight_map": dict.fromkeys(stored, "model.safetensors")})
    assert torch.equal(logits_of(directory), want) and index_of(directory) is not None


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 99999], ids=["cut", "bytes", "deep"])
def test_an_index_that_is_not_json(copy, text):
    directory = copy("llama")
    (directory / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"index\.json' is not JSON"):
        build(directory, range(1))


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_weights_that_are_not_floating_point_are_refused(copy, name, dtype):
    """They would run as if the numbers were weights: nothing says what they stand for."""
    directory = copy("llama")
    rewrite(directory, lambda ts: {**ts, name: ts[name].to(dtype)})
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(
        ValueError, match=f"model.safetensors': tensor '{name}' is {kind}, expected"
    ):
        build(directory, range(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_any_plain_floating_point_is_read(copy, dtype):
    directory = copy("llama")
    rewrite(directory, lambda ts: {n: t.to(dtype) for n, t in ts.items()})
    assert len(build(directory, range(3)).layers) == 3


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("opt", "num_hidden_layers"),
        ("bloom", "n_layer"),
        ("llama", "num_hidden_layers"),
        ("qwen3", "num_hidden_layers"),
        ("mixtral", "num_hidden_layers"),
    ],
)
def test_a_config_with_fewer_layers_than_the_checkpoint_is_refused(copy, kind, key):
    directory = copy(kind)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, key: 2}))
    with pytest.raises(
        ValueError, match=r"has layers up to 2 .*config\.json says 2 layers"
    ) as refused:
        build(directory, range(2))
    assert str(directory) in str(refused.value)


def test_buffers_and_tied_heads_of_old_checkpoints_are_no_layers(tiny_models, copy):
    """Tensors that nothing reads stay legal: rotary buffers, integers among them."""
    directory = copy("qwen3")
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
        "model.rotary_emb.inv_freq": torch.ones(16),
        "model.layers.1.self_attn.masked_bias": torch.tensor(-10000),
        "vision.layers.40.weight": torch.ones(1),
    }

    def change(tensors):
        return tensors | more | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    rewrite(directory, change)
    assert torch.equal(logits_of(directory), logits_of(tiny_models.directory("qwen3")))


def test_a_head_of_its_own_in_a_tied_model_is_refused(copy):
    directory = copy("llama")
    config = json.loads((directory / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="'lm_head.weight' is another one than 'model.embed"):
        ReferencePipeline.from_directory(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    ReferencePipeline.from_directory(directory)


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
        pipeline = ReferencePipeline.build(spec, RandomSource(spec, seed=seed), splits=splits)
        return pipeline.logits(tokens, step, pipeline.caches(1, 4))

    assert torch.equal(logits(1, ()), logits(1, (1, 2)))
    assert not torch.equal(logits(1, ()), logits(2, ()))


def mapped_at(path: Path) -> list[range]:
    """Return where in memory this process has a file's pages."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [range(int(start, 16), int(end, 16)) for start, end in ends]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mappings")
def test_a_part_that_is_used_as_stored_is_the_files_pages(copy, monkeypatch):
    directory = copy("llama")
    spec, path = ModelSpec.from_directory(directory), directory / "model.safetensors"
    source = CheckpointSource(directory, spec)
    table = source.embedding(torch.float32)["tokens.weight"]
    assert not mapped_at(path), "a small part keeps no file mapped"
    monkeypatch.setattr("llmpq.runtime.weights.sources._MAPPED_BYTES", table.nbytes)
    mapped = source.embedding(torch.float32)["tokens.weight"]
    assert any(mapped.data_ptr() in pages for pages in mapped_at(path))
    assert torch.equal(mapped, table)
    del mapped
    source.layer(0, torch.float32)
    assert not mapped_at(path), "files are let go with the last part that is kept of them"
    rounded = source.embedding(torch.bfloat16)["tokens.weight"]
    assert rounded.dtype == torch.bfloat16 and not mapped_at(path), "another dtype is a copy"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "some/base"}',
            "is an adapter of 'some/base', not a model: merge it",
        ),
        ("adapter_config.json", '{"peft_type": "IA3"}', "is an IA3 adapter, not a model: merge it"),
        (
            "adapter_config.json",
            '{"peft_type": "PROMPT_TUNING"}',
            "is a PROMPT_TUNING adapter, not a model, and peft cannot merge it",
        ),
        ("adapter_config.json", "[]", "is an adapter, not a model: merge it"),
        ("openvino_model.bin", "", "in OpenVINO's own form"),
        ("consolidated.safetensors", "", "in Mistral's own form .'consolidated.safetensors'"),
        ("consolidated.00.pth", "", "in Meta's own form"),
        ("model.onnx", "", "in ONNX's own form"),
    ],
)
def test_directories_that_hold_something_else_say_what(copy, file, content, message):
    directory = copy("llama")
    spec = ModelSpec.from_directory(directory)
    (directory / "model.safetensors").unlink()
    (directory / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        CheckpointSource(directory, spec)
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_directory(directory)


@pytest.mark.parametrize("config", [True, False])
def test_an_adapter_with_its_models_config_is_no_model(demo_model, tmp_path, config):
    """Said when it is planned for, too: no weights lie beside it."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    if config:
        shutil.copy(demo_model / "config.json", tmp_path)
    with pytest.raises(ValueError, match="is a LoRA adapter, not a model: merge it"):
        ModelSpec.from_directory(tmp_path)


def test_layers_that_are_left_out_are_neither_counted_nor_read(
    models, tmp_path, planned_and_loaded
):
    """Multi-token prediction (MTP): a shard of its own, half of whose data is gone."""
    directory = Path(shutil.copytree(models.directory("deepseek_v3"), tmp_path / "copy"))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    last = ModelSpec.from_directory(directory).num_layers
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors = load_file(directory / "model.safetensors")
    before = f"model.layers.{last - 1}."
    further = {
        name.replace(before, f"model.layers.{last}."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(before)
    }
    files = {"one.safetensors": tensors, "two.safetensors": further}
    for file, held in files.items():
        save_file(held, directory / file)
    (directory / "model.safetensors").unlink()
    weight_map = {name: file for file, held in files.items() for name in held}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    second = directory / "two.safetensors"
    os.truncate(second, second.stat().st_size - sum(t.nbytes for t in further.values()) // 2)
    spec = ModelSpec.from_directory(directory)
    assert spec.num_layers == last and spec.further_layers == 1
    assert further and torch.equal(logits_of(directory), logits_of(models.directory("deepseek_v3")))
    planned, loaded = planned_and_loaded(directory)
    assert planned == loaded
    plan = make_plan(directory, devices="cpu", batch=1, prompt_len=8, gen_len=4, bits="16")
    assert has_further_layers(directory, spec) and not has_mtp_head(directory, spec)
    (note,) = mtp_notes(plan, spec)
    assert note.startswith("left out: 1 layer for further tokens (MTP): the files hold no whole")

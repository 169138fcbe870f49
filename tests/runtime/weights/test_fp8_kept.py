"""FP8 checkpoints at 8 bits: the file's codes are kept; logits are those of their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmpq.kernels.weights.fp8_weight import Fp8Weight, fp8_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.stored_precisions import stored_layers
from llmpq.precision import Precision, WeightScheme
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.layer_cache import KeptLayers
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
TOKENS = [5, 30, 77, 120, 9, 61, 62, 63, 64]
EIGHT = WeightScheme(bits=8)
CT = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
KINDS = {
    "tensor": (CT, None),
    "channel": (CT, None),
    "static": ({"quant_method": "fp8", "activation_scheme": "static"}, None),
    "Mistral's": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        None,
    ),
    "blocks": (BLOCKS, (128, 128)),
}


def logits(directory: Path, **options: Any) -> Tensor:
    pipeline = ReferencePipeline.from_directory(directory, **options)
    step = Step.of([0], [0], [len(TOKENS)])
    caches = pipeline.caches(1, len(TOKENS))
    return pipeline.logits(pad([TOKENS]), step, caches, all_positions=True)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def coded(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return a weight's tensors in a form and the numbers that they are."""
    n, k = weight.shape
    rows, columns = {"channel": (1, k), "blocks": (128, 128)}.get(kind, (n, k))
    wide = torch.zeros(n, k)
    scale = torch.empty(-(-n // rows), -(-k // columns))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[block].abs().max() / 448
            wide[block] = scale[i, j]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    last = "weight_scale_inv" if kind == "blocks" else "weight_scale"
    held = {"weight": codes, last: scale if kind in ("channel", "blocks") else scale.reshape(1)}
    if kind == "static":
        held["input_scale"] = torch.tensor(0.5)
    if kind == "Mistral's":
        one = {"weight_scale_inv": scale.reshape(()), "activation_scale": torch.tensor(0.5)}
        held = {"weight": codes, **one}
    return held, codes.float() * wide


def write(config: Any, folder: Path, kind: str) -> tuple[Path, Path]:
    """Return the directory in FP8, and the one of its numbers."""
    import transformers

    torch.manual_seed(11)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "dense")
    stored, numbers = {}, {}
    for name, tensor in load_file(folder / "dense" / "model.safetensors").items():
        numbers[name] = stored[name] = tensor.float() + torch.randn(tensor.shape) * 0.05
        if "_proj" in name and name.endswith(".weight"):
            held, numbers[name] = coded(stored.pop(name), kind)
            stored |= {name.removesuffix("weight") + last: t for last, t in held.items()}
    content = json.loads((folder / "dense" / "config.json").read_text())
    described = {"quantization_config": KINDS[kind][0]}
    for path, tensors, more in (
        (folder / "form", stored, described), (folder / "numbers", numbers, {})
    ):  # fmt: skip
        path.mkdir()
        save_file({n: t.contiguous().clone() for n, t in tensors.items()},
                  path / "model.safetensors")  # fmt: skip
        (path / "config.json").write_text(json.dumps({**content, **more}))
    return folder / "form", folder / "numbers"


def llama() -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=199, hidden_size=192, intermediate_size=320, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip


def weights(directory: Path, scheme: WeightScheme | None, layers: int = 2) -> list[dict[str, Any]]:
    spec = ModelSpec.from_directory(directory)
    source = open_checkpoint(directory, spec)
    source.keep_codes(dict.fromkeys(range(layers), scheme))
    return [source.layer(i, torch.float32) for i in range(layers)]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.seldom] * (n % 2)) for n, k in enumerate(KINDS)]
)
def test_logits_at_eight_bits_are_those_of_the_numbers(tmp_path: Path, kind: str) -> None:
    form, numbers = write(llama(), tmp_path, kind)
    eight = logits(form, precisions=[Precision.W8A16] * 2)
    assert relative(eight, logits(numbers)) < 1e-6
    assert relative(logits(form), logits(numbers)) < 1e-6
    rounded = logits(numbers, precisions=[Precision.W8A16] * 2)
    assert relative(rounded, logits(numbers)) > 1e-4, "a second rounding would be seen"
    for layer in weights(form, EIGHT):
        for part in ("qkv", "o", "gate_up", "down"):
            assert isinstance(layer[f"{part}.weight"], Fp8Weight)
        assert layer["qkv.weight"].nbytes <= EIGHT.nbytes(*layer["qkv.weight"].codes_NK.shape, 2)
    assert all(isinstance(p, Tensor) for p in weights(form, WeightScheme(bits=4))[0].values())
    assert all(isinstance(p, Tensor) for p in weights(form, None)[0].values())


@pytest.mark.parametrize("kind", KINDS)
def test_plans_keep_them_and_may_have_other_bits(tmp_path: Path, kind: str) -> None:
    form, _ = write(llama(), tmp_path, kind)
    layers = stored_layers(form, ModelSpec.from_directory(form))
    assert layers is not None
    assert [layer.stored for layer in layers] == [Precision.W8A16] * 2
    assert all(layer.served == tuple(Precision) for layer in layers)


def test_blocks_that_no_kernel_takes_are_numbers(tmp_path: Path) -> None:
    form, numbers = write(llama(), tmp_path, "blocks")
    config = json.loads((form / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128, 96]
    (form / "config.json").write_text(json.dumps(config))
    layers = stored_layers(form, ModelSpec.from_directory(form))
    assert layers is not None and layers[0].stored is Precision.W16A16


@pytest.mark.parametrize("kind", ["blocks", "channel"])
def test_experts_are_kept(tmp_path: Path, kind: str) -> None:
    """Qwen3-30B-A3B-FP8's form: every expert's linears, the router left whole."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=199, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    form, numbers = write(config, tmp_path, kind)
    eight = logits(form, precisions=[Precision.W8A16] * 2)
    assert relative(eight, logits(numbers)) < 1e-6
    first = weights(form, EIGHT)[0]
    assert sum(isinstance(part, Fp8Weight) for part in first.values()) == 2 + 2 * 4


@pytest.mark.parametrize("blocks", [None, [64, 64]])
@pytest.mark.parametrize("kind", ["mistral4", "qwen3_vl_moe"])
def test_experts_in_one_tensor(
    models: Any, tmp_path: Path, planned_and_loaded: Any, kind: str, blocks: list[int] | None
) -> None:
    """Mistral Small 4's form: a scale an expert, or blocks; Qwen3-VL's codes lie as [in, out]."""
    dense = models.directory(kind)
    stored = load_file(dense / "model.safetensors")
    numbers = {name: tensor.float() for name, tensor in stored.items()}
    for name in [n for n in stored if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = stored.pop(name).float()
        experts, n, k = weight.shape
        high, wide = blocks or (n, k)
        scale = torch.rand(experts, -(-n // high), -(-k // wide)) / 1000 + 1e-4
        spread = scale.repeat_interleave(high, 1).repeat_interleave(wide, 2)[:, :n, :k]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        numbers[name] = codes.float() * spread
        stored |= {name: codes, f"{name}_scale_inv": scale}
        stored[f"{name}_activation_scale"] = torch.ones(experts)
    config = json.loads((dense / "config.json").read_text())
    described = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": blocks}
    for folder, tensors, more in (
        ("form", stored, {"quantization_config": described}), ("numbers", numbers, {})
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        save_file({n: t.contiguous() for n, t in tensors.items()},
                  tmp_path / folder / "model.safetensors")  # fmt: skip
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}))
    form, want = tmp_path / "form", logits(tmp_path / "numbers")
    spec = ModelSpec.from_directory(form)
    assert relative(logits(form), want) < 1e-6
    layers = stored_layers(form, spec)
    assert layers is not None
    with_experts = [i for i in range(spec.num_layers) if i not in spec.dense_layers]
    assert {layers[i].stored for i in with_experts} == {Precision.W8A16}
    first = weights(form, EIGHT, spec.num_layers)[with_experts[0]]
    plain = weights(tmp_path / "numbers", None, spec.num_layers)[with_experts[0]]
    names = [name for name in first if name.startswith("experts.")]
    assert all(isinstance(first[name], Fp8Weight) == (kind == "mistral4") for name in names)
    for name in names:
        got = first[name]
        values = got.dequantize(torch.float32) if isinstance(got, Fp8Weight) else got
        torch.testing.assert_close(values, plain[name], rtol=1e-6, atol=1e-9)
    planned, loaded = planned_and_loaded(form)
    assert planned >= loaded  # codes of one scale pad no group


def test_latents_and_shared_experts_are_kept(tmp_path: Path) -> None:
    """DeepSeek-V3's form: the matrix that makes keys and values is numbers, all else codes."""
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=199, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=2, first_k_dense_replace=1, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=96, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=8, num_experts_per_tok=2,
        n_group=2, topk_group=1, n_shared_experts=1, max_position_embeddings=64,
    )  # fmt: skip
    form, numbers = write(config, tmp_path, "blocks")
    eight = logits(form, precisions=[Precision.W8A16] * 2)
    assert relative(eight, logits(numbers)) < 1e-6
    for layer in weights(form, EIGHT):
        assert isinstance(layer["kv_b.weight"], Tensor)
        assert isinstance(layer["kv_a.weight"], Fp8Weight)


def test_layers_kept_on_disk_are_not_those(tmp_path: Path) -> None:
    """`--layer-cache` keeps what is quantised here; codes as they are stay in the checkpoint."""
    form, _ = write(llama(), tmp_path, "channel")
    source = open_checkpoint(form, ModelSpec.from_directory(form))
    kept = KeptLayers(source, tmp_path / "kept", {0: EIGHT, 1: None}, torch.device("cpu"))
    assert isinstance(kept.layer(0, torch.float32)["o.weight"], Fp8Weight)
    assert not list((tmp_path / "kept").glob("**/*.safetensors"))


@pytest.mark.parametrize(
    ("last", "change", "message"),
    [
        ("weight_scale_inv", lambda t: t[:-1], "down_proj.*they have shape .*expected"),
        ("weight_scale_inv", lambda t: -t, "FP8 scales that are negative"),
        ("weight_scale_inv", lambda t: t * float("nan"), "NaN or infinite"),
        ("weight", lambda t: torch.full_like(t.float(), float("nan")).to(t.dtype),
         "FP8 codes that are NaN"),
        ("weight", lambda t: t[:64], "down_proj.*have shape|they have shape"),
        ("weight_scale_inv", None, "weight is FP8 without a scale"),
    ],
)  # fmt: skip
def test_lying_tensors_are_refused(tmp_path: Path, last: str, change: Any, message: str) -> None:
    form, _ = write(llama(), tmp_path, "blocks")
    path = form / "model.safetensors"
    tensors = load_file(path)
    victim = f"model.layers.1.mlp.down_proj.{last}"
    if change is None:
        del tensors[victim]
    else:
        tensors[victim] = change(tensors[victim]).contiguous()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        logits(form, precisions=[Precision.W8A16] * 2)


@pytest.mark.parametrize("kind", ["channel", "blocks"])
def test_numbers_beyond_float16_are_refused(kind: str) -> None:
    codes = torch.tensor([[448.0, 1.0], [2.0, 3.0]]).repeat(1, 64).to(torch.float8_e4m3fn)
    block = (1, 128) if kind == "blocks" else None
    scale = torch.tensor([[147.0], [1.0]])
    with pytest.raises(ValueError, match="up to 6.59e.04, beyond float16's 65504; run it in bf"):
        fp8_weight(codes, scale, block, torch.float16)
    assert (
        fp8_weight(codes, scale, block, torch.bfloat16).dequantize(torch.bfloat16).isfinite().all()
    )
    fine = fp8_weight(codes, scale.flip(0), block, torch.float16)  # of small codes
    assert fine.dequantize(torch.float16).isfinite().all()


def test_stacked_scales_stay_shared_where_rows_line_up() -> None:
    codes = torch.randn(256, 128).to(torch.float8_e4m3fn)
    piece = fp8_weight(codes, torch.rand(2, 1) + 1, (128, 128), torch.bfloat16)
    both = Fp8Weight.stack([piece, piece])
    assert both.rows == 128 and both.scale.shape == (4, 1)
    short = fp8_weight(codes[:64], torch.rand(1, 1) + 1, (128, 128), torch.bfloat16)
    apart = Fp8Weight.stack([short, piece])
    assert apart.rows == 1 and apart.scale.shape == (320, 1)
    want = torch.cat([short.dequantize(torch.float32), piece.dequantize(torch.float32)])
    assert torch.equal(apart.dequantize(torch.float32), want)


def test_codes_of_a_cpu_stay_those_of_the_file(tmp_path: Path) -> None:
    """A view: no memory beside the mapped shard; what is stacked is a copy."""
    save_file({"w": torch.ones(4, 128).to(torch.float8_e4m3fn)}, tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", "pt") as shard:
        codes = shard.get_tensor("w")
    for block in (None, (1, 128)):
        made = fp8_weight(codes, torch.ones(4, 1), block, torch.float32).to("cpu")
        assert made.codes_NK.data_ptr() == codes.data_ptr()
    two = Fp8Weight.stack([made, made])
    assert two.codes_NK.untyped_storage().nbytes() == two.codes_NK.nbytes


@pytest.mark.thin
@pytest.mark.parametrize("kind", KINDS)
def test_plans_count_what_codes_take(tmp_path: Path, planned_and_loaded: Any, kind: str) -> None:
    form, _ = write(llama(), tmp_path, kind)
    for dtype in ("bfloat16", "float32"):
        planned, loaded = planned_and_loaded(form, "--dtype", dtype)
        assert loaded == planned, dtype


def test_plans_count_scales_of_one_block_of_columns(
    tmp_path: Path, planned_and_loaded: Any
) -> None:
    """Gates of 192 rows above ups: the ups begin inside a block, so every row has its scale."""
    config = llama()
    config.update({"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4})
    config.update({"head_dim": 32})
    form, _ = write(config, tmp_path, "blocks")
    planned, loaded = planned_and_loaded(form, "--dtype", "bfloat16")
    assert loaded == planned

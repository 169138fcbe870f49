"""Checkpoints of 4-bit tables: codes kept at 4 and 8 bits, logits are those of their numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmpq.devices.cluster import Cluster
from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.weights.codebook_weight import CodebookWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.stored_precisions import kept_grid, stored_layers
from llmpq.precision import Precision, WeightScheme
from llmpq.profiler.quantize.layer_walk import random_windows
from llmpq.profiler.quantize.recipes import Settings
from llmpq.profiler.quantize.whole_model import QuantizeJob, quantize_model
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.codebook_forms import bitsandbytes_weight
from llmpq.runtime.weights.layer_cache import KeptLayers
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint, open_dequantized
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
TOKENS = [5, 30, 77, 120, 9, 61, 62, 63, 64]
FOUR, FLOAT = WeightScheme(bits=4), torch.float32
CT = {"quant_method": "compressed-tensors"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
Stored = tuple[dict[str, Tensor], Tensor]


def logits(directory: Path, **options: Any) -> Tensor:
    pipeline = ReferencePipeline.from_directory(directory, **options)
    step = Step.of([0], [0], [len(TOKENS)])
    caches = pipeline.caches(1, len(TOKENS))
    return pipeline.logits(pad([TOKENS]), step, caches, all_positions=True)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def compressed(name: str, tensors: dict[str, Tensor], **arguments: Any) -> dict[str, Tensor]:
    """Compress a weight by compressed-tensors."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(num_bits=4, type="float", **arguments),
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(dict(tensors), scheme)
    return {k: v.contiguous() for k, v in stored.items() if v is not None}


def e2m1(packed: Tensor) -> Tensor:
    """Return the numbers of two codes a byte, by the definition of sign, exponent, mantissa."""
    codes = torch.stack((packed & 15, packed >> 4), 2).flatten(1).int()
    exponent, mantissa = codes >> 1 & 3, (codes & 1).float()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    return torch.where(codes > 7, -size, size)


def mxfp4(weight: Tensor) -> Stored:
    peak = weight.view(weight.shape[0], -1, 32).abs().amax(2)
    scale = torch.exp2(torch.floor(torch.log2(peak)) - 2)
    tensors = {"weight": weight, "weight_scale": scale}
    form = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    stored = compressed("mxfp4-pack-quantized", tensors, **form)
    return stored, e2m1(stored["weight_packed"]) * scale.repeat_interleave(32, 1)


def nvfp4(weight: Tensor) -> Stored:
    whole = 448 * 6 / weight.abs().max()
    peak = weight.view(weight.shape[0], -1, 16).abs().amax(2)
    scale = (peak / 6 * whole).to(torch.float8_e4m3fn).float()
    tensors = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole.reshape(1)}
    form = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
    stored = compressed("nvfp4-pack-quantized", tensors, **form)
    wide = (stored["weight_scale"].float() / whole).repeat_interleave(16, 1)
    return stored, e2m1(stored["weight_packed"]) * wide


def bitsandbytes(kind: str, *, nested: bool) -> Callable[[Tensor], Stored]:
    """As bitsandbytes 0.45 and 0.50 write it: blocks of 64, the first code in the upper half."""
    table = torch.tensor(Codebook(kind).values)

    def form(weight: Tensor) -> Stored:
        blocks = weight.view(-1, 64)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        stored = {"weight.absmax": absmax, "weight.quant_map": table}
        if nested:
            offset, levels = float(absmax.mean()), torch.linspace(-1, 1, 256)
            groups = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            peak = groups.abs().amax(1)
            codes = (groups / peak[:, None])[..., None].sub(levels).abs().argmin(-1)
            absmax = (levels[codes] * peak[:, None] + offset).flatten()[: len(absmax)]
            flat = codes.flatten()[: len(absmax)].to(torch.uint8)
            stored |= {"weight.absmax": flat, "weight.nested_absmax": peak}
            stored["weight.nested_quant_map"] = levels
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(-1).to(torch.uint8)
        pairs = codes.flatten().view(-1, 2)
        stored["weight"] = (pairs[:, 0] << 4 | pairs[:, 1])[:, None]
        as_bytes = list(json.dumps(state).encode())
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            as_bytes, dtype=torch.uint8
        )
        return stored, (table[codes.int()] * absmax[:, None]).view(weight.shape)

    return form


FORMS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "mxfp4": (mxfp4, CT),
    "nvfp4": (nvfp4, CT),
    "nf4": (bitsandbytes("nf4", nested=False), BNB),
    "nf4 twice": (bitsandbytes("nf4", nested=True), BNB),
    "fp4": (bitsandbytes("fp4", nested=False), BNB),
}


def write(dense: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """Return the directory in a form, and the one of the numbers that it stands for."""
    form, described = FORMS[name]
    stored, numbers = {}, {}
    for key, tensor in load_file(dense / "model.safetensors").items():
        if "_proj" not in key:
            stored[key] = numbers[key] = tensor
            continue
        tensors, numbers[key] = form(tensor)
        stored |= {key.removesuffix("weight") + last: t for last, t in tensors.items()}
    config = json.loads((dense / "config.json").read_text())
    for path, content, extra in (
        (folder / "form", stored, {"quantization_config": described}),
        (folder / "numbers", numbers, {}),
    ):
        path.mkdir()
        save_file(
            {k: v.contiguous().clone() for k, v in content.items()}, path / "model.safetensors"
        )
        (path / "config.json").write_text(json.dumps({**config, **extra}))
    return folder / "form", folder / "numbers"


@pytest.mark.parametrize("name", FORMS)
def test_codes_are_kept_and_logits_those_of_the_numbers(
    dense: Path, tmp_path: Path, name: str
) -> None:
    form, numbers = write(dense, tmp_path, name)
    want = logits(numbers)
    assert relative(logits(dense), want) > 1e-2, "the form must be seen in the logits"
    again = logits(numbers, precisions=[Precision.W4A16] * 2)
    assert relative(again, want) > 1e-2, "a second rounding would be seen"
    for precision in (Precision.W16A16, Precision.W8A16, Precision.W4A16):
        assert relative(logits(form, precisions=[precision] * 2), want) < 1e-5
    source = open_checkpoint(form, ModelSpec.from_directory(form))
    source.keep_codes({0: FOUR, 1: None})
    kept = [
        part for part in source.layer(0, torch.float32).values() if isinstance(part, CodebookWeight)
    ]
    assert len(kept) == 4
    assert not any(
        isinstance(part, CodebookWeight) for part in source.layer(1, torch.float32).values()
    )
    bits = (
        8
        * sum(part.nbytes for part in kept)
        / sum(part.out_features * (-(-part.in_features // 128) * 128) for part in kept)
    )
    assert bits <= (4.75 if name == "nvfp4" else 4.5)


@pytest.mark.parametrize("name", FORMS)
def test_stages_and_kept_layers_compute_the_same(dense: Path, tmp_path: Path, name: str) -> None:
    form, _ = write(dense, tmp_path, name)
    four = {"precisions": [Precision.W4A16] * 2}
    whole = ReferencePipeline.from_directory(form, **four).generate([TOKENS], max_new=6)
    halves = ReferencePipeline.from_directory(form, splits=(1,), **four)
    assert halves.generate([TOKENS], max_new=6) == whole
    source = open_checkpoint(form, ModelSpec.from_directory(form))
    for _ in range(2):
        kept = KeptLayers(source, tmp_path / "cache", {0: FOUR, 1: FOUR}, torch.device("cpu"))
        part = kept.layer(0, torch.float32)["down.weight"]
        assert isinstance(part, CodebookWeight) and kept.num_read == 0


def test_bytes_of_bitsandbytes_under_the_name_of_another_type(dense: Path, tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`, as whoever trains adapters on several GPUs has it."""
    form, _ = write(dense, tmp_path, "nf4")
    held = load_file(form / "model.safetensors")
    want = bitsandbytes_weight("model.layers.0.mlp.down_proj", held, held.__getitem__, FLOAT)
    for name in [name for name in held if name.endswith("_proj.weight")]:
        held[name] = held[name].flatten().view(torch.bfloat16)[:, None]
    got = bitsandbytes_weight("model.layers.0.mlp.down_proj", held, held.__getitem__, FLOAT)
    assert torch.equal(got.dequantize(FLOAT), want.dequantize(FLOAT))


@pytest.mark.parametrize(
    ("name", "last", "change", "message"),
    [
        ("nvfp4", "weight_scale", lambda t: t[:, :-1], "scales of groups of 16 have shape"),
        ("nvfp4", "weight_global_scale", lambda t: t.repeat(2), "expected one number"),
        ("nvfp4", "weight_global_scale", lambda t: t * 0, "NaN or infinite"),
        ("mxfp4", "weight_scale", lambda t: t[:-1], "scales of groups of 32 have shape"),
        ("mxfp4", "weight_scale", lambda t: t * 0 + 255, "NaN or infinite"),
        ("mxfp4", "weight_scale", lambda t: t.float(), "expected torch.uint8"),
        ("mxfp4", "weight_packed", lambda t: t[:, :-16], "scales of groups of 32 have shape"),
        ("nf4", "weight.absmax", lambda t: t[:-1], "absmax has 959 scales, expected 960"),
        ("nf4", "weight", lambda t: t[:-1], "its state says"),
        ("nf4", "weight.quant_map", lambda t: t.roll(1), "not the codebook of nf4"),
        ("nf4 twice", "weight.nested_absmax", lambda t: t[:-1], "nested_absmax has"),
        ("nf4 twice", "weight.nested_quant_map", None, "nested_quant_map is missing"),
        ("fp4", "weight.quant_state.bitsandbytes__fp4", lambda t: t[:-9], "does not say how"),
        ("fp4", "weight.quant_state.bitsandbytes__fp4", None, "uint8"),
    ],
)
@pytest.mark.parametrize("precision", [Precision.W4A16, Precision.W16A16])
def test_lying_tensors_are_refused(
    dense: Path, tmp_path: Path, name: str, last: str, change: Any, message: str,
    precision: Precision,
) -> None:  # fmt: skip
    directory, _ = write(dense, tmp_path, name)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    victim = f"model.layers.1.mlp.down_proj.{last}"
    if change is None:
        del tensors[victim]
    else:
        tensors[victim] = change(tensors[victim]).contiguous()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        logits(directory, precisions=[precision] * 2)


def test_eight_bits_of_bitsandbytes_and_others_are_refused(dense: Path, tmp_path: Path) -> None:
    directory, _ = write(dense, tmp_path, "nf4")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"load_in_8bit": True}, "LLM.int8"),
        ({"quant_method": "hqq"}, "quantization method 'hqq' is not supported"),
    ):
        path.write_text(json.dumps(config | {"quantization_config": {**BNB, **change}}))
        with pytest.raises(ValueError, match=message):
            logits(directory)


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    """Return gpt-oss as it is published, and with attention as 4 bits round it, experts exact."""
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(5)
    config = transformers.GptOssConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "numbers")
    numbers = load_file(folder / "numbers" / "model.safetensors")
    stored = dict(numbers)
    for name in list(numbers):
        if name.endswith("_proj.weight"):
            rounded = quantize_weight(numbers[name], FOUR, dtype=torch.float32)
            numbers[name] = rounded.dequantize(torch.float32).contiguous()
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inside, outside = numbers[name].shape
        blocks = torch.randint(256, (experts, outside, inside // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 123, (experts, outside, inside // 32), dtype=torch.uint8)
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(numbers, folder / "numbers" / "model.safetensors")
    (folder / "form").mkdir()
    save_file(stored, folder / "form" / "model.safetensors")
    stored_config = json.loads((folder / "numbers" / "config.json").read_text())
    stored_config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "form" / "config.json").write_text(json.dumps(stored_config))
    return folder / "form", folder / "numbers"


def test_experts_of_gpt_oss_keep_their_codes(tmp_path: Path) -> None:
    form, numbers = gpt_oss(tmp_path)
    want, four = logits(numbers), {"precisions": [Precision.W4A16] * 2}
    assert relative(logits(form, **four), want) < 1e-4
    assert relative(logits(numbers, **four), want) > 1e-2, "a second rounding would be seen"
    tensors = load_file(form / "model.safetensors")
    victim = "model.layers.1.mlp.experts.down_proj_blocks"
    save_file(tensors | {victim: tensors[victim][:, :, :-1].clone()}, form / "model.safetensors")
    with pytest.raises(ValueError, match="groups of 32 have shape"):
        logits(form, **four)


def test_experts_of_gpt_oss_are_quantised_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`llmpq-quantize` of MXFP4 writes what it would of the same numbers, and says so."""
    form, numbers = gpt_oss(tmp_path)
    spec = ModelSpec.from_directory(form)
    stored = load_file(form / "model.safetensors")
    attention = {k: v for k, v in stored.items() if k.endswith("_proj.weight")}
    plain = load_file(numbers / "model.safetensors") | attention
    save_file(plain, numbers / "model.safetensors")
    job = QuantizeJob(
        spec=spec,
        precisions=(Precision.W8A16, Precision.W4A16),
        settings=Settings(method="rtn", group_size=None),
        windows_WT=random_windows([t % 199 for t in range(7, 900, 7)], count=2, length=24),
    )
    for source in (form, numbers):
        with torch.inference_mode():
            quantize_model(job, open_dequantized(source, spec), tmp_path / f"{source.name}-q")
    assert "stored quantised (mxfp4): its values are rounded a second time" in caplog.text
    assert torch.equal(logits(tmp_path / "form-q"), logits(tmp_path / "numbers-q"))


def test_bitsandbytes_own_codes(dense: Path) -> None:
    """What the library itself writes and reads, where it is installed."""
    functional = pytest.importorskip("bitsandbytes.functional")

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            w = torch.randn(96, 192) * 0.05
            codes, state = functional.quantize_4bit(
                w, blocksize=64, quant_type=kind, compress_statistics=nested
            )
            held = {f"x.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
            held["x.weight"] = codes
            made = bitsandbytes_weight("x", held, held.__getitem__, torch.float32)  # type: ignore[arg-type]
            want = functional.dequantize_4bit(codes, state)
            assert relative(made.dequantize(torch.float32), want) < 1e-6


def test_a_directory_whose_weights_are_elsewhere_is_planned(dense: Path, tmp_path: Path) -> None:
    """Config and index alone: planned before it is downloaded, or on a node with its own slice."""
    (tmp_path / "config.json").write_text((dense / "config.json").read_text())
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (
        kept_grid(
            tmp_path, ModelSpec.from_directory(tmp_path), Cluster.from_counts(["T4"], [1]).devices
        )
        is None
    )


@pytest.mark.parametrize("name", FORMS)
def test_plans_keep_four_bits(dense: Path, tmp_path: Path, name: str) -> None:
    form, _ = write(dense, tmp_path, name)
    layers = stored_layers(form, ModelSpec.from_directory(form))
    assert layers is not None and all(layer.stored is Precision.W4A16 for layer in layers)
    assert all(layer.served == tuple(Precision) for layer in layers)
    assert (
        kept_grid(form, ModelSpec.from_directory(form), Cluster.from_counts(["T4"], [1]).devices)
        is None
    )


@pytest.mark.thin
@pytest.mark.parametrize("name", [*FORMS, "experts"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plans_count_what_codes_take(
    dense: Path, tmp_path: Path, planned_and_loaded: Any, name: str, dtype: str
) -> None:
    """At 4 and at 8 bits, and on grids that say more and less."""
    form, _ = gpt_oss(tmp_path) if name == "experts" else write(dense, tmp_path, name)
    for words in ([], ["--bits", "8"], ["--symmetric"], ["--weight-group-size", "0"]):
        planned, loaded = planned_and_loaded(form, "--dtype", dtype, *words)
        assert loaded == planned, words

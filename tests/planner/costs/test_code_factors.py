"""What a checkpoint's own codes cost on GPUs, and that a plan knows what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.costs.cost_model import Phase
from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.costs.cost_book import FACTORS, CostBook, form_of, with_code_factor
from llmpq.planner.costs.roofline import estimate_costs
from llmpq.planner.make import make_plan
from llmpq.planner.problem.checkpoint_codes import checkpoint_codes, with_checkpoint_codes
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.memory import Quantization
from llmpq.workload import Workload

pytestmark = pytest.mark.pure
LLAMA = ModelSpec.by_name("llama-3.1-8b")
DEVICES = Cluster.parse_data(
    {
        "name": "two",
        "nodes": [
            {"name": "a", "accelerators": "H200:1"},
            {"name": "b", "accelerators": "CPU:1"},
            {"name": "c", "accelerators": "T4:1"},
        ],
    },
    where="test",
).devices
W4, W8 = Precision.W4A16, Precision.W8A16


def book(quantization: Quantization) -> CostBook:
    estimate = estimate_costs(
        LLAMA, DEVICES, dtype="bfloat16", precisions=(W4, W8), quantization=quantization
    )
    return CostBook(estimate=estimate, quantization=quantization)


def test_forms_of_codes() -> None:
    plain = Quantization()
    assert form_of(plain, W4) is None and form_of(plain, Precision.W16A16) is None
    assert form_of(replace(plain, group_size=32), W8) == "small"
    assert form_of(replace(plain, group_size=64), Precision.W3A16) == "small3"
    assert form_of(plain, Precision.W3A16) is None
    assert form_of(replace(plain, group_size=32, codes="nf4"), W4) == "nf4"
    assert form_of(replace(plain, codes="nf4"), W8) is None
    assert form_of(replace(plain, codes="e4m3"), W8) == "e4m3"
    assert form_of(replace(plain, codes="e4m3"), Precision.W8A8) is None


def test_scales_of_small_groups_are_counted_once_on_gpus_and_whole_on_cpus() -> None:
    plain, small = (book(Quantization(group_size=size)).estimate for size in (128, 32))
    assert plain is not None and small is not None
    for device in DEVICES:
        same = [
            plain.find(device.profile_kind, **key) == small.find(device.profile_kind, **key)
            for key in (
                {"part": "layer", "phase": phase, "precision": W4, "dtype": "bfloat16",
                 "kv": KVPrecision.KV16}
                for phase in Phase
            )
        ]  # fmt: skip
        assert all(same) != device.spec.is_cpu


def _header(path: Path, tensors: dict[str, tuple[str, list[int]]], method: str) -> Path:
    """Write a checkpoint's headers alone: names, dtypes and shapes."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    described = {"quant_method": method, "bits": 4, "sym": True}
    (path / "config.json").write_text(json.dumps({"quantization_config": described}))
    return path


def test_what_the_codes_of_a_directory_are(tmp_path: Path) -> None:
    """By what most weights have: `gate_up` is more than half of a layer, `down` is less."""
    layer, nk = "model.layers.0.mlp", [LLAMA.ffn, LLAMA.hidden // 2]
    state, blocks = "weight.quant_state.bitsandbytes__nf4", [LLAMA.ffn * LLAMA.hidden // 64]
    mxfp4 = {"weight_packed": ("U8", nk), "weight_scale": ("U8", nk)}
    some: dict[str, tuple[dict[str, tuple[str, list[int]]], str | None]] = {
        "nf4": ({"weight.absmax": ("F32", blocks), state: ("U8", [9])}, "nf4"),
        "mxfp4": (mxfp4, "mxfp4"),
        "nvfp4": ({**mxfp4, "weight_global_scale": ("F32", [1])}, "nvfp4"),
        "fp8": ({"weight": ("F8_E4M3", nk), "weight_scale": ("F32", [1])}, "e4m3"),
        "w4": ({"weight_packed": ("I32", nk)}, None),
        "down alone": (mxfp4, None),
    }
    one = replace(LLAMA, num_layers=1)
    for name, (tensors, wanted) in some.items():
        linears = ("down_proj",) if name == "down alone" else ("gate_proj", "up_proj")
        held = {f"{layer}.{one}.{last}": t for one in linears for last, t in tensors.items()}
        path = _header(tmp_path / name, held, "any")
        found = with_checkpoint_codes(Quantization(), checkpoint_codes(path, one), one, (W4, W8), 2)
        assert found.codes == wanted, name


@pytest.mark.parametrize("form", FACTORS)
def test_layers_are_priced_by_their_form(form: str) -> None:
    """The products' share of a time grows by the factor, attention and 16 bits stay; CPUs too.

    A prompt of small groups is quicker on Hopper alone.
    """
    grid = Quantization(group_size=32 if form == "small" else 128)
    plain = book(Quantization())
    codes = None if form == "small" else form
    own = replace(plain, quantization=replace(grid, codes=codes))
    b = W8 if form == "e4m3" else W4
    work = Workload(batch=8, prompt_len=512, gen_len=8, dtype="bfloat16", kv=KVPrecision.KV16)
    for phase, factor in FACTORS[form].items():
        for device in DEVICES:
            before = plain.entry(device, "layer", phase, work, b)
            after = own.entry(device, "layer", phase, work, b)
            own_kernels = device.spec.capability == "9.0"
            times = 1.0 if device.spec.is_cpu else factor if own_kernels else max(factor, 1.0)
            for old, new in zip(before.regimes, after.regimes, strict=True):
                for term, value in old.terms.items():
                    still = term in ("v*s^2", "v*(t+s)", "t+s")
                    assert new.terms[term] == pytest.approx(value * (1 if still else times))
            ends = plain.entry(device, "head", Phase.DECODE, work)
            assert own.entry(device, "head", Phase.DECODE, work) == ends


def test_verifying_is_priced_as_decoding() -> None:
    entry = book(Quantization()).entry(
        DEVICES[0],
        "layer",
        Phase.DECODE,
        Workload(batch=8, prompt_len=512, gen_len=8, dtype="bfloat16"),
        W4,
    )
    own = with_code_factor(
        entry.model_copy(update={"phase": Phase.VERIFY}), DEVICES[0].spec, Quantization(codes="nf4")
    )
    assert (
        own.regimes == with_code_factor(entry, DEVICES[0].spec, Quantization(codes="nf4")).regimes
    )


METHODS: dict[str, dict[str, object]] = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    "integers": {},
}


@pytest.mark.thin
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cards", ["h100:2", "4090:2", "t4:2"])
def test_a_plan_states_the_temporaries_that_its_codes_need(
    method: str, cards: str, tmp_path: Path
) -> None:
    """A plan that states what its own formulas do not give is refused: `make_plan` checks it."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **({"quantization_config": METHODS[method]} if METHODS[method] else {}),
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = make_plan(model=str(tmp_path), devices=cards, batch=8, prompt_len=4000, gen_len=16)
    assert isinstance(plan, Plan)
    codes = plan.quantization.codes
    assert codes == {"nvfp4": "nvfp4", "fp8": "e4m3"}.get(method)
    again = Plan.parse_data(json.loads(plan.dump_json()), where="again")
    assert again.settings().codes == codes

"""Experts from end to end: routing, bytes, plans, calibration with experts that see no token."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmpq.checkpoints.model_config import spec_fields
from llmpq.costs.cost_model import Phase
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.weights.atom_weight import AtomWeight
from llmpq.models.model_spec import ModelSpec, builtin_configs
from llmpq.planner.__main__ import main as plan_main
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.quality.observation import observe
from llmpq.profiler.quality.omega import HessianObserver, VarianceObserver
from llmpq.profiler.quality.output_error import OutputErrorObserver
from llmpq.profiler.quantize.layer_walk import CalibrationRun, Hessian, random_windows
from llmpq.profiler.quantize.linears_in_turn import quantize
from llmpq.profiler.quantize.one_layer import Recipe, quantize_layer
from llmpq.profiler.quantize.recipes import Settings
from llmpq.profiler.quantize.whole_model import QuantizeJob, quantize_model, spread
from llmpq.profiler.timing.cases import Effort, Sampling, Target, TimedCase
from llmpq.profiler.timing.timed_layers import TimedModel
from llmpq.runtime.models.experts import Routing, SparseMLP
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import GatedMLP
from llmpq.runtime.weights.convert import convert
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.memory import Quantization, layer_weight_bytes
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
MIXTRAL = builtin_configs()["mixtral-8x7b"]


def sparse(experts: int = 5, per_token: int = 2, *, hidden: int = 16, ffn: int = 24) -> SparseMLP:
    generator = torch.Generator().manual_seed(experts)

    def matrix(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, generator=generator)

    mlps = [
        GatedMLP(Linear(matrix(2 * ffn, hidden), None), Linear(matrix(hidden, ffn), None))
        for _ in range(experts)
    ]
    return SparseMLP(Routing(matrix(experts, hidden), per_token), mlps)


def by_the_formula(part: SparseMLP, x: torch.Tensor) -> torch.Tensor:
    """Token by token: the softmax's largest chances, renormalised, times their experts."""
    rows = []
    for token in x.flatten(0, 1):
        chance = (part.routing.weight_Eh @ token).softmax(0)
        chosen = chance.argsort(descending=True)[: part.routing.per_token]
        total = chance[chosen].sum()
        rows.append(sum(chance[e] / total * part.experts[int(e)](token[None])[0] for e in chosen))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("per_token", [1, 2, 5])
def test_a_token_gets_its_experts_weighted_sum(per_token: int) -> None:
    part = sparse(per_token=per_token)
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(part(x), by_the_formula(part, x), rtol=1e-4, atol=1e-4)
    part.routing.weight_Eh = part.routing.weight_Eh.roll(1, dims=0)
    other = part(x)
    part.routing.weight_Eh = part.routing.weight_Eh.roll(-1, dims=0)
    assert not torch.allclose(other, by_the_formula(part, x), rtol=0.1, atol=0.1)


def test_an_expert_without_tokens_is_left_out() -> None:
    part = sparse()
    part.routing.weight_Eh[3] = 0
    part.routing.weight_Eh[:3] = 1
    part.routing.weight_Eh[4] = -1
    assert part(torch.ones(1, 2, 16)).isfinite().all()


def test_bytes_count_every_expert_and_flops_those_of_a_token() -> None:
    spec = ModelSpec.by_name("mixtral-8x7b")
    dense = dataclasses.replace(spec, experts=0, experts_per_token=0, family="llama")
    mlp = 3 * spec.hidden * spec.ffn
    router = spec.experts * spec.hidden
    assert spec.layer_params == dense.layer_params + 7 * mlp + router
    assert spec.weights_per_token == dense.weights_per_token + mlp + router
    four = Quantization(symmetric=True)
    extra = layer_weight_bytes(spec, Precision.W4A16, four, 2)
    extra -= layer_weight_bytes(dense, Precision.W4A16, four, 2)
    assert extra == 7 * (mlp // 2 + mlp // 128 * 2) + 2 * router


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 of num_local_experts=8"),
        ({"layer_types": ["chunked_attention"] * 32}, "type 'chunked_attention' are not supported"),
        ({"num_local_experts": 0}, "'num_local_experts' must be a positive integer"),
    ],
)
def test_configs_that_would_run_wrongly_are_refused(change: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        spec_fields({**MIXTRAL, **change}, "changed")


def test_a_model_without_experts_keeps_its_fingerprint() -> None:
    """Plans made before there were experts still fit their models."""
    assert ModelSpec.by_name("llama-3.1-8b").fingerprint() == "cfed884768092c1c"
    spec = ModelSpec.by_name("mixtral-8x7b")
    assert dataclasses.replace(spec, experts_per_token=1).fingerprint() != spec.fingerprint()


@pytest.fixture
def tiny(tiny_models: Any) -> tuple[Path, ModelSpec, CheckpointSource]:
    directory = tiny_models.directory("mixtral")
    spec = ModelSpec.from_directory(directory)
    return directory, spec, CheckpointSource(directory, spec)


def windows(spec: ModelSpec) -> torch.Tensor:
    return random_windows([t % spec.vocab for t in range(7, 3000, 7)], count=2, length=48)


def test_experts_of_a_checkpoint_share_their_outlier_channels(
    tiny: tuple[Path, ModelSpec, CheckpointSource], tmp_path: Path
) -> None:
    directory, spec, source = tiny
    job = QuantizeJob(
        spec=spec,
        precisions=spread([Precision.W4A4], spec.num_layers),
        settings=Settings(outliers=4),
        windows_WT=windows(spec),
    )
    with torch.inference_mode():
        quantize_model(job, source, tmp_path / "q")
    layer = open_checkpoint(tmp_path / "q", spec).layer(1, torch.float32)
    ups = [layer[f"{mlp}gate_up.weight"] for mlp in spec.mlps()]
    assert all(isinstance(up, AtomWeight) and up.index_K is not None for up in ups)
    assert all(torch.equal(up.index_K, ups[0].index_K) for up in ups)
    assert isinstance(layer["router.weight"], torch.Tensor)
    whole, parts = (
        ReferencePipeline.from_directory(tmp_path / "q", splits=splits) for splits in ((), (1, 2))
    )
    prompts = [[5, 9, 30, 7], [3, 3, 60]]
    assert whole.generate(prompts, max_new=8) == parts.generate(prompts, max_new=8)
    dense = ReferencePipeline.from_directory(directory)
    assert whole.generate(prompts, max_new=8) != dense.generate(prompts, max_new=8)


def test_an_expert_that_calibration_never_reached_is_rounded_to_nearest(
    tiny: tuple[Path, ModelSpec, CheckpointSource],
) -> None:
    _, spec, source = tiny
    recipe = Recipe(scheme=AtomScheme(outliers=4))
    with torch.inference_mode():
        run = CalibrationRun(spec, source, windows(spec))
        view = run.view(0)
        unseen = {
            name: Hessian(h.sum_KK.shape[0], torch.device("cpu"))
            for name, h in view.hessians.items()
            if name.startswith("experts.2.")
        }
        seen, found = (
            quantize_layer(dataclasses.replace(view, hessians=h), recipe, dtype=torch.float32)
            for h in (view.hessians, {**view.hessians, **unseen})
        )
    weight = view.tensors["experts.2.gate_up.weight"]

    def error(layer: dict[str, Any], mlp: str) -> float:
        return float((layer[f"{mlp}gate_up.weight"].dequantize(torch.float32) - weight).norm())

    # GPTQ trades the weight's own error for the output's.
    assert error(found, "experts.2.") < error(seen, "experts.2.")
    same = (layer["experts.0.down.weight"].codes for layer in (seen, found))
    assert torch.equal(*same)
    with pytest.raises(ValueError, match="leave out --in-turn"):
        quantize(run, view, dataclasses.replace(recipe, compensated=True), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["variance", "hessian", "output"])
def test_every_indicator_counts_an_expert_by_its_tokens(
    kind: str, tiny: tuple[Path, ModelSpec, CheckpointSource]
) -> None:
    _, spec, source = tiny
    bits, kv, settings = (Precision.W8A16, Precision.W4A16), (KVPrecision.KV4,), Quantization()

    def omega(*, hidden: bool) -> float:
        observer: Any = {
            "variance": lambda: VarianceObserver(bits, kv, "deterministic", "group", settings),
            "hessian": lambda: HessianObserver(bits, kv, settings),
            "output": lambda: OutputErrorObserver(bits, kv, settings),
        }[kind]()
        hear = observer.on_input
        if hidden:
            observer.on_input = lambda name, x: None if "experts.0" in name else hear(name, x)
        observe(spec, source, windows(spec).tolist(), observer, device=torch.device("cpu"))
        assert all(a < b for a, b in zip(*(observer.table[p] for p in bits), strict=True))
        return float(sum(observer.table[Precision.W4A16]))

    assert omega(hidden=True) < omega(hidden=False)


def test_layers_are_timed(tiny: tuple[Path, ModelSpec, CheckpointSource]) -> None:
    _, spec, _ = tiny
    subject = TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
    for phase in (Phase.PREFILL, Phase.DECODE):
        target = Target(
            device_kind="cpu",
            part="layer",
            phase=phase,
            precision=Precision.W4A16,
            dtype="float32",
        )
        case = TimedCase(target=target, v=2, length=16)
        assert subject.time(case, Effort(seconds=0.01, min_repeats=3)).seconds > 0


def test_a_plan_places_experts_by_their_bytes(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = "--model mixtral-8x7b --device-names A100-40GB --device-numbers 2 --global_bz 8 --s 512"
    words += f" --n 100 --theta 0 --engines 1 --bits 4,8,w4a4 -o {out}"
    assert plan_main(words.split()) == 0
    made, spec = Plan.load(out), ModelSpec.by_name("mixtral-8x7b")
    assert sum(stage.num_layers for stage in made.stages) == spec.num_layers
    for stage in made.stages:
        weights = sum(layer_weight_bytes(spec, p, made.settings(), 2) for p in stage.precisions)
        assert stage.memory is not None and stage.memory.weights_bytes == weights
    # All experts in 16 bits would need 93 GB.
    assert plan_main(words.replace("4,8,w4a4", "16").split()) == 5


def test_a_pickled_checkpoint_is_converted(
    tiny: tuple[Path, ModelSpec, CheckpointSource], tmp_path: Path
) -> None:
    directory, _, _ = tiny
    (tmp_path / "old").mkdir()
    shutil.copy(directory / "config.json", tmp_path / "old")
    torch.save(load_file(directory / "model.safetensors"), tmp_path / "old" / "pytorch_model.bin")
    convert(tmp_path / "old", tmp_path / "new")
    tokens = (
        ReferencePipeline.from_directory(path).generate([[5, 6, 7]], max_new=6)
        for path in (directory, tmp_path / "new")
    )
    assert next(tokens) == next(tokens)

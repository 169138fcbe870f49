"""Families of the last years against Transformers: token for token, every option switched on.

Tiny random configs, fp32; prompts of unequal length, some beyond the window and beyond the length
that a scaled rope was trained for; one, two and three stages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.cli.quantize import unread_by_transformers
from llmpq.profiler.quantize.layer_walk import CalibrationRun, random_windows
from llmpq.profiler.quantize.recipes import Settings
from llmpq.profiler.quantize.smooth_channels import smoothed
from llmpq.profiler.quantize.whole_model import QuantizeJob, quantize_model
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.models.part_shapes import embedding_shapes, head_shapes, layer_shapes
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.request import Request
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.sources import CheckpointSource, RandomSource
from llmpq.sizes.memory import Quantization
from llmpq.sizes.pool_size import PoolSize
from reference.contiguous_kv import make_kv_cache
from reference.family_runs import served, stages_of
from reference.open_stages import OpenStages
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
VOCAB, TRAINED, NEW = 199, 32, 12
"""As in tests/runtime/conftest.py."""
BY_RULE = ("gemma4 with shared caches", "gemma2", "gemma3", "gpt_oss", "deepseek_v3")
"""Kinds whose attention is not Llama's."""


@pytest.mark.usefixtures("with_new_parts")
def test_greedy_tokens_equal_transformers_whatever_the_split(
    models: Any, random_prompts: Callable[..., list[list[int]]], family_kind: str, seeds: Any
) -> None:
    """In one stage here; by the pool's test below every kind in two; in three with all tests."""
    splits_of = [(), (1, 3), (1,)]
    long = models.changes_by_length(family_kind)
    batches = [random_prompts(5, 17, 1, 9)]
    # Longrope changes its factors at a length; a run has requests on one side only.
    batches += [random_prompts(40, 35, seed=1)] if long else []
    for prompts in batches:
        for splits in seeds(splits_of):
            pipeline = ReferencePipeline.from_directory(
                models.directory(family_kind), splits=models.cuts(family_kind, splits)
            )
            found = pipeline.generate(prompts, max_new=NEW)
            assert models.choices(family_kind, prompts, found) == found
            assert len({tuple(row) for row in found}) == len(prompts), "a constant oracle"


@pytest.mark.thin
@pytest.mark.parametrize("kind", BY_RULE)
@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_an_engine_gives_the_same_tokens(
    models: Any, make_plan: Any, random_prompts: Any, kind: str, speculate: Any
) -> None:
    prompts = random_prompts(5, 24, 1, 9)
    splits = models.cuts(kind, (2,))
    plan = make_plan(models.directory(kind), splits, batch=4, prompt_len=24, gen_len=NEW)
    settings = StageSettings(
        model_dir=str(models.directory(kind)),
        options=EngineOptions(
            backend="threads", speculate=speculate, gamma=3 if speculate else None
        ),
    )
    with PipelineClient.start(plan, settings) as engine:
        engine.submit([
            Request(id=i, prompt=tuple(prompt), max_new=NEW) for i, prompt in enumerate(prompts)
        ])  # fmt: skip
        found = {d.id: d.tokens for update in engine.updates() for d in update.finished}
    assert [found[i] for i in range(len(prompts))] == models.greedy(kind, prompts)


DRAFTED = (
    ("gemma4", "kv4"),
    ("gemma4 with shared caches", "w4kv4"),
    ("gemma3n", "kv4"),
    ("deepseek_v32", "qspec"),
    ("llama4", "w4kv4"),
)
"""Kinds, and who drafts for them."""


@pytest.mark.parametrize(("kind", "mode"), DRAFTED)
def test_drafts_leave_the_tokens_as_they_are(
    models: Any, make_plan: Any, random_prompts: Any, kind: str, mode: Any
) -> None:
    """Unlike heads, shared caches, chosen tokens; beyond a block, in chunks that others follow."""
    directory, (word,) = models.directory(kind), random_prompts(5)
    prompts = [*random_prompts(150), (word * 4)[:18]]
    size = PoolSize(num_blocks=6, slots=2, max_len=300)
    bits = "w4a16" if mode == "qspec" else "w16a16"
    plan = make_plan(directory, batch=2, prompt_len=150, gen_len=NEW, bits=bits)
    want = served(stages_of(directory, plan, size), prompts, size, new=NEW)
    drafting, drafter = stages_of(directory, plan, size, speculate=mode), FixedDrafter(mode, 3)
    got = served(drafting, prompts, size, new=NEW, drafter=drafter, step_tokens=100)
    assert got.tokens == want.tokens
    assert sum(drafter.acceptance.accepted) > 0 and drafter.acceptance.refusals > 0


def test_chunks_of_a_pool_give_the_same_tokens(
    models: Any, make_plan: Any, random_prompts: Any, family_kind: str
) -> None:
    """Prompts in chunks of 8 tokens beside decoding rows, two stages."""
    if "dynamic" in family_kind:
        return  # earlier keys stay as they were turned: chunks are another model there
    prompts = random_prompts(5, 17, 1, 9)
    directory = models.directory(family_kind)
    spec = ModelSpec.from_directory(directory)
    pool = PoolSize(num_blocks=8, slots=4, max_len=TRAINED)
    splits = models.cuts(family_kind, (2,))
    plan = make_plan(directory, splits, batch=4)
    limits = PoolLimits(
        num_blocks=8,
        kv=KVPrecision.KV16,
        max_rows=4,
        max_len=TRAINED,
        step_tokens=8,
        decode_rows=3,
        num_stages=len(splits) + 1,
        prefix_cache=True,
    )
    stages = OpenStages(plan, spec, CheckpointSource(directory, spec), pool=pool)
    requests = [
        Request(id=i, prompt=tuple(prompt), max_new=NEW) for i, prompt in enumerate(prompts)
    ]
    by_id = {done.id: done.tokens for done in stages.run(Scheduler(limits), requests).finished}
    found = [by_id[i] for i in range(len(prompts))]
    assert [len(row) for row in found] == [NEW] * len(prompts)
    assert models.choices(family_kind, prompts, found) == found
    assert len({*map(tuple, found)}) == len(prompts), "a constant oracle"


ROUNDED = (
    "afmoe",
    "deepseek_v3",
    "deepseek_v32",
    "gemma3n",
    "gemma4 in its wrapper",
    "llama4",
    "nemotron_h",
    "qwen3_next",
)
"""Kinds with parts beside Llama's in front of and behind their linears."""


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_activations_are_near_the_same_weights(
    models: Any, make_plan: Any, random_prompts: Any, kind: str
) -> None:
    directory, prompts = models.directory(kind), random_prompts(40, 18)
    size, found = PoolSize(num_blocks=4, slots=2, max_len=80), {}
    for bits in ("w16a16", "w8a16", "w8a8", "w4a16"):
        plan = make_plan(directory, batch=2, prompt_len=40, gen_len=NEW, bits=bits)
        scores = served(stages_of(directory, plan, size), prompts, size, new=1).prompt_scores
        found[bits] = torch.tensor([score for row in scores for score in row])
    apart = {bits: float((own - found["w16a16"]).abs().mean()) for bits, own in found.items()}
    assert apart["w8a8"] < 0.5 * apart["w4a16"]


FORMS = (("w4a16", "kv8", "bfloat16"), ("w8a16", "kv4", "float16"), ("w3a16", "kv2", "float32"))
"""Bits of weights and of KV, and what is computed in."""


@pytest.mark.usefixtures("with_new_parts")
def test_few_bits_in_a_pool_give_the_same_tokens_whatever_the_split(
    models: Any, make_plan: Any, random_prompts: Any, family_kind: str, seeds: Any
) -> None:
    """One of the three forms for each kind in turn; all of them where all tests run."""
    turn = len(family_kind) % len(FORMS)
    directory, prompts = models.directory(family_kind), random_prompts(5, 19, 1, 9)
    spec = ModelSpec.from_directory(directory)
    pool = PoolSize(num_blocks=8, slots=4, max_len=TRAINED)
    for bits, kv, dtype in seeds([*FORMS[turn:], *FORMS[:turn]]):
        found = []
        for splits in ((1, 3), (2, 3)):  # the same steps: three stages each, where it may be cut
            splits = models.cuts(family_kind, splits)
            limits = PoolLimits(
                num_blocks=8,
                kv=KVPrecision.parse(kv),
                max_rows=4,
                max_len=TRAINED,
                step_tokens=8,
                decode_rows=2,
                num_stages=len(splits) + 1,
            )
            plan = make_plan(directory, splits, bits=bits, batch=4, kv=kv, dtype=dtype)
            stages = OpenStages(plan, spec, CheckpointSource(directory, spec), pool=pool)
            requests = [Request(id=i, prompt=tuple(p), max_new=6) for i, p in enumerate(prompts)]
            found.append(stages.run(Scheduler(limits), requests).tokens)
        assert found[0] == found[1] and len({*map(tuple, found[0].values())}) > 1


def test_matrices_that_stay_whole_are_named_to_other_readers(models: Any, family_kind: str) -> None:
    """compressed-tensors' `ignore` has every matrix of a layer that is not quantised, no other."""
    directory = models.directory(family_kind)
    spec = ModelSpec.from_directory(directory)
    source = CheckpointSource(directory, spec)
    quantised = {
        source.root + name.partition("[")[0].removesuffix("^T")
        for index in range(spec.num_layers)
        for linear in spec.of_layer(index).linears()
        for name in source.names.of_layer(spec, index)[f"{linear.name}.weight"]
    }
    patterns = [re.compile(found[3:]) for found in source.names.never_quantised(spec)]
    layers = source.root + source.names.layer_prefix
    for name in source.file_of:
        stem = name.removesuffix(".weight")
        of_layer = name.startswith(layers) and stem != name and not stem.endswith("norm")
        if not of_layer or source.read(name).ndim != 2:
            continue
        ignored = any(pattern.match(stem) for pattern in patterns)
        assert ignored != (name in quantised), name


def test_parts_have_the_bytes_the_planner_counts(models: Any, family_kind: str) -> None:
    spec = ModelSpec.from_directory(models.directory(family_kind))
    assert spec.num_params == models.num_params(family_kind)
    for index in range(spec.num_layers):
        one = spec.of_layer(index)
        shapes = layer_shapes(one).values()
        assert sum(torch.Size(shape).numel() for shape in shapes) == one.layer_params
    for shapes, params in (
        (embedding_shapes(spec), spec.embedding_params),
        (head_shapes(spec), spec.head_params),
    ):
        assert sum(torch.Size(shape).numel() for shape in shapes.values()) == params


@pytest.mark.usefixtures("with_new_parts")
def test_quantised_and_random_weights_run_whatever_the_split(
    models: Any, random_prompts: Any, family_kind: str
) -> None:
    spec = ModelSpec.from_directory(models.directory(family_kind))
    precisions = [Precision.W8A16, Precision.W16A16, Precision.W4A16, Precision.W3A16]
    prompts = random_prompts(4, 7)
    found = [
        ReferencePipeline.build(spec, RandomSource(spec), precisions=precisions, splits=splits)
        for splits in ((), models.cuts(family_kind, (2,)))
    ]
    whole, halves = (pipeline.generate(prompts, max_new=4) for pipeline in found)
    assert whole == halves


def logits(directory: Path, prompt: list[int], kv: KVPrecision) -> torch.Tensor:
    """Return the logits of the last tokens, attended to through a cache of these bits."""
    pipeline = ReferencePipeline.from_directory(directory)
    cache = make_kv_cache(
        pipeline.spec, kv, num_layers=4, slots=1, max_len=len(prompt), dtype=torch.float32
    )
    first = len(prompt) - 1
    pipeline.hidden(pad([prompt[:first]]), Step.of([0], [0], [first]), [cache])
    return pipeline.logits(pad([prompt[first:]]), Step.of([0], [first], [1]), [cache])


@pytest.mark.parametrize(
    "kind", ["deepseek_v2", "kimi_k2", "dots1", "granite4", "stablelm", "qwen3_vl", "ministral"]
)
def test_kv_in_few_bits_are_near_those_in_sixteen(
    models: Any, random_prompts: Any, kind: str
) -> None:
    (prompt,) = random_prompts(300)
    directory = models.directory(kind)
    exact = logits(directory, prompt, KVPrecision.KV16)
    errors = [
        float((logits(directory, prompt, kv) - exact).norm() / exact.norm())
        for kv in (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2)
    ]
    assert 0 < errors[0] < 0.02 and errors[0] < min(errors[1:])


def test_rope_of_a_run_is_decided_once(models: Any, random_prompts: Any) -> None:
    """Short prompts of a run with long ones turn by the long factors, and none may cross."""
    directory = models.directory("phi3")
    prompts = random_prompts(TRAINED - 4, 3)
    with pytest.raises(ValueError, match=f"grows beyond {TRAINED} tokens"):
        ReferencePipeline.from_directory(directory).generate(prompts, max_new=NEW)
    by_run = [
        ReferencePipeline.from_directory(directory, max_len=length).generate(prompts[1:], max_new=8)
        for length in (TRAINED, TRAINED + 1)
    ]
    assert by_run[0] != by_run[1]
    assert by_run[0] == ReferencePipeline.from_directory(directory).generate(prompts[1:], max_new=8)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gemma2", {"attn_logit_softcapping": 40.0}),
        ("gemma2", {"query_pre_attn_scalar": 8}),
        ("gpt_oss", {"swiglu_limit": 0.05}),
        ("gpt_oss", {"sliding_window": 2}),
        ("granite", {"residual_multiplier": 0.9}),
        ("deepseek_v3", {"topk_group": 1}),
        ("deepseek_v3", {"routed_scaling_factor": 0.1}),
        ("glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
        ("llama with yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ],
)
def test_every_option_changes_the_logits(
    models: Any, random_prompts: Any, tmp_path: Path, kind: str, change: dict[str, Any]
) -> None:
    """So that the comparison above would see it."""
    (prompt,) = random_prompts(20)
    directory = models.directory(kind)
    config = json.loads((directory / "config.json").read_text())
    for path in directory.glob("*.safetensors"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    found = [logits(path, prompt, KVPrecision.KV16) for path in (directory, tmp_path)]
    assert float((found[0] - found[1]).norm() / found[0].norm()) > 1e-3


class LoudChannels(CheckpointSource):
    """Norms give some channels that are far larger than the others."""

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the layer's tensors."""
        tensors = dict(super().layer(index, dtype))
        for name in ("attn_norm.weight", "mlp_norm.weight"):
            if name in tensors:
                tensors[name] = tensors[name].clone()
                tensors[name][::7] *= 30.0
        return tensors


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32", "olmo2", "glm4_moe", "minimax"])
def test_smoothed_channels_leave_a_layer_what_it_computes(models: Any, kind: str) -> None:
    directory = models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    with torch.inference_mode():
        run = CalibrationRun(spec, LoudChannels(directory, spec), WINDOWS_WT)
        view = run.view(0)
        other = smoothed(view)
        last = "down" if "down.weight" in view.tensors else "experts.0.down"
        for name in ("o", last):
            for got, want in zip(
                run.inputs(other.tensors, name), run.inputs(view.tensors, name), strict=True
            ):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    changed = [n for n, t in view.tensors.items() if not torch.equal(t, other.tensors[n])]
    stays = kind in ("olmo2", "minimax")
    assert bool(changed) != stays, "without norms in front, or with norms that go on beside linears"


MIXED = [Precision.parse(text) for text in ("w8a16", "w4a16", "w16a16", "w3a16")]
WINDOWS_WT = random_windows([t % VOCAB for t in range(7, 900, 7)], count=2, length=24)


def scores(pipeline: ReferencePipeline) -> torch.Tensor:
    """Return the logits of a prompt's every token."""
    tokens = [(7 * i * i + 3) % VOCAB for i in range(24)]
    step, caches = Step.of([0], [0], [len(tokens)]), pipeline.caches(1, len(tokens))
    return pipeline.logits(pad([tokens]), step, caches, all_positions=True)


def quantize(directory: Path, target: Path, precisions: list[Precision], method: str) -> None:
    spec = ModelSpec.from_directory(directory)
    job = QuantizeJob(
        spec=spec,
        precisions=tuple(precisions),
        settings=Settings(method=method, group_size=None),  # type: ignore[arg-type]
        windows_WT=WINDOWS_WT,
    )
    with torch.inference_mode():
        quantize_model(job, CheckpointSource(directory, spec), target)


@pytest.mark.usefixtures("with_new_parts")
def test_mixed_layers_are_those_that_are_rounded_on_load(
    models: Any, tmp_path: Path, family_kind: str
) -> None:
    directory = models.directory(family_kind)
    mixed = MIXED
    if ModelSpec.from_directory(directory).per_layer_dim:  # of 8 channels here
        with pytest.raises(ValueError, match="rows of 8 channels are too short for codes of 3"):
            quantize(directory, tmp_path / "q3", MIXED, "rtn")
        mixed = [*MIXED[:3], Precision.W4A16]
    quantize(directory, tmp_path / "q", mixed, "rtn")
    rounded = ReferencePipeline.from_directory(
        directory, precisions=mixed, scheme=Quantization(group_size=None, symmetric=True).scheme
    )
    got, want = scores(ReferencePipeline.from_directory(tmp_path / "q")), scores(rounded)
    assert float((got - want).norm() / want.norm()) < 2e-3


@pytest.mark.parametrize(
    "kind",
    [
        *("gemma4 with shared caches", "nemotron_h", "qwen3_5_moe", "gemma3n", "llama4", "apertus"),
        *("deepseek_v32", "glm_moe_dsa"),
    ],
)
def test_transformers_reads_a_quantised_copy(models: Any, tmp_path: Path, kind: str) -> None:
    """Matrices in front of the layers, unlike heads, experts that are stored apart, streams,
    constants that others look for, and indexers."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    directory = models.directory(kind)
    count = ModelSpec.from_directory(directory).num_layers
    quantize(directory, tmp_path / "q", [Precision.W8A16] * count, "rtn")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = [(7 * i * i + 3) % VOCAB for i in range(24)]
    with torch.no_grad():
        want = model.eval()(torch.tensor([tokens])).logits
    got = scores(ReferencePipeline.from_directory(tmp_path / "q"))
    assert float((got - want).norm() / want.norm()) < 2e-5


@pytest.mark.parametrize(
    "kind",
    [
        *("granitemoehybrid", "gemma4", "kimi_linear", "gpt_oss", "olmo_hybrid", "mistral4"),
        *("gpt2", "gpt_bigcode", "falcon"),
    ],
)
def test_what_transformers_does_not_read_of_a_copy_is_said(
    models: Any, tmp_path: Path, kind: str
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    directory = models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    eights = [Precision.W8A16] * spec.num_layers
    quantize(directory, tmp_path / "q", eights, "rtn")
    said = unread_by_transformers(spec, eights)
    assert said is not None and f" of a quantised {spec.family};" in said
    assert unread_by_transformers(spec, [Precision.W16A16] * spec.num_layers) is None
    got = scores(ReferencePipeline.from_directory(tmp_path / "q"))
    auto = transformers.AutoModelForCausalLM
    tokens = torch.tensor([[(7 * i * i + 3) % VOCAB for i in range(24)]])
    try:
        model = auto.from_pretrained(tmp_path / "q", dtype=torch.float32)
        with torch.no_grad():  # what was not found is drawn
            want = model.eval()(tokens).logits
    except (RuntimeError, ValueError, AttributeError):
        return
    assert float((got - want).norm() / want.norm()) > 0.1


@pytest.mark.parametrize("kind", ["gpt_oss", "olmo2", "gemma2", "glm4_moe"])
def test_gptq_of_eight_bits_is_near(models: Any, tmp_path: Path, kind: str) -> None:
    directory = models.directory(kind)
    quantize(directory, tmp_path / "q", [Precision.W8A16] * 4, "gptq")
    got, want = (scores(ReferencePipeline.from_directory(d)) for d in (tmp_path / "q", directory))
    assert float((got - want).norm() / want.norm()) < 0.06


def test_a_factor_that_leaves_a_bias_alone_is_refused(models: Any, tmp_path: Path) -> None:
    config = json.loads((models.directory("falcon_h1") / "config.json").read_text())
    config |= {"mamba_proj_bias": True, "projectors_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="ssm_in_multiplier=1.4 beside a bias"):
        ModelSpec.from_directory(tmp_path)

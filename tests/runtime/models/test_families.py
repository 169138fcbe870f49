"""The runtime's models against transformers: tokens in fp32, logits in bf16, any split."""

from __future__ import annotations

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.models.layers import Attention
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import MLP, GatedMLP
from llmpq.runtime.models.part_shapes import embedding_shapes, head_shapes, layer_shapes
from llmpq.runtime.steps.step import Step
from reference.pipeline import ReferencePipeline, pad

pytestmark = [pytest.mark.cpu, pytest.mark.quick]
KINDS = ("opt", "bloom", "llama", "qwen2", "qwen3", "mixtral")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers_whatever_the_split(tiny_models, random_prompts, kind):
    prompts = random_prompts(5, 12, 1, 9)
    expected = tiny_models.greedy(kind, prompts, 12)
    assert len({tuple(row) for row in expected}) == len(prompts), "the oracle must not be constant"
    for splits in ((), (1,), (1, 2)):
        pipeline = ReferencePipeline.from_directory(tiny_models.directory(kind), splits=splits)
        assert pipeline.generate(prompts, max_new=12) == expected


def test_demo_model_equals_transformers(demo_model):
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    prompts = [[5, 300, 77, 1200, 9], [61, 62, 63, 64, 65, 66, 67, 68, 69], [1000]]
    expected = [
        reference.generate(
            torch.tensor([p]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(p) :].tolist()
        for p in prompts
    ]
    for splits in ((), (3,), (2, 5)):
        pipeline = ReferencePipeline.from_directory(demo_model, splits=splits)
        assert pipeline.generate(prompts, max_new=24) == expected


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def _bf16_errors(tiny_models, kind, prompt) -> tuple[float, float]:
    """Return the relative error of our bf16 logits and of transformers' to its fp32 ones."""
    reference = tiny_models.reference(kind)
    tokens = pad([prompt])
    with torch.no_grad():
        expected = reference(tokens).logits
        theirs = reference.to(torch.bfloat16)(tokens).logits
        reference.float()
        reference.load_state_dict(
            type(reference).from_pretrained(tiny_models.directory(kind)).state_dict()
        )
    pipeline = ReferencePipeline.from_directory(tiny_models.directory(kind), dtype=torch.bfloat16)
    step = Step.of([0], [0], [len(prompt)])
    ours = pipeline.logits(tokens, step, pipeline.caches(1, len(prompt)), all_positions=True)
    return _relative_error(ours, expected), _relative_error(theirs, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_logits_are_as_close_to_fp32_as_those_of_transformers(
    tiny_models, random_prompts, kind, monkeypatch
):
    (prompt,) = random_prompts(40)
    ours, theirs = _bf16_errors(tiny_models, kind, prompt)
    tolerance = 1.3 * theirs
    assert ours <= tolerance
    build = Attention.__init__

    def wrong_scale(self, *args, **options):
        build(self, *args, **options)
        self.scale *= 1.1

    monkeypatch.setattr(Attention, "__init__", wrong_scale)
    planted, _ = _bf16_errors(tiny_models, kind, prompt)
    assert planted > tolerance, "a wrong attention scale must not pass"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["w8a16", "w4a16", "w3a16"])
def test_quantised_layers_run_whatever_the_split(tiny_models, random_prompts, kind, precision):
    precisions = [Precision.parse(precision), Precision.W16A16, Precision.W4A16]
    prompts = random_prompts(4, 7)
    directory = tiny_models.directory(kind)
    whole = ReferencePipeline.from_directory(directory, precisions=precisions)
    halves = ReferencePipeline.from_directory(directory, precisions=precisions, splits=(2,))
    assert whole.generate(prompts, max_new=6) == halves.generate(prompts, max_new=6)


@pytest.mark.parametrize("precision, limit", [("w8a16", 0.03), ("w4a16", 0.5)])
def test_quantised_logits_stay_near_the_dense_ones(tiny_models, random_prompts, precision, limit):
    (prompt,) = random_prompts(32)
    directory, tokens = tiny_models.directory("llama"), pad([prompt])
    step = Step.of([0], [0], [32])

    def logits(name: str) -> torch.Tensor:
        pipeline = ReferencePipeline.from_directory(
            directory, precisions=[Precision.parse(name)] * 3
        )
        return pipeline.logits(tokens, step, pipeline.caches(1, 32), all_positions=True)

    error = _relative_error(logits(precision), logits("w16a16"))
    assert 0 < error < limit
    if precision == "w8a16":
        assert _relative_error(logits("w4a16"), logits("w16a16")) > limit


@pytest.mark.parametrize(
    "name", ["opt-13b", "bloom-560m", "llama-3.1-8b", "qwen3-8b", "mixtral-8x7b"]
)
def test_parts_have_the_bytes_the_planner_counts(name):
    spec = ModelSpec.by_name(name)
    for shapes, expected in (
        (layer_shapes(spec), spec.layer_params),
        (embedding_shapes(spec), spec.embedding_params),
        (head_shapes(spec), spec.head_params),
    ):
        assert sum(torch.Size(shape).numel() for shape in shapes.values()) == expected


def test_an_activation_that_no_part_computes_is_refused():
    """On every device: another one in its place would give wrong text without a word."""
    part = Linear(torch.zeros(4, 4), None)
    with pytest.raises(ValueError, match="activation 'gelu' is not supported in a gated MLP"):
        GatedMLP(part, part, "gelu")
    with pytest.raises(ValueError, match="activation 'swish' is not supported"):
        MLP(part, part, "swish")
    with pytest.raises(ValueError, match="no stage runs on 'meta' devices"):
        backend_of("meta")

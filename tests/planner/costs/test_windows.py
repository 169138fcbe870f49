"""Times of layers with a window: what they read and compute is what is in sight."""

from dataclasses import replace
from pathlib import Path

import pytest

import llmpq
from llmpq.costs.cost_model import LatencyEntry, Phase
from llmpq.devices.cluster import Cluster
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.check.check import check_alone
from llmpq.planner.costs.roofline import bandwidth, estimate_costs
from llmpq.precision import Precision
from llmpq.sizes.memory import Quantization

pytestmark = pytest.mark.pure
ROOT = Path(__file__).parents[3]
H200 = Cluster.load(ROOT / "clusters/h200x1.yaml").devices


def estimated(spec: ModelSpec, phase: Phase) -> LatencyEntry:
    costs = estimate_costs(
        spec,
        H200,
        dtype="bfloat16",
        precisions=[Precision.W8A16],
        quantization=Quantization(),
    )
    found = costs.find("H200", phase=phase, precision=Precision.W8A16, dtype="bfloat16")
    assert found is not None
    return found


def with_window(name: str, window: int, full_every: int) -> ModelSpec:
    """Return a built-in model whose layers have a window, but for every `full_every`-th."""
    spec = ModelSpec.by_name(name)
    windows = tuple(0 if (i + 1) % full_every == 0 else window for i in range(spec.num_layers))
    return replace(spec, windows=windows)


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec.by_name("gemma-3-27b"),
        ModelSpec.by_name("gpt-oss-20b"),
        with_window("mistral-7b-v0.3", 4096, 1000),
        with_window("qwen3-30b-a3b", 700, 2),
    ],
    ids=lambda spec: spec.name,
)
def test_entries_are_the_mean_of_layers_that_each_see_their_own(spec: ModelSpec) -> None:
    """Against the same model with all layers of one window, layer by layer."""
    alone = {w: replace(spec, windows=(w,) * spec.num_layers) for w in set(spec.windows)}
    for phase in (Phase.PREFILL, Phase.DECODE):
        entry = estimated(spec, phase)
        entries = {window: estimated(one, phase) for window, one in alone.items()}
        for tokens in (100, 1000, 100_000):

            def of(entry: LatencyEntry, tokens: int = tokens) -> float:
                if entry.phase is Phase.DECODE:
                    return entry.seconds(v=3, length=tokens)
                return entry.chunk_s(v=3, start=tokens, length=2048)

            mean = sum(of(entries[window]) for window in spec.windows) / spec.num_layers
            # A mean of maxima is not below the maximum of means.
            assert 0.9 * mean < of(entry) <= mean * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-20b"])
def test_a_long_context_costs_what_its_cache_holds(name: str) -> None:
    spec = ModelSpec.by_name(name)
    entry, short, long = estimated(spec, Phase.DECODE), 1000, 131_072
    more_s = spec.num_layers * (entry.seconds(v=1, length=long) - entry.seconds(v=1, length=short))
    token = 2 * spec.kv_heads * spec.head_dim * 2
    seen = sum(min(long, w or long) - min(short, w or long) for w in spec.windows)
    assert more_s == pytest.approx(token * seen / bandwidth(H200[0]))


def test_an_indexer_reads_its_keys_and_attention_those_it_chooses() -> None:
    """On a GPU; a CPU multiplies by all keys, and a prompt's choice is of operations."""
    spec = ModelSpec.by_name("deepseek-v3.2")
    assert spec.indexer is not None and spec.latent is not None
    decode, prefill = (estimated(spec, phase) for phase in (Phase.DECODE, Phase.PREFILL))

    def more_s(short: int, long: int) -> float:
        return decode.seconds(v=1, length=long) - decode.seconds(v=1, length=short)

    latent, index = spec.latent.dim, spec.indexer.dim
    assert (latent, index, spec.indexer.topk) == (576, 128, 2048)
    byte_s = 1 / bandwidth(H200[0])
    assert more_s(100, 1100) == pytest.approx(1000 * 2 * (latent + index) * byte_s)
    assert more_s(8_000, 128_000) == pytest.approx(120_000 * 2 * index * byte_s)
    assert more_s(100, 128_000) == pytest.approx(2 * byte_s * (1948 * latent + 127_900 * index))
    ((most, share),) = prefill.windows
    assert most == 2048 and share == pytest.approx(4 * 128 * 576 / (4 * 128 * 576 + 2 * 64 * 128))
    cpu = estimate_costs(
        spec,
        Cluster.load(ROOT / "examples/cpu-two-stages.yaml").devices,
        dtype="float32",
        precisions=[Precision.W8A16],
        quantization=Quantization(),
    )
    assert all(not entry.windows for entry in cpu.entries)


def test_a_window_that_holds_everything_changes_nothing() -> None:
    plain = ModelSpec.by_name("llama-3.1-8b")
    wide = replace(plain, windows=(131_072,) * plain.num_layers)
    for phase in (Phase.PREFILL, Phase.DECODE):
        of_plain, of_wide = estimated(plain, phase), estimated(wide, phase)
        assert of_plain.windows == () and of_wide.regimes == of_plain.regimes
        assert of_wide.seconds(v=2, length=900) == of_plain.seconds(v=2, length=900)
        assert of_wide.chunk_s(v=2, start=700, length=512) == pytest.approx(
            of_plain.chunk_s(v=2, start=700, length=512)
        )


def test_plans_predict_and_carry_what_is_in_sight() -> None:
    plan = llmpq.make_plan(
        "gemma-3-27b", devices="h200", batch=1, context=131_072, gen_len=3, bits="8"
    )
    again = check_alone(plan)
    assert again is not None and again.total_s == pytest.approx(plan.predicted.total_s)
    assert plan.inputs is not None
    layer = plan.inputs.cost("H200", "layer", Phase.DECODE, Precision.W8A16, plan.workload.kv)
    assert layer.windows == ((1024, pytest.approx(52 / 62)),)
    least = 2 * 27e9 * 0.5 / 4.8e12  # its weights at 8 bits
    assert least < plan.predicted.decode_s / 2 < 14e-3, "25 ms with every layer seeing all"

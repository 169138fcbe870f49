"""Profiling a tiny model: shapes that were not sampled are predicted, errors are explained."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq.costs.cost_model import CostModel, LatencyEntry, LinkCost, Padding, Phase, Regime
from llmpq.kernels.cpu.native_layer import NativeStack
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.__main__ import main
from llmpq.profiler.timing.cases import Conditions, Effort, Sample, Sampling, Target, TimedCase
from llmpq.profiler.timing.latency_fit import Point, fit_latency
from llmpq.profiler.timing.profile_host import fit_entry
from llmpq.profiler.timing.shape_grid import Reach, cases, make_grid
from llmpq.profiler.timing.stopwatch import summarise
from llmpq.profiler.timing.timed_layers import TimedModel, pool_of, step_message
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.steps.device_copies import HostCopy
from llmpq.sizes.memory import Quantization
from llmpq.sizes.step_padding import gpu_padded

pytestmark = pytest.mark.cpu

CLUSTER = """
schema: 1
name: two
nodes:
  - name: here
    devices:
      - {kind: CPU, threads: 1, memory: 1 GiB, count: 2}
"""


def seconds(fit: Any, phase: Phase, case: TimedCase) -> float:
    entry = LatencyEntry(
        device_kind="CPU@1t",
        part="layer",
        phase=phase,
        precision=case.target.precision,
        dtype="float32",
        regimes=fit.regimes,
        padding="cpu",
        source="profile",
    )
    return entry.seconds(v=case.v, length=case.length, q_len=case.q_len)


def machine_s(case: TimedCase) -> float:
    """Return what a step takes on a machine of known speed: its weights are read or its products
    computed, whichever is longer, then each row's cache is read."""
    tokens = case.v * (case.length if case.target.phase is Phase.PREFILL else 1)
    seen = case.v * case.length
    return 2e-6 + max(30e-6, 2e-6 * tokens) + 5e-9 * seen


def ratios(
    directory: Path, phase: Phase, scale: Callable[[float], float] = lambda s: s
) -> list[float]:
    """Fit a small grid of one layer's times; return predicted over true at other shapes.

    Steps are made and run as they are timed, but the clock is `machine_s`: what another program
    does to this machine meanwhile changes nothing.
    """
    spec = ModelSpec.from_directory(directory)
    timed = TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
    found = cases(
        make_grid(spec, Reach(max_batch=8, max_len=96), quick=True),
        device_kind="CPU@1t",
        dtype="float32",
        precisions=[Precision.W8A16],
        kv=[KVPrecision.KV16],
    )
    target = Target(
        device_kind="CPU@1t",
        part="layer",
        phase=phase,
        precision=Precision.W8A16,
        dtype="float32",
    )
    points = []
    for case in found:
        if case.target == target:
            timed.step(case)[0]()
            points.append(
                Point(
                    v=case.v,
                    length=case.length,
                    start=case.start,
                    seconds=scale(machine_s(case)),
                )
            )
    fit = fit_latency(phase, points, padding="cpu")
    unseen = [
        TimedCase(target=target, v=v, length=s) for v, s in ((2, 40), (5, 30), (6, 80), (7, 50))
    ]
    return [seconds(fit, phase, case) / machine_s(case) for case in unseen]


@pytest.mark.parametrize(
    "phase", [pytest.param(Phase.PREFILL, marks=pytest.mark.seldom), Phase.DECODE]
)
def test_unseen_shapes_are_predicted(phase: Phase, tiny_models: Any) -> None:
    found = ratios(tiny_models.directory("llama"), phase)
    assert found == pytest.approx([1.0] * 4, rel=0.1), found


def test_milliseconds_taken_for_seconds_are_noticed(tiny_models: Any) -> None:
    found = ratios(tiny_models.directory("llama"), Phase.DECODE, scale=lambda s: s * 1e3)
    assert found == pytest.approx([1e3] * 4, rel=0.1), found


def test_a_layer_is_timed_alone(tiny_models: Any) -> None:
    """The time of a stage of several layers is divided by their number."""
    spec = ModelSpec.from_directory(tiny_models.directory("opt"))
    timed = TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
    target = Target(device_kind="c", part="layer", phase=Phase.DECODE, dtype="float32")
    timing = timed.time(
        TimedCase(target=target, v=2, length=16), Effort(seconds=0.005, min_repeats=3)
    )
    assert timing.layers == spec.num_layers == 3
    assert summarise([0.3, 0.1, 0.2], layers=1).seconds == 0.2
    assert summarise([5.0, 1.0, 2.0, 3.0, 4.0]).noise == pytest.approx(1 / 3)


def test_an_answer_on_its_way_is_waited_for(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []

    class Copied:
        def synchronize(self) -> None:
            waits.append(1)

    monkeypatch.setattr(StageRunner, "run", lambda *_: HostCopy(torch.zeros(1), Copied()))
    spec = ModelSpec.from_directory(tiny_models.directory("opt"))
    timed = TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
    target = Target(device_kind="c", part="layer", phase=Phase.PREFILL, dtype="float32")
    timing = timed.time(
        TimedCase(target=target, v=2, length=8), Effort(seconds=0.005, min_repeats=3)
    )
    assert len(waits) >= timing.repeats >= 3


SPEC = ModelSpec.by_name("llama-3.1-8b")


def sample(padding: Padding, v: int, length: int, seconds: float, start: int = 0) -> Sample:
    target = Target(device_kind="g", part="layer", phase=Phase.PREFILL, dtype="float16")
    conditions = Conditions(model_fingerprint="m", machine="g", copies=1, padding=padding)
    case = TimedCase(target=target, v=v, length=length, start=start)
    return Sample(conditions=conditions, case=case, timing=summarise([seconds] * 3))


def test_steps_are_fitted_and_priced_at_the_places_they_take() -> None:
    samples = [
        sample("gpu", v, length, 1e-6 * gpu_padded(v * length))
        for v in (1, 2, 4)
        for length in (16, 65, 100, 400)
    ]
    entry = fit_entry(samples[0].case.target, samples, SPEC)
    assert entry.seconds(v=3, length=171) == pytest.approx(1e-6 * 768, rel=1e-2)
    assert CostModel.parse_data(costs(entry).model_dump(mode="json", by_alias=True), where="c")


def test_attention_to_what_stands_before_a_chunk_is_a_term_of_its_own() -> None:
    shapes = [(v, s, p) for v in (1, 2, 4) for s in (16, 64, 200) for p in (0, 500, 900)]

    def seconds(v: int, s: int, p: int) -> float:
        return 1e-6 * v * s + 1e-9 * v * s * s + 5e-9 * v * s * p

    samples = [sample("none", v, s, seconds(v, s, p), p) for v, s, p in shapes]
    entry = fit_entry(samples[0].case.target, samples, SPEC)
    assert entry.chunk_s(v=3, start=700, length=100) == pytest.approx(
        seconds(3, 100, 700), rel=1e-2
    )
    without = fit_entry(samples[0].case.target, [s for s in samples if s.case.start == 0], SPEC)
    assert without.chunk_s(v=3, start=700, length=100) == pytest.approx(
        seconds(3, 100, 0) + 2 * 1e-9 * 3 * 100 * 700, rel=1e-2
    )


def test_steps_are_those_of_the_engine() -> None:
    def shape(phase: Phase, **sizes: int) -> tuple[list[int], list[int]]:
        target = Target(device_kind="c", part="layer", phase=phase, dtype="float32")
        case = TimedCase(target=target, **sizes)
        size = pool_of(ModelSpec.by_name("opt-30b"), case)
        message = step_message(case, size, SamplerConfig())
        blocks = [block for row in message.rows_with_news for block in row.new_blocks]
        assert sorted(blocks) == list(range(size.num_blocks))
        assert all(len(row.drafts) == sizes.get("q_len", 1) - 1 for row in message.rows_with_news)
        return message.starts_B.tolist(), message.num_new_B.tolist()

    assert shape(Phase.PREFILL, v=3, length=9) == ([0, 0, 0], [9, 9, 9])
    assert shape(Phase.PREFILL, v=2, length=512, start=700) == ([700, 700], [512, 512])
    assert shape(Phase.DECODE, v=3, length=9) == ([8, 7, 8], [1, 1, 1])
    assert shape(Phase.VERIFY, v=2, length=9, q_len=4) == ([5, 4], [4, 4])
    assert shape(Phase.VERIFY, v=2, length=4, q_len=4) == ([0, 0], [4, 4])


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("kv", [KVPrecision.KV16, KVPrecision.KV4, KVPrecision.KV8V4])
def test_every_step_is_timed_over_the_pool(window: int | None, kv: KVPrecision) -> None:
    config = {
        "model_type": "mistral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "sliding_window": window,
        "torch_dtype": "float32",
    }
    spec = ModelSpec.from_config(config, name="tiny")
    timed = TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
    effort = Effort(seconds=1e-4, min_repeats=1)
    for phase, sizes in (
        (Phase.PREFILL, {"length": 40}),
        (Phase.PREFILL, {"length": 20, "start": 150}),
        (Phase.DECODE, {"length": 170}),
        (Phase.VERIFY, {"length": 170, "q_len": 3}),
    ):
        target = Target(device_kind="c", part="layer", phase=phase, kv=kv, dtype="float32")
        assert timed.time(TimedCase(target=target, v=2, **sizes), effort).seconds > 0


def test_a_decode_step_is_timed_as_one_call_of_all_layers(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    whole = NativeStack.whole
    monkeypatch.setattr(
        NativeStack, "whole", lambda stack, *given: calls.append(1) or whole(stack, *given)
    )
    spec = ModelSpec.from_directory(tiny_models.directory("llama"))
    timed = TimedModel(spec, torch.device("cpu"), Quantization(), Sampling())
    target = Target(device_kind="c", part="layer", phase=Phase.DECODE, dtype="float32")
    timing = timed.time(TimedCase(target=target, v=3, length=40), Effort(seconds=0, min_repeats=3))
    assert len(calls) >= timing.repeats >= 2


def entry(kind: str, seconds_per_v: float) -> LatencyEntry:
    return LatencyEntry(
        device_kind=kind,
        part="layer",
        phase=Phase.DECODE,
        precision=Precision.W4A16,
        dtype="float16",
        regimes=(Regime(terms={"v": seconds_per_v}),),
        sampled_v=(1, 8),
        sampled_length=(16, 64),
        source="profile",
    )


def costs(
    *entries: LatencyEntry,
    model: str = "m",
    fingerprint: str = "f",
    links: tuple[LinkCost, ...] = (),
) -> CostModel:
    return CostModel(model=model, model_fingerprint=fingerprint, entries=entries, links=links)


def link(source: str, target: str, alpha_s: float, **more: Any) -> LinkCost:
    return LinkCost(
        source_kind=source, target_kind=target, alpha_s=alpha_s, beta_s_per_byte=1e-9, **more
    )


def test_cost_files_of_hosts_are_merged(tmp_path: Path) -> None:
    a, b, c, out = (tmp_path / f"{name}.json" for name in ("a", "b", "c", "merged"))
    costs(entry("T4", 1e-3), entry("V100-32GB", 3e-3)).save_json(a)
    costs(entry("T4", 2e-3), entry("P100-12GB", 4e-3)).save_json(b)
    costs(entry("L4", 5e-3)).save_json(c)
    assert main(["merge", str(a), str(b), str(c), "-o", str(out)]) == 0
    merged = CostModel.load_json(out)
    assert merged.device_kinds == ("L4", "P100-12GB", "T4", "V100-32GB")
    found = merged.find("T4", phase=Phase.DECODE, precision=Precision.W4A16, dtype="float16")
    assert found is not None and found.seconds(v=4, length=10) == pytest.approx(8e-3)
    assert found.extrapolates(v=9, length=32) and not found.extrapolates(v=8, length=32)


def test_a_later_link_wins_either_way_round() -> None:
    first = costs(links=(link("T4", "L4", 1.0), link("T4", "L4", 2.0, same_node=False)))
    merged = first.merged(costs(links=(link("L4", "T4", 3.0), link("T4", "T4", 4.0))))
    found = [
        merged.link("T4", other, same_node=same_node)
        for other, same_node in (("L4", True), ("L4", False), ("T4", True))
    ]
    assert [one and one.alpha_s for one in found] == [3.0, 2.0, 4.0]
    assert len(merged.links) == 3


def test_costs_of_different_models_do_not_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    costs(entry("T4", 1e-3)).save_json(a)
    costs(entry("T4", 2e-3), model="n", fingerprint="g").save_json(b)
    assert main(["merge", str(a), str(b), "-o", str(tmp_path / "c.json")]) == 2
    assert "cost files of different models cannot be merged: m and n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model opt-31b", "unknown model 'opt-31b': did you mean 'opt-30b'"),
        ("--model opt-13b --cluster none.yaml", "no such cluster file: 'none.yaml'"),
        ("--model opt-13b --device T5", "unknown device kind 'T5'"),
        ("--model opt-13b --bits 7", "unknown precision '7'"),
        ("--model opt-13b --verify x", "--verify: expected numbers such as 2,4, got 'x'"),
        ("--model opt-13b --verify 1", "--verify: a verify step has at least 2 tokens, got '1'"),
        ("--model opt-13b --temperature 1 --top-p 2", "sampling: 'top_p': expected at most 1"),
        ("--model opt-13b --copies 0", "--copies must be at least 1, got 0"),
        ("--model opt-13b --max-len 4", "--max-len must be at least 16 tokens, got 4"),
    ],
)
def test_errors_name_the_argument(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "two.yaml"
    cluster.write_text(CLUSTER)
    arguments = options.split()
    if "--cluster" not in arguments:
        arguments += ["--cluster", str(cluster)]
    assert main([*arguments, "-o", str(tmp_path / "costs.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_of_other_hosts_cannot_be_profiled_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    cluster = tmp_path / "far.yaml"
    cluster.write_text("schema: 1\nname: far\nnodes: [{name: a, accelerators: 'T4:2'}]\n")
    arguments = f"--model opt-13b --cluster {cluster} -o {tmp_path / 'costs.json'}".split()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "none of T4 is on this host (found: its CPU, no GPU)" in error
    assert "llmpq-profile merge" in error


@pytest.mark.parametrize("activations, bits", [("exact", 16), ("int8", 8)])
def test_cpus_are_timed_with_the_activations_asked_for(tiny_models, activations, bits):
    spec = ModelSpec.from_directory(tiny_models.directory("llama"))
    quantization = Quantization(cpu_activations=activations)
    timed = TimedModel(spec, torch.device("cpu"), quantization, Sampling())
    for part in ("layer", "head"):
        target = Target(
            device_kind="CPU@1t",
            part=part,
            phase=Phase.DECODE,
            precision=Precision.W8A16,
            dtype="float32",
        )
        stage = timed._stage(target)
        held = [getattr(m, "weight", None) for m in stage.modules()]
        rounded = [w.activation_bits for w in held if hasattr(w, "activation_bits")]
        assert rounded and set(rounded) == {bits}


@pytest.mark.parametrize("layers", [1, 4, 12])
def test_layers_with_a_window_are_fitted_to_the_keys_they_see(layers: int) -> None:
    """Whichever of the first layers were timed, the entry is of all the model's layers."""
    gemma = ModelSpec.by_name("gemma-3-27b")  # a layer in six sees all
    target = Target(device_kind="g", part="layer", phase=Phase.DECODE, dtype="bfloat16")
    conditions = Conditions(model_fingerprint="m", machine="g", copies=1)

    def seconds(v: int, length: int, windows: Sequence[int]) -> float:
        keys = sum(min(length, window or length) for window in windows) / len(windows)
        return 1e-4 + 2e-9 * v * keys

    samples = [
        Sample(
            conditions=conditions,
            case=TimedCase(target=target, v=v, length=length),
            timing=summarise([seconds(v, length, gemma.windows[:layers])] * 3, layers=1).model_copy(
                update={"layers": layers}
            ),
        )
        for v in (1, 4, 16)
        for length in (100, 900, 5000, 20_000)
    ]
    entry = fit_entry(target, samples, gemma)
    for length in (500, 100_000):
        assert entry.seconds(v=8, length=length) == pytest.approx(
            seconds(8, length, gemma.windows), rel=1e-3
        )

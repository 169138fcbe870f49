"""The indicators against slow direct evaluations, on tiny layers."""

import gc
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.weights.atom_weight import AtomWeight, quantize_atom
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import WEIGHT_ONLY, KVPrecision, Precision, WeightScheme
from llmpq.profiler.__main__ import main
from llmpq.profiler.quality import output_error
from llmpq.profiler.quality.hessian import HessianSum, squared_error
from llmpq.profiler.quality.kv_variance import kv_omega, kv_ranges
from llmpq.profiler.quality.observation import cut_windows, observe
from llmpq.profiler.quality.omega import HessianObserver, VarianceObserver, random_tables
from llmpq.profiler.quality.variance import InputStats, Rounding, activation_omega, weight_omega
from llmpq.profiler.quantize.recipes import Settings, num_outliers
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sensitivity import Sensitivity
from llmpq.sizes.memory import Quantization

pytestmark = pytest.mark.cpu

N, K, T = 6, 256, 40


@pytest.fixture
def layer() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    w_NK = torch.randn(N, K, generator=generator) * torch.linspace(0.5, 2, K)
    x_TK = torch.randn(T, K, generator=generator) * torch.linspace(0.1, 3, K) + 0.7
    return w_NK, x_TK


def step(values: list[float], bits: int, symmetric: bool) -> float:
    if symmetric:
        return max(abs(min(values)), abs(max(values))) / (2 ** (bits - 1) - 1)
    return (max(values) - min(values)) / (2**bits - 1)


def gain(values: list[float], rounding: Rounding) -> float:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    return variance / 4 if rounding == "deterministic" else (mean**2 + variance) / 6


def direct(w_NK: Tensor, x_TK: Tensor, scheme: WeightScheme, rounding: Rounding) -> float:
    """Eq. (3) of one operator as printed: D_W S_W^2 G(X)."""
    s_w = step(w_NK.flatten().tolist(), scheme.bits, scheme.symmetric)
    return w_NK.numel() * s_w**2 * gain(x_TK.flatten().tolist(), rounding)


def direct_by_group(w_NK: Tensor, x_TK: Tensor, scheme: WeightScheme, rounding: Rounding) -> float:
    """Eq. (3) of every (row, group of K), element by element."""
    size, total = scheme.group_size or K, 0.0
    gains = [gain(x_TK[:, k].tolist(), rounding) for k in range(K)]
    for row in w_NK.tolist():
        for start in range(0, K, size):
            s_w = step(row[start : start + size], scheme.bits, scheme.symmetric)
            total += sum(s_w**2 * gains[k] for k in range(start, start + size))
    return total


@pytest.mark.parametrize("rounding", ["deterministic", "stochastic"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_variance_is_eq_3(
    layer: tuple[Tensor, Tensor], bits: int, symmetric: bool, rounding: Rounding
) -> None:
    w_NK, x_TK = layer
    stats = InputStats.empty(K).plus(x_TK[:15]).plus(x_TK[15:].view(5, 5, K))
    scheme = WeightScheme(bits=bits, symmetric=symmetric)
    tensor = weight_omega(w_NK, stats, scheme, rounding=rounding, granularity="tensor")
    assert tensor == pytest.approx(direct(w_NK, x_TK, scheme, rounding), rel=1e-5)
    group = weight_omega(w_NK, stats, scheme, rounding=rounding, granularity="group")
    assert group == pytest.approx(direct_by_group(w_NK, x_TK, scheme, rounding), rel=1e-5)
    assert group < 0.8 * tensor, "steps of groups are smaller than the matrix's"


def test_d_w_is_the_number_of_weights(layer: tuple[Tensor, Tensor]) -> None:
    """Twice the rows give twice the omega: the published code left D_W out."""
    w_NK, x_TK = layer
    stats, scheme = InputStats.empty(K).plus(x_TK), WeightScheme(bits=4)
    for granularity in ("tensor", "group"):
        once, twice = (
            weight_omega(w, stats, scheme, rounding="stochastic", granularity=granularity)  # type: ignore[arg-type]
            for w in (w_NK, torch.cat([w_NK, w_NK]))
        )
        assert twice == pytest.approx(2 * once, rel=1e-9)


def test_stochastic_group_variance_bounds_the_error_of_real_rounding(
    layer: tuple[Tensor, Tensor],
) -> None:
    """The output error of round-to-nearest is about half of it: S^2 / 12 against S^2 / 6."""
    w_NK, x_TK = layer
    scheme = WeightScheme(bits=4, clip_search=False)
    omega = weight_omega(
        w_NK,
        InputStats.empty(K).plus(x_TK),
        scheme,
        rounding="stochastic",
        granularity="group",
    )
    low, high = w_NK.view(N, -1, 128).aminmax(dim=2, keepdim=True)
    s_w = (high - low) / 15
    error_NK = (((w_NK.view(N, -1, 128) - low) / s_w).round() * s_w + low).view(N, K) - w_NK
    measured = float((x_TK @ error_NK.T).square().sum(1).mean())
    assert 0.25 * omega < measured < omega


def test_activation_rounding_by_hand() -> None:
    w_NK, x_TK = torch.tensor([[1.0, 2.0]]), torch.tensor([[7.0, -1.0], [0.0, 14.0]])
    omega = activation_omega(w_NK, InputStats.empty(2).plus(x_TK), 4, "deterministic")
    assert omega == pytest.approx(5 * (1.0**2 + 2.0**2) / 2 / 4)


def test_kv_variance_by_hand() -> None:
    k_TGD = torch.tensor([0.0, 3.0, 1.0]).view(3, 1, 1)
    v_TGD = torch.tensor([[0.0, 6.0], [1.0, 1.0], [3.0, 0.0]]).view(3, 1, 2)
    # Keys: one channel, step 3 / 3 = 1. Values: steps 2, 0, 1 a token, two channels each.
    by_hand = (1.0 + 2 * (4.0 + 0.0 + 1.0) / 3) / 4
    ranges = kv_ranges(k_TGD, v_TGD)
    assert kv_omega(ranges, KVPrecision.KV2, "deterministic") == pytest.approx(by_hand)
    assert kv_omega(ranges, KVPrecision.KV2, "stochastic") == pytest.approx(by_hand * 4 / 6)
    assert kv_omega(ranges, KVPrecision.KV16, "deterministic") == 0
    # Keys at 4 bits have steps of 3 / 15, values at 2 bits those above; keys as they are add none.
    values = 2 * (4.0 + 0.0 + 1.0) / 3
    apart = (0.2**2 + values) / 4
    assert kv_omega(ranges, KVPrecision.KV4V2, "deterministic") == pytest.approx(apart)
    assert kv_omega(ranges, KVPrecision.KV16V2, "deterministic") == pytest.approx(values / 4)


def test_top_eigenvalue_and_weight_error(layer: tuple[Tensor, Tensor]) -> None:
    w_NK, x_TK = layer
    total = HessianSum(K)
    total.add(x_TK[:10])
    total.add(x_TK[10:])
    exact = torch.linalg.eigvalsh(2 * x_TK.T @ x_TK / T)
    assert total.top_eigenvalue() == pytest.approx(float(exact[-1]), rel=1e-4)
    assert total.mean_eigenvalue() == pytest.approx(float(exact.mean()), rel=1e-4)
    errors = [squared_error(w_NK, WeightScheme(bits=bits)) for bits in (3, 4, 8)]
    assert errors[0] > 3 * errors[1] > 0 and errors[1] > 100 * errors[2] > 0


class Watcher:
    """Notes the layers' weights, and how many were alive at once."""

    def __init__(self) -> None:
        self.weights: list[weakref.ref[Tensor]] = []
        self.shapes: list[dict[str, tuple[int, ...]]] = []
        self.most_alive = self.tokens = 0

    def begin(self, index: int, weights: Mapping[str, Tensor]) -> None:
        gc.collect()
        self.shapes.append({name: tuple(w.shape) for name, w in weights.items()})
        self.weights += [weakref.ref(w) for w in weights.values()]
        alive = sum(ref() is not None for ref in self.weights)
        self.most_alive = max(self.most_alive, alive)

    def on_input(self, name: str, x: Tensor) -> None:
        assert x.shape[-1] == self.shapes[-1][name][1]

    def on_cache(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        self.tokens += k_TGD.shape[0]

    def end(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["opt", "bloom", "llama", "qwen3"])
def test_layers_stream_through_calibration(kind: str, tiny_models: Any) -> None:
    directory = tiny_models.directory(kind)
    spec, watcher = ModelSpec.from_directory(directory), Watcher()
    windows = [[(7 * i + j) % spec.vocab for j in range(20)] for i in range(6)]
    gc.freeze()  # or each collection looks through all that other tests have made
    try:
        source = CheckpointSource(directory, spec)
        observe(spec, source, windows, watcher, device=torch.device("cpu"))
    finally:
        gc.unfreeze()
    assert len(watcher.shapes) == spec.num_layers
    expected = {(s.out_features, s.in_features) for s in spec.linears()}
    assert all(set(shapes.values()) == expected for shapes in watcher.shapes)
    assert watcher.most_alive <= 2 * len(expected), "at most two layers' weights at once"
    assert watcher.tokens == spec.num_layers * 6 * 20


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_omega_falls_with_bits_and_matches_what_layers_see(kind: str, tiny_models: Any) -> None:
    directory = tiny_models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    precisions = (*WEIGHT_ONLY, Precision.W4A4)
    kv = (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2)
    windows = [[(5 * i + 3 * j) % spec.vocab for j in range(24)] for i in range(3)]
    for observer in (
        VarianceObserver(precisions, kv, "deterministic", "group", Quantization()),
        HessianObserver(WEIGHT_ONLY, kv, Quantization()),
    ):
        observe(
            spec, CheckpointSource(directory, spec), windows, observer, device=torch.device("cpu")
        )
        for layer in range(spec.num_layers):
            falling = [observer.table[p][layer] for p in reversed(WEIGHT_ONLY)]
            assert falling == sorted(falling, reverse=True) and falling[-1] == 0 < falling[-2]
            cached = [observer.kv_table[k][layer] for k in kv]
            assert cached == sorted(cached) and cached[0] > 0
        if Precision.W4A4 in observer.table:
            pairs = zip(
                observer.table[Precision.W4A4], observer.table[Precision.W4A16], strict=True
            )
            assert all(both > weights for both, weights in pairs)


def test_random_omega_is_seeded_and_ordered() -> None:
    kv = (KVPrecision.KV4, KVPrecision.KV8)
    weights, caches = random_tables(5, WEIGHT_ONLY, kv, seed=1)
    assert (weights, caches) == random_tables(5, WEIGHT_ONLY, kv, seed=1)
    assert weights != random_tables(5, WEIGHT_ONLY, kv, seed=2)[0]
    for layer in range(5):
        falling = [weights[p][layer] for p in reversed(WEIGHT_ONLY)]
        assert falling == sorted(falling, reverse=True) and falling[-1] == 0
        assert caches[KVPrecision.KV4][layer] > caches[KVPrecision.KV8][layer] > 0


def test_windows_are_spread_over_the_text() -> None:
    tokens = list(range(1000))
    windows = cut_windows(tokens, count=4, length=50, where=Path("t"))
    assert [window[0] for window in windows] == [0, 250, 500, 750]
    assert all(len(window) == 50 for window in windows)
    assert len(cut_windows(tokens, count=99, length=400, where=Path("t"))) == 2
    with pytest.raises(ValueError, match="'t' has 1000 tokens, calibration needs a window of at"):
        cut_windows(tokens, count=1, length=1001, where=Path("t"))


def test_the_command_writes_a_labelled_file(tmp_path: Path, demo_model: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "omega.json"
    text.write_text("def add(a, b):\n    return a + b\n" * 30)
    options = f"--model {demo_model} --text {text} --windows 2 --window 32 -o {out}"
    assert main(["indicator", *options.split()]) == 0
    omega = Sensitivity.load(out, num_layers=8)
    assert omega.indicator == "variance"
    assert omega.omega(0, Precision.W3A16) > omega.omega(0, Precision.W4A16) > 0
    assert omega.kv_omega(7, KVPrecision.KV2) > 0
    assert "2 windows of 32 tokens of text.txt" in json.loads(out.read_text())["note"]


def test_w4a4_keeps_the_channels_that_a_checkpoint_would(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: set[int] = set()

    def spy(w_NK: Tensor, scheme: AtomScheme, **how: Any) -> AtomWeight:
        kept.add(scheme.outliers)
        return quantize_atom(w_NK, scheme, **how)

    monkeypatch.setattr(output_error, "quantize_atom", spy)
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 30)
    options = (
        f"--kind output --model {demo_model} --text {text} --windows 2 --window 32 --bits w4a4"
    )
    assert main(["indicator", *options.split(), "-o", str(tmp_path / "omega.json")]) == 0
    assert kept == {num_outliers(ModelSpec.from_directory(demo_model), Settings())} == {8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kind variance --model opt-30b", "--kind variance reads real weights: --model must be"),
        ("--kind hessian --model {demo}", "--kind hessian needs calibration text: give --text"),
        ("--model {demo} --text /none.txt", "--text '/none.txt' cannot be read: No such file"),
        ("--model {demo} --bits 5", "unknown precision '5'"),
        ("--model {demo} --kv 3", "unknown KV cache dtype '3'"),
        ("--model opt-31b --kind random", "unknown model 'opt-31b': did you mean 'opt-30b'"),
        ("--model {demo} --text {demo}/config.json --window 0", "--window must be at least 1"),
    ],
)
def test_errors_name_the_argument(
    options: str,
    message: str,
    demo_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = options.format(demo=demo_model).split()
    assert main(["indicator", *arguments, "-o", str(tmp_path / "omega.json")]) == 2
    assert message in capsys.readouterr().err

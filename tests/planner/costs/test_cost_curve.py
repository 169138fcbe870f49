"""A polyline in the new tokens beside the shape terms: what follows a GPU's change of kernels."""

import pytest

from llmpq.costs.cost_model import LatencyEntry, Phase, Regime, new_tokens
from llmpq.planner.costs.cost_book import mean_decode_s
from llmpq.precision import Precision
from llmpq.workload import Workload

pytestmark = pytest.mark.pure
CURVE = ((1, 10e-6), (4, 40e-6), (8, 20e-6))


def entry(*regimes: Regime, phase: Phase = Phase.DECODE) -> LatencyEntry:
    return LatencyEntry(
        device_kind="H200",
        part="layer",
        phase=phase,
        precision=Precision.W4A16,
        dtype="bfloat16",
        regimes=regimes,
        source="profile",
    )


@pytest.mark.parametrize(
    ("tokens", "microseconds"),
    [(0.5, 10), (1, 10), (2, 20), (4, 40), (6, 30), (8, 20), (10, 10), (12, 0), (99, 0)],
)
def test_straight_between_points_and_never_negative(tokens: float, microseconds: float) -> None:
    assert Regime(terms={}, curve=CURVE).curve_s(tokens) * 1e6 == pytest.approx(microseconds)
    assert Regime(terms={}).curve_s(tokens) == 0.0


def test_the_curve_takes_the_tokens_of_its_phase() -> None:
    assert new_tokens(Phase.PREFILL, v=3, length=100) == 300
    assert new_tokens(Phase.DECODE, v=3, length=100) == 3
    assert new_tokens(Phase.VERIFY, v=3, length=100, q_len=5) == 15
    with_curve = Regime(terms={"v*s^2": 1e-6}, curve=((0, 0.0), (100, 1.0)))
    prefill = entry(with_curve, phase=Phase.PREFILL)
    assert prefill.seconds(v=2, length=30) == pytest.approx(0.6 + 1e-6 * 2 * 900)


def test_the_largest_regime_counts_and_means_agree() -> None:
    latency = entry(
        Regime(terms={"v*(t+s)": 2e-8, "1": 1e-6}, curve=CURVE), Regime(terms={"1": 45e-6})
    )
    assert latency.seconds(v=4, length=100) == pytest.approx(49e-6)
    assert latency.seconds(v=4, length=20) == pytest.approx(45e-6)
    work = Workload(batch=4, prompt_len=10, gen_len=200)
    slow = sum(latency.seconds(v=3, length=10 + t) for t in range(1, 200)) / 199
    assert mean_decode_s(latency, work, 3) == pytest.approx(slow)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ([[1, 1.0]], "at least two points"),
        ([[2, 1.0], [2, 1.0]], "ascending"),
        ([[1, 1.0], [2, -1.0]], ">= 0 seconds"),
    ],
)
def test_bad_curves_are_refused(curve: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Regime.parse_data({"terms": {}, "curve": curve}, where="costs")


def test_a_step_takes_as_long_as_its_host_needs_to_enqueue_it() -> None:
    latency = entry(Regime(terms={"v*s": 1e-6}), phase=Phase.PREFILL)
    latency = latency.model_copy(update={"launch_s": 5e-4})
    assert latency.seconds(v=1, length=100) == pytest.approx(5e-4)
    assert latency.device_s(v=1, length=100) == pytest.approx(1e-4)
    assert latency.seconds(v=8, length=100) == latency.device_s(v=8, length=100)


@pytest.mark.parametrize(
    ("length", "taken"), [(1, 1), (63, 63), (64, 64), (65, 128), (128, 128), (1000, 1024)]
)
def test_a_prompt_is_priced_with_its_padding(length: int, taken: int) -> None:
    regime = Regime(terms={"v*s^2": 1e-9}, curve=((0, 0.0), (1000, 1.0)))
    plain = entry(regime, phase=Phase.PREFILL)
    padded = plain.model_copy(update={"padded_to": 64})
    assert padded.seconds(v=3, length=length) == plain.seconds(v=3, length=taken)
    decode = entry(Regime(terms={"t+s": 1.0})).model_copy(update={"padded_to": 64})
    assert decode.seconds(v=1, length=65) == 65

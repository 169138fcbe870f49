"""Fits find the coefficients that made the samples, and say so when the form is wrong."""

import numpy as np
import pytest

from llmpq.costs.cost_model import LatencyEntry, Phase, term_values
from llmpq.precision import Precision
from llmpq.profiler.timing.latency_fit import Fit, Point, fit_latency, fit_link, fit_rounds

pytestmark = pytest.mark.pure

PREFILL = {"1": 3e-5, "v": 2e-6, "s": 4e-8, "v*s": 1e-6, "v*s^2": 2e-9}
DECODE = {"1": 1e-4, "v": 3e-6, "v*(t+s)": 2e-8, "t+s": 5e-9}
SHAPES = [(v, s) for v in (1, 2, 4, 8, 16, 32) for s in (32, 96, 256, 512, 1024)]


def points(phase: Phase, terms: dict[str, float], *, noise: float = 0.0) -> list[Point]:
    rng = np.random.default_rng(7)
    made = []
    for v, length in SHAPES:
        values = term_values(phase, v=v, length=length)
        seconds = sum(c * values[t] for t, c in terms.items())
        seconds *= 1 + noise * rng.standard_normal()
        made.append(Point(v=v, length=length, seconds=seconds))
    return made


def predicted(fit: Fit, phase: Phase, v: int, length: int) -> float:
    values = term_values(phase, v=v, length=length)
    return max(sum(c * values[t] for t, c in r.terms.items()) for r in fit.regimes)


@pytest.mark.parametrize(("phase", "terms"), [(Phase.PREFILL, PREFILL), (Phase.DECODE, DECODE)])
def test_coefficients_are_recovered(phase: Phase, terms: dict[str, float]) -> None:
    fit = fit_latency(phase, points(phase, terms))
    assert len(fit.regimes) == 1
    assert fit.regimes[0].terms == pytest.approx(terms, rel=1e-4)
    assert fit.held_out.mean < 1e-4
    assert fit.held_out.samples == len(SHAPES)


def test_a_few_percent_of_noise_stay_a_few_percent() -> None:
    fit = fit_latency(Phase.PREFILL, points(Phase.PREFILL, PREFILL, noise=0.03))
    assert 0.01 < fit.held_out.mean < 0.06
    for v, s in ((3, 48), (24, 700)):
        true = sum(c * term_values(Phase.PREFILL, v=v, length=s)[t] for t, c in PREFILL.items())
        assert predicted(fit, Phase.PREFILL, v, s) == pytest.approx(true, rel=0.05)


def test_small_shapes_count_as_much_as_large_ones() -> None:
    """An absolute least-squares fit of these samples is off by more than 20 % at 1 x 32."""
    made = points(Phase.PREFILL, PREFILL, noise=0.05)
    small = next(p for p in made if (p.v, p.length) == (1, 32))
    fit = fit_latency(Phase.PREFILL, made)
    assert predicted(fit, Phase.PREFILL, 1, 32) == pytest.approx(small.seconds, rel=0.15)


def test_coefficients_are_never_negative() -> None:
    falling = [Point(v=v, length=s, seconds=1e-3 / v) for v, s in SHAPES]
    fit = fit_latency(Phase.DECODE, falling)
    assert all(c >= 0 for r in fit.regimes for c in r.terms.values())


def test_a_wrong_form_is_reported() -> None:
    """Time that grows with the square of the cache has no term: the held-out error must say so."""
    wrong = [Point(v=v, length=s, seconds=1e-9 * s * s) for v, s in SHAPES]
    fit = fit_latency(Phase.DECODE, wrong)
    assert fit.held_out.mean > 0.15


def test_a_floor_and_a_slope_are_two_regimes() -> None:
    made = [Point(v=v, length=s, seconds=max(2e-4, 1e-5 * v + 3e-8 * v * s)) for v, s in SHAPES]
    fit = fit_latency(Phase.DECODE, made)
    assert len(fit.regimes) == 2
    assert fit.held_out.mean < 0.05
    assert predicted(fit, Phase.DECODE, 1, 48) == pytest.approx(2e-4, rel=0.05)
    assert predicted(fit, Phase.DECODE, 24, 900) == pytest.approx(24e-5 + 3e-8 * 21600, rel=0.05)
    one = fit_latency(Phase.DECODE, made, target=1.0)
    assert one.held_out.mean > 2 * fit.held_out.mean


def gpu_like(phase: Phase, v: int, length: int) -> float:
    """A layer whose products change kernels with their rows, and attention beside them."""
    rows = v if phase is Phase.DECODE else v * length
    attention = 4e-9 * v * length if phase is Phase.DECODE else 1.5e-11 * v * length**2
    # Bound by weights up to 64 rows, by dequantising them from there, by arithmetic in the end.
    products = np.interp(np.log(rows), np.log([1, 16, 64, 512, 4096, 65536]), [0, 4, 6, 9, 20, 30])
    return 6e-5 * float(2 ** (products / 4)) + attention


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_products_that_change_kernels_are_a_curve(phase: Phase) -> None:
    shapes = [(v, s) for v in (1, 2, 4, 8, 16, 32, 64) for s in (32, 128, 512, 1024, 2048)]
    made = [Point(v=v, length=s, seconds=gpu_like(phase, v, s)) for v, s in shapes]
    fit = fit_latency(phase, made)
    (regime,) = fit.regimes
    assert regime.curve and fit.held_out.mean < 0.08

    def errors(found: Fit) -> list[float]:
        entry = LatencyEntry(
            device_kind="g",
            part="layer",
            phase=phase,
            precision=Precision.W4A16,
            dtype="bfloat16",
            regimes=found.regimes,
            source="profile",
        )
        unseen = [(3, 700), (5, 96), (7, 300), (11, 64), (20, 1500), (27, 40), (48, 900)]
        return [entry.seconds(v=v, length=s) / gpu_like(phase, v, s) - 1 for v, s in unseen]

    assert np.abs(errors(fit)).mean() < 0.03
    without = fit_latency(phase, made, target=1.0)
    assert np.abs(errors(without)).mean() > 3 * np.abs(errors(fit)).mean()


def test_short_chunks_take_what_the_keys_before_them_take() -> None:
    """A chunk's programs walk over all keys before it, however few tokens it has."""
    terms = {"1": 5e-5, "v*s": 8e-7, "v*s^2": 1e-11, "v*s*p": 2e-11, "p": 1.5e-8}
    shapes = [(v, s, p) for v in (1, 4, 7) for s in (16, 128, 512, 700) for p in (0, 1000, 4000)]
    made = []
    for v, s, start in shapes:
        values = term_values(Phase.PREFILL, v=v, length=s, start=start)
        seconds = sum(c * values[t] for t, c in terms.items())
        made.append(Point(v=v, length=s, start=start, seconds=seconds))
    fit = fit_latency(Phase.PREFILL, made)
    assert fit.held_out.mean < 1e-3
    entry = LatencyEntry(
        device_kind="gpu",
        part="layer",
        phase=Phase.PREFILL,
        precision=Precision.W4A16,
        dtype="bfloat16",
        regimes=fit.regimes,
        source="profile",
    )
    for v, s, start in ((5, 35, 3947), (1, 600, 2000)):
        values = term_values(Phase.PREFILL, v=v, length=s, start=start)
        true = sum(c * values[t] for t, c in terms.items())
        assert entry.chunk_s(v=v, start=start, length=s) == pytest.approx(true, rel=1e-3)


def test_a_curve_is_taken_where_it_is_better_at_all() -> None:
    """Steps of a kernel's tiles are within a line's few percent, and still no noise."""
    tokens = (64, 128, 192, 256, 320, 384, 448, 512, 768, 1024, 1280, 1536)
    made = [
        Point(v=v, length=t // v, seconds=(1e-4 + 8e-7 * t) * (1.045 if i % 2 else 0.955))
        for i, t in enumerate(tokens)
        for v in (1, 2, 4)
    ]
    fit = fit_latency(Phase.PREFILL, made, target=0.01)
    assert fit.regimes[0].curve and fit.held_out.mean < 0.045


def test_terms_can_be_limited() -> None:
    made = [Point(v=v, length=100, seconds=1e-5 + 2e-6 * v) for v in (1, 2, 4, 8)]
    fit = fit_latency(Phase.DECODE, made, terms=("1", "v"))
    assert fit.regimes[0].terms == pytest.approx({"1": 1e-5, "v": 2e-6}, rel=1e-6)


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="2 samples are too few to fit decode times to 4 terms"):
        fit_latency(Phase.DECODE, points(Phase.DECODE, DECODE)[:2])


def test_link_latency_and_bandwidth() -> None:
    sizes = (64, 4096, 65536, 1 << 20)
    alpha_s, beta = fit_link(sizes, [4e-5 + size / 2e9 for size in sizes])
    assert alpha_s == pytest.approx(4e-5, rel=1e-6)
    assert beta == pytest.approx(5e-10, rel=1e-6)


def test_rounds_between_hosts_give_the_way_there_and_what_occupies_it():
    alpha_s, beta_s_per_byte, occupied_s = 5e-3, 8e-8, 2e-3
    sizes = (16_384, 131_072, 1_048_576)
    rounds = [2 * alpha_s + size * beta_s_per_byte for size in sizes]
    burst_s = occupied_s + sizes[0] * beta_s_per_byte
    assert fit_rounds(sizes, rounds, burst_s) == pytest.approx((5e-3, 8e-8, 2e-3))
    assert fit_rounds(sizes, rounds, 0.0)[2] == 0.0
    assert fit_rounds(sizes, rounds, 1.0)[2] == pytest.approx(alpha_s)

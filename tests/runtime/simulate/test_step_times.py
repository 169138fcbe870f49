"""Times of ragged steps: of equal rows they are the entry's own, and nothing is counted twice."""

from __future__ import annotations

import pytest

from llmpq.costs.cost_model import LatencyEntry, Phase, Regime
from llmpq.precision import Precision
from llmpq.runtime.simulate.step_times import ChunkTimes, DecodeTimes, StepRows

pytestmark = pytest.mark.pure

PREFILL = (
    Regime(terms={"1": 3e-5, "v": 1e-6, "s": 2e-8, "v*s": 4e-7, "v*s^2": 3e-11}),
    Regime(
        terms={"1": 9e-5, "v*s^2": 2e-11, "v*s*p": 5e-11, "p": 7e-9}, curve=((1, 0.0), (900, 3e-4))
    ),
)
DECODE = (
    Regime(terms={"1": 8e-5, "v": 1e-7, "v*(t+s)": 1e-9, "t+s": 2e-9}),
    Regime(terms={"v*(t+s)": 2e-9}, curve=((1, 2e-5), (64, 4e-4))),
)


def _entry(phase: Phase, **more: object) -> LatencyEntry:
    return LatencyEntry.model_validate(
        {
            "device_kind": "X",
            "part": "layer",
            "phase": phase,
            "precision": Precision.W16A16,
            "dtype": "float16",
            "regimes": PREFILL if phase is Phase.PREFILL else DECODE,
            "source": "profile",
            **more,
        }
    )


FORMS = [
    {},
    {"padding": "cpu"},
    {"padding": "gpu"},
    {"windows": ((64, 0.5),)},
    {"launch_s": 4e-4},
    {"padded_to": 64},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3, 17])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 100), (256, 70)])
def test_chunks_of_equal_length_take_the_entrys_time(
    form: dict[str, object], size: int, start: int, tokens: int
) -> None:
    entry = _entry(Phase.PREFILL, **form)
    rows = StepRows(chunks=[(start, tokens)] * size, caches=[], samples=size)
    assert ChunkTimes(entry).seconds(rows) == pytest.approx(
        entry.chunk_s(v=size, start=start, length=tokens), rel=1e-12
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3, 17])
def test_caches_of_equal_length_take_the_entrys_time(form: dict[str, object], size: int) -> None:
    entry = _entry(Phase.DECODE, **form)
    rows = StepRows(chunks=[], caches=[300] * size, samples=size)
    assert DecodeTimes(entry).seconds(rows) == pytest.approx(
        entry.seconds(v=size, length=300), rel=1e-12
    )


def test_unequal_rows_count_what_each_has() -> None:
    entry = _entry(Phase.DECODE, regimes=(DECODE[0],))
    rows = StepRows(chunks=[], caches=[100, 900], samples=2)
    assert DecodeTimes(entry).seconds(rows) == pytest.approx(8e-5 + 2e-7 + 1000e-9 + 900 * 2e-9)
    entry = _entry(Phase.PREFILL, regimes=(PREFILL[1],))
    rows = StepRows(chunks=[(0, 30), (128, 10)], caches=[77], samples=3)
    curve = 3e-4 * 40 / 899  # of 41 tokens
    own = 9e-5 + curve + (900 + 100) * 2e-11 + 10 * 128 * 5e-11 + 128 * 7e-9
    assert ChunkTimes(entry).seconds(rows) == pytest.approx(own)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_an_entry_timed_at_once_is_a_share_of_it_alone(phase: Phase) -> None:
    entry = _entry(phase, alone_share=0.75)
    alone = entry.alone()
    assert alone.alone_share == 1.0 and alone.alone() is alone
    for v, length in ((1, 16), (3, 700), (40, 128)):
        assert alone.seconds(v=v, length=length) == pytest.approx(
            0.75 * entry.seconds(v=v, length=length)
        )

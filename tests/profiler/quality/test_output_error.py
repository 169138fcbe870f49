"""The measured indicator: it orders precisions by what they cost and sees what outliers do."""

from __future__ import annotations

import pytest
import torch

from llmpq.precision import KVPrecision, Precision, default_scheme
from llmpq.profiler.quality.output_error import OutputErrorObserver, output_error
from llmpq.sizes.memory import Quantization

pytestmark = pytest.mark.cpu


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(48, 256, generator=seeded), torch.randn(400, 256, generator=seeded)


def error(precision: Precision, w: torch.Tensor, x: torch.Tensor) -> float:
    scheme = default_scheme(precision)
    assert scheme is not None
    return output_error(w, x, scheme)


def test_fewer_bits_cost_more() -> None:
    w, x = inputs()
    w8, w4, w3 = (error(p, w, x) for p in (Precision.W8A16, Precision.W4A16, Precision.W3A16))
    assert w8 < 0.1 * w4 and w4 < 0.5 * w3
    assert w8 < error(Precision.W8A8, w, x) < w4 < error(Precision.W4A4, w, x)


def test_it_measures_the_output_exactly() -> None:
    w, x = inputs()
    scheme = default_scheme(Precision.W4A16)
    assert scheme is not None
    doubled = output_error(w, 2 * x, scheme)
    assert doubled == pytest.approx(4 * output_error(w, x, scheme), rel=1e-4)


def test_kept_outliers_hold_w4a4_down() -> None:
    w, x = inputs()
    plain = error(Precision.W4A4, w, x)
    x[:, 7] *= 50
    assert error(Precision.W4A4, w, x) < 3 * plain
    # Per token in 8 bits, the same channel spoils all others.
    assert error(Precision.W8A8, w, x) > 50 * error(Precision.W8A8, w, inputs()[1])


def test_the_observer_adds_a_row_a_layer() -> None:
    w, x = inputs()
    precisions = (Precision.W16A16, Precision.W4A4)
    observer = OutputErrorObserver(precisions, (KVPrecision.KV4,), Quantization())
    for index in range(2):
        observer.begin(index, {"mlp.down": w})
        observer.on_input("mlp.down", x.view(2, 200, 256))
        observer.on_cache(torch.randn(200, 2, 64), torch.randn(200, 2, 64))
        observer.end()
    assert observer.table[Precision.W16A16] == [0.0, 0.0]
    assert len(observer.table[Precision.W4A4]) == 2 == len(observer.kv_table[KVPrecision.KV4])
    assert observer.table[Precision.W4A4][0] == observer.table[Precision.W4A4][1] > 0

"""The probe measures every product that a CPU's plans may hold, and writes what planners read."""

from __future__ import annotations

import pytest
import torch

from llmpq.costs.cpu_rates import CpuRates
from llmpq.profiler.timing import cpu_probe

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def same_threads():
    """The probe is a process of its own, and takes its threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_product_has_its_rate(monkeypatch, dtype):
    monkeypatch.setattr(cpu_probe, "SIDE", 256)
    monkeypatch.setattr(cpu_probe, "_COLD_BYTES", 1 << 17)
    monkeypatch.setattr(cpu_probe, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(cpu_probe, "_POINT_S", 0.0)
    rates = CpuRates.model_validate_json(cpu_probe.measure(1, dtype))
    assert (rates.threads, rates.dtype) == (1, dtype)
    names = {(product.bits, product.activations) for product in rates.products}
    assert names == {(16, "exact"), *((b, a) for b in (8, 4, 3) for a in ("exact", "int8"))}
    for product in rates.products:
        assert [rows for rows, _ in product.per_weight] == list(cpu_probe.ROWS)

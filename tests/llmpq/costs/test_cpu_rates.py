"""Rates of a CPU: read between measured rows, kept for this machine, refused in a sentence."""

from __future__ import annotations

import subprocess

import pytest

from llmpq.costs import cpu_rates
from llmpq.costs.cpu_rates import CpuRates, ProductRate, kept_rates, outdated, probe, rates_of

pytestmark = pytest.mark.pure
FOUR = ProductRate(bits=4, per_weight=((1, 1e-10), (4, 1e-10), (16, 4e-10)))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def answering(monkeypatch, text: str, code: int = 0, error: str = "") -> None:
    """Have the probe's process answer with a text."""
    done = subprocess.CompletedProcess([], code, text, error)
    monkeypatch.setattr(cpu_rates.subprocess, "run", lambda *_, **__: done)


def test_seconds_between_rows_and_beyond_them():
    assert [FOUR.seconds(rows) for rows in (0.5, 1, 3, 4)] == [1e-10] * 4
    assert FOUR.seconds(10) == pytest.approx(2.5e-10)
    assert FOUR.seconds(32) == pytest.approx(8e-10)


@pytest.mark.parametrize("points", [((4, 1e-9), (1, 1e-9)), ((1, 0.0), (2, 1e-9)), ((1, 1e-9),)])
def test_rates_that_no_probe_writes_are_refused(points):
    with pytest.raises(ValueError, match="per_weight"):
        ProductRate(bits=4, per_weight=points)


def test_what_a_probe_finds_is_kept_for_its_threads_and_dtype(monkeypatch):
    rates = rates_of(1, "float32", [FOUR], 20.0)
    answering(monkeypatch, rates.dump_json())
    assert kept_rates(1, "float32") is None
    assert probe(1, "float32") == rates == kept_rates(1, "float32")
    assert kept_rates(2, "float32") is None and kept_rates(1, "bfloat16") is None
    monkeypatch.setattr(cpu_rates, "processor_name", lambda: "another")
    assert kept_rates(1, "float32") is None, "another processor's rates are not this one's"


def test_rates_of_other_kernels_are_named_and_not_taken(monkeypatch):
    answering(monkeypatch, rates_of(1, "float32", [FOUR], 20.0).dump_json())
    probe(1, "float32")
    assert outdated(1, "float32") is None and outdated(2, "float32") is None
    monkeypatch.setattr(cpu_rates, "kernels_mark", lambda on_cpu: "another")
    assert kept_rates(1, "float32") is None
    assert "--probe-cpu" in (outdated(1, "float32") or "")


def test_a_damaged_file_is_as_none(monkeypatch):
    answering(monkeypatch, rates_of(1, "float32", [FOUR], 20.0).dump_json())
    probe(1, "float32")
    cpu_rates._path(1, "float32").write_text("{")
    assert kept_rates(1, "float32") is None


def test_a_probe_that_cannot_be_says_why(monkeypatch):
    monkeypatch.setattr(cpu_rates, "usable_cores", lambda: 2)
    with pytest.raises(ValueError, match=r"has 8 threads, this machine has 2 cores; say cpu="):
        probe(8, "float32")
    answering(monkeypatch, "", 1, "Traceback\nModuleNotFoundError: No module named 'torch'\n")
    with pytest.raises(ValueError, match=r"code 1: ModuleNotFoundError.*leave it out"):
        probe(1, "float32")


def test_what_was_measured_is_one_line():
    dense = ProductRate(bits=16, per_weight=((1, 1e-9), (256, 4e-9)))
    rates = rates_of(1, "bfloat16", [dense, FOUR], 20.0)
    quiet = CpuRates.model_validate(rates.model_dump() | {"busy": False, "processor": "X"})
    assert quiet.text().endswith(
        f"(X, 1 thread, bfloat16) as measured on {quiet.day}: 20 GB/s; weights met by one row, "
        "1e9/s, and Gflop/s of many rows: 16 bits 1 and 128, 4 bits 10 and 80"
    )

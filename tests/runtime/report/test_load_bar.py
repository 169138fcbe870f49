"""Layers that are loaded are a bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from llmpq.runtime.report.progress import LoadBar

pytestmark = pytest.mark.cpu


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_of_layers(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with LoadBar() as bar:
        assert bar.on_load is not None
        bar.on_load(3, 8, "stage 0: 3 of 8 layers")
    said = sys.stderr.getvalue()
    assert "loading" in said and "3/8" in said and "stage 0: 3 of 8 layers" in said
    assert LoadBar(quiet=True).on_load is None


def test_elsewhere_there_is_none(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with LoadBar() as bar:
        assert bar.on_load is None
    assert sys.stderr.getvalue() == ""

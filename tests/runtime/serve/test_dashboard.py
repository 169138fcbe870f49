"""The Grafana dashboard asks for metrics that there are, and draws each somewhere of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmpq.runtime.serve.metrics import Metrics

pytestmark = pytest.mark.cpu
DASHBOARD = Path(__file__).resolve().parents[3] / "examples" / "grafana.json"
STAGE = {
    "device": "cpu", "node": "here", "weights_bytes": 1, "kv_bytes": 1, "busy_s": 0.5,
    "kinds": {"decode": {"steps": 2, "rows": 3, "busy_s": 0.5}},
    "predicted": {"decode": {"seconds": 0.2, "rows": 4}}, "tokens": 3, "steps_by_tokens": [1] * 14,
}  # fmt: skip


def test_every_metric_it_asks_for_exists():
    made = Metrics("m", "vllm", lambda: {"stages": [STAGE], "gauges": {"blocks": 4}})
    made.answered(200)
    text = made.text().decode()
    known = set(re.findall(r"^((?:vllm|llmpq):\w+)", text, flags=re.M))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|llmpq):\w+", target["expr"])
    }
    assert len(asked) > 10 and asked <= known, asked - known
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)

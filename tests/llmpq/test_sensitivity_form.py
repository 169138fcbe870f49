"""Omega files that are refused."""

import json
from pathlib import Path

import pytest

from llmpq.sensitivity import Sensitivity

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_omega_is_finite_and_not_negative(value: float, tmp_path: Path) -> None:
    path = tmp_path / "omega.json"
    data = {"indicator": "x", "model": "m", "num_layers": 2, "weights": {"w4a16": [1, value]}}
    path.write_text(json.dumps(data))
    with pytest.raises(
        ValueError, match=f"w4a16 must be finite and >= 0 .at most 1e.15., got {value}; make"
    ):
        Sensitivity.load(path, num_layers=2)

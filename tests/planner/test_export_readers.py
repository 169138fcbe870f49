"""The compressed-tensors config is read by compressed-tensors itself."""

from __future__ import annotations

import json

import pytest

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.export import WRITERS

pytestmark = pytest.mark.cpu


def test_compressed_tensors_reads_the_config() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    spec = ModelSpec.by_name("opt-125m")
    bits = ["w16a16"] * 2 + ["w8a16"] * 4 + ["w4a16"] * 2 + ["w3a16"] * 2 + ["w8a8", "w4a4"]
    data = {
        "model": {"name": "opt-125m", "num_layers": 12, "fingerprint": spec.fingerprint()},
        "cluster": {"name": "box", "fingerprint": "0"},
        "workload": {"batch": 8, "prompt_len": 64, "gen_len": 8, "kv": "kv8"},
        "prefill_microbatch": 2,
        "decode_microbatch": 4,
        "stages": [
            {"device": "T4-0", "node": "box", "kind": "T4", "profile_kind": "T4",
             "layers": [0, 12], "precisions": bits}
        ],
    }  # fmt: skip
    plan = Plan.parse_data(data, where="test")
    config = json.loads(WRITERS["compressed-tensors"](plan, spec).text)["quantization_config"]
    read = quantization.QuantizationConfig.model_validate(config)
    assert sorted(g.weights.num_bits for g in read.config_groups.values()) == [3, 4, 4, 8, 8]
    assert all(g.weights.symmetric for g in read.config_groups.values())
    assert read.kv_cache_scheme is None

"""The shared nouns: parsing is strict and helpful, shapes and bytes are right."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase
from llmpq.devices.cluster import Cluster
from llmpq.errors import BadPlanError, PlanMismatchError
from llmpq.models.model_spec import ModelSpec, builtin_configs, builtin_ids, builtin_name
from llmpq.plans.plan import MemoryForm, Plan
from llmpq.precision import KVPrecision, Precision, WeightScheme, kv_bits_of
from llmpq.sensitivity import Sensitivity
from llmpq.sizes.kv_format import kv_cache_bytes
from llmpq.sizes.memory import Quantization, embedding_bytes, layer_weight_bytes
from llmpq.units import format_size, parse_size

pytestmark = pytest.mark.pure
MIB = 2**20
PUBLISHED_BILLIONS = {
    "opt-13b": 12.85,
    "opt-30b": 29.97,
    "opt-66b": 65.72,
    "bloom-176b": 176.25,
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "llama-3.1-8b": 8.030,
    "llama-3.1-70b": 70.554,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "opt-2.7b": 2.652,
    "llama-3-8b": 8.030,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "llama-3.3-70b": 70.554,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b-instruct": 1.544,
    "qwen2.5-3b": 3.086,
    "qwen2.5-7b": 7.616,
    "qwen2.5-7b-instruct": 7.616,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
    "qwen2.5-32b-instruct": 32.764,
    "qwen2.5-72b": 72.706,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-32b": 32.762,
    "mistral-7b": 7.248,
    "mistral-nemo-12b": 12.248,
    "mistral-small-24b": 23.572,
    "codestral-22b": 22.247,
    "yi-34b": 34.389,
}
"""Parameter counts of the published checkpoints."""


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_builtin_models_have_their_published_size(name: str) -> None:
    spec = ModelSpec.by_name(name)
    assert spec.num_params / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=1e-3)


def test_hugging_face_ids_mean_builtin_models() -> None:
    assert set(builtin_ids()) == set(builtin_configs())
    for name, ids in builtin_ids().items():
        for own in ids:
            assert builtin_name(own) == builtin_name(own.upper()) == name
            assert ModelSpec.by_name(own).name == name
    assert builtin_name("Qwen3-32B") == builtin_name("Qwen/Qwen3-32B") == "qwen3-32b"
    assert builtin_name("Qwen/Qwen3-32B-AWQ") is None and builtin_name("") is None
    with pytest.raises(ValueError, match="did you mean 'qwen3-32b'"):
        ModelSpec.by_name("Qwen/Qwen3-33B")


def test_mistral_is_llama_without_a_window() -> None:
    config = dict(builtin_configs()["mistral-7b"])
    same = {k: v for k, v in config.items() if k != "sliding_window"} | {"model_type": "llama"}
    of = ModelSpec.from_config
    assert of(config, name="a").fingerprint() == of(same, name="a").fingerprint()
    windowed = of({**config, "sliding_window": 4096}, name="a")
    assert windowed.windows == (4096,) * windowed.num_layers
    silent = of({k: v for k, v in config.items() if k != "sliding_window"}, name="a")
    assert silent == windowed, "Transformers takes 4096 where a Mistral config says nothing"


def test_paper_spelling_of_a_model() -> None:
    assert ModelSpec.by_name("opt", "30b") == ModelSpec.by_name("opt-30b")
    with pytest.raises(ValueError, match="did you mean 'opt-30b'"):
        ModelSpec.by_name("opt", "30")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not supported: llmpq lacks a record"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_alibi": True}, "'use_alibi'=True changes what a model computes"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope scaling 'ntk' is not supported"),
        ({"num_key_value_heads": 5}, "do not share 5 key/value heads"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change: dict, message: str) -> None:
    config = {**builtin_configs()["llama-3.1-8b"], **change}
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config(config, name="changed")


def test_bytes_match_measured_memory() -> None:
    """Measured on BLOOM by the authors of LLM-PQ (their memory-model notebook), MiB, fp16."""
    for name, pre_post, kv in (("bloom-560m", 980.0078, 534.0), ("bloom-1b7", 1960.0156, None)):
        spec = ModelSpec.by_name(name)
        ends = embedding_bytes(spec, first=True, last=False, dtype_bytes=2)
        ends += embedding_bytes(spec, first=False, last=True, dtype_bytes=2)
        assert ends / MIB == pytest.approx(pre_post, rel=5e-3)
        if kv is not None:
            cache = spec.num_layers * kv_cache_bytes(
                KVPrecision.KV16,
                slots=8,
                max_len=712,
                kv_heads=spec.kv_heads,
                vectors=spec.kv_vectors,
                head_dim=spec.head_dim,
                dtype_bytes=2,
            )
            assert cache / MIB == pytest.approx(kv, rel=5e-3)


def test_quantised_layer_counts_scales_and_zeros() -> None:
    spec = ModelSpec.by_name("llama-2-7b")
    weights = sum(s.num_weights for s in spec.linears())
    four = layer_weight_bytes(spec, Precision.W4A16, Quantization(), 2)
    assert four == weights // 2 + weights // 128 * 4 + 2 * spec.hidden * 2
    symmetric = layer_weight_bytes(spec, Precision.W4A16, Quantization(symmetric=True), 2)
    assert four - symmetric == weights // 128 * 2
    assert layer_weight_bytes(spec, Precision.W16A16, Quantization(), 2) == spec.layer_params * 2


def test_weight_scheme_pads_k() -> None:
    scheme = WeightScheme(bits=3, group_size=128, symmetric=True)
    assert scheme.nbytes(10, 130, 2) == 10 * 256 * 3 // 8 + 10 * 2 * 2
    with pytest.raises(ValueError, match="3, 4 or 8"):
        WeightScheme(bits=5)


@pytest.mark.parametrize(("text", "value"), [("14.5 GiB", int(14.5 * 2**30)), ("40MiB", 40 * MIB)])
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value
    assert parse_size(format_size(value)) == value
    with pytest.raises(ValueError, match="expected a size"):
        parse_size("many GiB")


def test_precision_spellings() -> None:
    assert Precision.parse("4") is Precision.W4A16
    assert KVPrecision.parse("int4") is KVPrecision.KV4
    for text in ("kv8v4", "8v4", "k8v4", " KV8V4 "):
        assert KVPrecision.parse(text) is KVPrecision.KV8V4
    assert KVPrecision.parse("8v8") is KVPrecision.KV8
    assert KVPrecision.parse("kv16v16") is KVPrecision.KV16
    with pytest.raises(ValueError, match="did you mean 'w8a8'.* known: 16, 3, 4, 8, w4a4, w8a8"):
        Precision.parse("w8a")


def test_bits_of_keys_and_values() -> None:
    for kv in KVPrecision:
        assert KVPrecision.parse(kv.value) is KVPrecision.parse(kv.typed) is kv
        assert kv.key_bits >= kv.value_bits and kv.is_apart == ("v" in kv.typed)
        assert kv.mean_bits == (kv.key_bits + kv.value_bits) / 2
    apart = KVPrecision.KV8V4
    assert (apart.key_bits, apart.value_bits) == (8, 4)
    assert apart.title == "8-bit keys and 4-bit values" and KVPrecision.KV4.title == "4 bits"
    three = [KVPrecision.KV8, apart, KVPrecision.KV4]
    assert kv_bits_of(three) == "8 or 4 bits or 8-bit keys and 4-bit values"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("4v8", "8v4"), ("turboquant_k8v4", "8v4"), ("q8_0/q4_0", "8"), ("kv4v3", "4"),
        ("8v", "8"), ("16v4v2", "16v4"), ("fp8", "8"),
    ],
)  # fmt: skip
def test_a_near_kv_precision_is_named(text: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match=f"did you mean {meant}\\? known bits: 16, 8, 4, 2; of keys"
    ):
        KVPrecision.parse(text)


def cluster_data() -> dict:
    return {
        "name": "lab",
        "nodes": [
            {"name": "a", "accelerators": "T4:2"},
            {"name": "b", "devices": [{"kind": "V100", "reserve": "1 GiB"}]},
        ],
        "links": {"pairs": [{"between": ["a", "b"], "gbps": 25, "latency_us": 40}]},
    }


def test_cluster_names_devices_and_links() -> None:
    cluster = Cluster.parse_data(cluster_data(), where="lab.yaml")
    assert [d.name for d in cluster.devices] == ["T4-0", "T4-1", "V100-32GB-0"]
    assert cluster.device("b:0").name == "V100-32GB-0"
    v100 = cluster.device("V100-32GB-0")
    assert v100.limit_bytes == v100.spec.memory - 2**30
    assert cluster.link(cluster.devices[0], v100).gbps == 25
    with pytest.raises(ValueError, match="did you mean 'T4-1'"):
        cluster.device("T4-11")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes", 1, "devices", 0, "kind"), "V10", "'V10': nearest: V100-16GB, V100"),
        (("nodes", 1, "devices", 0, "reserv"), 1, "did you mean 'reserve'"),
        (("nodes", 0, "acelerators"), "T4", "did you mean 'accelerators'"),
        (("links", "pairs", 0, "between"), ["a", "c"], "unknown node or device 'c'"),
        (("links", "pairs", 0, "gbps"), 0, "expected at least 1e-06, got 0"),
        (("nodes", 1, "devices", 0, "threads"), 2, "'threads' is for CPU devices"),
    ],
)
def test_cluster_errors_name_the_key(path: tuple, value: object, message: str) -> None:
    data = json.loads(json.dumps(cluster_data()))
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        Cluster.parse_data(data, where="lab.yaml")


def test_paper_form_of_a_cluster() -> None:
    cluster = Cluster.from_counts(["Tesla_T4", "Tesla_V100-SXM2-32GB"], [3, 1])
    assert [d.kind for d in cluster.devices] == ["T4"] * 3 + ["V100-32GB"]
    with pytest.raises(ValueError, match="as many of each"):
        Cluster.from_counts(["T4"], [1, 2])


def entry(**changes: object) -> dict:
    base = {
        "device_kind": "T4",
        "part": "layer",
        "phase": "decode",
        "precision": "w4a16",
        "dtype": "float16",
        "regimes": [{"terms": {"1": 1e-3, "v*(t+s)": 1e-8}}, {"terms": {"v": 1e-3}}],
        "source": "profile",
    }
    return {**base, **changes}


def test_latency_is_the_larger_regime() -> None:
    latency = LatencyEntry.parse_data(entry(), where="costs")
    assert latency.phase is Phase.DECODE
    assert latency.seconds(v=1, length=100) == pytest.approx(1e-3 + 1e-6)
    assert latency.seconds(v=8, length=100) == pytest.approx(8e-3)
    with pytest.raises(ValueError, match="unknown term 'v\\*s' of decode"):
        LatencyEntry.parse_data(entry(regimes=[{"terms": {"v*s": 1.0}}]), where="costs")


def test_cost_model_finds_by_key(tmp_path: Path) -> None:
    costs = CostModel(model="m", model_fingerprint="f", entries=(LatencyEntry(**entry()),))
    costs.save_json(tmp_path / "costs.json")
    again = CostModel.load_json(tmp_path / "costs.json")
    assert again == costs
    key = {"phase": Phase.DECODE, "precision": Precision.W4A16, "dtype": "float16"}
    assert again.find("T4", **key) is not None
    assert again.find("V100", **key) is None


def test_sensitivity_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "omega.json"
    data = {"indicator": "variance", "model": "m", "num_layers": 2, "weights": {"w4a16": [1, 2]}}
    path.write_text(json.dumps(data))
    omega = Sensitivity.load(path, num_layers=2)
    assert omega.omega(1, Precision.W4A16) == 2
    assert omega.omega(1, Precision.W16A16) == 0
    with pytest.raises(ValueError, match="no w3a16"):
        omega.omega(0, Precision.W3A16)
    with pytest.raises(ValueError, match="made for 2 layers"):
        Sensitivity.load(path, num_layers=3)
    path.write_text(json.dumps({**data, "weights": {"w4a16": [1]}}))
    with pytest.raises(ValueError, match="has 1 layers, expected 2"):
        Sensitivity.load(path, num_layers=2)


def plan_data(bounds: list[tuple[int, int]], num_layers: int) -> dict:
    stages = [
        {
            "device": f"T4-{i}",
            "node": "a",
            "kind": "T4",
            "profile_kind": "T4",
            "layers": [start, end],
            "precisions": ["w4a16"] * (end - start),
        }
        for i, (start, end) in enumerate(bounds)
    ]
    return {
        "schema": 1,
        "model": {"name": "m", "num_layers": num_layers, "fingerprint": "f"},
        "cluster": {"name": "c", "fingerprint": "g"},
        "workload": {"batch": 8, "prompt_len": 16, "gen_len": 4},
        "prefill_microbatch": 2,
        "decode_microbatch": 4,
        "stages": stages,
    }


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_layer_exactly_once(sizes: list[int]) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    bounds = list(zip(starts, starts[1:], strict=False))
    plan = Plan.parse_data(plan_data(bounds, starts[-1]), where="plan")
    covered = [i for stage in plan.stages for i in range(*stage.layers)]
    assert covered == list(range(starts[-1]))
    assert len(plan.precisions) == starts[-1]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([(0, 2), (3, 4)], "leave a gap"),
        ([(0, 2), (1, 4)], "leave an overlap"),
        ([(0, 2)], r"cover layers \[0, 2\), the model has 4"),
        ([(0, 4), (4, 4)], "are empty"),
    ],
)
def test_broken_partitions_are_rejected(bounds: list, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data(bounds, 4)))
    with pytest.raises(BadPlanError, match=message):
        Plan.load(path)


def test_plan_file_round_trip_and_mismatch(tmp_path: Path) -> None:
    plan = Plan.parse_data(plan_data([(0, 2), (2, 4)], 4), where="plan")
    plan.save_json(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    shown = f"{plan} {plan!r}"
    assert len(shown) < 800 and plan.model.name in shown and "layers 2-3" in shown
    with pytest.raises(PlanMismatchError, match="re-plan with llmpq-algo --model"):
        plan.require_model(ModelSpec.by_name("opt-13b"))
    with pytest.raises(PlanMismatchError, match="re-plan with llmpq-algo --cluster"):
        plan.require_cluster("other", "x")
    (tmp_path / "plan.pkl").write_bytes(b"\x80\x04\x95")
    with pytest.raises(BadPlanError, match="reads no pickle"):
        Plan.load(tmp_path / "plan.pkl")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("quantization.outliers", -1, "'quantization.outliers': got -1, expected a whole number"),
        ("quantization.group_size", 0, "'quantization.group_size': expected "),
        ("stages.0.device_index", -1, "'stages.0.device_index': got -1"),
        ("stages.0.sms", 0, "'stages.0.sms'"),
        ("stages.0.prefill_s", math.nan, "'stages.0.prefill_s': got nan, expected a number"),
        ("stages.0.decode_s", math.inf, "'stages.0.decode_s': got inf"),
        ("stages.0.decode_s", -2.0, "'stages.0.decode_s': got -2.0"),
        ("workload.gen_len", 10**9, "'workload.gen_len': got 1000000000"),
        ("workload.batch", 10**30, "'workload.batch': got 1"),
        ("prefill_microbatch", -3, "'prefill_microbatch': expected more than 0, got -3"),
        ("decode_microbatch", 10**9, "'decode_microbatch': got 1000000000"),
        ("solver.value", math.nan, "'solver.value': got nan"),
        ("stages.0.memory.kv_bytes", -1, "'stages.0.memory.kv_bytes': got -1"),
    ],
)
def test_numbers_no_plan_can_hold_are_named(
    place: str, value: float, message: str, tmp_path: Path
) -> None:
    data = plan_data([(0, 2)], 2)
    memory = [name for name in MemoryForm.model_fields if name != "reserve_bytes"]
    data["stages"][0] |= {"memory": dict.fromkeys(memory, 0)}
    data |= {"quantization": {}, "solver": {"method": "m", "status": "feasible", "value": -1.0}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert Plan.load(path).solver.value == -1.0, "an objective may be below zero"
    *parents, last = place.split(".")
    inner: Any = data
    for key in parents:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    path.write_text(json.dumps(data))
    with pytest.raises(BadPlanError, match=f"plan.json: {re.escape(message)}"):
        Plan.load(path)

"""Exports: exact strings for a small plan, and configs that the engines' own readers accept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.__main__ import main
from llmpq.planner.export import WRITERS
from llmpq.planner.export.result import ranges

pytestmark = pytest.mark.pure


def _plan(nodes: tuple[str, str] = ("box", "box"), kv: str = "kv16") -> Plan:
    spec = ModelSpec.by_name("opt-125m")
    bits = ["w16a16"] * 4 + ["w8a16"] * 5 + ["w4a16"] * 3
    stages = [
        {"device": f"T4-{j}", "node": nodes[j], "device_index": j, "kind": "T4",
         "profile_kind": "T4", "layers": [a, b], "precisions": bits[a:b]}
        for j, (a, b) in enumerate([(0, 7), (7, 12)])
    ]  # fmt: skip
    data = {
        "model": {"name": "opt-125m", "num_layers": 12, "fingerprint": spec.fingerprint()},
        "cluster": {"name": "box", "fingerprint": "0"},
        "workload": {"batch": 8, "prompt_len": 512, "gen_len": 100, "kv": kv},
        "prefill_microbatch": 2,
        "decode_microbatch": 4,
        "stages": stages,
    }
    return Plan.parse_data(data, where="test")


SPEC = ModelSpec.by_name("opt-125m")


def test_vllm_and_sglang_partitions() -> None:
    vllm = WRITERS["vllm"](_plan(), SPEC)
    assert vllm.text == (
        "# vLLM: stages on T4-0@box, T4-1@box\n"
        "export VLLM_PP_LAYER_PARTITION=7,5\n"
        "vllm serve opt-125m --pipeline-parallel-size 2 --dtype float16 --max-model-len 612 "
        "--max-num-seqs 8\n"
    )
    assert any(
        line.startswith("precision per layer (w16a16: layers 0-3; w8a16")
        for line in vllm.not_expressed
    )
    assert "--distributed-executor-backend ray" in WRITERS["vllm"](_plan(("a", "b")), SPEC).text
    sglang = WRITERS["sglang"](_plan(("a", "b")), SPEC).text
    assert "export SGLANG_PP_LAYER_PARTITION=7,5\n" in sglang
    assert "--pp-size 2" in sglang and "--nnodes 2" in sglang


def test_llamacpp_split_counts_the_head_and_names_odd_layers() -> None:
    text = WRITERS["llamacpp"](_plan(kv="kv8"), SPEC).text
    assert "-ngl 13 --split-mode layer --tensor-split 7,6 " in text
    assert "--tensor-type 'blk\\.(0|1|2|3)\\..*=f16'" in text
    assert "--tensor-type 'blk\\.(9|10|11)\\..*=q4_k'" in text
    assert " model-f16.gguf model-plan.gguf Q8_0\n" in text
    assert "--cache-type-k q8_0 --cache-type-v q8_0" in text


@pytest.mark.parametrize(
    "model", ["opt-125m", "bloom-560m", "llama-2-7b", "qwen3-8b", "mixtral-8x7b"]
)
def test_accelerate_places_every_layer_once(model: str) -> None:
    spec = ModelSpec.by_name(model)
    half = spec.num_layers // 2
    plan = _plan()
    stages = tuple(
        stage.model_copy(
            update={"layers": span, "precisions": (plan.precisions[0],) * (span[1] - span[0])}
        )
        for stage, span in zip(plan.stages, [(0, half), (half, spec.num_layers)], strict=True)
    )
    ref = plan.model.model_copy(
        update={"name": model, "num_layers": spec.num_layers, "fingerprint": spec.fingerprint()}
    )
    table = json.loads(
        WRITERS["accelerate"](plan.model_copy(update={"stages": stages, "model": ref}), spec).text
    )
    layers = {name: device for name, device in table.items() if re.search(r"\.\d+$", name)}
    assert len(layers) == spec.num_layers
    assert list(layers.values()) == [0] * half + [1] * (spec.num_layers - half)
    assert table["lm_head"] == (0 if spec.tied_embeddings else 1)


def test_accelerate_refuses_two_nodes() -> None:
    with pytest.raises(ValueError, match=r"the plan is on 2 nodes \(a, b\); plan for one node"):
        WRITERS["accelerate"](_plan(("a", "b")), SPEC)


def test_every_layer_matches_exactly_one_rule() -> None:
    for engine in ("compressed-tensors", "gptqmodel"):
        config = json.loads(WRITERS[engine](_plan(), SPEC).text)
        for layer, precision in enumerate(_plan().precisions):
            name = f"model.decoder.layers.{layer}.self_attn.q_proj"
            if engine == "gptqmodel":
                hits = [(k, v) for k, v in config["dynamic"].items() if re.match(k[2:], name)]
                bits = 16 if hits and hits[0][0][0] == "-" else config["bits"]
                bits = hits[0][1].get("bits", bits) if hits else bits
                assert len(hits) <= 1 and bits == precision.weight_bits
                continue
            inner = config["quantization_config"]
            groups = [
                g for g in inner["config_groups"].values() if re.match(g["targets"][0][3:], name)
            ]
            ignored = [i for i in inner["ignore"] if i[:3] == "re:" and re.match(i[3:], name)]
            assert len(groups) + len(ignored) == 1
            if groups:
                assert groups[0]["weights"]["num_bits"] == precision.weight_bits


def test_routers_stay_unquantised() -> None:
    plan, spec = _plan(), ModelSpec.by_name("mixtral-8x7b")
    config = json.loads(WRITERS["compressed-tensors"](plan, spec).text)["quantization_config"]
    assert any(re.match(i[3:], "model.layers.5.block_sparse_moe.gate") for i in config["ignore"])
    assert not any(
        re.match(i[3:], "model.layers.5.block_sparse_moe.experts.3.w1") for i in config["ignore"]
    )
    assert json.loads(WRITERS["gptqmodel"](plan, spec).text)["bits"] == 8


@pytest.mark.parametrize("engine", WRITERS)
def test_command_writes_file_and_says_what_is_lost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str
) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    _plan().save_json(plan)
    assert main(["export", str(plan), "--to", engine, "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert out.read_text() and shown.out == ""
    assert "not expressed: micro-batches (prefill 2, decode 4)" in shown.err


def test_a_plan_of_an_unknown_model_asks_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    text = _plan().dump_json().replace('"name": "opt-125m"', '"name": "mine"')
    plan.write_text(text)
    assert main(["export", str(plan), "--to", "vllm"]) == 2
    assert capsys.readouterr().err == (
        "llmpq-algo: the plan's model 'mine' is not here; give --model DIR\n"
    )


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"

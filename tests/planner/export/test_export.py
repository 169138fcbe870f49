"""Exports: what is written for small plans, what is refused, and with which words."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.export import WRITERS
from llmpq.planner.export.llamacpp import UNDIVIDED
from llmpq.planner.export.result import ranges
from llmpq.plans.plan import Plan
from llmpq.precision import Precision

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


def _on(*stages: tuple[str, str, int, int], dtype: str = "float16", **changes: object) -> Plan:
    """Return a plan of llama-2-7b: each stage's kind, node, index and number of layers."""
    spec = ModelSpec.by_name("llama-2-7b")
    start, rows = 0, []
    for kind, node, index, layers in stages:
        rows.append(
            {"device": f"{kind}-{len(rows)}", "node": node, "device_index": index, "kind": kind,
             "profile_kind": kind, "layers": [start, start + layers],
             "precisions": ["w4a16"] * layers}
        )  # fmt: skip
        start += layers
    data = {
        "model": {"name": "llama-2-7b", "num_layers": start, "fingerprint": spec.fingerprint()},
        "cluster": {"name": "box", "fingerprint": "0"},
        "workload": {"batch": 8, "prompt_len": 512, "gen_len": 100, "dtype": dtype},
        "prefill_microbatch": 2,
        "decode_microbatch": 4,
        "stages": rows,
        **changes,
    }
    return Plan.parse_data(data, where="test")


LLAMA = ModelSpec.by_name("llama-2-7b")


def test_vllm_and_sglang_partitions() -> None:
    vllm = WRITERS["vllm"](_plan(), SPEC)
    assert vllm.text == (
        "# vLLM 0.33.0: stages on T4-0@box, T4-1@box\n"
        "# facebook/opt-125m stands for its checkpoint at the plan's bits: write that first "
        "(llmpq-quantize MODEL OUT --plan PLAN) and serve it\n"
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1\n"
        "export VLLM_PP_LAYER_PARTITION=7,5\n"
        "vllm serve facebook/opt-125m --pipeline-parallel-size 2 --dtype float16 "
        "--max-model-len 612 --max-num-seqs 8\n"
    )
    assert any(
        line.startswith("precision per layer (w16a16: layers 0-3; w8a16")
        for line in vllm.not_expressed
    )
    assert "--distributed-executor-backend ray" in WRITERS["vllm"](_plan(("a", "b")), SPEC).text
    sglang = WRITERS["sglang"](_plan(("a", "b")), SPEC).text
    assert "export SGLANG_PP_LAYER_PARTITION=7,5\n" in sglang
    assert "--pp-size 2" in sglang
    assert "--nnodes 2 --node-rank 0 --dist-init-addr a:20000\n" in sglang
    assert "--nnodes 2 --node-rank 1 --dist-init-addr a:20000\n" in sglang


def test_sglang_calls_the_first_node_by_its_host() -> None:
    nodes = [{"name": "a", "host": "10.0.0.1"}, {"name": "b", "host": "10.0.0.2"}]
    stages = (("A100-40GB", "a", 0, 16), ("A100-40GB", "b", 0, 16))
    text = WRITERS["sglang"](_on(*stages, nodes=nodes), LLAMA).text
    assert text.count("--dist-init-addr 10.0.0.1:20000\n") == 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["M4-Max", "Arc-B580"])
def test_devices_that_llamacpp_alone_runs_are_refused(engine: str, kind: str) -> None:
    plan = _on((kind, "box", 0, 32))
    with pytest.raises(ValueError, match=rf"has {kind}-0 \({kind}\); export with --to llamacpp"):
        WRITERS[engine](plan, LLAMA)
    assert "llama-server" in WRITERS["llamacpp"](plan, LLAMA).text


def test_gpus_are_listed_in_the_order_of_their_stages() -> None:
    plan = _on(("A100-40GB", "box", 2, 20), ("A100-40GB", "box", 0, 12))
    assert "CUDA_VISIBLE_DEVICES=2,0\n" in WRITERS["vllm"](plan, LLAMA).text
    assert "CUDA_VISIBLE_DEVICES=2,0 python -m sglang" in WRITERS["sglang"](plan, LLAMA).text
    assert "--device CUDA2,CUDA0 " in WRITERS["llamacpp"](plan, LLAMA).text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_on_gpus_refuse_a_cpu_stage(engine: str) -> None:
    plan = _on(("RTX-3090", "home", 0, 20), ("CPU", "home", 0, 12))
    with pytest.raises(ValueError, match=r"runs no stage on a CPU .* CPU-1; .*--to llamacpp"):
        WRITERS[engine](plan, LLAMA)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["T4", "V100-32GB", "RTX-2080-Ti", "P100-16GB"])
def test_servers_on_gpus_refuse_bfloat16_where_there_is_none(engine: str, kind: str) -> None:
    stages = (("A100-40GB", "box", 0, 20), (kind, "box", 1, 12))
    with pytest.raises(ValueError, match=rf"no bfloat16 on {kind}-1 .*--dtype float16"):
        WRITERS[engine](_on(*stages, dtype="bfloat16"), LLAMA)
    assert "--dtype float16" in WRITERS[engine](_on(*stages), LLAMA).text
    assert "--dtype bfloat16" in WRITERS[engine](_on(*stages[:1], dtype="bfloat16"), LLAMA).text


def test_servers_say_which_cards_are_too_old_for_their_release() -> None:
    plan = _on(("V100-32GB", "box", 0, 32))
    lines = WRITERS["vllm"](plan, LLAMA).not_expressed
    assert any(line.startswith("V100-32GB-0 (V100-32GB, 7.0): vLLM runs on") for line in lines)
    turing = WRITERS["vllm"](_on(("T4", "box", 0, 32)), LLAMA)
    assert not any("older release" in line for line in turing.not_expressed)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_on_gpus_refuse_two_makers(engine: str) -> None:
    plan = _on(("MI300X", "box", 0, 20), ("H100-SXM", "box", 1, 12))
    with pytest.raises(
        ValueError, match=r"has AMD and NVIDIA \(MI300X-0, H100-SXM-1\); .*llamacpp"
    ):
        WRITERS[engine](plan, LLAMA)
    assert "--device ROCm0,CUDA1 " in WRITERS["llamacpp"](plan, LLAMA).text


def test_pipelines_that_nodes_cannot_be_given_are_refused() -> None:
    back = _on(("L4", "a", 0, 10), ("L4", "b", 0, 10), ("L4", "a", 1, 12))
    with pytest.raises(ValueError, match=r"comes back to a \(nodes in order: a, b, a\)"):
        WRITERS["vllm"](back, LLAMA)
    uneven = _on(("L4", "a", 0, 10), ("L4", "a", 1, 10), ("L4", "b", 0, 12))
    with pytest.raises(ValueError, match="as many stages, the plan has a 2, b 1"):
        WRITERS["sglang"](uneven, LLAMA)
    assert "VLLM_PP_LAYER_PARTITION=10,10,12" in WRITERS["vllm"](uneven, LLAMA).text


def test_families_that_an_engine_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="llama.cpp has no OPT models; export with --to vllm"):
        WRITERS["llamacpp"](_plan(), SPEC)
    with pytest.raises(ValueError, match="SGLang has no BLOOM models"):
        WRITERS["sglang"](_plan(), ModelSpec.by_name("bloom-560m"))


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
                assert config["sym"] is True
                continue
            inner = config["quantization_config"]
            groups = [
                g for g in inner["config_groups"].values() if re.match(g["targets"][0][3:], name)
            ]
            ignored = [i for i in inner["ignore"] if i[:3] == "re:" and re.match(i[3:], name)]
            assert len(groups) + len(ignored) == 1
            if groups:
                assert groups[0]["weights"]["num_bits"] == precision.weight_bits
                assert groups[0]["weights"]["symmetric"] is True


def test_routers_stay_unquantised() -> None:
    plan, spec = _plan(), ModelSpec.by_name("mixtral-8x7b")
    config = json.loads(WRITERS["compressed-tensors"](plan, spec).text)["quantization_config"]
    assert any(re.match(i[3:], "model.layers.5.block_sparse_moe.gate") for i in config["ignore"])
    assert not any(
        re.match(i[3:], "model.layers.5.block_sparse_moe.experts.3.w1") for i in config["ignore"]
    )
    assert json.loads(WRITERS["gptqmodel"](plan, spec).text)["bits"] == 8


def test_w8a8_has_a_scale_per_channel_as_the_plan_counts() -> None:
    stage = _plan().stages[0]
    bits = (Precision.W8A8,) * 4 + stage.precisions[4:]
    stages = (stage.model_copy(update={"precisions": bits}), *_plan().stages[1:])
    plan = _plan().model_copy(update={"stages": stages})
    text = WRITERS["compressed-tensors"](plan, SPEC).text
    groups = json.loads(text)["quantization_config"]["config_groups"]
    found = [g for g in groups.values() if g["input_activations"]]
    assert [(g["format"], g["weights"]["strategy"]) for g in found] == [
        ("int-quantized", "channel")
    ]
    rules = json.loads(WRITERS["gptqmodel"](plan, SPEC).text)["dynamic"]
    assert {"bits": 8, "group_size": -1} in rules.values() or {"group_size": -1} in rules.values()


def test_groups_that_do_not_divide_the_model_are_refused() -> None:
    spec = dataclasses.replace(SPEC, ffn=3000)
    with pytest.raises(ValueError, match=r"groups of 128, the model's ffn size is 3000; plan with"):
        WRITERS["compressed-tensors"](_plan(), spec)


@pytest.mark.parametrize("engine", ["compressed-tensors", "gptqmodel"])
def test_a_plan_that_quantises_nothing_has_no_checkpoint(engine: str) -> None:
    stages = tuple(
        stage.model_copy(update={"precisions": (Precision.W16A16,) * stage.num_layers})
        for stage in _plan().stages
    )
    with pytest.raises(ValueError, match="the plan quantises no layer"):
        WRITERS[engine](_plan().model_copy(update={"stages": stages}), SPEC)


@pytest.mark.parametrize("engine", WRITERS)
def test_command_writes_file_and_says_what_is_lost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str
) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    _on(("A100-40GB", "box", 0, 20), ("A100-40GB", "box", 1, 12)).save_json(plan)
    assert main(["export", str(plan), "--to", engine, "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert out.read_text() and shown.out == ""
    drawn = engine == "svg"  # a picture of the plan, for no engine
    assert ("not expressed: micro-batches (prefill 2, decode 4)" in shown.err) is not drawn


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


def _shared(*stages: tuple[int, ...], heads: str = "llama-2-7b") -> Plan:
    """Return a plan of stages that two GPUs or more share, given by their shares."""
    rows, start, gpu, spec = [], 0, 0, ModelSpec.by_name(heads)
    for number, shares in enumerate(stages):
        end = spec.num_layers * (number + 1) // len(stages)
        names = [{"device": f"L4-{gpu + k}"} for k in range(len(shares))]
        row = {"device": f"L4-{gpu}", "node": "box", "device_index": gpu, "kind": "L4",
               "profile_kind": "L4", "layers": [start, end],
               "precisions": ["w4a16"] * (end - start)}  # fmt: skip
        rows.append({**row, "devices": names, "shares": shares} if len(shares) > 1 else row)
        start, gpu = end, gpu + len(shares)
    data = _on(("L4", "box", 0, spec.num_layers)).model_dump(mode="json", by_alias=True)
    data["model"] = {"name": heads, "num_layers": start, "fingerprint": spec.fingerprint()}
    return Plan.parse_data({**data, "stages": rows}, where="test")


@pytest.mark.parametrize(
    ("stages", "vllm", "sglang"),
    [
        ([(1, 1), (1, 1)], "--pipeline-parallel-size 2 --tensor-parallel-size 2 ", "2 --tp-size 2"),
        ([(1, 1, 1, 1)], "--pipeline-parallel-size 1 --tensor-parallel-size 4 ", "1 --tp-size 4"),
    ],
)
def test_stages_that_gpus_share_evenly(
    stages: list[tuple[int, ...]], vllm: str, sglang: str
) -> None:
    plan = _shared(*stages)
    for to, words in (("vllm", vllm), ("sglang", f"--pp-size {sglang} --dtype")):
        text = WRITERS[to](plan, LLAMA).text
        assert words in text and "CUDA_VISIBLE_DEVICES=0,1,2,3" in text and "L4-0+L4-1" in text


@pytest.mark.parametrize("stages", [[(3, 1)], [(1, 1), (1,)], [(1, 1), (1, 1, 1)]])
def test_servers_have_no_uneven_shares(stages: list[tuple[int, ...]]) -> None:
    for to in ("vllm", "sglang"):
        with pytest.raises(ValueError, match="each with an equal share of its layers, the plan's"):
            WRITERS[to](_shared(*stages), LLAMA)


@pytest.mark.parametrize(
    ("model", "shares", "odd"),
    [
        ("llama-2-7b", (1, 1), None),  # 11008 = 86 x 128
        ("llama-2-7b", (1, 1, 1, 1), "each of 4 GPUs has 2752 of down's"),
        ("llama-3.1-8b", (1,) * 8, None),  # 14336 = 8 x 14 x 128
        ("qwen2.5-7b", (1, 1, 1, 1), None),  # 18944 = 4 x 37 x 128
        ("qwen2.5-0.5b", (1, 1), "each of 2 GPUs has 448 of o's"),
    ],
)
def test_parts_of_groups_are_warned_of(
    model: str, shares: tuple[int, ...], odd: str | None
) -> None:
    plan, spec = _shared(shares, heads=model), ModelSpec.by_name(model)
    for to in ("vllm", "sglang"):
        said = " ".join(WRITERS[to](plan, spec).warnings)
        assert odd in said if odd else not said


def test_heads_that_do_not_divide_are_refused() -> None:
    spec = ModelSpec.by_name("llama-2-7b")  # 32 heads
    with pytest.raises(ValueError, match="cuts the 32 heads and 32 KV heads"):
        WRITERS["vllm"](_shared((1, 1, 1)), spec)


def test_llamacpp_divides_all_layers_or_none() -> None:
    written = WRITERS["llamacpp"](_shared((3, 1)), LLAMA)
    words = "-ngl 33 --device CUDA0,CUDA1 --split-mode tensor --tensor-split 3,1"
    assert words in written.text and "--flash-attn on" in written.text
    assert any("--tensor-split in units of its own" in line for line in written.not_expressed)
    with pytest.raises(ValueError, match="stage L4-0 is one of several; plan with"):
        WRITERS["llamacpp"](_shared((1, 1), (1, 1)), LLAMA)


def test_llamacpp_divides_no_latents() -> None:
    assert set(FAMILIES) >= UNDIVIDED
    for name in ("deepseek-v2-lite", "gemma-3n-e2b"):
        spec = ModelSpec.by_name(name)
        with pytest.raises(ValueError, match=f"does not divide layers of {name} .*sor-parallel 1"):
            WRITERS["llamacpp"](_shared((1, 1), heads=name), spec)


def test_what_cannot_say_shares_names_what_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    _shared((1, 1)).save_json(path)
    assert main(["export", str(path), "--to", "accelerate"]) == 2
    said = capsys.readouterr().err
    assert "export to vllm, sglang, llamacpp, compressed-tensors or gptqmodel, or plan" in said
    assert main(["export", str(path), "--to", "vllm"]) == 0
    assert "--tensor-parallel-size 2" in capsys.readouterr().out


@pytest.mark.parametrize(("engine", "flag"), [
    ("vllm", "--max-model-len 4600 "), ("sglang", "--context-length 4600 "),
    ("llamacpp", "--ctx-size 9600 --parallel 8 --kv-unified"),
    ("vllm", "--max-num-batched-tokens 512"), ("sglang", "--chunked-prefill-size 512"),
    ("llamacpp", "--batch-size 512"),
])  # fmt: skip
def test_live_traffic_s_longest_request_and_steps_are_the_engine_s(engine: str, flag: str) -> None:
    seconds = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    served = dict.fromkeys(("ttft_s", "tpot_s", "latency_s"), seconds)
    rates = {"attained": 1.0, "goodput_per_s": 1.0, "requests_per_s": 1.0}
    traffic = {
        "objective": "rate", "requests": 10, "prompt_tokens": seconds, "output_tokens": seconds,
        "longest": 4600, "limits": {}, "step_tokens": 512, "rate_per_s": 1.0,
        "predicted": {**served, **rates, "output_tokens_per_s": 1, "requests": 9, "seconds": 1},
    }  # fmt: skip
    work = {"batch": 8, "prompt_len": 1000, "gen_len": 200}  # of live traffic: the mean lengths
    plan = _on(("T4", "box", 0, 16), ("T4", "box", 1, 16), traffic=traffic, workload=work)
    assert flag in WRITERS[engine](plan, LLAMA).text


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "accelerate"])
def test_drafts_are_not_lost_without_a_word(engine: str) -> None:
    drafts = {"mode": "ngram", "gamma": 3, "acceptance": 0.5}
    plan = _on(("T4", "box", 0, 16), ("T4", "box", 1, 16), speculation=drafts)
    said = WRITERS[engine](plan, LLAMA).not_expressed
    assert any(line.startswith("drafts (ngram, 3 tokens each)") for line in said)
    plain = _on(("T4", "box", 0, 16), ("T4", "box", 1, 16))
    assert not any("drafts" in line for line in WRITERS[engine](plain, LLAMA).not_expressed)

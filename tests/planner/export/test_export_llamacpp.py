"""llama.cpp's flags put every layer where the plan has it, by llama.cpp's own rule."""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.export import WRITERS
from llmpq.planner.export.llamacpp import llamacpp
from llmpq.plans.plan import Plan

pytestmark = pytest.mark.pure

SPEC = ModelSpec.by_name("qwen3-8b")


def _plan(*stages: tuple[str, int], bits: str = "w4a16", kv: str = "kv16", nodes: str = "") -> Plan:
    start, rows, seen = 0, [], dict[str, int]()
    for number, (kind, layers) in enumerate(stages):
        node = nodes[number] if nodes else "home"
        index = seen.get(kind + node, 0)
        seen[kind + node] = index + 1
        rows.append(
            {"device": f"{kind}-{number}", "node": node, "device_index": index, "kind": kind,
             "profile_kind": kind, "layers": [start, start + layers],
             "threads": 8 if kind == "CPU" else None, "precisions": [bits] * layers}
        )  # fmt: skip
        start += layers
    data = {
        "model": {"name": "qwen3-8b", "num_layers": start, "fingerprint": SPEC.fingerprint()},
        "cluster": {"name": "home", "fingerprint": "0"},
        "workload": {"batch": 4, "prompt_len": 64, "gen_len": 8, "kv": kv, "dtype": "bfloat16"},
        "prefill_microbatch": 2,
        "decode_microbatch": 4,
        "stages": rows,
    }
    return Plan.parse_data(data, where="test")


def _flags(plan: Plan) -> dict[str, str]:
    """Return llama-server's flags and their values."""
    last = shlex.split(llamacpp(plan, SPEC).text.splitlines()[-1])
    assert last[0] == "llama-server"
    return dict(zip(last[1::2], last[2::2], strict=True))


def _placed(flags: dict[str, str], num_layers: int) -> list[str]:
    """Return the device of every layer and, last, of the output matrix.

    The rule of llama.cpp's load_tensors: the last `-ngl` of all layers and the output go to GPUs,
    each to the first whose share of the running sum of `--tensor-split` is beyond its own place.
    """
    offloaded = min(int(flags["-ngl"]), num_layers + 1)
    devices = flags["--device"].split(",")
    split = [float(x) for x in flags.get("--tensor-split", "1").split(",")]
    ends = [end / sum(split) for end in accumulate(split)]
    first = num_layers + 1 - offloaded
    found = [
        "CPU" if i < first else devices[bisect_right(ends, (i - first) / offloaded)]
        for i in range(num_layers + 1)
    ]
    names = [f"blk.{i}.ffn_up.weight" for i in range(num_layers)] + ["output.weight"]
    for rule in flags.get("--override-tensor", "").split(","):
        pattern, _, where = rule.partition("=")
        for i, name in enumerate(names):
            if rule and re.search(pattern, name):
                found[i] = where
    return found


@pytest.mark.parametrize(
    "stages",
    [
        (("RTX-4090", 20), ("RTX-3090", 16)),
        (("CPU", 5), ("RTX-4090", 20), ("RTX-3090", 11)),
        (("RTX-4090", 20), ("CPU", 5), ("RTX-3090", 11)),
        (("RTX-4090", 20), ("RTX-3090", 11), ("CPU", 5)),
        (("RTX-4090", 1), ("RTX-3090", 17), ("RTX-3090", 18)),
        (("CPU", 3), ("RTX-4090", 30), ("CPU", 3)),
        (("CPU", 36),),
        (("MI300X", 36),),
    ],
)
def test_every_layer_is_where_the_plan_has_it(stages: tuple[tuple[str, int], ...]) -> None:
    plan = _plan(*stages)
    flags = _flags(plan)
    wanted: list[str] = []
    for stage in plan.stages:
        maker = "ROCm" if stage.kind == "MI300X" else "CUDA"
        name = "CPU" if stage.is_cpu else f"{maker}{stage.device_index}"
        wanted += [name] * stage.num_layers
    assert _placed(flags, 36) == [*wanted, wanted[-1]]


def test_a_cpu_stage_has_no_share_of_the_gpus() -> None:
    flags = _flags(_plan(("CPU", 5), ("RTX-4090", 20), ("RTX-3090", 11)))
    assert flags["--tensor-split"] == "20,12" and flags["-ngl"] == "32"
    assert flags["--device"] == "CUDA0,CUDA0" and flags["--threads"] == "8"
    one = _flags(_plan(("CPU", 6), ("RTX-4090", 30)))
    assert "--tensor-split" not in one and one["-ngl"] == "31"
    alone = _flags(_plan(("CPU", 36)))
    assert alone["-ngl"] == "0" and alone["--device"] == "none"
    behind = llamacpp(_plan(("RTX-4090", 30), ("CPU", 6)), SPEC)
    assert any("KV cache of layers 30-35" in line for line in behind.not_expressed)


def test_gpus_of_other_nodes_are_reached_by_rpc_from_the_node_whose_cpu_works() -> None:
    plan = _plan(("RTX-3090", 10), ("CPU", 6), ("RTX-4090", 10), ("RTX-3090", 10), nodes="abba")
    text = llamacpp(plan, SPEC).text
    order = "export CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
    rpc = "rpc-server --host 0.0.0.0 --port 50052 --device CUDA0,CUDA1\n"
    assert f"# on a\n{order}{rpc}# on b\n{order}llama-server" in text
    flags = _flags(plan)
    assert flags["--rpc"] == "a:50052" and flags["--device"] == "RPC0,CUDA0,RPC1"
    with pytest.raises(ValueError, match="on the CPU of one host, the plan on those of a, b"):
        llamacpp(_plan(("CPU", 6), ("CPU", 30), nodes="ab"), SPEC)


def test_numbers_of_unlike_cards_are_said_at_every_export_of_them() -> None:
    mixed = _plan(("RTX-3090", 20), ("RTX-4090", 16))
    alike = _plan(("RTX-3090", 20), ("RTX-3090", 16))
    for name in ("llamacpp", "vllm", "sglang", "accelerate"):
        (line,) = [x for x in WRITERS[name](mixed, SPEC).not_expressed if x.startswith("whose")]
        assert ": RTX-3090-0 0, RTX-4090-" in line and ", in the order of --devices" in line
        assert not [x for x in WRITERS[name](alike, SPEC).not_expressed if x.startswith("whose")]


def test_a_quantised_file_names_the_type_of_every_layer() -> None:
    plan = _plan(("RTX-4090", 36), kv="kv8")
    mixed = (*(["w16a16"] * 20), *(["w8a16"] * 10), *(["w3a16"] * 6))
    data = plan.model_dump(mode="json", by_alias=True)
    data["stages"][0]["precisions"] = list(mixed)
    text = llamacpp(Plan.parse_data(data, where="test"), SPEC).text
    assert "convert_hf_to_gguf.py Qwen/Qwen3-8B --remote --outtype bf16" in text
    words = next(shlex.split(li) for li in text.splitlines() if li.startswith("llama-quantize"))
    # llama-quantize heeds --tensor-type only where the file's own type is a quantised one.
    assert words[-3:] == ["model-bf16.gguf", "model-plan.gguf", "Q8_0"]
    rules = [word.split("=") for word in words if word.startswith("blk")]
    for layer, bits in enumerate(mixed):
        hits = [type_ for rule, type_ in rules if re.search(rule, f"blk.{layer}.attn_q.weight")]
        assert hits == [{"w16a16": "bf16", "w8a16": "q8_0", "w3a16": "q3_k"}[bits]]
    assert "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0" in text


@pytest.mark.parametrize(
    ("kv", "keys", "values"),
    [("kv8v4", "q8_0", "q4_0"), ("kv16v8", "f16", "q8_0"), ("kv4v2", "q4_0", "q4_0")],
)
def test_keys_and_values_have_types_of_their_own(kv: str, keys: str, values: str) -> None:
    exported = llamacpp(_plan(("RTX-4090", 36), kv=kv), SPEC)
    assert f"--flash-attn on --cache-type-k {keys} --cache-type-v {values}" in exported.text
    said = [line for line in exported.not_expressed if line.startswith("KV cache of ")]
    assert bool(said) == kv.endswith("2") and all("closest to 2 bits is q4_0" in x for x in said)


def test_a_plan_of_a_gguf_file_serves_that_file(tmp_path: Path) -> None:
    """From any of its parts, or its folder; nothing is converted."""
    gguf = pytest.importorskip("gguf")
    for number in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"my m-0000{number}-of-00002.gguf", "qwen3")
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    data = _plan(("RTX-4090", 36)).model_dump(mode="json", by_alias=True)
    first = tmp_path / "my m-00001-of-00002.gguf"
    for path in (first, tmp_path / "my m-00002-of-00002.gguf", tmp_path):
        data["model"]["path"] = str(path)
        found = llamacpp(Plan.parse_data(data, where="test"), SPEC)
        assert "convert_hf_to_gguf" not in found.text and "llama-quantize" not in found.text
        assert f"llama-server -m '{first}' -ngl 37" in found.text
        assert any(line.startswith("bits: the plan's GGUF file") for line in found.not_expressed)


def test_an_unquantised_plan_serves_the_converted_file() -> None:
    text = llamacpp(_plan(("RTX-4090", 36), bits="w16a16"), SPEC).text
    assert "llama-quantize" not in text and "llama-server -m model-bf16.gguf" in text

"""`llmpq-algo fits`: what the field asked of tools that guess, and what its numbers must be."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from llmpq.errors import DoesNotFitError
from llmpq.planner.__main__ import main
from llmpq.planner.cli import fit_report
from llmpq.planner.cli.arguments import fits_parser, plan_parser
from llmpq.planner.cli.fit_report import fit_answer, plan_request
from llmpq.planner.cli.show_fits import next_command
from llmpq.planner.make import make_plan
from llmpq.planner.problem.requests import FitsRequest, PlanRequest

pytestmark = pytest.mark.pure

GIB = 2**30
HYBRID = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 27},
}
WITH_MTP = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("answered by counting, without a search")

    monkeypatch.setattr(fit_report, "search_plan", refuse)


@pytest.fixture
def fits(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; its exit code, its report and its last line on stderr."""

    def run(words: str) -> tuple[int, dict[str, Any], str]:
        code = main(["fits", *words.split(), "--json"])
        found = capsys.readouterr()
        return code, json.loads(found.out) if found.out else {}, found.err.strip()

    return run


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def used(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {d["device"]: d for d in report["devices"] if d["layers"] is not None}


def test_70b_does_not_fit_24_and_12_gb(fits: Any) -> None:
    code, report, said = fits(
        "--devices 4090,3060 --model llama-3.3-70b --bits 4 --kv 16 --prompt-len 32000 "
        "--gen-len 768"
    )
    assert code == 5 and not report["fits"]
    needs = 33.1 + 3.9 + 10.0
    have = sum(d["memory_bytes"] - d["reserve_bytes"] for d in report["devices"]) / GIB - 1.0
    assert report["short_bytes"] / GIB == pytest.approx(needs - have, abs=3.0)
    assert report["forms"][0]["loads"][0]["longest_context"] == 0, "none at 4 bits"
    assert report["remedies"][0] == "--bits 3,4 --kv 4"
    assert any(way.startswith("cpu=") for way in report["remedies"])
    assert "--bits 3,4 --kv 4" in said and said.count("\n") == 0
    three = "--devices 4090,3060 --model llama-3.3-70b --bits 3 --prompt-len 32000 --gen-len 768"
    assert fits(f"{three} --kv 16")[0] == 5
    assert fits(f"{three} --kv 4")[0] == 0


def test_two_cards_share_a_model_and_no_layer_is_in_ram(fits: Any) -> None:
    code, report, _ = fits(
        "--devices 4070,3060-ti,cpu=64GB+8threads --model qwen3-14b --bits 4 --kv 16 "
        "--prompt-len 15360 --gen-len 1024"
    )
    held = used(report)
    assert code == 0 and set(held) == {"RTX-4070-0", "RTX-3060-Ti-0"}
    layers = {name: own["layers"][1] - own["layers"][0] for name, own in held.items()}
    assert layers["RTX-4070-0"] > layers["RTX-3060-Ti-0"]
    for own in held.values():
        assert own["total_bytes"] <= own["memory_bytes"] - GIB // 2 and own["free_bytes"] >= 0
    parts = ("weights_bytes", "embedding_bytes", "kv_bytes")
    total = sum(own[part] for own in held.values() for part in parts) / GIB
    assert total == pytest.approx(6.4 + 2.9 + 2.5, rel=0.03)


def test_the_slow_card_stays_out(fits: Any) -> None:
    job = "--model qwen3-14b --bits 4 --kv 16 --prompt-len 512 --gen-len 256"
    code, report, _ = fits(f"--devices 5090,3090 {job} --batch 1")
    assert code == 0 and set(used(report)) == {"RTX-5090-0"}
    rates = []
    for devices in ("5090,3090", "5090"):
        code, report, _ = fits(f"--devices {devices} {job} --batch 64")
        assert code == 0
        rates.append(report["forms"][0]["loads"][1]["tokens_per_s"])
    assert rates[0] >= rates[1]


def test_four_engines_are_named_beside_one_over_four_cards(fits: Any) -> None:
    job = "--model llama-3.1-8b --bits 4 --kv 16 --prompt-len 512 --gen-len 256"
    code, report, _ = fits(f"--devices 3090:4 {job} --batch 256")
    assert code == 0 and report["engines"].startswith("4 engines, each on RTX-3090 with 64 ")
    rate = float(report["engines"].split(": ")[1].split()[0])
    _, one, _ = fits(f"--devices 3090 {job} --batch 64")
    assert rate == pytest.approx(4 * one["forms"][0]["loads"][1]["tokens_per_s"], rel=1e-3)


def test_windows_count_as_windows(fits: Any) -> None:
    code, report, _ = fits(
        "--devices a6000 --model gemma-3-27b --bits 4 --kv 16 --prompt-len 130000 --gen-len 1072"
    )
    (own,) = used(report).values()
    assert code == 0 and own["kv_bytes"] / GIB == pytest.approx(10.4, rel=0.04)
    assert report["kv_bytes_per_token"] == 10 * 8192, "layers that see all, and no other"


@pytest.mark.parametrize(
    ("job", "layers", "each", "windows"),
    [
        ("gemma-2-9b --devices 4090 --context 8k", 21, 2 * 8 * 256 * 2, (21, 4096)),
        ("gpt-oss-120b --devices h100 --context 128k", 18, 2 * 8 * 64 * 2, (18, 128)),
        ("deepseek-v3 --devices h200:8 --context 32k", 61, (512 + 64) * 2, None),
        ("exaone-4.0-32b --devices a6000 --context 64k", 16, 2 * 8 * 128 * 2, (48, 4096)),
        ("llama-4-scout-17b-16e --devices h100:2", 12, 2 * 8 * 128 * 2, (36, 8192)),
        ("gemma-3n-e2b --devices 3090 --context 16k", 4, 2 * 2 * 256 * 2, (16, 512)),
        ("minimax-text-01 --devices h200:4", 10, 2 * 8 * 128 * 2, None),
        ("kimi-linear-48b-a3b --devices a100", 7, (512 + 64) * 2, None),
    ],
)
def test_a_token_takes_what_its_layers_keep(
    fits: Any, job: str, layers: int, each: int, windows: tuple[int, int] | None
) -> None:
    """By hand, of published configs: layers that see all grow, windows and states do not."""
    _, report, _ = fits(f"--model {job} --bits 4 --kv 16")
    assert report["kv_bytes_per_token"] == layers * each
    own, length = windows or (0, 0)
    kept, step = report["window_bytes_per_request"], 512 + 2 * 128  # a step's tokens, two blocks
    assert own * each * length <= kept <= own * each * (length + step)


def test_a_hybrid_has_16_layers_of_keys_and_a_state_that_does_not_grow(
    fits: Any, tmp_path: Path
) -> None:
    model = written(tmp_path, HYBRID)
    job = f"--devices a6000 --model {model} --bits 4 --kv 16 --dtype bfloat16"
    states = []
    for context in ("8k", "131072"):
        code, report, _ = fits(f"{job} --context {context}")
        assert code == 0 and report["kv_bytes_per_token"] == 65536
        states.append(report["state_bytes_per_request"])
        assert any("vision tower" in note for note in report["notes"])
        assert not any("does not run" in note for note in report["notes"])
    assert states[0] == states[1] > 0
    kept, rest = divmod(used(report)["RTX-A6000-0"]["kv_bytes"] - 131072 * 65536, states[0])
    assert kept >= 1 and rest == 0, "a state for the request, and those of prefixes"


def test_only_caches_that_the_devices_run_are_listed_or_named(fits: Any) -> None:
    """Gemma 4's wide heads have packed caches on CPUs alone; a Mac's plan is exported."""
    kinds = {"4090": {"kv16"}, "4090,cpu=64GB+60GB/s+8threads": {"kv16"}}
    kinds |= {"cpu=64GB+60GB/s+8threads": {"kv16", "kv8", "kv4"}, "m4-max=64GB": {"kv16", "kv8"}}
    for devices, kvs in kinds.items():
        _, report, _ = fits(f"--devices {devices} --model gemma-4-31b --bits 8,4")
        assert {row["kv"] for row in report["forms"]} >= kvs
        assert kvs != {"kv16"} or {row["kv"] for row in report["forms"]} == kvs
    job = "--model gemma-4-31b --devices 4090 --context 131072"
    code, report, _ = fits(job)
    assert code == 5 and not any("--kv" in way for way in report["remedies"])
    assert "(--kv" not in fits(f"{job} --batch 8")[2]


def test_a_cache_of_fewer_bits_is_named_only_where_every_gpu_reads_it(fits: Any) -> None:
    """Before Ampere the kernels' registers are not those of tensor cores: answers were wrong."""
    for devices, kvs in (
        ("v100", {"kv16"}),
        ("3090", {"kv16", "kv8", "kv4"}),
        ("3090,t4", {"kv16"}),
    ):
        _, report, _ = fits(f"--devices {devices} --model qwen3-8b")
        assert {row["kv"] for row in report["forms"]} == kvs
        dense = [note for note in report["notes"] if "makes them dense" in note]
        assert bool(dense) == (devices != "3090")
    code, report, _ = fits("--devices t4 --model qwen3-14b --context 40k --bits 4 --batch 8")
    assert code == 5 and not any("--kv" in way for way in report["remedies"])
    _, report, _ = fits("--devices 3090,t4 --model qwen3-8b --kv 8")
    assert any("T4 left out: llmpq has no kernels for a KV" in note for note in report["notes"])
    assert {row["kv"] for row in report["forms"]} == {"kv8"}
    assert set(used(report)) == {"RTX-3090-0"}


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("--devices t4:2 --model qwen3-8b", "no kernels for a KV cache of 8, 4 or 2 bits on GPUs"),
        ("--devices 3090,v100 --model qwen3-8b", "GPUs before Ampere (V100-32GB)"),
        ("--devices 4090 --model gemma-4-31b", "has heads of more than 256 channels, which"),
    ],
)
def test_bits_that_no_device_runs_are_not_planned_beside_16(
    fits: Any, capsys: pytest.CaptureFixture[str], job: str, why: str
) -> None:
    """Planned in 8 bits, as allowed, a plan could not be run; alone, 8 bits are of other cards."""
    _, report, _ = fits(f"{job} --kv 8,16 --bits 4")
    assert {row["kv"] for row in report["forms"]} == {"kv16"}
    (note,) = [note for note in report["notes"] if note.startswith("no plan has a KV cache of 8 ")]
    assert why in note
    words = f"{job} --batch 2 --bits 4 --engines 1 --tensor-parallel 1 --json --kv"
    assert main([*words.split(), "16,8"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["kv"] == "kv16"
    code, (out, err) = main([*words.split(), "8"]), capsys.readouterr()
    if "3090" not in job:
        assert code == 2 and "plan with --kv 16" in err and why.removesuffix(", which") in err
        return
    plan = json.loads(out)
    assert code == 0 and plan["workload"]["kv"] == "kv8"
    assert {stage["kind"] for stage in plan["stages"]} == {"RTX-3090"}


def test_keys_and_values_of_different_bits_lie_between(
    fits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """8-bit keys and 4-bit values: the mean of the bytes and of the guessed loss of kv8 and kv4."""
    words = "--devices 4090 --model qwen3-8b --batch 8 --context 16k --bits 4 --kv"
    found = {}
    for kv in ("8", "8v4", "4"):
        code, report, _ = fits(f"{words} {kv}")
        assert code == 0 and {row["kv"] for row in report["forms"]} == {f"kv{kv}"}
        assert main([*f"{words} {kv} --gen-len 100 --json".split()]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["workload"]["kv"] == f"kv{kv}"
        held = sum(stage["memory"]["kv_bytes"] for stage in plan["stages"])
        found[kv] = (held, plan["predicted"]["sum_omega"])
    for eight, mixed, four in zip(found["8"], found["8v4"], found["4"], strict=True):
        assert mixed == pytest.approx((eight + four) / 2)


def test_latents_have_one_number_of_bits(fits: Any) -> None:
    """Beside others those that do not run are left out; alone they are refused, with why."""
    job = "--devices h200 --model deepseek-v2-lite --bits 4 --kv"
    _, report, _ = fits(f"{job} 16,8,8v4")
    assert {row["kv"] for row in report["forms"]} == {"kv16", "kv8"}
    (note,) = [note for note in report["notes"] if note.startswith("no plan has a KV cache of ")]
    assert "of 8-bit keys and 4-bit values: deepseek-v2-lite" in note
    assert "has latents that are key and value at once, which" in note
    code, _, err = fits(f"{job} 8v4")
    assert code == 2 and "at once, which llmpq does not run with keys and v" in err


def test_a_cache_of_fewer_bits_that_holds_fewer_tokens_is_explained(fits: Any) -> None:
    _, windows, _ = fits("--devices 4090 --model gpt-oss-20b --batch 8 --context 16k")
    assert any("layers with a window keep all tokens" in note for note in windows["notes"])
    _, latents, _ = fits("--devices 3090 --model glm-4.7-flash")
    assert any("latents are kept twice" in note for note in latents["notes"])
    _, packed, _ = fits("--devices 4090 --model gemma-3-27b --context 20k --kv 8")
    assert any("longer with --kv 16" in note for note in packed["notes"])
    code, refused, _ = fits("--devices 4090 --model gemma-3-27b --context 60k --kv 8 --bits 4")
    assert code == 5 and refused["remedies"][0] == "--kv 16"
    assert fits("--devices 4090 --model gemma-3-27b --context 60k --kv 16 --bits 4")[0] == 0
    _, plain, _ = fits("--devices 3090 --model qwen3-8b")
    assert not any("contexts are shorter" in note for note in plain["notes"])


@pytest.mark.parametrize(
    ("model", "layer_bytes", "layers"),
    [("gemma-4-31b", 16 * 256 * 2 * 2, 50), ("gpt-oss-20b", 8 * 64 * 2 * 2, 12)],
)
def test_what_layers_with_a_window_take_is_stated(
    fits: Any, model: str, layer_bytes: int, layers: int
) -> None:
    """The window and a chunk of tokens, in whole blocks, in each of those layers."""
    _, report, _ = fits(f"--devices a100-80gb --model {model} --context 32k --bits 4")
    (own,) = used(report).values()
    stated = report["window_bytes_per_request"]
    assert own["kv_bytes"] == 32768 * report["kv_bytes_per_token"] + stated
    tokens, rest = divmod(stated, layers * layer_bytes)
    assert rest == 0 and tokens % 128 == 0 and tokens >= 128
    _, none, _ = fits("--devices a100-80gb --model qwen3-8b")
    assert none["window_bytes_per_request"] == 0


def test_codes_that_are_kept_lose_nothing_more(fits: Any) -> None:
    """gpt-oss' experts stay as they are published; its attention is rounded."""
    _, found, _ = fits("--model gpt-oss-20b --devices 4080")
    losses = {(row["weights"], row["kv"]): row["quality_loss"] for row in found["forms"]}
    assert losses["8 bits", "kv16"] == pytest.approx(1.1e-4, rel=0.02)
    assert losses["4 bits", "kv16"] == pytest.approx(0.0323, rel=0.02)
    stored = "'gpt-oss-20b' is stored at w4a16 beside linears of more bits"
    assert any(stored in note for note in found["notes"])


def test_what_is_left_out_is_not_counted(fits: Any, tmp_path: Path) -> None:
    sizes = []
    for extra in (1, 0):
        folder = tmp_path / str(extra)
        folder.mkdir()
        model = written(folder, {**WITH_MTP, "num_nextn_predict_layers": extra})
        code, report, _ = fits(f"--devices cpu=4GB+1threads --model {model} --dtype float32")
        assert code == 0
        sizes.append(used(report)["CPU-0"]["weights_bytes"])
    assert sizes[0] == sizes[1]


def test_layers_for_further_tokens_are_named(fits: Any) -> None:
    _, report, _ = fits("--model qwen3.5-27b --devices cpu=99GB+60GB/s+8threads")
    assert any("(MTP)" in note for note in report["notes"])


@pytest.mark.parametrize("name", ["strix-halo", "m3-ultra", "gb20", "my spark"])
def test_a_device_that_is_not_listed_is_never_the_nearest(fits: Any, name: str) -> None:
    code = main(["fits", "--devices", name, "--model", "qwen3-14b", "--json"])
    assert code == 2


def test_a_device_of_119_gb_is_no_card_of_32(fits: Any) -> None:
    for name in ("gb10", "gb10=119GB+273GB/s+100TFLOPS"):
        code, report, _ = fits(f"--devices {name} --model qwen3-14b")
        (own,) = report["devices"]
        assert code == 0 and own["memory_bytes"] > 110e9 and own["kind"].lower().startswith("gb10")


SOME = (
    "--model qwen3-32b --devices 4090,3090",
    "--model llama-3.1-8b --devices 3060,cpu=16GB+4threads --batch 4",
    "--model gpt-oss-20b --devices 4060:2 --kv 16,4",
    "--model gemma-3-12b --devices 3060 --bits 4,8 --batch 2",
)


@pytest.mark.parametrize("job", SOME)
def test_the_longest_context_fits_and_a_token_more_does_not(fits: Any, job: str) -> None:
    _, report, _ = fits(job)
    tried = 0
    for form in report["forms"][:: 1 + len(report["forms"]) // 3]:
        for load in form["loads"]:
            bits = form["weights"].split()[0]
            words = f"{_without(job, '--bits', '--kv', '--batch')} --bits {bits}"
            words += f" --kv {form['kv'][2:]} --batch {load['batch']}"
            longest = load["longest_context"]
            if longest:
                assert fits(f"{words} --context {longest}")[0] == 0
            if 0 < longest < report["max_context"]:
                assert fits(f"{words} --context {longest + 1}")[0] == 5
                tried += 1
    assert tried


def _without(job: str, *flags: str) -> str:
    words = job.split()
    for flag in flags:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    return " ".join(words)


def test_bytes_are_those_of_the_plan_that_is_shown() -> None:
    found = fit_answer(FitsRequest(model="qwen3-32b", devices="4090,3090,3060", batch=4))
    report, plan = found.report, found.plan
    assert plan is not None and report.fits and plan.solver.method == "counted"
    of_stage = {stage.device: stage.memory for stage in plan.stages}
    assert sum(own.layers is not None for own in report.devices) == len(plan.stages)
    for own in report.devices:
        memory = of_stage.get(own.device)
        if memory is None:
            assert own.total_bytes == 0
            continue
        assert (
            own.total_bytes
            == memory.total_bytes
            == (
                own.weights_bytes
                + own.embedding_bytes
                + own.kv_bytes
                + own.workspace_bytes
                + own.context_bytes
            )
        )
        assert own.free_bytes == own.memory_bytes - own.reserve_bytes - own.total_bytes
    held = sum(own.kv_bytes_per_token for own in report.devices)
    assert held == report.kv_bytes_per_token


def test_the_plan_of_the_same_requests_is_no_slower() -> None:
    job: dict[str, Any] = {"devices": "4090,3090", "context": 8192, "bits": "8"}
    found = fit_answer(FitsRequest(model="qwen3-32b", **job))
    best = make_plan("qwen3-32b", batch=1, prefer="speed", **job)
    assert found.plan is not None and found.plan.predicted is not None
    assert best.predicted is not None
    assert best.predicted.total_s <= found.plan.predicted.total_s * (1 + 1e-6)


def test_every_remedy_is_typed_and_fits(fits: Any) -> None:
    job = "--devices 4060 --model qwen3-8b --bits 8 --context 32k"
    code, report, _ = fits(job)
    assert code == 5
    ways = report["remedies"]
    kinds = ["more" if " more " in way else way.split()[0].partition("=")[0] for way in ways]
    order = ["--reserve", "--kv", "--bits", "--context", "more", "cpu"]
    assert kinds == sorted(kinds, key=order.index) and {"--bits", "cpu", "more"} <= set(kinds)
    for way in ways:
        if way.startswith("cpu"):
            words = job.replace("4060", f"4060,{way.split()[0]}+4threads")
        elif " more " in way:
            more = {"one": 1}.get(way.split()[0]) or int(way.split()[0])
            words = job.replace("4060", f"4060:{1 + more}")
        else:
            words = f"{_without(job, way.split()[0])} {way}"
        assert fits(words)[0] == 0, way


def test_where_counting_is_not_enough_a_search_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit_report, "quick_plan", lambda p: None)
    asked = []

    def nothing(p: object, options: object) -> None:
        asked.append(p)
        raise DoesNotFitError("nothing fits")

    monkeypatch.setattr(fit_report, "search_plan", nothing)
    request = FitsRequest(model="qwen3-8b", devices="4090", bits="4", kv="16")
    assert not fit_answer(request).report.fits and len(asked) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model qwen3-8b --devices 4090 --context 50", "--context 50 has no room"),
        ("--model qwen3-8b --devices 4090 --context 8k --prompt-len 9", "with --context"),
        ("--model qwen3-8b --devices 4090 --batch 0", "batch"),
        ("--devices 4090", "--model is missing"),
    ],
)
def test_what_is_wrong_is_one_sentence(fits: Any, words: str, said: str) -> None:
    code, report, err = fits(words)
    assert code == 2 and report == {} and said in err and "\n" not in err


def test_a_person_reads_the_answer_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fits", "--model", "qwen3-32b", "--devices", "4090,3090", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen3-32b fits RTX-4090,RTX-3090: 2 requests of 8,192 tokens ")
    assert "omega" not in out.lower() and "theta" not in out.lower()
    plan = [line for line in out.splitlines() if line.startswith("plan it: llmpq-algo ")]
    assert plan == [
        "plan it: llmpq-algo --model qwen3-32b --devices 4090,3090 --context 8192 --batch 2 "
        "-o plan.json"
    ]


@pytest.mark.parametrize(
    "more",
    [
        "--bits 4 --weight-group-size 64 --symmetric",
        "--head-bits 8 --kv 8 --reserve 1GiB",
        "--weight-group-size 0 --gpu-memory-utilization 0.9 --dtype float16",
        "--prompt-len 4000 --gen-len 500 --batch 3",
    ],
)
def test_the_command_that_plans_it_asks_for_the_same(more: str) -> None:
    words = f"--model qwen3-8b --devices 4090,cpu {more}".split()
    asked = fits_parser().read_as(FitsRequest, words)
    answer = fit_answer(asked)
    program, *typed = shlex.split(next_command(asked, answer.report))
    assert program == "llmpq-algo"
    found, wanted = plan_parser().read_as(PlanRequest, typed), plan_request(asked)
    for field in fields(FitsRequest):
        if field.name not in ("json", "context", "prompt_len", "kv"):
            got = getattr(found, field.name)
            assert got == getattr(wanted, field.name), field.name
    assert (found.kv or "16") == wanted.kv
    assert found.context == answer.report.context


@pytest.mark.parametrize("devices", ["4090,1080-ti", "4090,2080-ti"])
def test_a_card_that_is_left_out_does_not_decide_the_dtype(fits: Any, devices: str) -> None:
    _, report, _ = fits(f"--model qwen3-8b --devices {devices}")
    assert len(used(report)) == 1 and report["dtype"] == "bfloat16"
    said = [note for note in report["notes"] if "bfloat16" in note]
    assert len(said) == 1 and "is not used: all stages compute in bfloat16" in said[0]
    _, report, _ = fits(f"--model qwen3-14b --devices {devices} --bits 16")
    assert len(used(report)) == 2 and report["dtype"] == "float16"
    assert any("GPUs before Ampere" in note for note in report["notes"])


def test_the_readme_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text()
    (command,) = re.findall(r"^\$ llmpq-algo (fits .*)$", text, flags=re.M)
    (block,) = re.findall(r"<!-- fits -->\n```text\n(.*?)```\n<!-- end fits -->", text, flags=re.S)
    assert main(command.split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = block.splitlines()
    assert len(shown) > 10
    assert [line for line in printed if line in shown] == shown
    assert not re.search("omega|theta", block, flags=re.I)


def test_matrices_are_rounded_as_a_plan_would_round_them(fits: Any) -> None:
    """`--head-bits`, `--weight-group-size` and `--symmetric` say what they say in `plan`."""
    job = "--devices 4090 --model llama-3.1-8b --bits 4 --context 2k"
    _, usual, _ = fits(job)
    (device,) = usual["devices"]
    _, rounded, _ = fits(f"{job} --head-bits 8")
    head = device["embedding_bytes"] - rounded["devices"][0]["embedding_bytes"]
    assert head == pytest.approx(128256 * 4096, rel=0.05), "half of the head's 16 bits"
    longest = [r["forms"][0]["loads"][0]["longest_context"] for r in (usual, rounded)]
    assert longest[0] <= longest[1]
    for flag, more in (("--weight-group-size 32", True), ("--symmetric", False)):
        _, changed, _ = fits(f"{job} {flag}")
        weights = changed["devices"][0]["weights_bytes"]
        assert (weights > device["weights_bytes"]) is more
        assert weights != device["weights_bytes"]


def test_what_a_search_fits_is_no_shorter_in_the_table(fits: Any) -> None:
    """At every context the table's longest is at least the one that was asked for and fits."""
    for context in (1000, 5889, 20000):
        code, report, _ = fits(f"--devices 3060,2060 --model qwen3-14b --context {context}")
        for form in report["forms"]:
            longest = form["loads"][0]["longest_context"]
            assert (longest >= context) is form["fits"]
        assert code == (0 if any(f["fits"] and not f["flags"] for f in report["forms"]) else 5)


def test_contexts_beyond_the_positions_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fits", "--model", "qwen3-14b", "--devices", "h200", "--bits", "4", "--kv", "16"]
    for context, marked in (("8k", False), ("100k", True)):
        assert main([*words, "--context", context]) == 0
        text = capsys.readouterr().out
        (row,) = [line for line in text.splitlines() if line.startswith(" 4 bits")]
        assert (" *" in row) is marked
        assert ("*: beyond the model's 40,960 positions" in text) is marked


@pytest.mark.parametrize("old", ["t4", "p40:2"])
def test_cards_that_would_cost_the_dtype_shorten_no_context(fits: Any, old: str) -> None:
    """Gemma 3 overflows float16: with cards without bfloat16 all would compute in float32."""
    longest, short = [], []
    for devices in ("4090:2", f"4090:2,{old}"):
        words = f"--model gemma-3-27b --devices {devices} --bits 4 --kv 16 --batch 8"
        code, report, said = fits(f"{words} --context 60000")
        assert code == 5
        longest.append([load["longest_context"] for load in report["forms"][0]["loads"]])
        short.append(report["short_bytes"])
    assert longest[1] == longest[0] and short[1] == short[0]


def test_a_refused_plan_is_short_of_what_is_less() -> None:
    job = {"model": "gemma-3-27b", "bits": 4, "batch": 8, "prompt_len": 60_000, "gen_len": 100}
    refusals = []
    for devices in ("4090:2", "4090:2,t4"):
        with pytest.raises(DoesNotFitError) as error:
            make_plan(devices=devices, **job)
        refusals.append(str(error.value))
    alone, beside = (re.search(r"short by (\S+ \S+) for", one) for one in refusals)
    assert alone is not None and beside is not None and alone[1] == beside[1]
    assert refusals[1].endswith("left out: with them all stages would compute in float32")


@pytest.mark.parametrize("name", ["model.bin", "notes.txt"])
def test_a_file_that_is_no_model_is_said_to_be_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"GGUF")
    assert main(["fits", "--model", name, "--devices", "4090"]) == 2
    assert f"'{name}' is a file, and its name does not end in .gguf" in capsys.readouterr().err

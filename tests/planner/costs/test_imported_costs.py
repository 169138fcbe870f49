"""`llmpq-algo costs import`: tables that others measured become cost entries of a model."""

from __future__ import annotations

import csv
import itertools
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmpq.costs.cost_model import CostModel, Phase
from llmpq.planner.__main__ import main
from llmpq.planner.costs.imported import AttentionTimes, layer_entries, thinned
from llmpq.plans.plan import Plan
from llmpq.precision import Precision

pytestmark = pytest.mark.pure

LAUNCH_S, KEY_S, PAIR_S = 1e-5, 4e-9, 7e-11


def test_terms_of_attention_are_found_again() -> None:
    prompts = [
        (1, s, p, LAUNCH_S + PAIR_S * s * s + 2e-10 * s * p)
        for s, p in itertools.product((64, 256, 1024), (0, 512, 4096))
    ]
    decoding = [
        (v, k, 2e-7 * v**0.8 + LAUNCH_S + KEY_S * v * k)
        for v, k in itertools.product((1, 8, 64), (64, 512, 4096))
    ]
    mixed = [(*prompts[0][1:3], v, k, prompts[0][3] + 1.5 * KEY_S * v * k) for v, k, _ in decoding]
    curve = ((1.0, 1e-4), (512.0, 2e-4))
    attention = AttentionTimes(prompts=prompts, decoding=decoding, mixed=mixed)
    found = layer_entries("X", {Precision.W16A16: curve}, attention, dtype="float16")
    prefill, decode = found
    assert prefill.chunk_s(v=1, start=512, length=512) == pytest.approx(
        2e-4 + LAUNCH_S + PAIR_S * 512**2 + 2e-10 * 512 * 512, rel=1e-6
    )
    assert decode.seconds(v=8, length=900) == pytest.approx(
        1e-4 + 1e-4 * 7 / 511 + 2e-7 * 8**0.8 + LAUNCH_S + KEY_S * 8 * 900, rel=1e-3
    )
    assert decode.mixed_attention == pytest.approx(1.5, rel=1e-6)


def test_a_thinned_curve_stays_near() -> None:
    curve = tuple((float(x), 1e-5 + 1e-7 * x + 1e-9 * x**1.5) for x in range(1, 300))
    few = thinned(curve, 0.01)
    assert len(few) < 20 and few[0] == curve[0] and few[-1] == curve[-1]
    for (x0, y0), (x1, y1) in itertools.pairwise(few):
        for x, y in curve:
            if x0 <= x <= x1:
                assert y0 + (y1 - y0) * (x - x0) / (x1 - x0) == pytest.approx(y, rel=0.011)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile in the form of LLMServingSim, of kernels whose times are known."""
    folder = tmp_path / "profile" / "tp1"
    folder.mkdir(parents=True)

    def table(name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])

    parts = ("embedding", "layernorm", "qkv_proj", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    dense = [(part, n, 10 + 0.1 * n) for part in parts for n in (1, 64, 2048)]
    table("dense.csv", ("layer", "tokens", "time_us"), dense)
    ends = [(part, n, 100 + n) for part in ("lm_head", "sampler") for n in (1, 64, 256)]
    table("per_sequence.csv", ("layer", "sequences", "time_us"), ends)
    attention: list[tuple[float, ...]] = []
    for s, p in itertools.product((0, 64, 1024), (0, 512)):
        for v, k in itertools.product((0, 8, 64), (0, 512, 2048)):
            alone = 1e6 * (1e-5 + KEY_S * v * k) if v and k else 0.0
            if (s or not p) and bool(v) == bool(k) and (s or v):
                chunk = 1e6 * (LAUNCH_S + PAIR_S * s * s + PAIR_S * 2 * s * p) if s else 0.0
                attention.append((s, p, v, k, chunk + alone))
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    table("attention.csv", columns, attention)
    return folder.parent


def test_a_profile_of_llmservingsim_is_imported_and_planned_with(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costs.json"
    words = ["costs", "import", str(profile), "--model", "llama-3.1-8b"]
    assert main([*words, "--kind", "4090", "-o", str(out)]) == 0
    costs = CostModel.load_json(out)
    layer = costs.find("RTX-4090", phase=Phase.DECODE, dtype="bfloat16")
    assert layer is not None
    products = 7 * (10 + 0.1 * 8) * 1e-6
    assert layer.seconds(v=8, length=512) == pytest.approx(
        products + 1e-5 + KEY_S * 8 * 512, rel=1e-2
    )
    head = costs.find("RTX-4090", part="head", phase=Phase.DECODE, dtype="bfloat16")
    assert head is not None and head.seconds(v=64, length=1) == pytest.approx(328e-6)
    plan = tmp_path / "plan.json"
    job = ["--model", "llama-3.1-8b", "--devices", "4090", "--bits", "16", "--batch", "4"]
    assert main([*job, "--costs", str(out), "-o", str(plan)]) == 0
    predicted = Plan.load(plan).predicted
    assert predicted is not None and not predicted.estimated
    capsys.readouterr()
    assert main([*words, "-o", str(out)]) == 2
    assert "give --kind" in capsys.readouterr().err
    assert main(["costs", "import", str(profile), "--model", "mixtral-8x7b", "--kind", "4090",
                 "-o", str(out)]) == 2  # fmt: skip
    assert "alike and dense" in capsys.readouterr().err


def _tables(folder: Path) -> None:
    """Write tables in the form of AIConfigurator's, of a made-up system."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(kind: str, name: str, rows: list[Mapping[str, Any]]) -> None:
        for version, factor in (("0.9.0", 3.0), ("0.24.0", 1.0)):
            path = folder / "systems" / "data" / "h100_sxm" / kind / "vllm" / version
            path.mkdir(parents=True, exist_ok=True)
            own = [{**row, "latency": row["latency"] * factor} for row in rows]
            parquet.write_table(pa.Table.from_pylist(own), path / f"{name}.parquet")

    sizes = (1024, 4096, 8192, 16384)
    write("gemm", "gemm_perf", [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": n * k * (1e-9 + m * 1e-12) * cost}
        for dtype, cost in (("bfloat16", 1.0), ("int4_wo", 0.25), ("fp8", 0.5))
        for m, n, k in itertools.product((1, 64, 1024), sizes, sizes)
    ])  # fmt: skip
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0}
    heads |= {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    write("attention", "context_attention_perf", [
        {**heads, "batch_size": v, "isl": s, "step": 0, "latency": 1e-2 + v * s * s * 1e-8}
        for v, s in itertools.product((1, 4), (64, 512, 2048))
    ])  # fmt: skip
    write("attention", "generation_attention_perf", [
        {**heads, "batch_size": v, "isl": 1, "step": k - 1, "latency": 1e-2 + v * k * 1e-6}
        for v, k in itertools.product((1, 16), (64, 1024, 4096))
    ])  # fmt: skip
    write("comm", "custom_allreduce_perf", [
        {"op_name": "all_reduce", "backend": backend, "num_gpus": n, "message_size": size,
         "latency": cost * 1e3 * sum_s(n, 2 * size)}
        for backend, cost in (("eager", 3.0), ("graph", 1.0))
        for n, size in itertools.product((2, 4), (1024, 2**20, 2**24))
    ])  # fmt: skip
    facts = (
        "gpu: {mem_bw: 3.35e12, mem_capacity: 85899345920, mem_empirical_constant_latency: 3e-6}"
    )
    facts = facts.replace("e12", "e+12") + "\nnode: {intra_node_bw: 450000000000}\n"
    (folder / "systems" / "h100_sxm.yaml").write_text(facts)


def sum_s(count: int, num_bytes: float) -> float:
    """What a made-up sum takes."""
    return 2e-6 * count + num_bytes / 3e11


@pytest.mark.parametrize("packed", [False, True])
def test_tables_of_aiconfigurator_are_imported(
    tmp_path: Path, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _tables(tmp_path / "tables")
    source, out = tmp_path / "tables", tmp_path / "costs.json"
    if packed:
        source = tmp_path / "tables.whl"
        with zipfile.ZipFile(source, "w") as wheel:
            for path in (tmp_path / "tables").rglob("*.*"):
                if path.is_file():
                    wheel.write(path, f"pkg/{path.relative_to(tmp_path / 'tables')}")
    words = ["costs", "import", str(source), "--model", "llama-3.1-8b", "-o", str(out)]
    assert main([*words, "--system", "h100_sxm"]) == 0
    text = capsys.readouterr().out
    assert "vllm 0.24.0: llama-3.1-8b on H100-SXM, w16a16, w4a16" in text
    costs = CostModel.load_json(out)
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    work = sum(n * k for n, k in shapes)
    for precision, cost in ((Precision.W16A16, 1.0), (Precision.W4A16, 0.25)):
        layer = costs.find("H100-SXM", phase=Phase.DECODE, precision=precision, dtype="bfloat16")
        assert layer is not None
        products = work * (1e-9 + 16e-12) * cost * 1e-3
        beside = 4 * 3e-6 + 16 * 12 * 4096 * 2 / (3.35e12 * 0.8)
        attention = (1e-2 + 16 * 1000 * 1e-6) * 1e-3
        assert layer.seconds(v=16, length=1000) == pytest.approx(
            products + beside + attention, rel=2e-3
        )
    prefill = costs.find("H100-SXM", phase=Phase.PREFILL, dtype="bfloat16")
    assert prefill is not None
    whole = work * (1e-9 + 1024e-12) * 1e-3 + 12e-6 + 1024 * 12 * 4096 * 2 / (3.35e12 * 0.8)
    whole += (1e-2 + 1024**2 * 1e-8) * 1e-3
    assert prefill.seconds(v=1, length=1024) == pytest.approx(whole, rel=2e-3)


def imported(tmp_path: Path, model: str = "llama-3.1-8b") -> CostModel:
    _tables(tmp_path / "tables")
    words = ["--model", model, "--system", "h100_sxm", "-o", str(tmp_path / "costs.json")]
    assert main(["costs", "import", str(tmp_path / "tables"), *words]) == 0
    return CostModel.load_json(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("shares", "shapes", "kv_heads"),
    [
        ((1, 1), ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)), 4),
        ((1, 1, 1, 1), ((1536, 4096), (4096, 1024), (7168, 4096), (4096, 3584)), 2),
        ((3, 1), ((4608, 4096), (4096, 3072), (21504, 4096), (4096, 10752)), 6),
    ],
)
def test_parts_of_layers_are_products_and_attention_of_what_a_device_has(
    tmp_path: Path, shares: tuple[int, ...], shapes: tuple[tuple[int, int], ...], kv_heads: int
) -> None:
    """Query, key and value heads of 128, the channels of the MLP; each product as a table's."""
    costs = imported(tmp_path)
    part = costs.find("H100-SXM", phase=Phase.DECODE, dtype="bfloat16", shares=shares)
    whole = costs.find("H100-SXM", phase=Phase.DECODE, dtype="bfloat16")
    assert part is not None and whole is not None
    beside = 4 * 3e-6 + 16 * 12 * 4096 * 2 / (3.35e12 * 0.8)
    products = sum(n * k for n, k in shapes) * (1e-9 + 16e-12) * 1e-3
    attention = (1e-2 + 16 * 1000 * 1e-6) * 1e-3 * kv_heads / 8
    assert part.seconds(v=16, length=1000) == pytest.approx(products + beside + attention, rel=2e-3)
    # So much for all devices together as the whole, and what each computes for itself.
    total = sum(shares) / max(shares) * part.seconds(v=16, length=1000)
    assert total <= whole.seconds(v=16, length=1000) + (len(shares) - 1) * beside * 1.01


def test_sums_are_of_as_many_cards_as_are_listed_and_between(tmp_path: Path) -> None:
    """The quickest of a table's ways; numbers of cards between two are between their times."""
    costs = imported(tmp_path)
    assert [len(one.kinds) for one in costs.sums] == [2, 3, 4]
    for one in costs.sums:
        assert set(one.kinds) == {"H100-SXM"} and one.gbps == pytest.approx(3600)
        for num_bytes, seconds in one.times:
            assert seconds == pytest.approx(sum_s(len(one.kinds), num_bytes), rel=5e-3)


def test_cards_with_imported_costs_share_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of them for one request: the layers take what is read of half of them, and two sums."""
    costs = imported(tmp_path)
    half = costs.find("H100-SXM", phase=Phase.DECODE, dtype="bfloat16", shares=(1, 1))
    head = costs.find("H100-SXM", part="head", phase=Phase.DECODE, dtype="bfloat16")
    assert half is not None and head is not None
    plan, words = tmp_path / "plan.json", ["--costs", str(tmp_path / "costs.json")]
    words += ["--model", "llama-3.1-8b", "--bits", "16", "--batch", "1", "--prompt-len", "1000"]
    words += ["--gen-len", "2", "-o", str(plan)]
    capsys.readouterr()
    assert main(["--devices", "h100:2", *words]) == 0
    text = capsys.readouterr().out
    assert "with measured costs" in text and "an older llmpq-profile" not in text
    found = Plan.load(plan)
    (stage,) = found.stages
    assert len(stage.shares) == 2 and found.predicted is not None
    assert not found.predicted.estimated
    each = half.seconds(v=1, length=1001) + 2 * sum_s(2, 4096 * 2)
    assert found.predicted.decode_s == pytest.approx(
        32 * each + head.seconds(v=1, length=1001), rel=0.02
    )
    link = "links: {within_node: {gbps: 128, latency_us: 15}}"
    devices = "devices: [{kind: H100-SXM, count: 2}]"
    (tmp_path / "pcie.yaml").write_text(
        f"schema: 1\nname: pcie\nnodes: [{{name: n, {devices}}}]\n{link}\n"
    )
    assert main(["--cluster", str(tmp_path / "pcie.yaml"), *words]) == 0
    assert "with estimated costs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "llama-3.1-8b"], "give --system: h100_sxm"),
        (["--model", "llama-3.1-8b", "--system", "b200_sxm"], "no tables of 'b200_sxm'"),
        (["--model", "opt-1.3b", "--system", "h100_sxm"], "attention of heads of 64 channels"),
        (["--model", "deepseek-v3", "--system", "h100_sxm"], "measure it with llmpq-profile"),
        (["--model", "llama-3.1-8b", "--system", "h100_sxm", "--engine", "x"], "--engine takes vl"),
    ],
)
def test_what_tables_do_not_have_is_said(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _tables(tmp_path)
    assert main(["costs", "import", str(tmp_path), *words, "-o", str(tmp_path / "c.json")]) == 2
    assert said in capsys.readouterr().err


def test_a_source_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-3.1-8b", "-o", str(tmp_path / "c.json")]
    assert main(["costs", "import", str(tmp_path / "none"), *words]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["costs", "import", str(tmp_path / "empty"), *words]) == 2
    assert "has no tables" in capsys.readouterr().err

"""The command: both spellings, exact texts of errors and explanations, exit codes, speed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmpq.devices.device_spec import device_specs
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.make import make_plan
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from llmpq.sizes.memory import Quantization, stage_memory
from llmpq.sizes.stage_shape import StageShape
from llmpq.units import format_size
from llmpq.workload import Workload

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
PAPER = ROOT / "clusters" / "paper"
PAIR = ("prefill_microbatch", "decode_microbatch")
JOB = ["--global_bz", "8", "--s", "512", "--n", "100"]
SMALL = ["--device-names", "T4", "V100", "--device-numbers", "1", "1", "--model", "opt-13b", *JOB]


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_both_spellings_make_the_same_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ours, papers = tmp_path / "ours.json", tmp_path / "papers.json"
    omega = str(PAPER / "omega-opt-30b.json")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "name: T4x3-V100x1\nnodes:\n  - {name: node-0, accelerators: 'T4:3'}\n"
        "  - {name: node-1, accelerators: V100}\n"
    )
    spellings = (
        f"--cluster {cluster} --model opt-30b --batch 16 --prompt-len 512 --gen-len 100"
        f" --omega-file {omega} --theta 1 --tensor-parallel 1 --engines 1 -o {ours}",
        "--model-name opt --model_size 30b --device_names T4 V100 --device_numbers 3 1"
        f" --omega_file {omega} --global_bz 16 --s 512 --n 100 --theta 1 --group 1 --engines 1"
        f" --tensor-parallel 1 --fit --output {papers}",
    )
    for words in spellings:
        assert _run(capsys, *words.split())[0] == 0
    plan, other = Plan.load(ours), Plan.load(papers)
    assert (plan.model, plan.workload, plan.inputs) == (other.model, other.workload, other.inputs)
    assert plan.solver.status == other.solver.status == "optimal"
    # Several orders of equal cards have the best value: the clock may choose among them.
    assert plan.solver.value == pytest.approx(other.solver.value, rel=2e-6)
    assert plan.solver.gap is not None and plan.solver.gap <= 1e-6
    assert "seconds" in plan.solver.model_dump() and plan.solver.seconds is None


def test_table_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, table, _ = _run(capsys, *SMALL)
    assert code == 0
    for word in ("V100-32GB-0 (node-1)", "0-39", "weights", "limit", "proven optimal", "tokens/s"):
        assert word in table
    code, text, _ = _run(capsys, *SMALL, "--json")
    plan = json.loads(text)
    assert code == 0 and plan["schema"] == 1
    assert sum(len(s["precisions"]) for s in plan["stages"]) == 40


def test_infeasible_text_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    spec = ModelSpec.by_name("opt-30b")
    work = Workload(batch=8, prompt_len=512, gen_len=100)
    whole = stage_memory(
        spec,
        work,
        StageShape(
            precisions=[Precision.W3A16] * 48,
            first=True,
            last=True,
            prefill_chunk=128,
            on_gpu=True,
        ),
        quantization=Quantization(),
        context_bytes=device_specs()["T4"].context,
    )
    short = whole.total_bytes - device_specs()["T4"].memory
    words = "--device-names T4 --device-numbers 1 --model opt-30b --bits 3 --global_bz 8"
    words += " --engines 1"  # several of one engine would take them in waves
    code, _, err = _run(capsys, *words.split(), "--s", "512", "--n", "100")
    assert code == 5
    found = re.fullmatch(
        rf"llmpq-algo: opt-30b does not fit T4x1: at w3a16 and kv16, T4-0 is short by "
        rf"{format_size(short)} for 8 requests of 612 tokens at once; what fits: --global_bz (\d), "
        r"or --s (\d+), or one more T4, or cpu=16GB among the devices \(first token after \d+ s, "
        r"then [\d.]+ tokens/s a request\)"
        r"\n",
        err,
    )
    assert found is not None, err
    for flag, most in (("--global_bz", int(found[1])), ("--s", int(found[2]))):
        for value, expected in ((most, 0), (most + 1, 5)):
            assert _run(capsys, *words.split(), "--n", "100", flag, str(value))[0] == expected


def test_pin_max_devices_and_reserve_are_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    _run(capsys, *SMALL, "--pin", "0-3=T4-0", "--pin", "5=node-0:0", "-o", str(out))
    first = Plan.load(out).stages[0]
    assert first.device == "T4-0" and first.layers[1] >= 6
    _run(capsys, *SMALL, "--max-devices", "1", "-o", str(out))
    assert len(Plan.load(out).stages) == 1
    _run(capsys, *SMALL, "--reserve", "16 GiB", "--max_devices", "2", "-o", str(out))
    plan = Plan.load(out) if out.exists() else None
    assert plan is not None


def test_reserve_leaves_memory_free(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert _run(capsys, *SMALL, "--reserve", "8GiB", "-o", str(out))[0] == 0
    for stage in Plan.load(out).stages:
        assert stage.memory is not None and stage.kind in ("T4", "V100-32GB")
        assert stage.memory.limit_bytes == device_specs()[stage.kind].memory - 8 * 2**30
        assert stage.memory.total_bytes <= stage.memory.limit_bytes


def test_kv_bits_are_a_trade(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ["--devices", "4090,3090:2", "--model", "opt-30b", "--global_bz", "32"]
    words += ["--engines", "1", "--tensor-parallel", "1"]
    _run(capsys, *words, "--kv", "16,8", "-o", str(out))
    low = Plan.load(out)
    _run(capsys, *words, "--kv", "16", "-o", str(out))
    high = Plan.load(out)
    assert low.workload.kv.value == "kv8" and high.workload.kv.value == "kv16"
    assert low.solver.value is not None and high.solver.value is not None
    assert low.solver.value < high.solver.value


def test_budget_is_kept_and_proven(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ["--cluster", str(PAPER / "09.yaml"), "--model", "opt-30b", "--global_bz", "8"]
    words += ["--tensor-parallel", "1"]
    code, text, _ = _run(capsys, *words, "--quality-budget", "1.0", "-o", str(out))
    plan = Plan.load(out)
    assert code == 0 and plan.predicted is not None and plan.predicted.sum_omega <= 1.0
    assert plan.solver.status == "optimal"
    assert plan.solver.note.startswith("fastest with sum omega <= 1 (theta at the budget ")
    assert f"note: {plan.solver.note}\n" in text


def test_waiting_stages_are_named() -> None:
    from llmpq.planner.check.build_plan import build_plan
    from llmpq.planner.cli.arguments import plan_request
    from llmpq.planner.cli.explain import explain_plan
    from llmpq.planner.evaluate.objective import stage_times
    from llmpq.planner.problem.make_problem import make_problem
    from llmpq.planner.solving.methods import SolveOptions, solve

    words = ["--cluster", str(PAPER / "09.yaml"), "--model", "opt-30b", "--global_bz", "32"]
    problem, _, _ = make_problem(plan_request(words))
    outcome = solve(problem, SolveOptions(method="uniform"))
    names = [s.device for s in build_plan(problem, outcome).stages]
    lines = explain_plan(problem, outcome.assignment, names)
    t = stage_times(problem, outcome.assignment)
    mp, md = problem.counts(*(getattr(outcome.assignment, k) for k in PAIR))
    slow, full = max(t.decode_s), md * max(t.decode_s)
    once = sum(t.decode_s) + sum(t.hop_decode_s) + t.back_decode_s
    assert full >= once
    assert lines[:3] == [
        f"prefill is bound by T4-3: {mp} micro-batches x {max(t.prefill_s) * 1e3:.2f} ms",
        f"decode is bound by T4-3: {md} micro-batches x {slow * 1e3:.2f} ms = {full * 1e3:.2f} ms "
        f"per token of every request; a token's own way takes {once * 1e3:.2f} ms",
        f"T4-0 waits {1 - md * t.decode_s[0] / full:.0%} of decode for T4-3",
    ]


def test_methods_are_compared_at_equal_quality(capsys: pytest.CaptureFixture[str]) -> None:
    """Each beside the exact method at no more loss: than its own, or than a budget."""
    words = ["--devices", "4090,3090", "--model", "opt-13b", "--batch", "8", "--method", "all"]
    budget, names = 0.2, ("exact", "ilp", "heuristic", "pipeedge", "uniform", "flexgen (estimate)")
    for extra in ([], ["--quality-budget", str(budget)]):
        code, text, _ = _run(capsys, *words, *extra)
        assert code == 0 and "adabits" in text
        rows = {}
        for line in text.splitlines():
            cells = re.split(r" {2,}", line.strip())
            if cells[0] in names:
                seconds, exact_s = (float(cells[k].split()[0]) for k in (3, 5))
                rows[cells[0]] = (cells[1], float(cells[2]), seconds, exact_s, float(cells[6][:-1]))
        assert set(rows) == set(names)
        for name, (bits, loss, seconds, exact_s, slower) in rows.items():
            assert slower == pytest.approx(seconds / exact_s, abs=2e-3) and slower >= 0.999
            assert loss <= budget or not extra
            assert bits == "16 bits" or loss > 0
            if name != "uniform":
                continue
            code, text, _ = _run(
                capsys,
                *words[:-2],
                "--quality-budget",
                str(budget if extra else loss),
                "--json",
                "--engines",
                "1",
                "--tensor-parallel",
                "1",
            )
            predicted = Plan.model_validate_json(text).predicted
            assert predicted is not None and exact_s <= predicted.total_s * 1.002


@pytest.mark.parametrize(
    "words, method, objective",
    [
        (["--shaq-efficient"], "heuristic", "makespan"),
        (["--llm_pq-efficient"], "heuristic", "makespan"),
        (["--method", "ilp", "--solver", "cbc"], "ilp", "makespan"),
        (["--objective", "paper"], "exact", "paper"),
        (["--method", "ilp", "--objective", "paper", "--group", "2"], "ilp", "paper"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_methods_and_objectives_by_flag(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    method: str,
    objective: str,
) -> None:
    out = tmp_path / "plan.json"
    small = ["--device-names", "V100", "--device-numbers", "2", "--model", "opt-1.3b"]
    job = ["--global_bz", "4", "--s", "64", "--n", "16"]
    assert _run(capsys, *small, *job, *words, "-o", str(out))[0] == 0
    plan = Plan.load(out)
    assert (plan.solver.method, plan.solver.objective) == (method, objective)
    if method != "heuristic":
        assert plan.solver.status == "optimal"


def test_check_command_and_its_exit_codes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    _run(capsys, *SMALL, "-o", str(out))
    devices = ["--device-names", "T4", "V100", "--device-numbers", "1", "1"]
    code, text, _ = _run(capsys, "check", str(out), "--model", "opt-13b", *devices)
    assert code == 0 and text.startswith(f"{out}: 1 stage, complete, fits\n")
    assert _run(capsys, "check", str(out), "--model", "opt-30b", *devices)[0] == 4
    other = ["--device-names", "T4", "--device-numbers", "4"]
    assert _run(capsys, "check", str(out), "--model", "opt-13b", *other)[0] == 4
    out.write_text(out.read_text().replace('"schema": 1', '"schema": 9'))
    assert _run(capsys, "check", str(out), "--model", "opt-13b", *devices)[0] == 3


def test_help_is_instant_and_planning_imports_no_torch() -> None:
    code = (
        "import sys; from llmpq.planner.__main__ import main; main(['--help']); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'pydantic', 'yaml', 'torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 0, "what --help does not need takes longer than --help"
    code = (
        "import sys; from llmpq.planner.__main__ import main; "
        f"main({SMALL!r} + ['--method', 'all', '--json']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_it_plans_from_a_checkout_that_is_not_installed() -> None:
    """No metadata of an installed llmpq, and the repository only as the working directory."""
    code = (
        "import importlib.metadata as m, sys\n"
        "found = m.version\n"
        "def version(name):\n"
        "    if name == 'llmpq':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
        "from llmpq.planner.__main__ import main\n"
        "sys.exit(main('--devices 4090 --model opt-125m --global_bz 2 --s 16 --n 4'.split()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "opt-125m on RTX-4090" in done.stdout


def test_a_cluster_may_name_its_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "name: x\nnodes:\n  - {name: a, accelerators: T4}\nplanning: {model: opt-1.3b}\n"
    )
    code, out, _ = _run(capsys, "--cluster", str(path), *JOB)
    assert code == 0 and out.startswith("opt-1.3b on x: ")
    code, out, _ = _run(capsys, "--cluster", str(path), "--model", "opt-125m", *JOB)
    assert code == 0 and out.startswith("opt-125m on x: ")


def test_cards_that_are_left_out_decide_no_dtype(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """V100 and T4 have no bfloat16; the A100 alone is best, in the checkpoint's own dtype."""
    path, plan = tmp_path / "lab.yaml", tmp_path / "plan.json"
    path.write_text(
        "name: lab\nnodes:\n  - {name: a, devices: [{kind: V100, count: 2}, {kind: T4}]}\n"
        "  - {name: b, devices: [{kind: A100-80GB}]}\n"
    )
    words = ["--cluster", str(path), "--model", "qwen3-8b", "-o", str(plan), *JOB]
    code, out, _ = _run(capsys, *words, "--pin", "0-35=A100-80GB-0")
    made = Plan.load(plan)
    assert code == 0 and made.workload.dtype == "bfloat16"
    assert [stage.device for stage in made.stages] == ["A100-80GB-0"]
    assert "V100-32GB, T4, which have no bfloat16, are not used: all stages compute in bfl" in out
    assert "assumed: V100 is the V100-32GB; the other is V100-16GB" in out
    for more in (["--pin", "0-35=V100-32GB-0"], ["--pin", "0-35=b:0", "--dtype", "float16"]):
        code, out, _ = _run(capsys, *words, *more)
        assert code == 0 and Plan.load(plan).workload.dtype == "float16"
        assert "not used: all stages" not in out


@pytest.mark.parametrize(
    ("devices", "left"),
    [
        pytest.param(
            "T4:4,3090",
            "T4, which has no bfloat16, is left out: with them all stages would",
            marks=pytest.mark.seldom,
        ),
        (
            "V100-32:2,A6000",
            "V100-32GB, which has no bfloat16, is left out: with them all stages",
        ),
        ("T4:2,3060", "T4 has no bfloat16, the checkpoint's dtype: all stages compute in float32"),
    ],
)
def test_float32_is_taken_only_where_it_is_better(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, devices: str, left: str
) -> None:
    """Gemma 3's values leave float16's range: with T4 or V100 all cards compute in float32."""
    plan = tmp_path / "plan.json"
    words = ["--model", "gemma-3-27b", "--devices", devices, "--batch", "2", "-o", str(plan)]
    code, out, _ = _run(capsys, *words, "--tensor-parallel", "1")
    assert code == 0 and left in out
    made = Plan.load(plan)
    alone = "which has no bfloat16" in left
    assert made.workload.dtype == ("bfloat16" if alone else "float32")
    assert {stage.kind in ("T4", "V100-32GB") for stage in made.stages} == (
        {False} if alone else {True, False}
    )


def test_engines_in_float32_are_held_against_the_cards_that_have_bfloat16(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two engines with the T4s, in float32, beat one; the A100 alone in bfloat16 beats both."""
    path = tmp_path / "plan.json"
    words = ["--model", "glm-4-9b", "--batch", "4", "--context", "4k"]
    words += ["--devices", "A100-40,T4:2", "-o", str(path)]
    code, out, _ = _run(capsys, *words)
    made = Plan.load(path)
    assert code == 0 and made.workload.dtype == "bfloat16"
    assert [stage.device for stage in made.stages] == ["A100-40GB-0"]
    assert "is left out: with them all stages would compute in float32" in out
    assert "best single card" not in out, "of the job in float32"
    code, out, _ = _run(capsys, *words, "--what-if", "batch=8")
    (line,) = [line for line in out.splitlines() if line.startswith("what if")]
    found = re.search(r"([\d.]+) instead of ([\d.]+) tokens/s", line)
    assert found is not None and float(found[1]) > float(found[2]), "in bfloat16, too"


def test_float32_is_left_to_the_cards_that_need_it_at_every_door(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_plan("glm-4-9b", devices="a100-40gb,t4", batch=1, bits="8", gen_len=20)
    assert made.workload.dtype == "bfloat16"
    assert [stage.device for stage in made.stages] == ["A100-40GB-0"]
    code, out, _ = _run(
        capsys, "fits", "--model", "glm-4-9b", "--devices", "a100-40gb,t4", "--context", "8k"
    )
    assert code == 0 and "KV cache 40.0 KiB a token (bfloat16)" in out and "T4-0" not in out
    assert "T4, which has no bfloat16, is left out" in out
    words = ["fits", "--model", "gemma-3-12b", "--bits", "16", "--devices", "a100-40gb,t4"]
    assert _run(capsys, *words)[0] == 0, "as the plan of the same words"
    words = ["fits", "--model", "gemma-3-27b", "--bits", "16", "--devices", "a100-40gb,t4:2"]
    assert _run(capsys, *words)[0] == 5


def test_cards_that_only_fit_in_bfloat16_are_not_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """16 bits of gemma-3-12b are 24 GB in bfloat16, 48 GB in float32."""
    words = ["--model", "gemma-3-12b", "--bits", "16", "--batch", "1", "--method", "uniform"]
    code, out, _ = _run(capsys, *words, "--devices", "A100-40,T4")
    assert code == 0 and "float32, and the model would not fit" in out
    code, _, said = _run(capsys, *words, "--devices", "A100-40,T4", "--dtype", "float32")
    assert code == 5 and "does not fit" in said

"""What `llmpq-algo` takes from the plan, and files and flags it says are of no use here."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.planner.__main__ import main
from llmpq.plans.plan import Plan

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
DEVICES = ["--device-names", "V100", "--device-numbers", "1"]
JOB = ["--global-bz", "2", "--s", "64", "--n", "8"]
SMALL = [*DEVICES, *JOB, "--model", "opt-1.3b"]


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize(("short", "full"), [("half", "float16"), ("fp32", "float32")])
def test_dtypes_may_have_their_short_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, short: str, full: str
) -> None:
    out = tmp_path / "plan.json"
    assert _run(capsys, *SMALL, "--dtype", short, "-o", str(out))[0] == 0
    assert Plan.load(out).workload.dtype == full


def test_a_plan_is_checked_against_its_own_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    assert _run(capsys, *SMALL, "-o", str(out))[0] == 0
    code, text, err = _run(capsys, "check", str(out), *DEVICES)
    assert (code, err) == (0, "") and text.startswith(f"{out}: 1 stage, complete, fits\n")
    assert _run(capsys, "check", str(out), *DEVICES, "--model", "opt-125m")[0] == 4


def test_a_plan_is_checked_against_the_directory_it_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, model = tmp_path / "plan.json", str(ROOT / "examples" / "demo-7m")
    cluster = ["--cluster", str(ROOT / "examples" / "cpu-two-stages.yaml")]
    assert _run(capsys, *cluster, *JOB, "--model", model, "-o", str(out))[0] == 0
    assert _run(capsys, "check", str(out), *cluster)[0] == 0
    plan = Plan.load(out)
    gone = plan.model.model_copy(update={"path": str(tmp_path / "gone")})
    plan.model_copy(update={"model": gone}).save_json(out)
    assert _run(capsys, "check", str(out), *cluster)[0] == 0, "by the shapes that it carries"
    plan.model_copy(update={"model": gone, "inputs": None}).save_json(out)
    code, _, err = _run(capsys, "check", str(out), *cluster)
    text = "llmpq-algo: the plan's model 'demo-7m' is not here; give --model DIR\n"
    assert (code, err) == (2, text)
    assert _run(capsys, "check", str(out), *cluster, "--model", model)[0] == 0


@pytest.mark.parametrize("mode", [["--pareto"], ["--quality-budget", "1"]])
def test_theta_beside_what_has_its_own(capsys: pytest.CaptureFixture[str], mode: list[str]) -> None:
    for theta in ("2", "0"):
        code, out, err = _run(capsys, *SMALL, "--theta", theta, *mode)
        assert (code, out) == (2, "")
        assert f"--theta has no effect with {mode[0]}" in err and f"leave {mode[0]} out" in err


def test_a_table_of_kinds_is_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    table = str(ROOT / "clusters" / "gpus.yaml")
    code, out, err = _run(capsys, "--cluster", table, *JOB, "--model", "opt-1.3b")
    assert (code, out) == (2, "")
    assert err == (
        f"llmpq-algo: '{table}' is a table of device kinds, expected a cluster: 'name' and 'nodes' "
        "that say which devices you have; llmpq-algo devices --yaml prints this machine's\n"
    )


def test_a_cluster_without_a_name_is_no_table_of_kinds(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for text in ("{}", "nodes: []", "links: {between_nodes: {gbps: 1}}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"cluster\.yaml: '") as caught:
            Cluster.load(path)
        assert "table" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fit --model qwen3-32b", "unknown command 'fit': did you mean 'fits'? see"),
        ("exports plan.json", "unknown command 'exports': did you mean 'export'? see"),
        ("qwen3-32b --devices 4090", "'qwen3-32b' belongs to no flag: write --model qwen3-32b;"),
        ("fits --model qwen3-32b 3090:2", "'3090:2' belongs to no flag: write --devices 3090:2;"),
        ("verify --plan p.json", "write PLAN without '--plan': llmpq-algo verify plan.json"),
        ("--model qwen3-32b 4090,cpu", "'4090,cpu' belongs to no flag: write --devices 4090,cpu;"),
        ("fits --model qwen3-32b --devices 4090 --context 32000k", "--context must be between 1 "),
        ("--model qwen3-32b --devices 4090 --bits q4", "unknown precision 'q4': did you mean '4'?"),
    ],
)
def test_a_word_in_a_wrong_place_is_answered(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"llmpq-algo: {said}")

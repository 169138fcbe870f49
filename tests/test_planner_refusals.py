"""What the planner refuses or warns of: files of another model, jobs longer than its positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmpq.model_spec import ModelSpec
from llmpq.plan import Plan
from llmpq.planner.__main__ import main
from llmpq.planner.positions import positions_note
from llmpq.workload import Workload

pytestmark = pytest.mark.pure

PAPER = Path(__file__).resolve().parents[1] / "clusters" / "paper"
TINY = ["--device-names", "V100", "--device-numbers", "1", "--global-bz", "2"]
JOB = ["--s", "64", "--n", "8"]
REMEDY = "make one for this model with llmpq-profile indicator --model"


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def _omega(path: Path, model: str, fingerprint: str | None) -> Path:
    layers = ModelSpec.by_name("opt-1.3b").num_layers
    data = {"indicator": "variance", "model": model, "num_layers": layers}
    data["weights"] = {p: [1.0] * layers for p in ("w4a16", "w8a16")}
    path.write_text(json.dumps({**data, "model_fingerprint": fingerprint}))
    return path


def test_omega_of_another_model_of_as_many_layers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here = ModelSpec.by_name("opt-1.3b").fingerprint()
    words = [*TINY, *JOB, "--model", "opt-1.3b", "--omega-file"]
    for model, fingerprint, got in (
        ("qwen3-2b", None, f"model qwen3-2b, got opt-1.3b; {REMEDY}\n"),
        ("opt-1.3b", "beef", f"model opt-1.3b (beef), got opt-1.3b ({here}); {REMEDY}\n"),
    ):
        path = _omega(tmp_path / "omega.json", model, fingerprint)
        code, _, err = _run(capsys, *words, str(path))
        assert (code, err) == (2, f"llmpq-algo: '{path}' was made for {got}")
    for model, fingerprint in (("OPT-1.3b", None), ("a-folder-renamed", here)):
        path = _omega(tmp_path / "omega.json", model, fingerprint)
        assert _run(capsys, *words, str(path))[0] == 0


def test_omega_of_another_number_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    path = PAPER / "omega-opt-13b.json"
    words = [*TINY, *JOB, "--model", "opt-1.3b", "--omega-file", str(path)]
    code, _, err = _run(capsys, *words)
    text = f"'{path}' was made for 40 layers (opt-13b), the model has 24; {REMEDY}\n"
    assert (code, err) == (2, f"llmpq-algo: {text}")


def test_a_job_beyond_the_models_positions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    long = [*TINY, "--s", "4000", "--n", "98", "-o", str(out)]
    code, text, _ = _run(capsys, *long, "--model", "llama-2-7b")
    beyond = "--s 4000 plus --n 98 is beyond the 4096 positions of llama-2-7b"
    assert code == 0 and f"note: warning: {beyond}; text past what rotary" in text
    assert f"warning: {beyond}" in Plan.load(out).solver.note
    code, text, _ = _run(capsys, *long[:-3], "97", *long[-2:], "--model", "llama-2-7b")
    assert code == 0 and "beyond" not in text and not Plan.load(out).solver.note
    code, _, err = _run(capsys, *long, "--model", "opt-1.3b")
    assert code == 2 and err.endswith("2048 positions of opt-1.3b; give a smaller --s or --n\n")
    code, _, err = _run(
        capsys, *TINY, "--s", "2000", "--n", "8", "--model", "opt-1.3b", "--what-if", "n=80"
    )
    assert code == 2 and "--s 2000 plus --n 80 is beyond the 2048 positions" in err


def test_alibi_may_extrapolate() -> None:
    bloom = ModelSpec.by_name("bloom-176b")
    note = positions_note(bloom, Workload(batch=1, prompt_len=2048, gen_len=100))
    assert "ALiBi extrapolates" in note and not note.startswith("warning")

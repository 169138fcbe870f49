"""Sensitivity -> plan with w4a4 and w8a8 layers -> llmpq-quantize -> stages, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main as plan_main
from llmpq.plans.member_memory import member_memory, planned_shape
from llmpq.plans.plan import Plan, QuantizationForm
from llmpq.precision import Precision
from llmpq.profiler.__main__ import main as profile_main
from llmpq.profiler.cli.quantize import main as quantize_main
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.sizes.pool_size import PoolSize
from llmpq.workload import Workload
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
TEXT = Path(__file__).parents[3] / "examples" / "heldout.txt"


@pytest.fixture(scope="module")
def omega(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("omega") / "omega.json"
    words = f"--model {demo_model} --text {TEXT} --kind output --bits w4a4,w8a8,w16a16"
    assert (
        profile_main(["indicator", *words.split(), *f"--windows 2 --window 128 -o {out}".split()])
        == 0
    )
    return out


def plan(demo_model: Path, omega: Path, folder: Path, *more: str) -> Plan:
    """Plan two CPU stages that have no room for 16 bits and little for 8."""
    cluster, out = folder / "cluster.yaml", folder / "plan.json"
    cluster.write_text(
        "schema: 1\nname: small\nnodes:\n  - name: here\n    devices:\n"
        "      - {kind: CPU, threads: 1, memory: 9.4 MiB}\n"
        "      - {kind: CPU, threads: 1, memory: 8.2 MiB}\n"
    )
    words = f"--model {demo_model} --cluster {cluster} --global-bz 4 --s 32 --n 16 --theta 0.0001"
    words += f" --bits w4a4,w8a8,w16a16 --omega-file {omega} -o {out}"
    words += " --prefill-microbatch 2 --decode-microbatch 2 --dtype float32 --engines 1"
    assert plan_main([*words.split(), *more]) == 0
    return Plan.load(out)


def test_a_planned_mix_has_the_planned_bytes(demo_model: Path, omega: Path, tmp_path: Path) -> None:
    made = plan(demo_model, omega, tmp_path)
    assert {Precision.W4A4, Precision.W8A8} == set(made.precisions)
    assert made.quantization.outliers == 8
    words = f"{demo_model} {tmp_path / 'q'} --strat_file_name {tmp_path / 'plan.json'}"
    words += f" --text {TEXT} --windows 2 --window 128"
    assert quantize_main(words.split()) == 0
    spec = ModelSpec.from_directory(tmp_path / "q")
    source = open_checkpoint(tmp_path / "q", spec)
    for index, stage in enumerate(made.stages):
        size = PoolSize(num_blocks=8, slots=2, max_len=64)
        _, report = build_stage(made, index, spec, source, torch.device("cpu"), size)
        assert stage.memory is not None
        planned = stage.memory.weights_bytes + stage.memory.embedding_bytes
        assert report.weights_bytes == planned
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    mixed = ReferencePipeline.from_directory(tmp_path / "q").generate(prompts, max_new=6)
    assert all(len(row) == 6 for row in mixed)


@pytest.mark.parametrize(
    ("scheme", "shares"), [("w4a4", (2, 1)), ("w4a4", (1, 1)), ("w8a8", (1, 1))]
)
def test_devices_that_share_a_stage_hold_their_parts_of_the_codes(
    demo_model: Path, tmp_path: Path, scheme: str, shares: tuple[int, ...]
) -> None:
    """Bytes as planned; the loss of quality is that of one device."""
    words = [str(demo_model), str(tmp_path / "q"), "--scheme", scheme, "--text", str(TEXT)]
    assert quantize_main([*words, "--windows", "1", "--window", "128"]) == 0
    spec = ModelSpec.from_directory(tmp_path / "q")
    form = QuantizationForm(outliers=8 if scheme == "w4a4" else 0)
    work = Workload(batch=2, prompt_len=64, gen_len=8, dtype="float32")
    one, shared = (
        manual_plan(spec, work, shares=own, precision=Precision.parse(scheme), quantization=form)
        for own in ((), (shares,))
    )
    prompt = [5, 6, 7, 8, *range(40, 90)]
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)

    def scored(directory: Path, plan: Plan) -> torch.Tensor:
        with LLM(str(directory), plan=plan, backend="threads") as llm:
            (answer,) = llm.generate([{"prompt_token_ids": prompt}], asked)
            for worker, load in zip(plan.workers, llm.engine.client.load_reports, strict=True):
                shape = planned_shape(plan, worker.stage, None, on_gpu=False)
                held = member_memory(plan, worker, spec, shape)
                if directory != demo_model:
                    assert load.weights_bytes == held.weights_bytes + held.embedding_bytes
        pairs = zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)
        return torch.tensor([of[token].logprob for of, token in pairs])

    plain = manual_plan(spec, work)
    exact = scored(demo_model, plain)
    alone, together = (
        (scored(tmp_path / "q", plan) - exact).abs().mean() for plan in (one, shared)
    )
    assert 0 < together < 1.15 * alone


def test_the_number_of_outliers_is_planned(
    demo_model: Path, omega: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, many = (plan(demo_model, omega, tmp_path, "--outliers", n) for n in ("0", "16"))
    assert (few.quantization.outliers, many.quantization.outliers) == (0, 16)
    with pytest.raises(AssertionError):
        plan(demo_model, omega, tmp_path, "--outliers", "256")
    assert "--outliers 256: expected 0 to 255" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_named(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    words = [str(model), str(tmp_path / "out"), "--scheme", "w4a16", "--text", str(TEXT)]
    assert quantize_main(words) == 2
    assert "config.json says 100 tokens: the two do not belong together" in capsys.readouterr().err


def test_a_directory_names_one_number_of_kv_bits(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(demo_model), str(tmp_path / "out"), "--scheme", "w4a16", "--text", str(TEXT)]
    assert quantize_main([*words, "--kv-cache-dtype", "8v4"]) == 2
    assert "config.json names one number of bits for keys and values" in capsys.readouterr().err

"""Perplexity: the stated protocol, the stated quality per precision, and the command."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from llmpq.errors import PlanMismatchError
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import ClusterRef, ModelRef, Plan, StagePlan
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.cli.tool_flags import EvalOptions, eval_parser
from llmpq.runtime.steps.step import Step
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.tools import evaluate
from llmpq.runtime.tools.evaluate import (
    MeasuredJob,
    describe,
    measured_plan,
    open_model,
    perplexity,
    scores_of,
    windows,
)
from llmpq.sizes.workspace import QUERIES_AT_ONCE
from llmpq.workload import Workload
from reference.contiguous_kv import make_kv_cache
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
TEXT = Path(__file__).parents[3] / "examples" / "heldout.txt"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokens(demo_model):
    return Tokenizer(demo_model).encode(TEXT.read_text(), special=False)


def test_perplexity_is_that_of_transformers(demo_model, tokens):
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    some, loss, count = tokens[:500], 0.0, 0
    for start in range(0, len(some), 200):
        window = torch.tensor([some[start : start + 200]])
        with torch.no_grad():
            mean = float(reference(window, labels=window).loss)
        loss, count = loss + mean * (window.numel() - 1), count + window.numel() - 1
    result = perplexity(ReferencePipeline.from_directory(demo_model).scores, some, window=200)
    assert (result.num_windows, result.num_tokens) == (3, count)
    assert result.value == pytest.approx(math.exp(loss / count), rel=1e-5)
    shifted = perplexity(ReferencePipeline.from_directory(demo_model).scores, some[1:], window=200)
    assert shifted.value != pytest.approx(result.value, rel=1e-4)


@pytest.mark.parametrize("precision", ["w16a16", "w4a16"])
def test_the_engine_scores_as_the_plain_loop(demo_model, tokens, precision):
    """Longer than a block, a window that fills the model's positions, and one token."""
    spec = ModelSpec.from_directory(demo_model)
    job = MeasuredJob(max_len=spec.max_positions)
    plan, _ = measured_plan(str(demo_model), spec, job, precision=precision)
    plain = ReferencePipeline.from_directory(demo_model, precisions=plan.precisions)
    with open_model(str(demo_model), plan) as llm:
        for some in (tokens[:2], tokens[:300], tokens[: spec.max_positions]):
            ours, likeliest = scores_of(llm)(some)
            wanted, expected = plain.scores(some)
            assert ours == pytest.approx(wanted, abs=1e-3) and likeliest == expected
        assert scores_of(llm)(tokens[:1]) == ([], [])


@pytest.mark.parametrize("bits", ["kv8", "kv2"])
def test_prompts_are_read_through_the_packed_cache(demo_model, tokens, bits):
    """As by an unpaged cache in steps of as many queries; in others a code may round otherwise."""
    spec, some = ModelSpec.from_directory(demo_model), tokens[:700]
    plan, described = measured_plan(str(demo_model), spec, MeasuredJob(max_len=len(some)), kv=bits)
    assert described == f"w16a16 x8, {bits}"
    with open_model(str(demo_model), plan) as llm:
        ours, _ = scores_of(llm)(some)
    plain = ReferencePipeline.from_directory(demo_model)
    (stage,) = plain.stages
    cache = make_kv_cache(
        spec,
        KVPrecision.parse(bits),
        num_layers=len(stage.layers),
        slots=1,
        max_len=len(some),
        dtype=torch.float32,
    )
    parts = []
    for at in range(0, len(some), QUERIES_AT_ONCE):
        part = some[at : at + QUERIES_AT_ONCE]
        step = Step.of([0], [at], [len(part)])
        parts.append(plain.logits(torch.tensor([part]), step, [cache], all_positions=True)[0])
    logits = torch.cat(parts)[:-1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(some[1:])[:, None])[:, 0]
    assert ours == pytest.approx(wanted.tolist(), abs=1e-4)
    exact = plain.scores(some)[0]
    apart = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
    assert apart > (0.5 if bits == "kv2" else 5e-3)


def test_quantised_demo_model_keeps_its_quality(demo_model, tokens):
    """8 bits within 0.5 %, 4 bits (group 128, asymmetric, clip search) within 5 % of 16 bits."""

    def value(name: str) -> float:
        precisions = [Precision.parse(name)] * 8
        return perplexity(
            ReferencePipeline.from_directory(demo_model, precisions=precisions).scores,
            tokens[-4096:],
            window=1024,
        ).value

    whole = value("w16a16")
    assert 3.5 < whole < 4.5
    assert value("w8a16") == pytest.approx(whole, rel=0.005)
    assert whole * 1.005 < value("w4a16") < whole * 1.05


def run(capsys, *arguments: str) -> str:
    assert evaluate.main(eval_parser().read_as(EvalOptions, arguments)) == 0
    return capsys.readouterr().out


@pytest.fixture
def short_text(tmp_path) -> Path:
    path = tmp_path / "short.txt"
    path.write_text(TEXT.read_text()[:3000])
    return path


def plan_for(spec: ModelSpec, precisions: tuple[Precision, ...]) -> Plan:
    stage = StagePlan(
        device="cpu0",
        node="a",
        kind="cpu",
        profile_kind="cpu",
        layers=(0, spec.num_layers),
        precisions=precisions,
    )
    return Plan(
        model=ModelRef(name="x", num_layers=spec.num_layers, fingerprint=spec.fingerprint()),
        cluster=ClusterRef(name="c", fingerprint="f"),
        workload=Workload(batch=1, prompt_len=8, gen_len=2, dtype="bfloat16"),
        prefill_microbatch=1,
        decode_microbatch=1,
        stages=(stage,),
    )


def test_the_command_prints_value_and_protocol(demo_model, short_text, capsys):
    out = run(capsys, "--model", str(demo_model), "--text", str(short_text))
    assert out.startswith("perplexity ") and "w16a16 x8, float32" in out
    assert "non-overlapping windows of at most 1024 tokens" in out


def test_a_plan_says_precisions_and_dtype(demo_model, short_text, tmp_path, capsys):
    w4, w8 = Precision.W4A16, Precision.W8A16
    plan = plan_for(ModelSpec.from_directory(demo_model), (w8, w8, w4, w8, w8, w8, w8, w8))
    plan.save_json(tmp_path / "plan.json")
    short_text.write_text(short_text.read_text()[:600])
    common = ["--model", str(demo_model), "--text", str(short_text), "--json"]
    planned = json.loads(run(capsys, *common, "--strat_file_name", str(tmp_path / "plan.json")))
    assert planned["precision"] == "w8a16 x2, w4a16 x1, w8a16 x5"
    assert planned["dtype"] == "bfloat16"
    named = "8,8,4,8,8,8,8,8"
    same = json.loads(run(capsys, *common, "--precision", named, "--dtype", "bfloat16"))
    assert same["value"] == planned["value"]
    by_name = json.loads(run(capsys, *common, "--strat_file_name", str(tmp_path / "plan")))
    assert by_name == planned
    dense = json.loads(run(capsys, *common, "--dtype", "bfloat16"))
    assert dense["value"] != planned["value"]


def test_a_plan_for_another_model_is_refused(tiny_models, demo_model, short_text, tmp_path, capsys):
    spec = ModelSpec.from_directory(tiny_models.directory("llama"))
    plan_for(spec, (Precision.W16A16,) * 3).save_json(tmp_path / "plan.json")
    arguments = ["--model", str(demo_model), "--text", str(short_text)]
    with pytest.raises(PlanMismatchError, match="re-plan"):
        run(capsys, *arguments, "--strat_file_name", str(tmp_path / "plan.json"))
    with pytest.raises(ValueError, match="--precision has no effect with --plan"):
        plan = str(tmp_path / "plan.json")
        run(capsys, *arguments, "--strat_file_name", plan, "--precision", "4")


def test_bad_input_is_explained(demo_model, short_text, tmp_path, capsys):
    with pytest.raises(ValueError, match="names 2 layers, demo-7m has 8"):
        run(capsys, "--model", str(demo_model), "--text", str(short_text), "--precision", "4,8")
    with pytest.raises(ValueError, match=r"--text '.*none.txt' cannot be read: No such file"):
        run(capsys, "--model", str(demo_model), "--text", str(tmp_path / "none.txt"))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        perplexity(ReferencePipeline.from_directory(demo_model).scores, [5], window=8)
    (tmp_path / "m").mkdir()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path / "m")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", "0"], "a window needs at least 2 tokens, got 0"),
        (["--window", "64", "--stride", "65"], "stride must be between 1 and the window's 64"),
        (["--window", "1025"], "--window 1025 is beyond the 1024 positions of demo-7m"),
        (["--precision", ""], "''"),
        (["--kv-cache-dtype", ""], "''"),
        (["--symmetric"], "--symmetric has no effect on weights without zeros: add --precision"),
        (["--symmetric", "--precision", "w8a8"], "--symmetric has no effect"),
    ],
)
def test_what_is_given_is_heeded_or_refused(demo_model, short_text, capsys, words, message):
    with pytest.raises(ValueError, match=message):
        run(capsys, "--model", str(demo_model), "--text", str(short_text), *words)


def test_tokenizer_round_trip_and_chat(demo_model, tmp_path):
    tokenizer = Tokenizer(demo_model)
    text = "def main(args):\n    return 0\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    hello = [{"role": "user", "content": "hello"}]
    assert tokenizer.decode(tokenizer.encode_chat(hello)) == "# user:\nhello\n\n# assistant:\n"
    shutil.copy(demo_model / "tokenizer.json", tmp_path)
    bare = Tokenizer(tmp_path)
    assert not bare.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        bare.encode_chat(hello)
    assert bare.encode_chat(hello, template="{{ messages[0].content }}") == bare.encode("hello")


def test_runs_of_equal_precisions_are_named_once():
    w4, w8 = Precision.W4A16, Precision.W8A16
    assert describe([w4, w4, w8, w4]) == "w4a16 x2, w8a16 x1, w4a16 x1"


def test_windows_of_every_protocol():
    stream = list(range(10))
    whole = [(w.tokens, w.counted) for w in windows(stream, 4)]
    assert whole == [([0, 1, 2, 3], 3), ([4, 5, 6, 7], 3), ([8, 9], 1)]
    assert [w.tokens for w in windows(stream, 4, whole=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    overlapping = [(w.tokens[-w.counted :]) for w in windows(stream, 4, stride=2)]
    assert overlapping == [[1, 2, 3], [4, 5], [6, 7], [8, 9]], "every token once, in order"
    for bad, message in (
        (lambda: windows(stream, 4, stride=5), "stride must be between 1 and the window's 4"),
        (lambda: windows(stream, 1), "a window needs at least 2 tokens"),
        (lambda: windows(stream, 11, whole=True), "a text of at least 11 tokens, got 10"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()


def test_overlapping_windows_know_more(demo_model, tokens):
    pipeline, some = ReferencePipeline.from_directory(demo_model), tokens[:800]
    apart = perplexity(pipeline.scores, some, window=200)
    overlapping = perplexity(pipeline.scores, some, window=200, stride=50)
    assert overlapping.num_tokens == len(some) - 1
    assert overlapping.value < apart.value
    assert "windows that overlap by 150 of at most 200 tokens" in overlapping.protocol()
    # The oracle: each judged token by itself, from all that its window has before it.
    losses = []
    for start in (0, 50):
        step = Step.of([0], [0], [200])
        window = torch.tensor([some[start : start + 200]])
        logits = pipeline.logits(window, step, pipeline.caches(1, 200), all_positions=True)
        every = torch.nn.functional.cross_entropy(logits[0, :-1], window[0, 1:], reduction="none")
        losses.append(every if start == 0 else every[-50:])
    found = perplexity(pipeline.scores, some[:250], window=200, stride=50)
    assert math.log(found.value) == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_agreement_counts_equal_first_choices(demo_model, short_text, tmp_path, capsys):
    common = ["--model", str(demo_model), "--text", str(short_text), "--json", "--agreement"]
    same = json.loads(run(capsys, *common))
    eight, three = (json.loads(run(capsys, *common, "--precision", p)) for p in ("8", "3"))
    assert same["agreement"] == 1.0 > eight["agreement"] > three["agreement"] > 0.5
    words = ["--model", str(demo_model), "--text", str(short_text), "--precision", "w8a16"]
    assert "greedy agreement with 16 bits: " in run(capsys, *words, "--agreement")
    (tmp_path / "q").mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "q" / name).symlink_to(demo_model / name)
    config = json.loads((demo_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantised; give the directory it was made from"):
        run(capsys, *common, "--reference", str(tmp_path / "q"))

"""From rows to requests and from tokens to text; what the command decides before anything runs."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict

import pytest
from rich.console import Console

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase, Regime
from llmpq.errors import BadPlanError
from llmpq.precision import Precision
from llmpq.runtime.cli.main import COMMANDS, main
from llmpq.runtime.cli.plan_file import load_plan
from llmpq.runtime.cli.run import prepare_rows
from llmpq.runtime.drafts.drafters import AutoDrafter, FixedDrafter, speculation_report
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.launch.stages.stage_loading import make_drafter
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.report.job_report import JobResult, build_report, precision_runs, print_summary
from llmpq.runtime.requests.request import Request
from llmpq.runtime.requests.request_output import CompletionOutput, RequestOutput
from llmpq.runtime.steps.trace import KindTotals, LoadReport, StageRecord, TraceEvent
from llmpq.runtime.text.answer_text import StopTexts
from llmpq.runtime.text.batch_rows import BatchRow, Defaults, json_row, text_row
from llmpq.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu
CHAT = json.dumps(
    {
        "custom_id": "c",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "import os"}]},
    }
)


@pytest.fixture(scope="module")
def tokenizer(demo_model, tmp_path_factory):
    """Return the model's tokenizer without its chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(demo_model / "tokenizer.json", folder)
    return Tokenizer(folder)


@pytest.fixture
def job(demo_model, make_plan, tokenizer):
    """Return a maker of prompts and errors over a plan of 32-token prompts and 16 new tokens."""

    def make(*rows: BatchRow, using: Tokenizer = tokenizer, skip=(), speculate=None):
        drafts = {"speculate": speculate, "gamma": 2} if speculate else {}
        llm = LLM(demo_model, plan=make_plan(demo_model, ()), start=False, offline=True, **drafts)
        prompts, errors = prepare_rows(rows, llm, using, skip=skip)
        return {index: own.requests[0] for index, own in prompts.items()}, errors

    return make


def test_rows_become_requests(job, tokenizer):
    rows = [
        text_row(0, "import os", Defaults()),
        json_row(1, '{"prompt": [5, 6], "max_tokens": 3, "ignore_eos": true}', Defaults()),
    ]
    first, second = job(*rows)[0].values()
    assert first.prompt == tuple(tokenizer.encode("import os"))
    assert (first.max_new, first.stop_ids) == (16, frozenset({0})), "the plan's, and end of text"
    assert (second.prompt, second.max_new, second.stop_ids) == ((5, 6), 3, frozenset())
    assert list(job(*rows, skip=[0])[0]) == [1], "what is done is not run again"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": [5, 4096]}', "token 4096 is not in the vocabulary of 4096"),
        ('{"prompt": []}', "no tokens"),
        (json.dumps({"prompt": [7] * 513}), "513 tokens, and the maximum context length"),
        (CHAT, "no chat template"),
    ],
)
def test_rows_there_is_no_room_for_become_errors(job, line, message):
    requests, errors = job(json_row(0, line, Defaults()), text_row(1, "x", Defaults()))
    assert message in errors[0]
    assert list(requests) == [1]


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"prompt": [7] * 33}),
        '{"prompt": [7], "max_tokens": 400}',
        '{"prompt": [7], "max_tokens": 9999}',
    ],
)
@pytest.mark.parametrize("speculate", [None, "ngram", "kv4"])
def test_rows_longer_than_planned_run_with_drafts_and_without(job, line, speculate):
    assert not job(json_row(0, line, Defaults()), speculate=speculate)[1]


def test_a_chat_row_uses_the_models_template(job, demo_model, tmp_path):
    folder = shutil.copytree(demo_model, tmp_path / "chatty")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    requests, _ = job(json_row(0, CHAT, Defaults()), using=Tokenizer(folder))
    assert Tokenizer(folder).decode(requests[0].prompt) == "<user>import os<assistant>"


def finished(tokens: list[int], total_s: float = 2.0) -> RequestOutput:
    answer = CompletionOutput(
        index=0, text="", token_ids=tokens, finish_reason="length", first_token_s=0.5,
        total_s=total_s,
    )  # fmt: skip
    return RequestOutput(request_id="0", prompt=None, prompt_token_ids=[5] * 7, outputs=[answer])


def test_a_stop_text_is_seen_when_its_last_token_arrives(demo_model, tokenizer):
    body = tokenizer.encode("    return x + 1\n\n\ndef g")
    request = Request(id=0, prompt=(1,), max_new=99, stop_texts=("def",))
    seen = StopTexts(demo_model)
    stops = []
    for token in body:
        request.output.append(token)
        stops.append(seen(request))
    place = stops.index(True)
    assert "def" in tokenizer.decode(body[: place + 1])
    assert "def" not in tokenizer.decode(body[:place])


def test_plans_by_stem_and_never_from_a_pickle(demo_model, make_plan, tmp_path):
    plan = make_plan(demo_model, ())
    plan.save_json(tmp_path / "plan.json")
    assert load_plan(str(tmp_path / "plan")) == load_plan(str(tmp_path / "plan.json")) == plan
    (tmp_path / "old.pkl").write_bytes(b"x")
    with pytest.raises(BadPlanError, match="no pickle"):
        load_plan(str(tmp_path / "old.pkl"))


def test_the_drafter_follows_the_settings(demo_model, make_plan, tmp_path):
    plan = make_plan(demo_model, ())
    entry = LatencyEntry(
        device_kind="CPU@1t",
        part="layer",
        phase=Phase.DECODE,
        precision=Precision.W16A16,
        dtype="float32",
        regimes=(Regime(terms={"1": 1e-3}),),
        source="profile",
    )
    costs = CostModel(model="m", model_fingerprint="0", entries=(entry,))
    costs.save_json(tmp_path / "costs.json")
    path = str(tmp_path / "costs.json")
    assert make_drafter(plan, EngineOptions()) is None
    assert isinstance(make_drafter(plan, EngineOptions(speculate="ngram", gamma=2)), FixedDrafter)
    assert isinstance(make_drafter(plan, EngineOptions(speculate="ngram", costs=path)), AutoDrafter)


def test_the_report_sets_predictions_beside_measurements(demo_model, make_plan):
    plan = make_plan(demo_model, (3,))
    totals = {"prefill": KindTotals(2, 4, 0.2), "decode": KindTotals(10, 20, 0.5)}
    events = (TraceEvent("decode", 1, 2, 1, 0.0, 0.05),)
    record = StageRecord(totals=totals, events=events)
    assert StageRecord.from_data(json.loads(json.dumps(asdict(record)))).totals == totals
    load = LoadReport(weights_bytes=100, kv_bytes=20, seconds=0.1)
    report = build_report(
        JobResult(
            plan=plan,
            loads=[load, load],
            records=[record, record],
            outputs=[finished([1, 2, 3, 4])],
            num_failed=1,
            startup_s=3.0,
        )
    )
    assert report["measured"] == {"prefill_s": 0.5, "decode_s": 1.5, "total_s": 2.0}
    assert report["output_throughput"] == 2.0 and report["mean_tpot_ms"] == 500
    stage = report["stages"][0]
    assert stage["steps"]["decode"]["mean_s"] == 0.05 and stage["busy_share"] == 0.35
    assert stage["memory"]["measured_bytes"] == 120
    assert precision_runs(plan.stages[0]) == "w16a16 x3"
    json.dumps(report)


def test_the_report_says_what_came_of_the_drafts(demo_model, make_plan):
    totals = {
        "prefill": KindTotals(1, 2, 0.2),
        "draft": KindTotals(6, 12, 0.3),
        "verify": KindTotals(2, 4, 0.5),
    }
    drafter = FixedDrafter("w4kv4", 3)
    drafter.observe(3, 2)
    drafter.observe(3, 0)

    def report(plain: list[RequestOutput] | None) -> dict:
        job = JobResult(
            plan=make_plan(demo_model, ()),
            loads=[LoadReport(weights_bytes=100, kv_bytes=20, seconds=0.1, draft_bytes=7)],
            records=[StageRecord(totals=totals)],
            outputs=[finished([1, 2, 3, 4])],
            num_failed=0,
            startup_s=3.0,
            speculation=speculation_report(drafter),
            plain=plain,
        )
        return build_report(job)

    slower = finished([1, 2, 3, 4], total_s=5)
    seen = report([slower])["speculation"]
    assert seen["acceptance_by_place"] == [0.5, 0.5, 0] and seen["tokens_per_verify"] == 2
    assert seen["time_share"] == pytest.approx({"prefill": 0.2, "draft": 0.3, "verify": 0.5})
    assert seen["draft_bytes"] == 7
    assert seen["plain"] == {
        "total_s": 5,
        "output_throughput": 0.8,
        "speedup": 2.5,
        "rows_with_the_same_tokens": 1,
    }
    shown = io.StringIO()
    print_summary(report([slower]), Console(file=shown, width=200))
    assert "draft 30%, verify 50%; 2.50x plain decoding" in shown.getvalue()
    assert report(None)["speculation"]["plain"] is None


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0 and "usage: llmpq-dist" in capsys.readouterr().out


def test_bad_usage_is_one_sentence_and_exit_2(tmp_path, capsys):
    missing = str(tmp_path / "none.json")
    code = main(["run", "--plan", missing, "-i", "x", "-o", "y"])
    assert code == 3 and "no such file" in capsys.readouterr().err
    assert main(["--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("llmpq-dist: ")

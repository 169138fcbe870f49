"""The harness's model class: its answers against transformers, and tiny local tasks end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmpq.runtime.tools.evaluate import perplexity, scores_of

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install 'llmpq[eval]'"
)

from llmpq.runtime.tools.lm_eval import LlmpqModel  # noqa: E402

pytestmark = pytest.mark.cpu
PAIRS = [
    ("def main():\n    ", "return 0"),
    ("import os\nimport ", "sys"),
    ("", "class Node:"),
    ("for index in range(", "zebra zebra"),
    ("x = 1\n" * 700, "x = 1"),
]


@pytest.fixture(scope="module")
def model(demo_model: Path) -> LlmpqModel:
    torch.set_num_threads(1)
    return LlmpqModel(str(demo_model), batch_size=2)


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


def request(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def test_likelihoods_are_those_of_transformers(model: LlmpqModel, reference: Any) -> None:
    found = model.loglikelihood([request(*pair) for pair in PAIRS], disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(PAIRS, found, strict=True):
        stripped = context.rstrip()
        whole = model.tok_encode(context + continuation)
        given = len(model.tok_encode(stripped))
        if not context:
            whole, given = [model.prefix_token_id, *whole], 1
        judged = len(whole) - given
        whole = whole[-model.max_length - 1 :]
        with torch.no_grad():
            logits = reference(torch.tensor([whole[:-1]])).logits[0, -judged:]
        targets = torch.tensor(whole[-judged:])
        expected = float(logits.log_softmax(-1).gather(1, targets[:, None]).sum())
        assert value == pytest.approx(expected, abs=2e-3)
        assert greedy == bool((logits.argmax(-1) == targets).all())
    assert found[3][0] < found[0][0], "an odd continuation is less likely"


def test_rolling_likelihood_counts_every_token_once(model: LlmpqModel, demo_model: Path) -> None:
    text = (Path(__file__).parents[3] / "examples" / "heldout.txt").read_text()[:2000]
    short = LlmpqModel(str(demo_model), max_length=200, batch_size=3)
    tokens = model.tok_encode(text)
    (whole,) = model.loglikelihood_rolling([request(text)])
    (pieces,) = short.loglikelihood_rolling([request(text)])
    assert len(tokens) > 2 * short.max_length
    # One window over everything: the text after the prefix token, as `llmpq-dist eval` judges it.
    value = perplexity(scores_of(model.llm), [model.prefix_token_id, *tokens], window=1024)
    assert value.num_windows == 1 and value.num_tokens == len(tokens)
    assert whole == pytest.approx(-torch.tensor(value.value).log().item() * len(tokens), rel=1e-4)
    assert pieces < whole, "less context, less likely"


def test_generation_stops_at_its_texts(model: LlmpqModel, reference: Any) -> None:
    prompt = "def add(a, b):\n    return"
    (text,) = model.generate_until([request(prompt, {"until": [], "max_gen_toks": 24})])
    tokens = reference.generate(
        torch.tensor([model.tok_encode(prompt)]), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    assert text == model.llm.tokenizer.decode(tokens[0, len(model.tok_encode(prompt)) :].tolist())
    stop = text[5:8]
    cut = model.generate_until(
        [
            request(prompt, {"until": [stop], "max_gen_toks": 24}),
            request("import ", {"until": "\n"}),
        ]
    )
    assert cut[0] == text[: text.index(stop)] and "\n" not in cut[1]


COMMAND = """
import functools, runpy
import lm_eval.tasks

# Some twenty seconds go into reading the thousands of tasks that the harness brings along.
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
runpy.run_module("llmpq.runtime.tools.lm_eval", run_name="__main__", alter_sys=True)
"""
"""`python -m llmpq.runtime.tools.lm_eval`, which finds the tasks of `--include_path` alone."""
KEPT = ("LLMPQ_", "HOME", "XDG_CACHE_HOME")
"""Variables that it sees, too: where native code lies that is compiled already."""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Three tasks over four documents of this file's making."""
    rows = [
        {"question": f"import {name}\nimport", "choices": [" os", " zq zq zq"], "answer": 0}
        for name in ("sys", "re", "json", "math")
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        f"  cache_dir: {tmp_path / 'cache'}\ntest_split: test\n"
    )
    (tmp_path / "choose.yaml").write_text(
        f"task: tiny_choice\n{common}output_type: multiple_choice\n"
        "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n"
    )
    (tmp_path / "roll.yaml").write_text(
        f"task: tiny_roll\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{question}}'\nmetric_list:\n  - metric: word_perplexity\n"
    )
    (tmp_path / "write.yaml").write_text(
        f"task: tiny_write\n{common}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_target: ' os'\ngeneration_kwargs:\n  until: ['\\n']\n  max_gen_toks: 8\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    return tmp_path


@pytest.mark.seldom  # serve/test_lm_eval.py runs tasks in process, too
def test_local_tasks_run_through_the_harness(tasks: Path, demo_model: Path) -> None:
    """The command, as a user runs it: the class is found by its name."""
    run = subprocess.run(
        [sys.executable, "-c", COMMAND, "run", "--model", "llmpq"]
        + [
            "--model_args",
            f"pretrained={demo_model},precision=w8a16",
            "--batch_size",
            "4",
            "--device",
            "cpu",
        ]
        + ["--tasks", "tiny_choice,tiny_roll,tiny_write", "--include_path", str(tasks)]
        + ["--output_path", str(tasks / "out")],
        capture_output=True,
        text=True,
        timeout=200,
        env={name: text for name, text in os.environ.items() if name.startswith(KEPT)}
        | {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks / "home")},
        cwd=Path(__file__).parents[3],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (report,) = (tasks / "out").rglob("results_*.json")
    results = json.loads(report.read_text())["results"]
    assert results["tiny_choice"]["acc,none"] == 1.0
    assert 1 < results["tiny_roll"]["word_perplexity,none"] < 1e6
    assert 0 <= results["tiny_write"]["exact_match,none"] <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "auto"}, "batch_size must be a number of requests, got 'auto'"),
        ({"precision": "w5a16"}, "unknown precision 'w5a16'"),
    ],
)
def test_bad_arguments_are_named(demo_model: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlmpqModel(str(demo_model), **options)  # type: ignore[arg-type]


def test_a_task_that_asks_for_too_much_is_refused(model: LlmpqModel) -> None:
    with pytest.raises(ValueError, match="asks for 1024 new tokens, the model has a context of"):
        model.generate_until([request("x", {"max_gen_toks": 1024})])

"""lm-eval's `local-completions` against the server: the figures of the model class in process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install 'llmpq[eval]'"
)
pytest.importorskip(
    "tenacity", reason="lm-eval's client is not installed: pip install lm-eval[api]"
)

pytestmark = pytest.mark.cpu
HELDOUT = Path(__file__).parents[3] / "examples" / "heldout.txt"
LONGEST = 390
PAIRS = [
    ("def main():\n    ", "return 0"),
    ("import os\nimport ", "sys"),
    ("for index in range(", "zebra zebra"),
    ("class Node:\n    def __init__(self):\n        self.", "value = 1"),
]


@pytest.fixture(scope="module")
def remote(server, demo_model):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model="demo-7m", base_url=f"{server.url}/v1/completions", tokenizer=str(demo_model),
        tokenizer_backend="huggingface", max_length=LONGEST, max_retries=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def local(demo_model):
    from llmpq.runtime.tools.lm_eval import LlmpqModel

    return LlmpqModel(str(demo_model), max_length=LONGEST)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Three tasks over pieces of held-out code: what comes next, how likely, and written out."""
    lines = [line for line in HELDOUT.read_text().splitlines() if len(line) > 24][:60]
    rows = [
        {
            "question": "\n".join(lines[i : i + 2]) + "\n",
            "choices": [lines[i + 2], lines[i + 4], lines[i + 3][::-1]],
            "target": lines[i + 2][:4],
        }
        for i in range(0, 55, 5)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        f"  cache_dir: {tmp_path / 'cache'}\ntest_split: test\n"
    )
    for name, rest in {
        "choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: 0\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        "roll": "output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{question}}'\nmetric_list:\n  - metric: word_perplexity\n"
        "  - metric: byte_perplexity\n  - metric: bits_per_byte\n",
        "write": "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: '{{target}}'\ntarget_delimiter: ''\n"
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 24\n  temperature: 0\n'
        "metric_list:\n  - metric: exact_match\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: tiny_{name}\n{common}{rest}")
    return tmp_path


def test_likelihoods_over_http_are_those_in_process(remote, local):
    asked = [SimpleNamespace(args=pair) for pair in PAIRS]
    over_http = remote.loglikelihood(asked, disable_tqdm=True)
    in_process = local.loglikelihood(asked, disable_tqdm=True)
    for (found, greedy), (wanted, best) in zip(over_http, in_process, strict=True):
        assert found == pytest.approx(wanted, abs=2e-3) and greedy == best
    assert {greedy for _, greedy in over_http} == {True, False}


def test_whole_tasks_have_the_same_figures_over_http_and_in_process(remote, local, tasks):
    names = ["tiny_choice", "tiny_roll", "tiny_write"]
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    over_http, in_process = (
        lm_eval.simple_evaluate(
            model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True
        )
        for model in (remote, local)
    )
    figures = {
        (name, metric): value
        for name in names
        for metric, value in in_process["results"][name].items()
        if isinstance(value, float)
    }
    assert len(figures) >= 6 and 0 < figures["tiny_choice", "acc,none"] < 1
    for (name, metric), value in figures.items():
        found = over_http["results"][name][metric]
        assert found == pytest.approx(value, rel=1e-4), (name, metric)
    written = [
        [sample["resps"] for sample in reply["samples"]["tiny_write"]]
        for reply in (over_http, in_process)
    ]
    assert written[0] == written[1] and any(text for ((text,),) in written[0])

"""lm-eval's `local-completions` against the server: the figures of the model class in process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'llmpq[eval]'")
pytest.importorskip(
    "tenacity", reason="lm-eval's client is not installed: pip install lm-eval[api]"
)

pytestmark = pytest.mark.cpu
PAIRS = [
    ("def main():\n    ", "return 0"),
    ("import os\nimport ", "sys"),
    ("for index in range(", "zebra zebra"),
    ("class Node:\n    def __init__(self):\n        self.", "value = 1"),
]


def test_likelihoods_over_http_are_those_in_process(server, demo_model):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from llmpq.runtime.tools.lm_eval import LlmpqModel

    asked = [SimpleNamespace(args=pair) for pair in PAIRS]
    remote = LocalCompletionsAPI(
        model="demo-7m", base_url=f"{server.url}/v1/completions", tokenizer=str(demo_model),
        tokenizer_backend="huggingface", max_length=390, max_retries=1,
    )  # fmt: skip
    over_http = remote.loglikelihood(asked, disable_tqdm=True)
    in_process = LlmpqModel(str(demo_model)).loglikelihood(asked, disable_tqdm=True)
    for (found, greedy), (wanted, best) in zip(over_http, in_process, strict=True):
        assert found == pytest.approx(wanted, abs=2e-3) and greedy == best
    assert {greedy for _, greedy in over_http} == {True, False}

"""The blocks of docs/how-to/python.md, run in their order over a model with a chat template."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan

pytestmark = pytest.mark.cpu
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "python.md"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_every_block_of_the_page_runs(demo_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    for block in blocks[:-1]:
        exec(block.replace("Qwen/Qwen3-0.6B", str(model)), names)
    llm, greedy = names["llm"], names["greedy"]
    assert [answer.finish_reason for answer in names["answers"]] == ["length", "length"]
    assert len(names["messages"]) == 3
    assert names["streamed"] == llm.chat(names["messages"], greedy)[0].text
    assert names["reasons"] == ["length", "abort"]
    assert len(names["scored"].outputs[0].logprobs) == 4
    assert names["guided"].text in ("yes", "no")
    assert names["plan"] == Plan.load_json("plan.json")
    assert {p.value for stage in names["plan"].stages for p in stage.precisions} == {"w8a16"}
    del llm
    exec(blocks[-1], names)
    assert "llm" not in names

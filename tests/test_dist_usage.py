"""`llmpq-dist` used wrongly: one sentence and exit 2 before anything runs, or a row's error."""

from __future__ import annotations

import json
import shutil

import pytest

from llmpq.model_spec import ModelSpec
from llmpq.runtime.batch_rows import Defaults, json_row
from llmpq.runtime.run_command import make_job
from llmpq.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu


@pytest.fixture
def chat_model(demo_model, tmp_path):
    """Return a copy of the tokenizer whose template allows users only."""
    folder = tmp_path / "chat"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(demo_model / name, folder)
    template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('users only') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_text_or_conversation_without_tokens_fails_its_row_only(
    demo_model, make_plan, chat_model
):
    lines = [
        r'{"prompt": "a\ud800b"}',
        '{"messages": [{"role": "robot", "content": "x"}]}',
        r'{"messages": [{"role": "user", "content": "\udfff"}]}',
        '{"messages": [{"role": "user", "content": "import os"}]}',
    ]
    rows = [json_row(index, line, Defaults()) for index, line in enumerate(lines)]
    job = make_job(
        make_plan(demo_model, ()),
        ModelSpec.from_directory(demo_model),
        rows,
        Tokenizer(chat_model),
        skip={},
    )
    assert [request.id for request in job.requests] == [3]
    assert "lone surrogate) at position 1" in job.errors[0]
    assert "chat template refuses the messages: users only" in job.errors[1]
    assert "lone surrogate" in job.errors[2]


@pytest.mark.parametrize("text", ["{}", '{"version": "1.0"', '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_one_sentence(chat_model, text):
    (chat_model / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json' .*cannot be read"):
        Tokenizer(chat_model)

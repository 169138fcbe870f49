"""Chat templates: several under names, and what of earlier turns reaches them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmpq.runtime.serve.bodies import ChatBody
from llmpq.runtime.serve.chat import plain_message
from llmpq.runtime.serve.service import Service
from llmpq.runtime.serve.settings import ServeSettings
from llmpq.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu
PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
TOOLS = "<tool_call>{{ tools[0].function.name }}" + PLAIN
MISTRAL = "[TOOL_CALLS]" + PLAIN
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
TOOL = {"type": "function", "function": {"name": "find"}}
TALK = [{"role": "user", "content": "hi"}]


def tokenizer_of(demo_model: Path, folder: Path, template) -> Tokenizer:
    shutil.copy(demo_model / "tokenizer.json", folder)
    settings = json.loads((demo_model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "plain", "with_tools"),
    [
        (PLAIN, PLAIN, PLAIN),
        (NAMED, PLAIN, TOOLS),
        (NAMED[:1], PLAIN, PLAIN),
        ([{"name": "tool_use", "template": TOOLS}], None, TOOLS),
        ([*NAMED, {"name": "rag", "template": "x"}], PLAIN, TOOLS),
        (None, None, None),
    ],
)
def test_the_template_of_tools_is_the_one_used_for_them(
    demo_model, tmp_path, template, plain, with_tools
):
    tokenizer = tokenizer_of(demo_model, tmp_path, template)
    assert tokenizer.chat_template() == plain
    assert tokenizer.chat_template(tools=True) == with_tools
    assert tokenizer.has_chat_template == (template is not None)
    for tools, own in ((None, plain), ([TOOL], with_tools)):
        if own is not None:
            shown = tokenizer.decode(tokenizer.encode_chat(TALK, tools=tools))
            assert shown == ("<tool_call>find[hi]" if own is TOOLS else "[hi]")
        elif template is not None:
            with pytest.raises(ValueError, match="chat template"):
                tokenizer.encode_chat(TALK, tools=tools)


@pytest.mark.parametrize("settings", [True, False])
@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_template_in_a_file_of_its_own_is_read(demo_model, tmp_path, name, settings):
    tokenizer_of(demo_model, tmp_path, None)
    if not settings:
        (tmp_path / "tokenizer_config.json").unlink()
    content = PLAIN if name.endswith("jinja") else json.dumps({"chat_template": PLAIN})
    (tmp_path / name).write_text(content)
    assert Tokenizer(tmp_path).chat_template() == PLAIN
    assert tokenizer_of(demo_model, tmp_path, MISTRAL).chat_template() in (MISTRAL, PLAIN)


@pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_turns_come_back_as_clients_dump_them(demo_model, tmp_path, calls, content):
    """`tool_calls: null` with a template that asks whether there are any."""
    asks = "{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls|length }}"
    asks += "{% endif %}[{{ m.content }}]{% endfor %}"
    tokenizer = tokenizer_of(demo_model, tmp_path, asks)
    turn = {"role": "assistant", "refusal": None, "name": None, **content, **calls}
    assert tokenizer.render_chat([*TALK, turn, *TALK]) == "[hi][][hi]"
    with pytest.raises(ValueError, match="message 0: its content must be a text"):
        tokenizer.render_chat([{"role": "user", **content, **calls}])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (NAMED, "hermes"),
        ([NAMED[0], {"name": "tool_use", "template": MISTRAL}], "mistral"),
        (MISTRAL, "mistral"),
        ([{"name": "default", "template": MISTRAL}, NAMED[1]], "hermes"),
        (PLAIN, None),
    ],
)
def test_the_form_of_calls_is_that_of_the_named_template(demo_model, tmp_path, template, form):
    service = Service(ServeSettings(model_names=("demo",)))
    service.llm = SimpleNamespace(
        tokenizer=tokenizer_of(demo_model, tmp_path, template),
        generation_config=SimpleNamespace(sampling={}),
        get_default_sampling_params=lambda: SimpleNamespace(
            temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
        ),
    )
    found = service.answer_form(tools=True).tools
    assert (found and found.name) == form


def test_a_gguf_files_named_templates_are_read():
    from llmpq.checkpoints import gguf_tokenizer

    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": PLAIN, "tokenizer.chat_template.tool_use": TOOLS,
        "tokenizer.chat_templates": ["tool_use"],
    }  # fmt: skip
    made = gguf_tokenizer.tokenizer_of(SimpleNamespace(metadata=metadata, path="a.gguf"))
    assert made.chat_template == {"default": PLAIN, "tool_use": TOOLS}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_what_earlier_turns_thought_reaches_the_template(name):
    turn = {"role": "assistant", "content": "4", name: "2 + 2"}
    body = ChatBody.model_validate({"messages": [*TALK, turn, *TALK]})
    plain = [plain_message(message) for message in body.messages]
    assert plain[1]["reasoning_content"] == plain[1]["reasoning"] == "2 + 2"
    assert "reasoning" not in plain[0] and "reasoning_content" not in plain[2]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"template": "{{ raise_exception('users only') }}"}, "refuses the messages: users only"),
        ({"template": "{{ 1 / 0 }}"}, "refuses the messages: division"),
        ({"template": "{{ messages }"}, "cannot be applied: unexpected '}'"),
        ({"tools": ["find"]}, "cannot be applied: Tools"),
        ({"continue_final_message": True}, "cannot be applied: continue_final_message and add_"),
    ],
)
def test_what_refuses_is_named(demo_model, how, said):
    """A template that raises refuses the messages; else it is the arguments that are wrong."""
    with pytest.raises(ValueError, match=rf"^the chat template {re.escape(said)}"):
        Tokenizer(demo_model).render_chat([*TALK, {"role": "assistant", "content": "so"}], **how)

"""`llmpq-dist chat`: turns, commands, an answer that is ended; a base model's texts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmpq import LLM, SamplingParams
from llmpq.runtime.cli.main import main

pytestmark = pytest.mark.cpu
FLAGS = ["--max-tokens", "6", "--temperature", "0", "--dtype", "float32"]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
STRICT = "{{ raise_exception('no system, please') if messages[0].role == 'system' }}" + PLAIN


def folder(demo_model: Path, target: Path, template: str | None) -> Path:
    shutil.copytree(demo_model, target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings |= {} if template is None else {"chat_template": template}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


def said(monkeypatch, capsys, model: Path, text: str, *flags: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = main(["chat", str(model), *FLAGS, *flags])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_turns_follow_each_other_by_the_models_template(demo_model, tmp_path, monkeypatch, capsys):
    model = folder(demo_model, tmp_path / "m", PLAIN)
    params = SamplingParams(max_tokens=6, temperature=0)
    talk, answers = [{"role": "system", "content": "S"}], []
    with LLM(model, dtype="float32") as llm:
        for text in ("def", "a\nb"):
            talk.append({"role": "user", "content": text})
            answers.append(llm.chat(talk, params)[0].text)
            talk.append({"role": "assistant", "content": answers[-1]})
        again = llm.chat([talk[0], {"role": "user", "content": "def"}], params)[0].text
        bare = llm.chat([{"role": "user", "content": "def"}], params)[0].text
    assert again == answers[0] != bare
    lines = "def\n\na\\\nb\n/again\n/undo\n/undo\n/again\n/reset\ndef\n/system\ndef\n/nothing\n"
    code, out, err = said(monkeypatch, capsys, model, lines, "--system", "S")
    assert code == 0
    assert out == "".join(f"{text}\n" for text in [*answers, answers[1], again, bare])
    assert "there is nothing to answer anew" in err and "unknown command /nothing" in err


def test_a_base_model_continues_texts(demo_model, tmp_path, monkeypatch, capsys):
    model = folder(demo_model, tmp_path / "m", None)
    with LLM(model, dtype="float32") as llm:
        params = SamplingParams(max_tokens=6, temperature=0)
        text = llm.generate("def f(x):", params)[0].text
    code, out, err = said(monkeypatch, capsys, model, "def f(x):\n/again\n/reset\n/exit\nnever\n")
    assert (code, out) == (0, f"def f(x):{text}\n" * 2)
    assert "has no chat template" in err
    code, _, err = said(monkeypatch, capsys, model, "", "--system", "S")
    assert code == 2 and "--system has no effect: the model has no chat template" in err


def test_what_is_refused_is_said_and_forgotten(demo_model, tmp_path, monkeypatch, capsys):
    model = folder(demo_model, tmp_path / "m", STRICT)
    code, out, err = said(
        monkeypatch, capsys, model, "hi\n/system S\nhi\n/system\nhi\n" + "ab " * 4000 + "\nhi\n"
    )
    assert code == 8 and "no system, please" in err and "/reset begins a new" in err
    turns = out.splitlines()
    assert turns[0] == turns[1] and len(turns) >= 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no model to talk to; give its directory: llmpq-dist chat DIR"),
        (["nowhere"], "no such model directory: 'nowhere'"),
        ([""], "the model's name is empty"),
        (["DEMO", "--temperature", "-1"], "--temperature must be 0 (greedy) or positive"),
        (["DEMO", "--top-p", "2"], "--top-p must be in (0, 1], got 2.0"),
        (["DEMO", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["DEMO", "--model", "other"], "give one of them"),
        (["DEMO", "--temprature", "1"], "did you mean '--temperature'"),
    ],
)
def test_mistakes_get_one_sentence(demo_model, capsys, words, sentence):
    assert main(["chat", *(str(demo_model) if word == "DEMO" else word for word in words)]) == 2
    assert sentence in capsys.readouterr().err


def test_control_c_ends_an_answer_and_not_the_chat(demo_model):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "llmpq.runtime", "chat", str(demo_model), "--temperature", "1"]
    terminal = lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0)  # noqa: E731
    chat = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=terminal,
    )
    os.close(theirs)
    seen = b""

    def until(*marks: bytes, limit_s: float = 120) -> bytes:
        """Read up to the first of `marks` that comes, and return it."""
        nonlocal seen
        end_s = time.monotonic() + limit_s
        while not any(mark in seen for mark in marks):
            assert time.monotonic() < end_s, seen
            if select.select([ours], [], [], 0.5)[0]:
                try:
                    seen += os.read(ours, 65536)
                except OSError:
                    raise AssertionError(seen) from None
        found = min((mark for mark in marks if mark in seen), key=seen.index)
        seen = seen[seen.index(found) + len(found) :]
        return found

    def interrupt(*marks: bytes) -> bytes:
        """Press Ctrl-C until a mark comes: Python's input() sleeps through one that comes between
        its prompt and its wait."""
        for _ in range(60):
            os.write(ours, b"\x03")
            with contextlib.suppress(AssertionError):
                return until(*marks, limit_s=2)
        raise AssertionError(seen)

    try:
        until(b"Ctrl-D ends")
        until(b"> ")
        stopped = 0
        for number in range(20):  # from before an answer's first piece to behind its end
            os.write(ours, b"import\n")
            until(b"import")
            until(b"\n")
            time.sleep(number * 0.004)
            stopped += interrupt(b"[stopped]", b"(Ctrl-D or /exit ends)") == b"[stopped]"
            until(b"> ")
        assert stopped >= 2, "no answer was stopped by Ctrl-C in twenty"
        interrupt(b"(Ctrl-D or /exit ends)")
        until(b"> ")
        os.write(ours, b"\x04")
        assert chat.wait(30) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)

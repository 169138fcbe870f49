"""The class of tokenizers that is chosen without Transformers' help is the one it would choose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmpq.checkpoints.tokenizer_files import backend_json
from llmpq.runtime.text.tokenizer import PLAIN_TYPES, Tokenizer

pytestmark = pytest.mark.cpu
TEXT = "def main():\n    print('größer', 17)  "


@pytest.mark.parametrize("declared", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("kind", [*PLAIN_TYPES, "qwen2", "phi3", "gemma2"])
def test_a_class_is_that_of_transformers(demo_model: Path, tmp_path: Path, kind, declared):
    from transformers import AutoTokenizer

    shutil.copy(demo_model / "tokenizer.json", tmp_path)
    settings = json.loads((demo_model / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = declared
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = Tokenizer(tmp_path)
    assert type(ours._inner) is type(theirs)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours._inner.init_kwargs == theirs.init_kwargs


@pytest.mark.parametrize("whole", [True, False])
def test_a_tokenizer_of_own_code_is_refused_without_a_question(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Transformers asks whether to run it, where nothing says so."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    if whole:
        shutil.copy(demo_model / "tokenizer.json", tmp_path)
    else:
        (tmp_path / "vocab.json").write_text("{}")
        (tmp_path / "merges.txt").write_text("")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    settings = json.loads((demo_model / "tokenizer_config.json").read_text())
    theirs = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | theirs))
    with pytest.raises(ValueError, match="code of the model's own .*, and llmpq runs no such code"):
        Tokenizer(tmp_path)
    assert not asked and not (tmp_path / "ran").exists()
    if whole:  # what the error says to do
        plain = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(plain))
        assert Tokenizer(tmp_path).encode(TEXT) == Tokenizer(demo_model).encode(TEXT)


def test_a_directory_of_a_tokenizer_alone_is_read(demo_model: Path, tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, tmp_path)
    assert Tokenizer(tmp_path).encode(TEXT) == Tokenizer(demo_model).encode(TEXT)


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "model_type gpt2", "nothing"])
def test_vocab_and_merges_are_read_as_tokenizer_json_is(
    demo_model: Path, tmp_path: Path, named: str
) -> None:
    """Where tokenizer_config.json or the model's type says of which class they are."""
    model = json.loads((demo_model / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    kind = "gpt2" if named.startswith("model_type") else "llama"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    if named == "GPT2Tokenizer":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
    if named == "nothing":
        with pytest.raises(ValueError, match="add tokenizer_class to tokenizer_config.json"):
            Tokenizer(tmp_path)
        return
    ours, theirs = Tokenizer(tmp_path), Tokenizer(demo_model)
    for text in (TEXT, " a  b\n", "\u4f60\u597d \U0001f600"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    made = json.loads(backend_json(tmp_path))["model"]
    assert made["vocab"] == model["vocab"]

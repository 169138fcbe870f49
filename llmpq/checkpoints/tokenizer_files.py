"""Where a model's tokenizer is: tokenizer.json, vocab.json with merges.txt, or a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.checkpoints.gguf_tokenizer import tokenizer_of

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MERGES = ("vocab.json", "merges.txt")


def has_merges(directory: Path) -> bool:
    """Whether a directory has a byte-level BPE as its two lists, as before tokenizer.json."""
    return all((directory / name).is_file() for name in MERGES)


def tokenizer_of_merges(directory: Path) -> Any:
    """Return the fast tokenizer that Transformers makes of vocab.json and merges.txt."""
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except ValueError:
        raise ValueError(
            f"{' and '.join(MERGES)} are there, but no class of tokenizers that is made of them is "
            f"named: add tokenizer_class to {SETTINGS}"
        ) from None
    if not hasattr(made, "backend_tokenizer"):
        raise ValueError(f"Transformers' {type(made).__name__} is no fast tokenizer")
    return made


def backend_json(path: Path) -> str:
    """Return the tokenizer of a model as tokenizer.json has it, made where there is none."""
    file = path / TOKENIZER
    if is_gguf(path):
        made = tokenizer_of(open_gguf(path))
    elif file.is_file() or not has_merges(path):
        return file.read_text(encoding="utf-8")
    else:
        made = tokenizer_of_merges(path)
    text: str = made.backend_tokenizer.to_str()
    return text


def without_special_names(tokenizer: str) -> str:
    """Return a `tokenizer.json` whose special tokens have names that no text contains.

    A text with such a name (`</s>` in a string of JSON) is then spelled with other tokens. So are
    added tokens such as `<tool_call>` and `<b>`: llguidance takes those for special, whatever the
    tokenizer says of them.
    """
    stored = json.loads(tokenizer)
    added = [
        token
        for token in stored.get("added_tokens") or ()
        if token.get("special") or re.fullmatch("<.*>", token["content"])
    ]
    names = {token["content"]: f"\ufdd0{token['id']}\ufdd1" for token in added}  # no characters
    for token in added:
        token["content"] = names[token["content"]]
    model = stored["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, Mapping):
        model["vocab"] = {names.get(piece, piece): place for piece, place in vocab.items()}
    elif vocab:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(stored)


def with_replaced_spaces(tokenizer: str) -> tuple[str, str]:
    """Return a `tokenizer.json`, and the character that it writes as a space (none: empty).

    SentencePiece's vocabularies have U+2581 for a space. llguidance knows that by a decoder that
    replaces it; of Transformers 5's Metaspace, which does the same, it takes the pieces as they
    are.
    """
    stored = json.loads(tokenizer)
    decoder = stored.get("decoder") or {}
    steps = decoder.get("decoders") or [decoder]
    metaspace = next((step for step in steps if step.get("type") == "Metaspace"), None)
    if metaspace is None:
        replaced = [s for s in steps if s.get("type") == "Replace" and s.get("content") == " "]
        return tokenizer, next((str(s["pattern"].get("String", "")) for s in replaced), "")
    mark = str(metaspace.get("replacement", "\u2581"))
    replace = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    others = [step for step in steps if step is not metaspace]
    stored["decoder"] = {"type": "Sequence", "decoders": [replace, *others, {"type": "Fuse"}]}
    return json.dumps(stored), mark

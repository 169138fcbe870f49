"""How many bytes of text one token can stand for at most.

By it a text that is surely too long is refused before it is tokenised. A token stands for as many
bytes as it is long, unless part of the text is dropped or joined before: by a normalizer, by a
pre-tokenizer that removes what it splits at, by an unknown token for a whole run, by special tokens
that take the spaces beside them. For a tokenizer that does any of that there is no bound (None).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_COMPOSED = 4
"""Most bytes of a text that NFC or NFKC replaces by one: a letter of Unicode's mathematical
alphabets has four bytes, the plain letter that takes its place has one."""
_ADDING = {"Prepend", "ByteLevel"}
"""Normalizers that take nothing away."""
_SPLITTING = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"}
"""Pre-tokenizers that take nothing away, unless they remove what they split at."""


def longest_token_bytes(tokenizer: str) -> int | None:
    """Return the most bytes of a text that one token stands for; None where it is not known.

    `tokenizer`: the JSON of `tokenizer.json`.
    """
    stored = json.loads(tokenizer)
    joined = _most_joined(stored.get("normalizer"))
    kept = all(_keeps(step) for step in _steps(stored.get("pre_tokenizer"), "pretokenizers"))
    added = stored.get("added_tokens") or []
    if joined is None or not kept or any(t.get("lstrip") or t.get("rstrip") for t in added):
        return None
    model = stored["model"]
    vocab = model.get("vocab")
    names = list(vocab) if isinstance(vocab, Mapping) else [piece for piece, _ in vocab or ()]
    known, by_bytes = set(names), _is_byte_level(stored)
    if model.get("type") == "BPE" and by_bytes:
        complete = all(letter in known for letter in _byte_letters())
    else:
        complete = bool(model.get("byte_fallback")) and all(
            f"<0x{byte:02X}>" in known for byte in range(256)
        )
    if not complete or not names:
        return None
    own = max(len(name) if by_bytes else len(name.encode()) for name in names)
    whole = max((len(token["content"].encode()) for token in added), default=0)
    return max(own, whole) * joined


def _steps(part: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer; `inner`: where a Sequence lists its own."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part[inner]:
            yield from _steps(one, inner)
    else:
        yield part


def _most_joined(normalizer: Any) -> int | None:
    """Return how many bytes of a text a normalizer replaces by one at most; None: not known."""
    most = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] in ("NFC", "NFKC"):
            most *= _COMPOSED
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif step["type"] not in _ADDING:
            return None
    return most


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer drops nothing of a text."""
    return step["type"] in _SPLITTING and step.get("behavior") != "Removed"


def _is_byte_level(stored: Mapping[str, Any]) -> bool:
    """Whether every byte of a text is a letter of the vocabulary's names."""
    steps = [
        *_steps(stored.get("pre_tokenizer"), "pretokenizers"),
        *_steps(stored.get("normalizer"), "normalizers"),
    ]
    return any(step["type"] == "ByteLevel" for step in steps)


def _byte_letters() -> list[str]:
    """Return the letters that stand for the 256 bytes (GPT-2's)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # stand for themselves
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]

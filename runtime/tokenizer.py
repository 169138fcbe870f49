"""Text to tokens and back, with the fast tokenizer of a local model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"


class Tokenizer:
    """A model's fast tokenizer; nothing is ever downloaded."""

    def __init__(self, directory: str | Path) -> None:
        self._inner = _load(Path(directory))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with the special tokens the model expects around it."""
        tokens: list[int] = self._inner.encode(text, add_special_tokens=special)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self._inner.decode(list(tokens), skip_special_tokens=True)
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model knows a format for conversations."""
        return bool(getattr(self._inner, "chat_template", None))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation (`role`, `content`), ready for the answer."""
        if not self.has_chat_template:
            raise ValueError(
                "the model's tokenizer has no chat template: /v1/chat/completions needs one; "
                "use /v1/completions with a prompt"
            )
        text = self._inner.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return self.encode(text, special=False)


def _load(directory: Path) -> Any:
    # transformers takes a second to import; commands that need no text do not pay for it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (directory / TOKENIZER).exists():
        raise ValueError(
            f"no {TOKENIZER} in '{directory}': llmpq uses fast tokenizers. Save one with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    if (directory / SETTINGS).exists():
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(directory / TOKENIZER))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"'{directory / TOKENIZER}' cannot be read: {error}") from None

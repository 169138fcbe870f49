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
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half a character (a lone surrogate) at position {error.start}: it "
                "is not valid Unicode and has no tokens"
            ) from None
        tokens: list[int] = self._inner.encode(text, add_special_tokens=special)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out, spaces as they were generated."""
        text: str = self._inner.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def text_of(self, token: int) -> str:
        """Return the text of one token alone, a special one's name."""
        text: str = self._inner.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-text token, where the tokenizer's settings name one."""
        found: int | None = self._inner.bos_token_id
        return found

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
        plain = [dict(message) for message in messages]
        try:
            text = self._inner.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is the model's program: it raises what it likes
            raise ValueError(f"the model's chat template refuses the messages: {error}") from None
        return self.encode(text, special=False)


def _load(directory: Path) -> Any:
    # transformers takes a second to import; commands that need no text do not pay for it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (directory / TOKENIZER).exists():
        raise ValueError(
            f"no {TOKENIZER} in '{directory}': llmpq uses fast tokenizers. Save one with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        if (directory / SETTINGS).exists():
            return AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=str(directory / TOKENIZER))
    except Exception as error:  # the tokenizers library raises bare Exception, KeyError and more
        raise ValueError(
            f"'{directory / TOKENIZER}' or the {SETTINGS} beside it cannot be read "
            f"({type(error).__name__}: {str(error)[:200]}); copy them from the model again"
        ) from None

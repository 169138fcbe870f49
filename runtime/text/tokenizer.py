"""Text to tokens and back, with the fast tokenizer of a local model directory or GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from traceback import walk_tb
from typing import Any

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.checkpoints.gguf_tokenizer import tokenizer_of
from llmpq.checkpoints.tokenizer_files import (
    MERGES,
    SETTINGS,
    TOKENIZER,
    has_merges,
    tokenizer_of_merges,
)
from llmpq.file_form import broken_link, lfs_pointer, read_json
from llmpq.runtime.requests.request import too_long
from llmpq.runtime.requests.sampling_params import require_whole
from llmpq.runtime.text.conversation import Messages, plain_messages, with_text_arguments
from llmpq.runtime.text.text_threads import QUICK_LENGTH
from llmpq.runtime.text.token_bytes import longest_token_bytes

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of one class, before and since Transformers 5."""
PLAIN_TYPES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "opt",
    "bloom",
    "falcon",
)
"""Model types for which `AutoTokenizer` takes the class that the settings name: no other one."""
_TEMPLATE_ARGUMENTS = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)
"""Names that a template's options cannot have: `apply_chat_template` has arguments of them."""


def _byte_of_character() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for.

    Printable bytes are themselves; the others are the characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


_JINJA = re.compile(r"\{[{%]")
_LOADING = Lock()
_BYTE = re.compile("<0x[0-9A-F]{2}>")


def _mark_broken(pieces: list[str]) -> bool:
    """Put U+FFFD for each byte piece that is part of no character; whether there were any."""
    end, found = 0, False
    while end < len(pieces):
        begin = end
        while end < len(pieces) and _BYTE.fullmatch(pieces[end]):
            end += 1
        run = bytes(int(piece[3:5], 16) for piece in pieces[begin:end])
        place = 0
        while place < len(run):
            try:
                run[place:].decode()
                break
            except UnicodeDecodeError as error:
                for broken in range(place + error.start, place + error.end):
                    pieces[begin + broken] = "\ufffd"
                found, place = True, place + error.end
        end += 1
    return found


LONG_BYTES = 16
"""Bytes of text, for each token that it may have, from which it counts as long.

A long text is refused by its length, if it surely has too many tokens, before it is tokenised.
"""


class Tokenizer:
    """A model's fast tokenizer; nothing is ever downloaded."""

    def __init__(self, directory: str | Path, *, max_positions: int | None = None) -> None:
        """`max_positions`: the model's, if known, for what is said of texts that are too long."""
        self._inner = _load(Path(directory))
        self._max_positions = max_positions
        self._backend.no_truncation()  # as a tokenizer.json may have it
        self._backend.no_padding()

    def encode(self, text: str, *, special: bool = True, room: int | None = None) -> list[int]:
        """Return the tokens of a text, with the special tokens the model expects around it.

        `room`: tokens that it may have; `ContextLengthError` at once where it surely has more.
        """
        require_whole(text, "the text")
        size = len(text.encode("utf-8"))
        long = room is not None and size > LONG_BYTES * room
        if room is not None and long and self._bytes_of_token is not None:
            least = -(-size // self._bytes_of_token)
            if least > room:
                raise too_long(least, room, max_positions=self._max_positions, counted=False)
        # A batch, as Transformers does: other threads go on meanwhile, which `encode` has wait.
        [found] = self._backend.encode_batch_fast([text], add_special_tokens=special)
        tokens: list[int] = found.ids
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens, spaces as they were generated.

        `skip_special`: special tokens (ends of turns, marks of calls in some models) are left out.

        Bytes that are no character are U+FFFD each. SentencePiece's decoder would write that for
        all bytes that stand together, whole characters among them: what is cut off within a
        character, as a stream always is, would lose those before it.
        """
        ids = [*tokens]
        if not self._byte_tokens.keys().isdisjoint(ids):
            hidden = self._special_ids if skip_special else frozenset()
            known = (None if token in hidden else self._backend.id_to_token(token) for token in ids)
            pieces = [piece for piece in known if piece is not None]
            if _mark_broken(pieces):
                return str(self._backend.decoder.decode(pieces))
        return self._plain_decode(ids, skip_special_tokens=skip_special)

    def _backend_decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        if len(tokens) <= QUICK_LENGTH:
            return str(self._backend.decode(tokens, skip_special_tokens=skip_special_tokens))
        [text] = self._backend.decode_batch([tokens], skip_special_tokens=skip_special_tokens)
        return str(text)

    @property
    def transformers(self) -> Any:
        """The tokenizer as Transformers has it."""
        return self._inner

    @property
    def _backend(self) -> Any:
        return self._inner.backend_tokenizer

    @cached_property
    def _bytes_of_token(self) -> int | None:
        """Bytes of a text that one token stands for at most; None where it is not known."""
        return longest_token_bytes(self._backend.to_str())

    @cached_property
    def _byte_tokens(self) -> Mapping[int, str]:
        """Tokens that are one byte (`<0xE3>`), where the decoder makes characters of them."""
        if "ByteFallback" not in repr(self._backend.decoder):
            return {}
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = {piece: self._backend.token_to_id(piece) for piece in pieces}
        return {token: piece for piece, token in ids.items() if token is not None}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, own in added.items() if own.special)

    def has_token(self, text: str) -> bool:
        """Return whether a text is one token that was added to the vocabulary."""
        return text in self._added_ids

    def names_special(self, texts: Iterable[str]) -> bool:
        """Return whether one of some texts contains a special token, which `decode` leaves out."""
        special = [text for text, token in self._added_ids.items() if token in self._special_ids]
        return any(name in text for text in texts for name in special)

    @cached_property
    def _added_ids(self) -> Mapping[str, int]:
        """Tokens that were added to the vocabulary, by their text."""
        added = self._backend.get_added_tokens_decoder()
        return {own.content: token for token, own in added.items()}

    @cached_property
    def _plain_decode(self) -> Callable[..., str]:
        """The tokenizer's own decoder, without what Transformers wraps around it.

        Streams decode for every token: the wrapping takes five times as long, and has no effect
        here unless a class of tokenizers has a way of its own.
        """
        from transformers import PreTrainedTokenizerFast

        inner = self._inner
        if {"decode", "_decode"}.isdisjoint(
            name
            for kind in type(inner).__mro__
            if kind not in PreTrainedTokenizerFast.__mro__
            for name in vars(kind)
        ):
            return self._backend_decode
        return partial(inner.decode, clean_up_tokenization_spaces=False)

    def text_of(self, token: int) -> str:
        """Return the text of one token, of a special one its name."""
        text: str = self._inner.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for, which need not be whole characters."""
        piece = self._inner.convert_ids_to_tokens(token)
        if isinstance(piece, str) and token not in self._inner.all_special_ids:
            if self._byte_level and all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
        return self.text_of(token).encode()

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in repr(self._inner.backend_tokenizer.decoder)

    def chat_template(self, *, tools: bool = False) -> str | None:
        """Return the model's format for conversations, as Jinja; None without any.

        Of several under names, the one of tools where there are `tools`, else the default.
        """
        known = getattr(self._inner, "chat_template", None)
        if not isinstance(known, Mapping):
            return known or None
        return (known.get("tool_use") if tools else None) or known.get("default")

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-text token, where the tokenizer's settings name one."""
        found: int | None = self._inner.bos_token_id
        return found

    @property
    def start_token_id(self) -> int | None:
        """What a text of nothing begins with: beginning of text, else its end, else None."""
        found: int | None = self._inner.bos_token_id
        return self._inner.eos_token_id if found is None else found

    @property
    def num_tokens(self) -> int:
        """How many tokens there are, special ones with them."""
        return len(self._inner)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model knows a format for conversations."""
        return bool(self.chat_template() or self.chat_template(tools=True))

    def encode_chat(self, messages: Messages, *, room: int | None = None, **how: Any) -> list[int]:
        """Return the tokens of a conversation, ready for the answer; as `render_chat`."""
        return self.encode(self.render_chat(messages, **how), special=False, room=room)

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation (`role`, `content`), ready for the answer.

        `continue_final_message`: up to the end of the last message's text, without what a template
        writes behind it. `template` instead of the model's; `options` are what it may ask for.
        `ValueError` for messages or options that it refuses, and for what is not text.
        """
        plain = plain_messages(messages)
        if template is None and not self.has_chat_template:
            raise ValueError(
                "the model's tokenizer has no chat template: give a prompt instead of messages, or "
                "a template by --chat-template"
            )
        named = getattr(self._inner, "chat_template", None)
        known = isinstance(named, Mapping) and template in named
        is_jinja = isinstance(template, str) and _JINJA.search(template)
        if template is not None and not known and not is_jinja:
            raise ValueError(
                "a chat template is Jinja, as {% for message in messages %}..., and this one says "
                f"nothing of the messages (a file is read first): got {template!r:.100}"
            )
        if not isinstance(options, Mapping | None):
            raise ValueError(
                "a chat template's options are a mapping such as {'enable_thinking': False}, got "
                f"{options!r:.100}"
            )
        own = sorted({*_TEMPLATE_ARGUMENTS} & set(options or ()))
        if own:
            raise ValueError(f"a chat template's options cannot be called '{own[0]}'")
        render = partial(
            self._inner.apply_chat_template,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(options or {}),
        )
        try:
            return str(render(plain))
        except Exception as error:  # a template is the model's program: it raises what it likes
            # DeepSeek's templates add a call's arguments to a text: they must be one.
            as_texts = [with_text_arguments(message) for message in plain]
            if as_texts != plain:
                with suppress(Exception):
                    return str(render(as_texts))
            frames = walk_tb(error.__traceback__)
            inside = any(frame.f_code.co_filename == "<template>" for frame, _ in frames)
            how = "refuses the messages" if inside else "cannot be applied"
            raise ValueError(f"the chat template {how}: {error}") from None


def _load(directory: Path) -> Any:
    # Transformers' names come as they are asked for, which two threads must not do at once.
    with _LOADING:
        made = _loaded(directory)
    if not getattr(made, "chat_template", None):
        made.chat_template = _template_beside(directory)
    return made


def _template_beside(directory: Path) -> str | None:
    """Return the chat template that has a file of its own, where the tokenizer has none.

    Transformers' tokenizers read the first of them, beside their settings; processors the second.
    """
    plain, in_json = directory / "chat_template.jinja", directory / "chat_template.json"
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    content = read_json(in_json) if in_json.is_file() else None
    found = content.get("chat_template") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None


def _is_plain(directory: Path) -> bool:
    """Return whether `AutoTokenizer`, whose import takes two seconds, has nothing to choose."""
    settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
    described = directory / "config.json"
    if not described.is_file():
        return False
    config = json.loads(described.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") not in _PLAIN_CLASSES or "auto_map" in settings:
        return False
    return config.get("model_type") in PLAIN_TYPES


def _own_code(directory: Path) -> str | None:
    """Say that a tokenizer that cannot be read is one of the model's own code; None for another."""
    settings = directory / SETTINGS
    given = read_json(settings) if settings.is_file() else None
    if not isinstance(given, dict) or "auto_map" not in given:
        return None
    return (
        f"'{settings}': the tokenizer's class is code of the model's own (auto_map), and llmpq "
        f"runs no such code; where {TOKENIZER} is all of it, take auto_map out and set "
        "tokenizer_class to PreTrainedTokenizerFast"
    )


def _loaded(directory: Path) -> Any:
    if is_gguf(directory):
        return tokenizer_of(open_gguf(directory))
    # transformers takes a second to import; commands that need no text do not pay for it.
    from transformers import PreTrainedTokenizerFast

    if not (directory / TOKENIZER).exists() and not has_merges(directory):
        raise ValueError(
            broken_link(directory / TOKENIZER)
            or f"no {TOKENIZER}, nor {' and '.join(MERGES)}, in '{directory}': llmpq uses fast "
            "tokenizers. AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers "
            f"writes {TOKENIZER} where there is such a form; ByT5's and others' have none"
        )
    try:
        if not (directory / TOKENIZER).exists():
            return tokenizer_of_merges(directory)
        if not (directory / SETTINGS).exists():
            return PreTrainedTokenizerFast(tokenizer_file=str(directory / TOKENIZER))
        if _is_plain(directory):
            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises bare Exception, KeyError and more
        lists = [TOKENIZER] if (directory / TOKENIZER).exists() else list(MERGES)
        read = lists + [SETTINGS] * (directory / SETTINGS).exists()
        pointer = next(filter(None, (lfs_pointer(directory / name) for name in read)), None)
        raise ValueError(
            pointer
            or _own_code(directory)
            or f"the tokenizer of '{directory}' ({', '.join(read)}) cannot be read "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); copy them from the "
            "model again"
        ) from None

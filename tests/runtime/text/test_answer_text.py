"""A streamed answer is the whole one, whatever the tokenizer and however its tokens come."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmpq.runtime.requests.request import Request
from llmpq.runtime.text.answer_text import StopTexts, TextStream
from llmpq.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu
SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    f"{SPACE}ab",
    "ab",
    "b",
    "a",
    "c",
    "d",
    " ",
    SPACE,
    f"{SPACE}{SPACE}",
    ".",
    "n't",
    "\u65e5",
]
TEXTS = (
    "ab " + "\u7d42\u308f\u308a" * 12 + " cd",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 a" * 6,
    "  ab  a\n\tb  ",
    "\u1200\u1208\u1210 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947 "
    * 3,
)


def answer_text(tokenizer, prompt, tokens) -> str:
    """Return the text of a finished answer, its tokens all at once."""
    stream = TextStream(tokenizer, prompt)
    return stream.push(tokens) + stream.finish()


def _sentencepiece() -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    backend = Backend(
        models.BPE(
            {piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
            [("a", "b"), (SPACE, "ab"), (SPACE, SPACE)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def llama() -> Backend:
    """Llama 2, Mistral, Yi, Phi-3: a space before the text, taken away behind."""
    made = _sentencepiece()
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    made.decoder = decoders.Sequence([
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return made


def gemma() -> Backend:
    """Gemma: no space before the text."""
    made = _sentencepiece()
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def llama_metaspace(scheme: Any) -> Backend:
    """The same as Transformers 5 writes it."""
    made = _sentencepiece()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    return made


def unigram(scheme: Any) -> Backend:
    """T5's and XLM's kind, with the bytes that some have."""
    pieces = [("<unk>", 0.0), *((piece, -9.0) for piece in BYTES), *((w, -3.0) for w in WORDS)]
    made = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    return made


def byte_level() -> Backend:
    """GPT-2, Llama 3, Qwen: every token is bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE({c: i for i, c in enumerate([*alphabet, "ab"])}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def word_piece() -> Backend:
    """BERT's: ends of words are marked."""
    pieces = ["[UNK]", "ab", "##b", "##cd", "a", ".", "n't", "'", "##a"]
    made = Backend(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made


def word_ends() -> Backend:
    """The first GPT's: `</w>` is a space, but at the end of the text."""
    pieces = ["a", "b</w>", "ab</w>", "c</w>", "c"]
    made = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    return made


KINDS: dict[str, Callable[[], Backend]] = {
    "llama": llama,
    "gemma": gemma,
    **{f"llama-{s}": (lambda s=s: llama_metaspace(s)) for s in ("always", "first", "never")},
    **{f"unigram-{s}": (lambda s=s: unigram(s)) for s in ("always", "first", "never")},
    "byte-level": byte_level,
    "word-piece": word_piece,
    "word-ends": word_ends,
}
READ_BACK = ("llama", "gemma", "llama-always", "llama-first", "llama-never", "byte-level")
"""Kinds whose text is what was encoded."""


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]()).save_pretrained(folder)
    return Tokenizer(folder)


def bites(tokens: list[int], rng: random.Random) -> list[list[int]]:
    """Cut tokens anywhere."""
    cuts = sorted(rng.sample(range(len(tokens) + 1), rng.randrange(len(tokens) + 1)))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def streamed(tokenizer, prompt, pieces, **options) -> str:
    stream = TextStream(tokenizer, prompt, **options)
    return "".join([*map(stream.push, pieces), stream.finish()])


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_joined_are_the_text_of_all_tokens(kind, tmp_path):
    tokenizer, rng = tokenizer_of(kind, tmp_path), random.Random(7)
    for _ in range(150):
        some = rng.choices(range(tokenizer.num_tokens), k=rng.randrange(2, 60))
        prompt = tokenizer.encode("ab a") if rng.random() < 0.5 else some[: rng.randrange(6)]
        before = tokenizer.decode(prompt)
        whole = tokenizer.decode([*prompt, *some])
        text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(some)
        if len(prompt) <= 8:
            assert answer_text(tokenizer, prompt, some) == text
        pieces = streamed(tokenizer, prompt, [[token] for token in some])
        assert pieces == answer_text(tokenizer, prompt, some)
        assert pieces == streamed(tokenizer, prompt, bites(some, rng))


@pytest.mark.parametrize("kind", READ_BACK)
def test_text_comes_back_as_soon_as_its_characters_are_there(kind, tmp_path):
    tokenizer = tokenizer_of(kind, tmp_path)
    prompt = tokenizer.encode("ab")
    for text in TEXTS:
        tokens = tokenizer.encode("ab" + text)
        assert tokens[: len(prompt)] == prompt or kind == "byte-level"
        answer = tokens[len(prompt) :]
        stream = TextStream(tokenizer, prompt)
        seen = ""
        for place, token in enumerate(answer, start=1):
            seen += stream.push([token])
            held = b"".join(map(tokenizer.bytes_of, answer[:place]))
            assert text.startswith(seen)
            if kind in ("gemma", "byte-level"):  # of others a token's bytes have the mark of spaces
                assert len(seen) == len(held.replace(SPACE.encode(), b" ").decode(errors="ignore"))
        assert seen + stream.finish() == text


@pytest.mark.parametrize("kind", ["llama", "gemma", "llama-first", "byte-level"])
def test_an_answer_cut_within_a_character_keeps_those_before(kind, tmp_path):
    tokenizer = tokenizer_of(kind, tmp_path)
    tokens = tokenizer.encode("\u7d42\u308f\u308a", special=False)[:-1]
    assert tokenizer.decode(tokens).strip("\ufffd ") == "\u7d42\u308f"
    assert answer_text(tokenizer, [], tokens).rstrip("\ufffd").strip() == "\u7d42\u308f"


STOPS = {
    "letters of several tokens": ("ab\u7d42\u308f\u308acd", ["\u7d42\u308f\u308a"], "ab"),
    "the second letter alone": ("ab\u7d42\u308f\u308acd", ["\u308f"], "ab\u7d42"),
    "begins with a space": ("a b ab cd", [" ab"], "a b"),
    "a space alone": ("ab  cd", [" "], "ab"),
    "only its beginning comes": ("ab\u7d42\u308f", ["\u7d42\u308f\u308a"], "ab\u7d42\u308f"),
    "across many tokens": ("a" + "b \u7d42" * 9, ["\u7d42b \u7d42b \u7d42b"], "ab "),
    "behind sixteen bytes": ("\U0001f600" * 9 + "ab", ["ab"], "\U0001f600" * 9),
    "the one that ends first": (
        "a\u7d42\u308f\u308ab",
        ["\u7d42\u308f\u308ab", "\u308f"],
        "a\u7d42",
    ),
    "an emoji": ("ab\U0001f468\u200d\U0001f469c", ["\U0001f468\u200d\U0001f469"], "ab"),
}


@pytest.mark.parametrize("kind", READ_BACK)
@pytest.mark.parametrize("case", STOPS)
def test_a_stop_text_ends_request_and_text_alike(kind, case, tmp_path):
    text, stops, shown = STOPS[case]
    tokenizer = tokenizer_of(kind, tmp_path)
    prompt = tokenizer.encode("ab")
    answer = tokenizer.encode("ab" + text)[len(prompt) :]
    if kind == "byte-level":
        prompt, answer = tokenizer.encode("ab"), tokenizer.encode(text)
    request = Request(id=0, prompt=tuple(prompt), max_new=999, stop_texts=tuple(stops))
    ends, ended = StopTexts(tmp_path), False
    for token in answer:
        request.output.append(token)
        if ends(request):
            ended = True
            break
    assert ended == (shown != text)
    rng = random.Random(3)
    for pieces in ([request.output], [[t] for t in request.output], bites(request.output, rng)):
        assert streamed(tokenizer, prompt, pieces, stop_texts=stops) == shown
    if ended:  # no token before the last one completes it
        before = streamed(tokenizer, prompt, [request.output[:-1]])
        assert not any(stop in before for stop in stops)


def test_stop_texts_that_do_not_count_end_nothing(tmp_path):
    tokenizer = tokenizer_of("gemma", tmp_path)
    tokens = tokenizer.encode("ab.ab.ab.ab", special=False)
    request = Request(id=0, prompt=(), max_new=99, stop_texts=(".",), min_new=4)
    ends = StopTexts(tmp_path)
    request.output += tokens[:5]  # asked from the first token on that counts
    assert not ends(request)
    request.output.append(tokens[5])
    assert ends(request)
    pieces = streamed(tokenizer, [], [tokens[:6]], stop_texts=["."], min_tokens=4)
    assert pieces == "ab.ab.ab"

"""Tokenizers carried in GGUF files against the ones that their tokens come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.checkpoints.gguf_tokenizer import PATTERNS
from llmpq.runtime.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.cpu
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DEMO = EXAMPLES / "demo-7m"
TEXTS = (
    "Hello world, it's 12345 o'clock!  Two  spaces\n\n\tand tabs",
    "<|endoftext|>after the end",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600 \u00df",
    " leading and trailing ",
    "",
)
SPACE = "\u2581"


def write(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def demo_metadata() -> dict[str, Any]:
    stored = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t == "<|endoftext|>" else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
    }


def test_byte_level_tokens_are_those_of_the_original(tmp_path: Path) -> None:
    ours = Tokenizer(write(tmp_path / "t.gguf", demo_metadata()))
    theirs = Tokenizer(DEMO)
    heldout = (EXAMPLES / "heldout.txt").read_text()[:20000]
    for text in (*TEXTS, heldout):
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens)
        assert [ours.bytes_of(t) for t in tokens[:50]] == [theirs.bytes_of(t) for t in tokens[:50]]
    chat = ours.encode_chat([{"role": "user", "content": "hi"}])
    assert ours.decode(chat) == "[hi]"


def test_the_beginning_is_added_where_the_file_asks(tmp_path: Path) -> None:
    asks = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    ours = Tokenizer(write(tmp_path / "t.gguf", demo_metadata() | asks))
    plain = Tokenizer(DEMO).encode("hello")
    assert ours.encode("hello") == [0, *plain] and ours.encode("hello", special=False) == plain


@pytest.mark.parametrize("pre", ["llama-bpe", "lfm2", "tekken", "qwen2"])
def test_files_that_do_not_say_begin_as_their_kind_does(pre: str, tmp_path: Path) -> None:
    """llama.cpp's older converter left `add_bos_token` out of Llama 3's files."""
    words = demo_metadata() | {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.pre": pre}
    begins = pre != "qwen2"
    assert (Tokenizer(write(tmp_path / "t.gguf", words)).encode("hello")[0] == 0) == begins
    never = words | {"tokenizer.ggml.add_bos_token": False}
    assert Tokenizer(write(tmp_path / "n.gguf", never)).encode("hello")[0] != 0


@pytest.fixture(scope="module")
def spm() -> Any:
    """A SentencePiece-like BPE of the held-out text, with bytes for what it lacks."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    raw = Raw(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    raw.train_from_iterator([(EXAMPLES / "heldout.txt").read_text()[:50000]], trainer)
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )  # as published tokenizer.json files of Llama 2, Mistral and Phi-3 have it
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return raw


def spm_metadata(raw: Any) -> dict[str, Any]:
    model = json.loads(raw.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    rank = {"".join(pair): place for place, pair in enumerate(model["merges"])}
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-rank.get(token, 1e6)) for token in tokens],
        "tokenizer.ggml.token_type": [
            kinds.get(t, 6 if t.startswith("<0x") and len(t) == 6 else 1) for t in tokens
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_tokens_follow_the_scores(spm: Any, tmp_path: Path) -> None:
    ours = Tokenizer(write(tmp_path / "t.gguf", spm_metadata(spm)))
    for text in (
        *("Hello world, it is late", "na\u00efve \u4f60 \U0001f600", "a b  c"),
        *(" a  b\n", "   three", "\n x", " ", "\t tab ", SPACE, " \u4f60", ""),
    ):
        want = spm.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [1, *want]
        assert ours.decode(ours.encode(text)) == text.replace(SPACE, " ")
    assert ours.bytes_of(ours.encode("\u4f60", special=False)[-1]) == "\u4f60".encode()[-1:]


def test_no_space_is_put_in_front_where_the_file_says_so(spm: Any, tmp_path: Path) -> None:
    words = spm_metadata(spm) | {"tokenizer.ggml.add_space_prefix": False}
    ours = Tokenizer(write(tmp_path / "t.gguf", words))
    for text in ("hello", " a  b\n", "   ", ""):
        assert ours.decode(ours.encode(text)) == text
    assert SPACE not in "".join(ours.text_of(t) for t in ours.encode("hello", special=False))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen35", "\u0939\u093f\u0902 \u0915\u0940", ["\u0939\u093f\u0902", " \u0915\u0940"]),
        ("kimi-k2", "ab\u4f60\u597dcd", ["ab", "\u4f60\u597d", "cd"]),
    ],
)
def test_marks_and_ideographs_are_cut_as_their_models_do(
    pre: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    ours = Tokenizer(write(tmp_path / "t.gguf", demo_metadata() | {"tokenizer.ggml.pre": pre}))
    cut = ours._inner.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces


def test_gemma_4s_tokens_follow_its_merges(spm: Any, tmp_path: Path) -> None:
    """As Transformers' tokenizer of Gemma makes them; "\\n\\n" is a token of its own."""
    from transformers import GemmaTokenizer

    words = spm_metadata(spm)
    merges = [tuple(pair) for pair in json.loads(spm.to_str())["model"]["merges"]]
    tokens = list(dict.fromkeys([*words["tokenizer.ggml.tokens"], "\n", "\n\n"]))
    merges = list(dict.fromkeys([*merges, ("\n", "\n")]))
    kinds = [*words["tokenizer.ggml.token_type"], 1, 1][: len(tokens)]
    theirs = GemmaTokenizer(
        vocab={token: place for place, token in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    )
    words |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }
    ours = Tokenizer(write(tmp_path / "t.gguf", words))
    for text in (*TEXTS[:1], "na\u00efve \u4f60 \U0001f600", " a  b\n\n\nc", "\t", ""):
        got = ours.encode(text)
        assert got == [1, *theirs.encode(text, add_special_tokens=False)]
        assert ours.decode(got) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "of the kind 't5'"),
        ({"tokenizer.ggml.pre": "klingon"}, "cuts text as 'klingon'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        ({"tokenizer.ggml.merges": ["a"]}, "is of tokens that the vocabulary lacks"),
        ({"tokenizer.ggml.merges": ["qzq zqz"]}, "is of tokens that the vocabulary lacks"),
    ],
)
def test_what_gives_other_tokens_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer(write(tmp_path / "t.gguf", demo_metadata() | change))


@pytest.mark.parametrize("key", ["model", "tokens", "merges", "pre", "scores"])
def test_what_is_missing_is_named_at_planning_too(key: str, spm: Any, tmp_path: Path) -> None:
    from llmpq.planner.problem.make_problem import _tokenizer_lack

    words = spm_metadata(spm) if key == "scores" else demo_metadata()
    whole = write(tmp_path / "whole.gguf", words)
    assert _tokenizer_lack(str(whole)) == []
    path = write(tmp_path / "t.gguf", {k: v for k, v in words.items() if not k.endswith(key)})
    with pytest.raises(ValueError, match=f"t.gguf'.*'tokenizer.ggml.{key}'") as error:
        Tokenizer(path)
    assert _tokenizer_lack(str(path)) == [str(error.value)]


@pytest.mark.parametrize("pre", PATTERNS)
def test_every_pattern_keeps_all_of_a_text(pre: str, tmp_path: Path) -> None:
    ours = Tokenizer(write(tmp_path / "t.gguf", demo_metadata() | {"tokenizer.ggml.pre": pre}))
    text = "It's ABCdef 1234567,  \u00fcber\n\n x_y/z\t!!\r\n" + TEXTS[0]
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["Don", "'t", " pay", " ", "123", "456", "7", "!!\n"]),
        ("qwen2", ["Don", "'t", " pay", " ", *"1234567", "!!\n"]),
        ("gpt-2", ["Don", "'t", " pay", " 1234567", "!!", "\n"]),
        ("smollm", ["Don", "'t", " pay", " ", *"1234567", "!!", "\n"]),
        ("gpt-4o", ["Don't", " pay", " ", "123", "456", "7", "!!\n"]),
        ("deepseek-v3", ["Don", "'t", " pay", " ", "123", "456", "7", "!!\n"]),
        ("qwen35", ["Don", "'t", " pay", " ", *"1234567", "!!\n"]),
        ("kimi-k2", ["Don't", " pay", " ", "123", "456", "7", "!!\n"]),
        ("tekken", ["Don", "'t", " pay", " ", *"1234567", "!!\n"]),
        ("seed-coder", ["Don", "'t", " pay", " ", *"1234567", "!!", "\n"]),
        ("command-r", ["Don", "'t", " pay", " ", *"1234567", "!!", "\n"]),
        ("deepseek-llm", ["Don", "'", "t", " pay", " ", *"1234567", "!!", "\n"]),
        ("deepseek-coder", ["Don", "'", "t", " pay", " ", *"1234567", "!!", "\n"]),
    ],
)
def test_patterns_cut_as_their_models_do(pre: str, pieces: list[str], tmp_path: Path) -> None:
    ours = Tokenizer(write(tmp_path / "t.gguf", demo_metadata() | {"tokenizer.ggml.pre": pre}))
    cut = ours._inner.backend_tokenizer.pre_tokenizer.pre_tokenize_str("Don't pay 1234567!!\n")
    assert [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece, _ in cut] == pieces

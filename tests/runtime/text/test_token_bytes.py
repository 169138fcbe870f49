"""A text is refused by its length alone only where it surely has more tokens than there is room."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from llmpq.errors import ContextLengthError
from llmpq.runtime.text.token_bytes import longest_token_bytes
from llmpq.runtime.text.tokenizer import LONG_BYTES
from llmpq.runtime.text.tokenizer import Tokenizer as Ours

pytestmark = [pytest.mark.cpu, pytest.mark.quick]
WORDS = ("    ", "hello", "the", "ﬁ", "Å", "あい", "🙂", "\U0001d400", "é", "\n\n\n\n", "a", "하")


def byte_level(*, spaces: int = 9) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *("Ġ" * n for n in range(2, spaces))]
    merges = [("Ġ" * n, "Ġ") for n in range(1, spaces - 1)]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁▁", "h", "a"]
    merges = [("▁", "▁"), ("▁▁", "▁▁")]
    made = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)}, merges, unk_token="<unk>",
            byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def composed() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFKC()
    return made


def with_turns() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens(["<|a turn of somebody ends here|>"])
    return made


KNOWN: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level, "fallback": byte_fallback, "nfkc": composed, "special": with_turns,
}  # fmt: skip


@pytest.mark.parametrize("kind", KNOWN)
def test_no_text_has_fewer_tokens_than_the_bound(kind: str) -> None:
    made, draw = KNOWN[kind](), random.Random(kind)
    most = longest_token_bytes(made.to_str())
    assert most is not None
    words = (*WORDS, "<|a turn of somebody ends here|>", "e\u0301", "\u03b1\u0313\u0300\u0345")
    for _ in range(300):
        text = "".join(draw.choice(words) for _ in range(draw.randint(0, 60)))
        assert len(made.encode(text, add_special_tokens=False).ids) >= len(text.encode()) / most


def changed(kind: str, change: Callable[[Any], None]) -> str:
    stored = json.loads(KNOWN[kind]().to_str())
    change(stored)
    return json.dumps(stored)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        lambda s: s.update(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
        lambda s: s.update(pre_tokenizer={"type": "WhitespaceSplit"}),
        lambda s: s["model"]["vocab"].pop("a"),
        lambda s: s["added_tokens"].append({"content": "<e>", "lstrip": True}),
    ],
)
def test_nothing_is_said_of_tokenizers_that_drop_text(change: Callable[[Any], None]) -> None:
    assert longest_token_bytes(changed("bytes", lambda s: None)) == 8
    assert longest_token_bytes(changed("bytes", change)) is None


def test_runs_of_unknown_characters_may_be_one_token() -> None:
    drop = changed("fallback", lambda s: s["model"].update(byte_fallback=False))
    assert longest_token_bytes(drop) is None


def test_a_text_that_is_surely_too_long_is_not_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = byte_level()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    )
    ours = Ours(tmp_path)
    text = "x" * (LONG_BYTES * 20)
    assert len(ours.encode(text)) == len(text) and len(ours.encode(text, room=1000)) == len(text)
    with pytest.raises(ContextLengthError, match="it has at least 41 tokens.* is 20 with"):
        ours.encode(text + "x" * 8, room=20)


def test_every_door_refuses_before_it_tokenises(demo_model: Path, monkeypatch: Any) -> None:
    from llmpq import LLM, SamplingParams

    text = "x = 1\n" * 200_000
    llm = LLM(demo_model, start=False, max_model_len=64)
    ask = SamplingParams(max_tokens=4)
    with pytest.raises(ContextLengthError, match="at least"):
        llm.prepare(text, ask)
    cut = llm.prepare(text[:4000], SamplingParams(max_tokens=4, truncate_prompt_tokens=8))
    assert len(cut.tokens) == 8

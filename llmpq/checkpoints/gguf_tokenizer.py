"""The tokenizer that a GGUF file carries, built with the tokenizers library.

    tokenizer.ggml.model "gpt2"    byte-level BPE: tokens, merges, and by `tokenizer.ggml.pre` the
                                   pattern that text is cut by first
    tokenizer.ggml.model "llama"   SentencePiece's BPE: tokens and scores; merges follow from those
    tokenizer.ggml.model "gemma4"  the same with merges of its own, and no space in front

Token types: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Control tokens are
special: decoding leaves them out. A pattern's name that is not known here is refused: other cuts
give other tokens, in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmpq.checkpoints.gguf_file import GgufFile
from llmpq.errors import shortened

KEY = "tokenizer.ggml."
NEEDED = {
    "gpt2": ("tokens", "merges"),
    "llama": ("tokens", "scores"),
    "gemma4": ("tokens", "merges"),
}
"""`tokenizer.ggml.model` -> the lists without which it cannot be built."""
ELSEWHERE = "Get the model's directory from its author instead, or give token ids"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_APOSTROPHES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WITH_MARKS = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""Letters that DeepSeek's first models take as words: those with case, of an older Unicode."""
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_HAN_APART = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BY_THREE = _APOSTROPHES + _WORDS % "{1,3}"
_SEED = (
    _APOSTROPHES + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
LLAMA3 = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "lfm2",
    "pixtral",
    "falcon3",
    "falcon-h1",
    "midm-2.0",
)
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _MARKED)
PATTERNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "exaone4", "trillion", "granite-docling"), (GPT2,)),
    **dict.fromkeys((*LLAMA3, "dbrx", "smaug-bpe"), (_BY_THREE,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_BY_THREE,)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open"),
        (_APOSTROPHES + _WORDS % "",),
    ),
    **dict.fromkeys(
        ("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone"), (r"\p{N}", GPT2)
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_CASED % (_ENDINGS, _ENDINGS, "{1,3}"),)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "seed-coder": (_SEED,),
    "qwen35": (_APOSTROPHES + _WITH_MARKS,),
    "kimi-k2": (_HAN_APART,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "tekken": (_CASED % ("", "", ""),),
}
"""`tokenizer.ggml.pre` -> the patterns that text is cut by, one after the other."""
WHOLE_WORDS_FIRST = (*LLAMA3, "tekken")
"""Where a word that is a token is not merged from parts (`ignore_merges`), and a text begins with
its token where the file does not say whether it does."""
NFC = ("qwen2", "qwen35", "deepseek-r1-qwen")
"""Where characters are composed first, as the models' own tokenizers do."""


def require_tokenizer(file: GgufFile) -> None:
    """Raise `ValueError`, by the name of a key, for a tokenizer that is not whole or not known."""
    metadata = file.metadata
    kind = metadata.get(KEY + "model")
    if kind is None:
        raise ValueError(f"'{file.path}' carries no tokenizer (no '{KEY}model'). {ELSEWHERE}")
    if kind not in BUILDERS:
        raise ValueError(
            f"'{file.path}' carries a tokenizer of the kind {shortened(repr(kind))}; llmpq reads "
            f"{' and '.join(repr(known) for known in BUILDERS)}. {ELSEWHERE}"
        )
    for key in NEEDED[kind]:
        if not isinstance(metadata.get(KEY + key), list):
            raise ValueError(
                f"'{file.path}': its tokenizer is not whole: '{KEY}{key}', which a tokenizer of "
                f"the kind '{kind}' needs, is missing. {ELSEWHERE}"
            )
    pre = metadata.get(KEY + "pre")
    if kind == "gpt2" and pre not in PATTERNS:
        how = f"as {shortened(repr(pre))}" if pre else f"in a way that it does not say ('{KEY}pre')"
        raise ValueError(
            f"'{file.path}': its tokenizer cuts text {how}, which llmpq does not know; it knows "
            f"{', '.join(PATTERNS)}. {ELSEWHERE}"
        )


def tokenizer_of(file: GgufFile) -> Any:
    """Return Transformers' fast tokenizer of a GGUF file; `ValueError` for a form not known."""
    from transformers import PreTrainedTokenizerFast

    require_tokenizer(file)
    metadata = file.metadata
    tokens, kind = metadata[KEY + "tokens"], metadata[KEY + "model"]
    types = metadata.get(KEY + "token_type") or [1] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"'{file.path}': {len(set(tokens))} different tokens of {len(tokens)}, and "
            f"{len(types)} token types; the file is damaged. Download it again"
        )
    backend = BUILDERS[kind](file, tokens, types)
    _add_special(backend, tokens, types, normalized=kind == "llama")
    by_itself = kind in ("llama", "gemma4") or metadata.get(KEY + "pre") in WHOLE_WORDS_FIRST
    _add_ends(backend, file, tokens, default_bos=by_itself)
    names = {
        f"{name}_token": tokens[place]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if type(place := metadata.get(f"{KEY}{key}_token_id")) is int and 0 <= place < len(tokens)
    }
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **names
    )
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(key).removeprefix(".") or "default": template
        for name, template in metadata.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(template, str)
    }
    made.chat_template = named if named.keys() - {"default"} else named.get("default")
    return made


def _byte_level(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Any:
    """Return a byte-level BPE."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    metadata = file.metadata
    pre = metadata[KEY + "pre"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    pairs = _stored_merges(file, vocabulary)
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=pairs,
            ignore_merges=pre in WHOLE_WORDS_FIRST,
        )
    )
    if pre in NFC:
        made.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[pre]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    made.decoder = decoders.ByteLevel()
    return made


def _stored_merges(file: GgufFile, tokens: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that a file has, of tokens that it has."""
    pairs = []
    for merge in file.metadata[KEY + "merges"]:
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= tokens.keys():
            raise ValueError(
                f"'{file.path}': merge {shortened(repr(merge))} is of tokens that the "
                "vocabulary lacks; the file is damaged. Download it again"
            )
        pairs.append((left, right))
    return pairs


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Any:
    """Return SentencePiece's BPE.

    Its next merge is the pair that makes the best-scored token, where the file lists no merges.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    metadata = file.metadata
    vocabulary = {token: place for place, token in enumerate(tokens)}
    by_score = metadata[KEY + "model"] == "llama"
    if by_score and len(metadata[KEY + "scores"]) != len(tokens):
        raise ValueError(f"'{file.path}': its tokenizer has no score for each of its tokens")
    plain = {t: i for t, i in vocabulary.items() if types[i] not in (UNKNOWN, CONTROL, BYTE)}
    unknown = metadata.get(KEY + "unknown_token_id", 0)
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(plain, metadata[KEY + "scores"])
            if by_score
            else _stored_merges(file, vocabulary),
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = "\u2581"
    spaces: list[Any] = [normalizers.Replace(" ", space)]
    steps: list[Any] = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(KEY + "add_space_prefix", by_score):
        # One more than the text has, before and behind special tokens: as llama.cpp does it.
        spaces.insert(0, normalizers.Prepend(space))
        steps.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(spaces)
    made.decoder = decoders.Sequence(steps)
    return made


def _merges(tokens: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes another one, best score first."""
    found = [
        (-scores[place], tokens[token[:cut]], tokens[token[cut:]], token[:cut], token[cut:])
        for token, place in tokens.items()
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _add_special(
    backend: Any, tokens: Sequence[str], types: Sequence[int], *, normalized: bool
) -> None:
    """Add the tokens that text is searched for before it is cut; `normalized`: spaces as U+2581."""
    from tokenizers import AddedToken

    added = [
        AddedToken(
            token,
            special=kind in (UNKNOWN, CONTROL),
            normalized=normalized and kind == USER_DEFINED,
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])


def _add_ends(backend: Any, file: GgufFile, tokens: Sequence[str], *, default_bos: bool) -> None:
    """Put the beginning and end of a text around it, where the file asks for it."""
    from tokenizers import processors

    def asked(end: str, default: bool) -> tuple[str, int] | None:
        place = file.metadata.get(f"{KEY}{end}_token_id")
        wanted = file.metadata.get(f"{KEY}add_{end}_token", default)
        if not wanted or not isinstance(place, int) or not 0 <= place < len(tokens):
            return None
        return tokens[place], place

    begin, end = asked("bos", default_bos), asked("eos", False)
    if begin or end:
        single = [*([begin[0]] if begin else []), "$A", *([end[0]] if end else [])]
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[found for found in (begin, end) if found]
        )


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}
"""`tokenizer.ggml.model` -> what builds it."""

"""Guided decoding: llguidance beside xgrammar on the same vocabularies, schemas and choices.

    python benchmarks/guides.py [--schemas 60] [--vocabs 4096,128256] [--write]

For each library: seconds to take in a vocabulary, to compile a schema, and to make one mask of what
may come next, in one thread; and how many of the walks through random schemas end in JSON that is
valid. Both walk by the same random preferences. xgrammar is optional: `pip install xgrammar`.
The vocabularies are invented: all bytes, and random runs of what JSON and code are made of.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from lib.rows import write_row

END, LONGEST_WALK = 0, 400
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"


class Walker(Protocol):
    """One text on its way."""

    def allowed(self) -> np.ndarray:
        """Return which tokens [V] may come next."""
        ...

    def take(self, token: int) -> None:
        """Go on."""
        ...


def vocabulary(size: int) -> list[bytes]:
    """Return the end, all bytes, and so many random pieces of text that no two are alike."""
    rng = random.Random(size)
    tokens = [b"<end>", *(bytes([value]) for value in range(256))]
    seen = set(tokens)
    while len(tokens) < size:
        word = "".join(rng.choices(LETTERS, k=rng.randint(2, 9)))
        piece = rng.choice([word, " " + word, word.capitalize(), str(rng.randint(0, 9999)),
                            '": ', '", "', '"}', "], ", '{"' + word, word + '"'])  # fmt: skip
        if piece.encode() not in seen:
            seen.add(piece.encode())
            tokens.append(piece.encode())
    return tokens


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema all of whose texts are short."""
    kinds = ["integer", "string", "boolean", "enum", *["object", "array"] * (depth < 2)]
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-9, 9), "maximum": rng.randint(9, 999)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 12)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", "blue", 7, None, True], 3)}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": 1, "maxItems": 3}
    if kind == "object":
        names = rng.sample(["id", "name", "tags", "size", "on", "city"], rng.randint(1, 4))
        parts = {name: schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": parts, "required": names,
                "additionalProperties": False}  # fmt: skip
    return {"type": kind}


def llguidance_maker(tokens: Sequence[bytes]) -> Callable[[dict[str, Any]], Walker]:
    """Return what compiles a schema with llguidance."""
    import llguidance

    class Raw:
        eos_token_id, bos_token_id, special_token_ids = END, None, [END]

        def __init__(self) -> None:
            self.tokens = list(tokens)

        def __call__(self, text: bytes) -> list[int]:
            return [1 + byte for byte in (text.encode() if isinstance(text, str) else text)]

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Raw()))
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

    class One:
        def __init__(self, wanted: dict[str, Any]) -> None:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(wanted, overrides=style)
            self.matcher = llguidance.LLMatcher(tokenizer, grammar)

        def allowed(self) -> np.ndarray:
            return np.frombuffer(self.matcher.compute_logit_bias(), dtype=np.uint8) > 0

        def take(self, token: int) -> None:
            assert self.matcher.consume_token(token)

    return One


def xgrammar_maker(tokens: Sequence[bytes]) -> Callable[[dict[str, Any]], Walker]:
    """Return what compiles a schema with xgrammar."""
    import torch
    import xgrammar

    info = xgrammar.TokenizerInfo(
        list(tokens), xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[END]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class One:
        def __init__(self, wanted: dict[str, Any]) -> None:
            made = compiler.compile_json_schema(
                json.dumps(wanted), any_whitespace=False, separators=(", ", ": ")
            )
            self.matcher = xgrammar.GrammarMatcher(made)
            self.mask = xgrammar.allocate_token_bitmask(1, len(tokens))

        def allowed(self) -> np.ndarray:
            self.matcher.fill_next_token_bitmask(self.mask)
            bits = np.unpackbits(self.mask.numpy().view(np.uint8)[0], bitorder="little")
            return bits[: len(tokens)].astype(bool)

        def take(self, token: int) -> None:
            assert self.matcher.accept_token(token)

    assert torch
    return One


MAKERS = {"llguidance": llguidance_maker, "xgrammar": xgrammar_maker}


def walk(walker: Walker, tokens: Sequence[bytes], seed: int, masks_s: list[float]) -> str | None:
    """Follow a guide by random preferences; None if the text did not end."""
    rng, text = np.random.default_rng(seed), b""
    for _ in range(LONGEST_WALK):
        started = time.perf_counter()
        allowed = walker.allowed()
        masks_s.append(time.perf_counter() - started)
        token = int(np.where(allowed, rng.random(len(tokens)), -1.0).argmax())
        if token == END:
            return text.decode(errors="replace")
        walker.take(token)
        text += tokens[token]
    return None


def valid(text: str | None, wanted: dict[str, Any]) -> bool:
    """Whether a text is JSON of a schema."""
    try:
        jsonschema.validate(json.loads(text or ""), wanted)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def measure(library: str, size: int, num_schemas: int, write: bool) -> None:
    """Print, and write, the rows of one library and vocabulary."""
    tokens = vocabulary(size)
    started = time.perf_counter()
    make = MAKERS[library](tokens)
    taken_in_s = time.perf_counter() - started
    compile_s: list[float] = []
    masks_s: list[float] = []
    good = 0
    for seed in range(num_schemas):
        wanted = schema(random.Random(seed))
        started = time.perf_counter()
        walker = make(wanted)
        compile_s.append(time.perf_counter() - started)
        good += valid(walk(walker, tokens, seed, masks_s), wanted)
    ordered = sorted(masks_s)
    half_s, most_s = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    print(
        f"{library:11} vocab {size:7}: taken in {taken_in_s:6.2f} s, compile "
        f"{statistics.median(compile_s) * 1e3:8.2f} ms (max {max(compile_s) * 1e3:8.1f}), mask "
        f"{half_s * 1e6:7.0f} us (p99 {most_s * 1e6:7.0f}), "
        f"valid {good}/{num_schemas}"
    )
    if write:
        case = {"library": library, "vocab": size, "valid": good, "schemas": num_schemas}
        for what, samples in (("compile", compile_s), ("mask", masks_s), ("vocab", [taken_in_s])):
            write_row("guides.jsonl", bench=f"guide_{what}", case=case, unit="s", samples=samples,
                      noisy=True)  # fmt: skip


def main() -> None:
    """Compare what is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=60)
    parser.add_argument("--vocabs", default="4096,128256")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for size in map(int, options.vocabs.split(",")):
        for library in MAKERS:
            try:
                measure(library, size, options.schemas, options.write)
            except ImportError as error:
                print(f"{library}: not installed ({error})")


if __name__ == "__main__":
    main()

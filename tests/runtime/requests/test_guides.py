"""Guided decoding: every answer parses and fits, whatever the model would rather say."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from llmpq import LLM, SamplingParams, StructuredOutputsParams
from llmpq.checkpoints.tokenizer_files import without_special_names
from llmpq.errors import GuideError
from llmpq.runtime.models.ruled_sampling import unpacked
from llmpq.runtime.requests.guides import GrammarCompiler
from llmpq.runtime.requests.token_rules import Guide, Thought
from llmpq.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """Return a schema all of whose texts are short."""
    kinds = ["integer", "string", "boolean", "enum", "null"] + ["object", "array"] * (depth < 2)
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 8)}
    if kind == "enum":
        return {"enum": rng.sample(["red", 7, None, 'a "quote"', 2.5, "\u00e9t\u00e9"], 3)}
    if kind == "array":
        count = rng.randint(0, 3)
        return {
            "type": "array", "items": random_schema(rng, depth + 1),
            "minItems": rng.randint(0, count), "maxItems": count,
        }  # fmt: skip
    if kind == "object":
        names = rng.sample(["id", "name", "tags", "size", "on", "x y", "\u00fc"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": names,
            "additionalProperties": False,
        }
    return {"type": kind}


@pytest.fixture(scope="module", params=[1, 2], ids=["one stage", "two stages"])
def llm(request, demo_model, make_plan):
    cuts = () if request.param == 1 else (3,)
    plan = make_plan(demo_model, cuts, batch=8, prompt_len=32, gen_len=480, decode_microbatch=8)
    with LLM(demo_model, plan=plan, backend="threads") as made:
        yield made


def asked(guide: StructuredOutputsParams, seed: int, **options: object) -> SamplingParams:
    values = {"temperature": 1.0, "seed": seed, "max_tokens": 400} | options
    return SamplingParams(structured_outputs=guide, **values)


def test_schemas_are_met(llm):
    rng = random.Random(20)
    schemas = [random_schema(rng) for _ in range(16)]
    params = [
        asked(StructuredOutputsParams(json=schema), seed, temperature=seed % 2)
        for seed, schema in enumerate(schemas)
    ]
    for schema, answer in zip(schemas, llm.generate(["x = "] * 16, params), strict=True):
        assert answer.outputs[0].finish_reason == "stop", (schema, answer.text)
        jsonschema.validate(json.loads(answer.text), schema)


def test_regexes_and_choices_are_met_beside_free_answers(llm):
    date = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
    names = ["yes", 'no "really"', "caf\u00e9", "yes indeed"]
    params = [
        asked(StructuredOutputsParams(regex=date), 1),
        SamplingParams(temperature=0, max_tokens=12),
        *(asked(StructuredOutputsParams(choice=names), seed) for seed in range(5)),
    ]
    answers = llm.generate(["when: "] * len(params), params)
    assert re.fullmatch(date, answers[0].text)
    assert answers[1].text == llm.generate("when: ", params[1])[0].text
    found = {answer.text for answer in answers[2:]}
    assert found <= set(names) and len(found) > 1


NODE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}
LIST = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}
TREE = {
    "type": "object",
    "properties": {"c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "required": ["c"],
    "additionalProperties": False,
}


def test_one_of_some_tools_is_called_with_arguments_of_its_own_schema(llm):
    schemas = {"list": LIST, "tree": TREE, "none": {"type": "object", "maxProperties": 0}}
    calls = StructuredOutputsParams(calls=[*schemas.items()])
    params = [asked(calls, seed) for seed in range(12)]
    answers = [answer.outputs[0] for answer in llm.generate(["call: "] * 12, params)]
    decoded = [json.loads(a.text) for a in answers if a.finish_reason == "stop"]
    assert len(decoded) > 6 and len({call["name"] for call in decoded}) > 1
    for call in decoded:
        assert sorted(call) == ["arguments", "name"]
        jsonschema.validate(call["arguments"], schemas[call["name"]])


@pytest.mark.parametrize(
    "grammar",
    ['start: "yes" " " NUMBER\nNUMBER: /[0-9]{2}/', 'root ::= "yes " [0-9] [0-9]'],
    ids=["Lark", "GBNF"],
)
def test_grammars_are_followed(llm, grammar):
    (answer,) = llm.generate("a", asked(StructuredOutputsParams(grammar=grammar), 1))
    assert re.fullmatch("yes [0-9]{2}", answer.text)


def test_a_regex_may_say_that_it_is_of_a_whole_text(llm):
    for regex, wanted in ((r"^[ab]{3}$", "[ab]{3}"), (r"^a\$", r"a\$"), (r"^a|b$", "a|b")):
        (answer,) = llm.generate("a", asked(StructuredOutputsParams(regex=regex), 1))
        assert re.fullmatch(wanted, answer.text), regex


def test_one_of_thousands_of_choices_is_made(llm):
    names = [f"entry {n} of the list" for n in range(3000)]
    for guide in (
        StructuredOutputsParams(choice=names),
        StructuredOutputsParams(json={"enum": names}),
    ):
        text = llm.generate("pick: ", asked(guide, 3))[0].text
        assert (json.loads(text) if guide.json else text) in names


def test_a_guide_that_gives_up_is_an_error_not_an_end(llm, monkeypatch):
    monkeypatch.setattr("llmpq.runtime.requests.guides._LIMITS", {"max_items_in_row": 60})
    inner = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(100)}}
    properties = {"first": {"type": "boolean"}, "in": inner}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    params = [asked(StructuredOutputsParams(json=schema), 1), SamplingParams(max_tokens=4, seed=1)]
    failed, other = (answer.outputs[0] for answer in llm.generate(["a", "b"], params))
    assert failed.text and '{"first": false, "in": {'.startswith(failed.text)
    assert failed.finish_reason == "error" and "too many ways open" in failed.stop_reason
    assert other.finish_reason == "length"


END = "<|endoftext|>"
"""The one special token of the model, which ends an answer."""


@pytest.mark.parametrize(
    ("guide", "text"),
    [
        (StructuredOutputsParams(choice=[f"a{END}b"]), f"a{END}b"),
        (StructuredOutputsParams(choice=[END]), END),
        (StructuredOutputsParams(json={"const": {END: f"{END} x"}}), f'{{"{END}": "{END} x"}}'),
        (StructuredOutputsParams(regex=r"a<\|endoftext\|>b"), f"a{END}b"),
        (
            StructuredOutputsParams(calls=[(END, {"const": END})]),
            f'{{"name": "{END}", "arguments": "{END}"}}',
        ),
    ],
)
def test_names_of_special_tokens_in_a_guide_are_text(llm, guide, text):
    (answer,) = llm.generate(["x = "], asked(guide, 1))
    assert (answer.text, answer.outputs[0].finish_reason) == (text, "stop")


def test_a_grammar_may_name_special_tokens(demo_model):
    compiler = GrammarCompiler(demo_model, vocab=4096, end_ids=[0])
    compiler.check(Guide(kind="grammar", text='start: "a" <|endoftext|>'))
    with pytest.raises(ValueError, match="cannot be followed"):
        compiler.check(Guide(kind="grammar", text='start: "a" <|nothing|>'))


def test_names_of_added_tokens_in_a_guide_are_text(demo_model, tmp_path):
    """Qwen's `<tool_call>` and Gemma's `<b>` are no special tokens; llguidance takes them so."""
    stored = json.loads((demo_model / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = ["<tool_call>", "<b>", "[x]"]
    for token, name in enumerate(names, start=4096):
        stored["added_tokens"].append({"id": token, "content": name, "special": False, **plain})
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    compiler = GrammarCompiler(tmp_path, vocab=4099, end_ids=[0])
    tokenizer = Tokenizer(tmp_path)
    for text in (*names, "a<tool_call>{}", "<b>x</b>"):
        automaton = compiler.compile(Guide(kind="choice", text=json.dumps([text])))
        tokens: list[int] = []
        while 0 not in tokens:
            (mask,) = unpacked(automaton.allowed_of([(automaton, tokens)], 4099)(), 4099)
            tokens.append(int(mask.nonzero()[0]))
        assert automaton.failure is None and tokenizer.decode(tokens[:-1]) == text


SPACE = "\u2581"
PIECES = [
    *("<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))),
    *(SPACE, f"{SPACE}{SPACE}", "a", "b", "ab", f"{SPACE}ab", "{", "}", '"', ":", ",", "1"),
]


def sentencepiece(kind: str) -> Any:
    """A SentencePiece vocabulary whose spaces come back as one of the decoders has them."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    merges = [("a", "b"), (SPACE, "ab"), (SPACE, SPACE)]
    if kind == "unigram":
        made = Backend(models.Unigram([(p, -3.0) for p in PIECES], unk_id=0, byte_fallback=True))
    else:
        vocabulary = {piece: place for place, piece in enumerate(PIECES)}
        how = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
        made = Backend(models.BPE(vocabulary, merges, **how))
    if kind == "replace":
        made.normalizer = normalizers.Replace(" ", SPACE)
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence(steps)
    else:
        scheme = "never" if kind == "unigram" else kind
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
        made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "</s>"])
    return made


@pytest.mark.parametrize("kind", ["replace", "always", "first", "never", "unigram"])
def test_spaces_of_sentencepieces_vocabularies_are_followed(kind, tmp_path):
    """Transformers 5 saves them with a decoder of its own, which llguidance does not know."""
    sentencepiece(kind).save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, vocab=len(PIECES), end_ids=[1])
    tokenizer = Tokenizer(tmp_path)
    guides = [Guide(kind="choice", text=json.dumps([text])) for text in ("a b", "ab  ab\u00e9 b")]
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": "a b"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    guides.append(Guide(kind="json", text=json.dumps(schema)))
    texts = ["a b", "ab  ab\u00e9 b", '{"a": 1, "b": "a b"}']
    for guide, text in zip(guides, texts, strict=True):
        compiler.check(guide)
        automaton, tokens = compiler.compile(guide), list[int]()
        while 1 not in tokens:
            (mask,) = unpacked(automaton.allowed_of([(automaton, tokens)], 270)(), 270)
            tokens.append(int(mask.nonzero()[-1]))  # not by bytes
        assert automaton.failure is None and tokenizer.decode(tokens[:-1]) == text
        assert PIECES.index(SPACE) in tokens or PIECES.index(f"{SPACE}ab") in tokens


@pytest.mark.parametrize(
    "guide",
    [
        {"choice": [f"a{SPACE}b", "a b"]},
        {"json": {"const": SPACE}},
        {"json": {"type": "object", "properties": {f"a{SPACE}": {}}}},
        {"json": {"anyOf": [{"enum": [1, f"{SPACE}b"]}]}},
        {"regex": f"a{SPACE}*"},
        {"calls": [(f"a{SPACE}", {})]},
    ],
)
def test_a_guide_that_asks_for_what_would_be_a_space_is_refused(guide, tmp_path, demo_model):
    asked_for = StructuredOutputsParams(**guide).guide()
    for kind in ("replace", "always"):
        sentencepiece(kind).save(str(tmp_path / "tokenizer.json"))
        compiler = GrammarCompiler(tmp_path, vocab=len(PIECES), end_ids=[1])
        with pytest.raises(
            GuideError, match=r"\(U\+2581\), which this model's tokenizer writes as"
        ):
            compiler.check(asked_for)
        described = {"type": "integer", "description": f"not {SPACE}"}
        compiler.check(Guide(kind="json", text=json.dumps(described)))
    GrammarCompiler(demo_model, vocab=4096, end_ids=[0]).check(asked_for)


@pytest.mark.parametrize("model", ["BPE", "Unigram"])
def test_special_tokens_without_names_keep_their_places(model):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    pieces = ["<unk>", "</s>", "a", "b", "ab", "<", "/", "s", ">"]
    made = Backend(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("a", "b")], unk_token="<unk>")
        if model == "BPE"
        else models.Unigram([(p, -1.0) for p in pieces], unk_id=0)
    )
    made.add_special_tokens(["<unk>", "</s>", "<more>"])
    made.add_tokens(["<ab>", "[s]"])
    unnamed = Backend.from_str(without_special_names(made.to_str()))
    assert made.encode("ab</s><ab>[s]").ids == [4, 1, 10, 11]
    assert unnamed.encode("ab</s><ab>[s]").ids == [4, 5, 6, 7, 8, 5, 4, 8, 11]
    assert unnamed.get_vocab_size() == made.get_vocab_size() == 12
    assert {t for t, own in unnamed.get_added_tokens_decoder().items() if own.special} == {0, 1, 9}


def test_a_guide_does_not_change_a_text_that_fits(llm):
    free = llm.generate("def main():", SamplingParams(temperature=0, max_tokens=12))[0].text
    params = asked(StructuredOutputsParams(choice=[free, free + "!"]), 0, temperature=0)
    assert llm.generate("def main():", params)[0].text in (free, free + "!")


@pytest.mark.parametrize(
    ("guide", "said"),
    [
        ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json": False}, "JSON schema cannot be followed"),
        ({"json": {"not": {"type": "string"}}}, "keywords not; leave them out"),
        ({"json": {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}}, "back to itself"),
        ({"json": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}, "write anyOf"),
        ({"grammar": "start: other"}, "grammar cannot be followed: .*other"),
        ({"grammar": 'root ::= "a'}, "grammar cannot be followed"),
        ({"calls": [("a", True), ("b", {"type": "odd"})]}, "parameters of the tool 'b' .*: odd"),
        ({"calls": [("a", {"$ref": "#"})]}, "parameters of the tool 'a' .* back to itself"),
        ({"regex": "(["}, "unclosed character class"),
        ({"regex": "a" * (1 << 20) + "a"}, "is too long"),
        ({"regex": "a{900000}"}, "the regex cannot be followed: it leaves too many ways open"),
    ],
)
def test_guides_that_cannot_be_followed_are_refused(llm, guide, said):
    with pytest.raises(ValueError, match=said) as caught:
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(**guide)))
    assert "\n" not in str(caught.value)
    # Looked at beside others, the same is said.
    others = [asked(StructuredOutputsParams(choice=["a", str(n)]), n) for n in range(9)]
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(**guide))
    with pytest.raises(ValueError, match=said):
        llm.generate(["a"] * 10, [*others, bad])
    assert llm.generate("a", SamplingParams(temperature=0, max_tokens=1))[0].outputs


def test_an_automaton_follows_an_answer_that_was_computed_anew(demo_model):
    guides = GrammarCompiler(demo_model, vocab=4100, end_ids=[0])
    automaton = guides.compile(Guide(kind="choice", text='["yes", "no"]'))

    def allowed(tokens):
        return unpacked(automaton.allowed_of([(automaton, tokens)], 4100)(), 4100)[0]

    start = allowed([]).nonzero()[:, 0].tolist()
    assert 1 < len(start) < 10 and 0 not in start
    whole = [start[0]]
    while not allowed(whole)[0]:
        whole.append(int(allowed(whole).nonzero()[0, 0]))
    assert allowed(whole).sum() == 1  # nothing but the end
    assert allowed([]).nonzero()[:, 0].tolist() == start
    assert allowed([*whole, 0])[0]


def test_a_guide_begins_behind_a_thought(demo_model):
    """Any token but the end while it lasts; the guide's own behind its closing mark, 9."""
    guides = GrammarCompiler(demo_model, vocab=4096, end_ids=[0])
    guide = Guide(kind="choice", text='["yes", "no"]')
    thought = Thought(tokens=None, begin=8, end=9, is_open=True)
    plain, behind = guides.compile(guide), guides.compile(guide, behind=thought)

    def allowed(automaton, *tokens):
        return unpacked(automaton.allowed_of([(automaton, tokens)], 4096)(), 4096)[0]

    for tokens in ((), (17,), (17, 300)):
        assert allowed(behind, *tokens).nonzero()[:, 0].tolist() == list(range(1, 4096))
    start = allowed(plain)
    first = int(start.nonzero()[0, 0])
    assert (allowed(behind, 17, 300, 9) == start).all()
    assert (allowed(behind, 17, 300, 9, first) == allowed(plain, first)).all()
    assert (allowed(behind, 9) == start).all(), "computed anew"
    assert behind.failure is None
    together = behind.allowed_of([(behind, (17,)), (plain, ())], 4096)()
    assert (unpacked(together, 4096)[1] == start).all()


def test_requests_of_one_guide_begin_alike_and_go_their_own_ways(demo_model):
    guides = GrammarCompiler(demo_model, vocab=4096, end_ids=[0])
    guide = Guide(kind="choice", text=json.dumps(["ab", "xy"]))
    one, two = guides.compile(guide), guides.compile(guide)

    def allowed(automaton, *tokens):
        return unpacked(automaton.allowed_of([(automaton, tokens)], 4096)(), 4096)[0]

    start = allowed(one)
    assert start.sum() > 1
    first, second = start.nonzero()[:, 0][[0, -1]].tolist()
    after = allowed(one, first)
    assert (allowed(two) == start).all(), "the second moved with the first"
    assert not (allowed(two, second) == after).all()
    assert (allowed(guides.compile(guide)) == start).all()


def test_only_the_newest_guides_are_kept(demo_model, monkeypatch):
    monkeypatch.setattr("llmpq.runtime.requests.guides._KEPT", 2)
    guides = GrammarCompiler(demo_model, vocab=4096, end_ids=[0])
    for text in ("a", "b", "a", "c", "d"):
        guides.check(Guide(kind="regex", text=text))
        guides.compile(Guide(kind="regex", text=text))
    assert [guide.text for guide in guides._begun._kept] == ["c", "d"]
    with pytest.raises(ValueError, match="cannot be followed"):
        guides.check(Guide(kind="regex", text="("))
    assert [guide.text for guide in guides._checked._kept] == ["c", "d"], "a refusal was kept"

"""Structural tags: both texts that clients send, what they allow, and what is refused."""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.grammar.engines import accepts, draw, engine, mask_of, text_of
from protos.inference_pb2 import Constraint
from runtime.grammar.engine import ConstraintError
from runtime.grammar.llguidance_engine import LlguidanceEngine
from runtime.grammar.vocabulary import Vocabulary

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
CALLS = {
    "structures": [
        {"begin": "<f=one>", "schema": AGE, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"enum": ["x"]}, "end": "</f>"},
        {"begin": "<g>", "schema": {"type": "boolean"}, "end": "</g>"},
    ],
    "triggers": ["<f=", "<g"],
}
TAG = {"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "[0-9/]+"}, "end": "]"}


def constraint(tag: Any) -> Constraint:
    found = engine().canonical(Constraint(structural_tag=json.dumps(tag)))
    assert engine().canonical(found) == found
    return found


def of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


def test_tags_in_free_text() -> None:
    found = constraint(CALLS)
    for text in (
        "",
        "no call",
        'First <f=one>{"age": 7}</f> then\n<g>true</g><f=two>"x"</f> and <b>.',
        "< f=one>",
    ):
        assert accepts(engine().matcher(found), text), text
    for text in ("<f=one>", '<f=one>{"age": "x"}</f>', "a <f=three>1</f>", "<g", '<f=two>"x"</g>', "<g>true</g> <f="):
        assert not accepts(engine().matcher(found), text), text


def test_both_texts_are_the_same() -> None:
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each["schema"]},
            "end": each["end"],
        }
        for each in CALLS["structures"]
    ]
    assert constraint(of("triggered_tags", triggers=CALLS["triggers"], tags=tags)) == constraint(CALLS)


def test_what_is_drawn_has_valid_tags() -> None:
    found = constraint(CALLS)
    num_drawn = 0
    for seed in range(20):
        output = draw(engine().matcher(found), Random(seed))
        if output is None:
            continue
        num_drawn += 1
        for part in text_of(output).split("<f=")[1:]:
            assert part.startswith(("one>{", 'two>"x"</f>')), part
    assert num_drawn


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (of("const_string", value='a"\n/é'), ['a"\n/é'], ["a"]),
        (of("json_schema", json_schema=AGE), ['{"age": 1}'], ["{}"]),
        (of("regex", pattern="a/b|\\/"), ["a/b", "/"], ["a"]),
        (of("grammar", grammar='root ::= "a" root "b" | "c"'), ["acb"], ["ac"]),
        (of("grammar", grammar='start: "a" start "b" | "c"'), ["acb"], ["ac"]),
        (of("any_text"), ["", "x <y>\n"], []),
        (of("any_text", excludes=["foo"]), ["fo o"], ["a foo"]),
        (of("sequence", elements=[TAG, {"type": "const_string", "value": "!"}]), ["[1/2]!"], ["[1]", "[]!"]),
        (of("or", elements=[TAG, {"type": "const_string", "value": "-"}]), ["[1]", "-"], ["[1]-"]),
        (of("optional", content=TAG), ["", "[1]"], ["[1][1]"]),
        (of("star", content=TAG), ["", "[1][2]"], ["["]),
        (of("plus", content=TAG), ["[1][2]"], [""]),
        (of("repeat", content=TAG, min=2, max=3), ["[1][2]", "[1][2][3]"], ["[1]", "[1][2][3][4]"]),
        (of("tags_with_separator", tags=[TAG], separator=", "), ["", "[1]", "[1], [2]"], ["[1],", "[1][2]"]),
        (of("tags_with_separator", tags=[TAG], separator="", at_least_one=True), ["[1][2]"], [""]),
        (of("tags_with_separator", tags=[TAG], separator=", ", stop_after_first=True), ["", "[1]"], ["[1], [2]"]),
        (of("tag", begin="<t>", content={"type": "any_text"}, end="</t>"), ["<t>a<b</t>"], ["<t>a</t>b", "<t>"]),
        (of("tag", begin="<t>", content=TAG, end=["</t>", "!"]), ["<t>[1]!", "<t>[1]</t>"], ["<t>[1]"]),
        (of("triggered_tags", triggers=["["], tags=[TAG], at_least_one=True), ["a [1] b"], ["", "a b", "[a"]),
        (of("triggered_tags", triggers=["["], tags=[TAG], stop_after_first=True), ["a [1]", "a"], ["a [1] b"]),
        (of("triggered_tags", triggers=["["], tags=[TAG], excludes=["z"]), ["a [1]"], ["z [1]", "[1] z"]),
        (
            of(
                "sequence",
                elements=[
                    {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                    {"type": "json_schema", "json_schema": AGE},
                ],
            ),
            ['<think>hm {</think>{"age":1}'],
            ['{"age":1}', "<think>hm</think>"],
        ),
    ],
)
def test_every_format(tag: Any, good: list[str], bad: list[str]) -> None:
    found = constraint(tag)
    for text in good:
        assert accepts(engine().matcher(found), text), text
    for text in bad:
        assert not accepts(engine().matcher(found), text), text


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ([], "must be an object"),
        ({"type": "structural_tag"}, "must be"),
        ({"type": "other", "format": {}}, "must be"),
        ({"structures": [], "triggers": ["x"]}, "tags must be a list of 1"),
        ({"structures": CALLS["structures"], "triggers": ["<h"]}, r"tags\[0\]: begin must start with exactly one"),
        ({"structures": CALLS["structures"], "triggers": ["<f=", "<", "<g"]}, "exactly one"),
        (of("qwen_xml_parameter", json_schema={}), "type 'qwen_xml_parameter' is not supported: use one of"),
        (of("json_schema", json_schema={"not": {"const": 1}}), "format: json_schema at #: the keyword 'not'"),
        (of("json_schema", json_schema={"x-guidance": {}}), "x-guidance"),
        (of("json_schema", json_schema=False), "nothing can satisfy"),
        (of("json_schema", json_schema={}, style="qwen_xml"), "style"),
        (of("grammar", grammar="start: %json {}"), "%json"),
        (of("any_text", limit=3), "'limit' is not supported"),
        (of("tag", begin="a", content={"type": "any_text"}, end=""), "needs an end"),
        (
            of("sequence", elements=[{"type": "any_text"}, {"type": "const_string", "value": "x"}]),
            "any_text must be the last",
        ),
        (of("repeat", content=TAG, min=3, max=2), "min is above max"),
        (of("repeat", content=TAG, min=0, max=10**6), "0 to 10000"),
        (of("regex", pattern="("), "structural_tag"),
    ],
)
def test_what_is_refused(tag: Any, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        constraint(tag)


# Special tokens as Mistral's and DeepSeek's: marks of calls.
SPECIAL = ("</s>", "[TOOL_CALLS]", "<call>", "</call>", "<sep>", "[OTHER]")


class Marked(NamedTuple):
    """An engine, and its vocabulary of bytes, with special tokens from 256 on."""

    engine: LlguidanceEngine
    vocabulary: Vocabulary

    def allows(self, tag: dict[str, Any], text: str, *, are_special: bool) -> bool:
        """Says if this is a whole output, by masks. are_special: marks in it are special tokens, else text."""
        matcher = self.engine.matcher(self.engine.canonical(Constraint(structural_tag=json.dumps(tag))))
        parts = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text) if are_special else [text]
        ids = list[int]()
        for part in parts:
            is_token = are_special and part in SPECIAL
            ids += [256 + SPECIAL.index(part)] if is_token else self.vocabulary.encode(part)
        size = self.vocabulary.size
        return all(token in mask_of(matcher, size) and matcher.take(token) for token in [*ids, 256])


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    folder = tmp_path_factory.mktemp("marks")
    vocab = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = Vocabulary(folder, 256 + len(SPECIAL), [256])
    made = LlguidanceEngine(vocabulary)
    yield Marked(made, vocabulary)
    made.close()


MISTRAL = {"begin": '[TOOL_CALLS][{"name": "f", "arguments": ', "content": {"type": "json_schema", "json_schema": AGE}}
DEEPSEEK = {"begin": "<call>f<sep>", "content": {"type": "json_schema", "json_schema": AGE}, "end": "</call>"}
ANSWER = {"begin": "<call>", "content": {"type": "any_text"}, "end": "</call>"}


@pytest.mark.parametrize("are_special", [True, False])
def test_special_tokens_are_marks(marked: Marked, are_special: bool) -> None:
    def allowed(tag: dict[str, Any], text: str) -> bool:
        return marked.allows(tag, text, are_special=are_special)

    auto = of("triggered_tags", triggers=["[TOOL_CALLS]"], tags=[MISTRAL | {"end": "}]"}])
    for text in ("", "no call", '[TOOL_CALLS][{"name": "f", "arguments": {"age": 3}}]', "a [ b"):
        assert allowed(auto, text), text
    assert allowed(auto, 'I ask.[TOOL_CALLS][{"name": "f", "arguments": {"age": 3}}] so')
    for text in ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "g"', 'a[TOOL_CALLS][{"name": "f", "arguments": {"age": ""}}]'):
        assert not allowed(auto, text), text
    required = of("tags_with_separator", tags=[DEEPSEEK], separator="[OTHER]\n", at_least_one=True)
    assert allowed(required, '<call>f<sep>{"age": 3}</call>')
    assert allowed(required, '<call>f<sep>{"age": 3}</call>[OTHER]\n<call>f<sep>{"age": 4}</call>')
    for text in ("", "<call>", '<call>f<sep>{"age": 3}', '<call>f[OTHER]{"age": 3}</call>', "a<call>"):
        assert not allowed(required, text), text
    assert allowed(of("tag", **ANSWER), "<call>any text</call>")
    assert not allowed(of("tag", **ANSWER), "<call>any </call> text")


def test_other_special_tokens_are_no_text(marked: Marked) -> None:
    """In free text and in arguments, where the text of one is its characters."""
    auto = of("triggered_tags", triggers=["<call>"], tags=[ANSWER])
    for text in ("a[OTHER]b", "<call>a[OTHER]</call>", "<call>a<sep></call>"):
        assert marked.allows(auto, text, are_special=False), text
        assert not marked.allows(auto, text, are_special=True), text

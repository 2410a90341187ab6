"""Prompts for filling in the middle, with the tokens of the families that know it."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, processors

from router.text.fill_in import FORMS
from router.text.tokenizer import Tokenizer, TooManyTokensError
from tests.fakes.routers import smollm2_tokenizer, smollm2_with

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DEEPSEEK = ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>")
CODESTRAL = ("[SUFFIX]", "[PREFIX]")


def code_llama(directory: Path) -> Tokenizer:
    """A tokenizer of sentencepiece's kind, which writes a space before a text and adds BOS."""
    marks = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>")
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", *marks, "\u2581", *"abcxyz"])}
    file = HfTokenizer(
        models.BPE(vocab | {f"<0x{byte:02X}>": 100 + byte for byte in range(256)}, [], byte_fallback=True)
    )
    file.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    file.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    file.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    file.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in ("<s>", *marks)])
    file.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def shown(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((*QWEN, "<|fim_pad|>"), "<|fim_prefix|>def f(<|fim_suffix|>\n    return x<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>def f(<fim_suffix>\n    return x<fim_middle>"),
        (DEEPSEEK, f"{DEEPSEEK[0]}def f({DEEPSEEK[1]}\n    return x{DEEPSEEK[2]}"),
        (CODESTRAL, "[SUFFIX]\n    return x[PREFIX]def f("),
    ],
    ids=["qwen", "starcoder", "deepseek", "codestral"],
)
def test_each_family_marks_the_parts_in_its_own_way(tmp_path: Path, tokens: tuple[str, ...], expected: str) -> None:
    tokenizer = smollm2_with(tmp_path, *tokens)
    token_ids = tokenizer.encode_fill_in("def f(", "\n    return x")
    assert shown(tokenizer, token_ids) == expected
    # The parts are tokenized as they are alone.
    inner = [tokenizer.encode("def f("), tokenizer.encode("\n    return x")]
    for part in inner:
        assert any(token_ids[place : place + len(part)] == part for place in range(len(token_ids)))


def test_tokens_that_end_the_middle_stop_it(tmp_path: Path) -> None:
    tokenizer = smollm2_with(tmp_path, *QWEN, "<|fim_pad|>")
    fill_in = tokenizer.fill_in
    assert fill_in is not None
    assert [shown(tokenizer, [token_id]) for token_id in fill_in.stop_token_ids] == ["<|fim_pad|>"]


def test_code_llama_writes_no_space_before_a_suffix_and_bos_before_all(tmp_path: Path) -> None:
    tokenizer = code_llama(tmp_path)
    assert shown(tokenizer, tokenizer.encode_fill_in("ab", "xy")) == "<s> <PRE> ab <SUF>xy <MID>"
    bare = tokenizer.encode_fill_in("ab", "xy", add_special_tokens=False)
    assert shown(tokenizer, bare) == " <PRE> ab <SUF>xy <MID>"
    fill_in = tokenizer.fill_in
    assert fill_in is not None
    assert fill_in.stop_token_ids == (5,)
    with pytest.raises(TooManyTokensError):
        tokenizer.encode_fill_in("ab", "xy", 8)


def test_a_tokenizer_without_such_tokens_has_no_form() -> None:
    assert smollm2_tokenizer().fill_in is None
    assert len({tuple(form.tokens) for form in FORMS}) == len(FORMS)

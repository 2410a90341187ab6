"""A model's tokens as a grammar sees them: the bytes of each one, and the ones that are no text."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
import tokenizers

from runtime.tokenizer.files import TokenizerError
from runtime.tokenizer.token_bytes import UnknownDecoderError, token_bytes_function

# Marks special tokens in the library. No UTF-8 has this byte.
_SPECIAL_MARK = b"\xff"


class Vocabulary:
    """The tokens of a model. Safe to use from several threads."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """directory: with the tokenizer.json. vocab_size: the model's, which may be larger than its tokenizer's.

        Raises TokenizerError.
        """
        path = directory / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing more specific
            raise TokenizerError(f"{path} can't be read by the tokenizers library: {error}") from None
        self.directory = directory
        self.size = vocab_size
        self.eos_token_ids = tuple(sorted({each for each in eos_token_ids if 0 <= each < vocab_size}))
        if not self.eos_token_ids:
            raise TokenizerError(f"{path}: the model has no token that ends an output: constraints need one")
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        ) | frozenset(self.eos_token_ids)
        # What each token is in a text that shows special tokens; nothing for ids without a token.
        self.token_texts = _token_texts(tokenizer, path, vocab_size)
        # Special tokens that do not end an output, by their texts: as marks of structural tags they may come.
        self.special_tokens = {
            self.token_texts[token_id].decode(errors="replace"): token_id
            for token_id in sorted(self.special_ids)
            if token_id < vocab_size and token_id not in self.eos_token_ids and self.token_texts[token_id]
        }
        _continue_texts(tokenizer)
        # The text "<|im_end|>" in a schema is not the token.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.library = llguidance.LLTokenizer(_Wrapper(self), eos_token=list(self.eos_token_ids))  # type: ignore[arg-type]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text that continues another one, as the model's tokenizer cuts it."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids
        # A tokenizer that normalizes writes another text: then the longest tokens are taken, one by one.
        if b"".join(self._plain(token_id) for token_id in ids) != text.encode():
            return self.library.greedy_tokenize(text)
        return ids

    @cached_property
    def sorted_texts(self) -> list[tuple[bytes, int]]:
        """The tokens that are something in a text, by that: 30 ms and 5 MB for 49,152."""
        return sorted((text, token_id) for token_id, text in enumerate(self.token_texts) if text)

    def cut(self, data: bytes) -> list[int]:
        """Returns tokens for bytes that may end within a character."""
        return self.library.tokenize_bytes(data)

    def _plain(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids or token_id >= self.size else self.token_texts[token_id]


class _Wrapper:
    """A vocabulary as the library's constructor reads it: llguidance.TokenizerWrapper without its trial call."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids: list[int] = []
        # Each with a name of its own, by which no text can be meant.
        self.tokens = [
            _SPECIAL_MARK + b"<[%d]>" % token_id
            if token_id in vocabulary.special_ids
            else (b"" if text.startswith(_SPECIAL_MARK) else text)
            for token_id, text in enumerate(vocabulary.token_texts)
        ]
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _token_texts(tokenizer: tokenizers.Tokenizer, path: Path, vocab_size: int) -> list[bytes]:
    decoder = tokenizer.decoder
    try:
        to_bytes = token_bytes_function(json.loads(decoder.__getstate__()) if decoder else None)
    except UnknownDecoderError as error:
        raise TokenizerError(f"{path} can't be used: {error}") from None
    tokens = (tokenizer.id_to_token(token_id) for token_id in range(vocab_size))
    return [b"" if token is None else to_bytes(token) for token in tokens]


def _continue_texts(tokenizer: tokenizers.Tokenizer) -> None:
    """Makes a tokenizer write no space before a text: an output continues its prompt."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.normalizer is not None:
        _change(tokenizer, "normalizer", _without_prepend)
    if tokenizer.pre_tokenizer is not None:
        _change(tokenizer, "pre_tokenizer", _without_prefix_space)


def _change(tokenizer: tokenizers.Tokenizer, part: str, change: Any) -> None:
    kind = getattr(tokenizer, part)
    before = json.loads(kind.__getstate__())
    after = change(before)
    if after is None:
        setattr(tokenizer, part, None)
    elif after != before:
        kind.__setstate__(json.dumps(after).encode())
        setattr(tokenizer, part, kind)


def _without_prepend(step: dict) -> dict | None:
    if step["type"] == "Prepend":
        return None
    if step["type"] != "Sequence":
        return step
    steps = [each for each in map(_without_prepend, step["normalizers"]) if each is not None]
    return step | {"normalizers": steps} if steps else None


def _without_prefix_space(step: dict) -> dict:
    match step["type"]:
        case "Metaspace":
            return step | {"prepend_scheme": "never"}
        case "ByteLevel":
            return step | {"add_prefix_space": False}
        case "Sequence":
            return step | {"pretokenizers": [*map(_without_prefix_space, step["pretokenizers"])]}
    return step

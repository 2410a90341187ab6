"""The served model's tokenizer, on the plain `tokenizers` library: text to token ids, and token ids to text as
they come.

Detokenizing byte by byte, rather than decoding a window of tokens again, makes every token cost the same, and makes the
text of a prefix of tokens a prefix of the text: what was sent never has to be taken back.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar

import tokenizers

from protos.inference_pb2 import ChatPrompt
from router.errors import RouterFull
from router.text.chat_template import (
    TemplateError,
    read_chat_template,
    template_arguments,
    template_message,
)
from router.text.tokenizer_files import TokenizerError

SPACE_MARK = "\u2581"  # sentencepiece writes a space so


class UnknownDecoderError(ValueError):
    """A vocabulary of a third kind."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's one printable character for each byte (bytes_to_unicode of openai/gpt-2, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def byte_level(token: str) -> bytes:
    """As tokenizers' ByteLevel decoder: a token with any other character (an added one) is its own text."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    """As tokenizers' Replace and Metaspace: the mark becomes a space wherever it stands."""
    return token.replace(SPACE_MARK, " ").encode()


def sentencepiece_with_bytes(token: str) -> bytes:
    """The same, and <0xNN> is one byte (ByteFallback)."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token.encode()
    return sentencepiece(token)


def token_bytes_function(decoder: Mapping | None) -> Callable[[str], bytes]:
    """Which of the three a tokenizer.json's "decoder" section asks for. Raises UnknownDecoderError.

    Steps that only touch the ends of a whole text (Strip) or join tokens (Fuse) have no part in it: output goes on from
    a prompt, so its first space belongs to it.
    """
    kinds = {step.get("type") for step in _decoder_steps(decoder)}
    if "ByteLevel" in kinds:
        return byte_level
    if "ByteFallback" in kinds:
        return sentencepiece_with_bytes
    if kinds & {"Metaspace", "Replace"}:
        return sentencepiece
    found = " + ".join(sorted(map(str, kinds))) or "missing"
    raise UnknownDecoderError(f"its decoder is {found}; ByteLevel, Metaspace and Replace/ByteFallback are supported")


def _decoder_steps(decoder: Mapping | None) -> Iterator[Mapping]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield decoder


class TokenTable(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none if the id names no token."""
        ...

    def token_text(self, token_id: int) -> str | None:
        """The same as text; None if they are not whole characters."""
        ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class IncrementalDetokenizer:
    """The text of a growing sequence of tokens.

    Bytes that begin a character are held back until it is whole. U+FFFD stands for bytes that can no longer become one.
    """

    __slots__ = ("_decoder", "_skipped", "_table")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that became certain with it."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._table.token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The same for several."""
        # Between two characters, as nearly always, most tokens' texts are known and need not be decoded.
        if not self._decoder.buffer and self._skipped.isdisjoint(token_ids):
            texts = [self._table.token_text(token_id) for token_id in token_ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type] # just seen
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """Returns the rest: U+FFFD if a character remained incomplete, else nothing."""
        return self._decoder.decode(b"", True)


def detokenize(table: TokenTable, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of a whole sequence of tokens."""
    detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip_special_tokens)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()


# What a call takes besides its text.
_CALL_BYTES = 2048

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class Tokenizer:
    """Encodes, renders chats, and knows every token's bytes. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """directory: as router.text.tokenizer_files gives it. Raises TokenizerError."""
        self.directory = directory
        path = directory / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing more specific
            raise TokenizerError(f"{path} is no tokenizer that the tokenizers library reads: {error}") from None
        # A length or a padding kept in the file is for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = self._tokenizer.decoder
        try:
            # Its state is its section of the file; reading that again would cost 30 times its size in memory.
            self._to_bytes = token_bytes_function(json.loads(decoder.__getstate__()) if decoder else None)
        except UnknownDecoderError as error:
            raise TokenizerError(f"{path} can't be used: {error}") from None
        self.special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._template = read_chat_template(directory)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token's spelling: a text of k times as many characters has k tokens or more."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """With the special tokens (BOS) that the tokenizer's own post-processor adds."""
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        """Renders and encodes; special tokens are the template's. Raises TemplateError, with its own words."""
        return self._tokenizer.encode(self.render(chat), add_special_tokens=False).ids

    def render(self, chat: ChatPrompt) -> str:
        """The text of a chat. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("the model has no chat template: send `prompt` or `token_ids` instead of `chat`")
        return self._template.render(
            [template_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)],
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
            arguments=template_arguments(chat),
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return detokenize(self, token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none if the id names no token (vocabularies are padded)."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                # Not kept: there are four billion of them.
                return b""
            known = self._bytes[token_id] = self._to_bytes(token)
        return known

    def token_text(self, token_id: int) -> str | None:
        """The same as text; None if they are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            known = self.token_bytes(token_id)
        try:
            text = known.decode()
        except UnicodeDecodeError:
            text = None
        if known:
            self._texts[token_id] = text
        return text


class TokenizerPool:
    """Runs a tokenizer's slow calls on threads of its own: one long prompt does not hold up everybody's tokens.

    What waits for a thread is bounded: calls raise RouterFull when there is too much. One whose caller goes away, or
    whose deadline passes, while it waits is not made.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        """max_bytes: option max_tokenizing_bytes."""
        self.tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="tokenizer")

    async def encode(self, text: str) -> list[int]:
        # A text of ASCII takes a byte a character, any other up to four.
        return await self._run(self.tokenizer.encode, text, len(text) * (1 if text.isascii() else 4))

    async def encode_chat(self, chat: ChatPrompt) -> list[int]:
        return await self._run(self.tokenizer.encode_chat, chat, chat.ByteSize())

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._run(
            lambda ids: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens),
            list(token_ids),
            8 * len(token_ids),
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[[_Argument], _Result], argument: _Argument, size: int) -> _Result:
        size += _CALL_BYTES
        if self._num_bytes and self._num_bytes + size > self._max_bytes:
            raise RouterFull(
                f"{self._num_bytes} bytes of text wait for the tokenizer, this one has {size} and "
                f"max_tokenizing_bytes={self._max_bytes}: try again later or at another router"
            )
        self._num_bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, argument)
        finally:
            self._num_bytes -= size

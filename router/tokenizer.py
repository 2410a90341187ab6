"""The served model's tokenizer and chat template, on the plain `tokenizers` library."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict
from pydantic_core import from_json

from protos.inference_pb2 import ChatMessage, ChatPrompt
from router.chat_template import ChatTemplate, TemplateError
from router.detokenizer import detokenize
from router.errors import RouterFull
from router.token_bytes import UnknownDecoderError, token_bytes_function
from router.tokenizer_files import TokenizerError

# The names under which templates know special tokens, as in transformers.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# What a call takes besides its text.
_CALL_BYTES = 2048

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class Tokenizer:
    """Encodes, renders chats, and knows every token's bytes. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """directory: as router.tokenizer_files gives it. Raises TokenizerError."""
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
        self._template = _read_template(directory)

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
            [_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)],
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
            arguments=_template_arguments(chat),
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


def _read_template(directory: Path) -> ChatTemplate | None:
    config = _read_json(directory / "tokenizer_config.json")
    special = _read_json(directory / "special_tokens_map.json") | config
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = special.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str):
            tokens[name] = content
    source: object = config.get("chat_template")
    if isinstance(source, list):
        source = _default_template(source, directory)
    if (directory / "chat_template.json").is_file():
        source = _read_json(directory / "chat_template.json").get("chat_template", source)
    if (directory / "chat_template.jinja").is_file():
        source = _read_text(directory / "chat_template.jinja")
    if not isinstance(source, str):
        return None
    try:
        return ChatTemplate(source, tokens)
    except TemplateError as error:
        raise TokenizerError(f"{directory}: {error}") from None


def _default_template(entries: list, directory: Path) -> object:
    """Of several, each with a name, the one called default, or the first."""
    try:
        named = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError):
        path = directory / "tokenizer_config.json"
        raise TokenizerError(f"{path}: each entry of chat_template needs a name and a template") from None
    return named.get("default") or next(iter(named.values()), None)


def _read_json(path: Path) -> dict:
    """An object; empty if there is no file."""
    if not path.is_file():
        return {}
    text = _read_text(path)
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(read, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return read


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}") from None


def _message(message: ChatMessage, place: str) -> dict[str, object]:
    """As templates see it. Raises TemplateError."""
    own: dict[str, object] = {"role": message.role, "content": message.content}
    if not message.fields_json:
        return own
    fields = _json_object(message.fields_json, f"{place}.fields_json")
    if twice := sorted(own.keys() & fields.keys()):
        raise TemplateError(f"{place}.fields_json has {' and '.join(twice)}: each is a field of its own")
    return own | fields


def _json_object(text: str, name: str) -> dict[str, object]:
    """Raises TemplateError."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise TemplateError(f"{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise TemplateError(f"{name} is no JSON object")
    return value


def _template_arguments(chat: ChatPrompt) -> dict[str, object]:
    """Raises TemplateError."""
    if chat.template_arguments_json:
        return _json_object(chat.template_arguments_json, "template_arguments_json")
    try:
        return _as_written(MessageToDict(chat.template_arguments))
    except (ValueError, JsonError) as error:
        # A NaN, or a value of no kind.
        raise TemplateError(f"template_arguments are no JSON: {error}") from None


def _as_written(value: Any) -> Any:
    """A protobuf Struct knows only doubles, but templates print them: 3.0 was a 3. And its keys come in an order that
    differs from process to process, which would make other prompts of the same request."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _as_written(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    return value
